"""Backend tcp: the trainer's rank 0 serves host copies of a version (`WeightServer`), and workers `pull` them.

A *version* is the weights after a training step, and its *image* is the copy in host memory, with the manifest, the
list of its tensors. A *worker* is a process of an engine that holds the model, or a part of it. All integers are
big-endian. First both sides prove that they know the run's token (`flash.transport.auth`, with the trainer as the
server). From then on the connection is *proven*, and carries these messages:

    worker → trainer   version, and the digest of the version that the worker holds, 0 for none
    trainer → worker   PullReply: an error, or the manifest, and whether changes of the held version follow
    trainer → worker   the tensors, in the manifest's order. If changes follow, each tensor is sent as the number of
                       changed elements, their places and their bit patterns. The number −1 means that all bytes of the
                       tensor follow. Without changes, only the bytes are sent

The announcement holds the manifest's SHA-256, and the manifest holds each tensor's CRC-32. So the loaded bytes are the
published bytes.

The trainer waits for no worker, because each connection has a thread of its own. A worker waits for the trainer, and
gives up after `timeout_s` seconds of silence. A worker that dies ends only its own connection. A late worker pulls a
version as any other worker does. A worker that requests a version which is not held any more gets VersionGoneError.

`AuthenticatedListener` limits the number of unproven connections and the time for a proof. Lengths are checked before
memory is allocated (`receive_message`, `_receive_tensor`); nothing is unpickled. `flash.weights.broadcast` builds on
this module.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
import torch

from flash.errors import DECODE_ERRORS, DeadlineError, TransportError, VersionGoneError, WeightsError
from flash.transport.auth import blocking_handshake, client_handshake, new_token, server_handshake
from flash.transport.server import PAUSE_S, LimitedLog
from flash.weights.image import (
    VERSIONS_KEPT,
    Changes,
    TensorMeta,
    WeightImage,
    apply_changes,
    empty_changes,
    find_changes,
    tensor_bytes,
)

CHUNK_BYTES = 4 << 20
"""Bytes per send and receive. Each chunk has its own deadline, so that a slow link does not count as a dead link."""
WORKER_NAME = "engine worker"
"""Name that workers give when they prove the token."""
MAX_MESSAGE_BYTES = 256 << 20
"""Largest number of bytes of a message that a worker accepts. A manifest is far smaller, even of a large model."""
PULL_REQUEST = struct.Struct("!q32s")
"""A worker's request: a version, and the SHA-256 digest of the version that it holds."""
CHANGE_COUNT = struct.Struct("!q")
"""Number before a tensor's changes; −1 if all its bytes follow."""
NO_DIGEST = bytes(32)
"""Digest that a worker sends if it holds no version."""
MAX_UNPROVEN = 64
"""Largest number of unproven connections at a time. Each unproven connection holds a thread."""
LINES_LOGGED = 20
"""Largest number of ended connections that are logged in a minute, so that a client cannot fill the log."""

MessageT = TypeVar("MessageT")


class PullReply(msgspec.Struct, frozen=True):
    """Trainer's answer to a worker's request."""

    error: str | None = None
    """Message if the trainer does not hold the version any more."""
    manifest: bytes = b""
    """Manifest of the version; empty with an error."""
    changes: bool = False
    """True if changes of the version that the worker holds follow, instead of whole tensors."""


_REPLIES = msgspec.msgpack.Decoder(PullReply)


@dataclass
class WeightSource:
    """Place at which a worker finds a version. The announcement has it in `UpdateInfo.update`."""

    host: str
    port: int
    """Port at which rank 0 of the trainer listens on `host`."""
    token: str
    """Secret that both sides prove, hexadecimal."""
    version: int
    digest: str
    """SHA-256 of the manifest, hexadecimal."""
    timeout_s: float
    """Seconds for which the other side may be silent before a wait for it ends."""
    backend: str = "tcp"
    """Backend of the trainer: tcp, gloo or nccl."""
    fingerprint: list[int] = field(default_factory=list[int])
    """Fingerprint of all tensors, which the broadcast backends compare."""
    deltas: bool = False
    """True if workers have to keep the version, because the next version is sent as changes of this one."""


Receive = Callable[[socket.socket, WeightSource], Iterator[tuple[str, torch.Tensor]]]
"""Function that fetches a version over a connection on which both sides have proven the token, and yields the version's
tensors by name."""


# -- the trainer's side ----------------------------------------------------------------------------------------------


class WeightServer:
    """Serves the newest `VERSIONS_KEPT` images to workers that prove the token.

    One thread accepts connections until `close`, and one thread per connected worker sends.

    Args:
        host: an address of this machine that workers reach.
        prove_s: seconds for a worker to prove the token.
        timeout_s: seconds for which a worker that has proven the token may be silent.
        deltas: True to send only the changed elements to a worker that holds the version before the newest.
    """

    backend = "tcp"
    """Backend that `WeightSource.backend` names. `BroadcastServer` sets gloo or nccl."""
    compares_crc32 = True
    """True if workers compare the CRC-32 of each tensor, so that the manifest has to hold it."""

    def __init__(self, host: str, prove_s: float, timeout_s: float, *, deltas: bool = False) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._deltas = deltas
        self._token = new_token()
        self._lock = threading.Lock()
        self._images: dict[int, WeightImage] = {}
        """Images that are served, by version."""
        self._changes: tuple[int, bytes, list[Changes | None]] | None = None
        """The newest version, the digest of the version before it, and the changes of each tensor between the two. None
        without deltas, and before there are two versions."""
        self.newest_bytes = 0
        """Bytes that are sent to a worker which holds the version before the newest one."""
        self._listener = AuthenticatedListener(host, self._token, prove_s, timeout_s, self._answer)

    def hold(self, version: int, image: WeightImage, fingerprint: Sequence[int] = ()) -> WeightSource:
        """Serve `image` as `version` from now on, and return the source to announce.

        The images of the newest `VERSIONS_KEPT` versions are served, and older ones are dropped. With deltas the method
        also finds the changes since the version before, and `newest_bytes` counts their bytes. `fingerprint` is a part
        of the source; only the broadcast backends compare it. The trainer calls this in its main thread, and the lock
        guards the attributes that the threads of connections read.
        """
        before = self._images[max(self._images)] if self._deltas and self._images else None
        changes: list[Changes | None] = [None] * len(image.payloads)
        if before is not None:
            pairs = zip(before.tensors, image.tensors, strict=True)
            changes = [find_changes(old, new) for old, new in pairs]
        sizes = zip(image.payloads, changes, strict=True)
        self.newest_bytes = sum(payload.nbytes if one is None else one.nbytes for payload, one in sizes)
        with self._lock:
            self._changes = None if before is None else (version, bytes.fromhex(before.digest), changes)
            self._images[version] = image
            for old in sorted(self._images)[:-VERSIONS_KEPT]:
                del self._images[old]
        return WeightSource(
            host=self._host,
            port=self._listener.port,
            token=self._token.hex(),
            version=version,
            digest=image.digest,
            timeout_s=self._timeout_s,
            backend=self.backend,
            fingerprint=list(fingerprint),
            deltas=self._deltas,
        )

    def close(self) -> None:
        """Accept no connection any more. Pulls that have begun continue as long as this process lives."""
        self._listener.close()

    def _answer(self, connection: socket.socket) -> None:
        """Send one worker the version that it requests, or an error if the version is not held any more.

        This runs in the connection's thread. It raises OSError or TransportError if the worker is lost, which
        `AuthenticatedListener` logs.
        """
        version, digest = PULL_REQUEST.unpack(_receive(connection, PULL_REQUEST.size))
        # `hold` may add a version between the two reads below, and while this thread sends. This does no harm: nothing
        # writes to an image or to its changes, and the changes name their version.
        with self._lock:
            known = self._changes
        if (image := self._held_image(version)) is None:
            send_message(connection, PullReply(error=self._not_held(version)))
            return
        # Changes fit one base version only. Compare the digest, because a version of another trainer may have the same
        # number.
        changes = known[2] if known is not None and known[:2] == (version, digest) else None
        send_message(connection, PullReply(manifest=image.manifest, changes=changes is not None))
        for number, payload in enumerate(image.payloads):
            one = changes[number] if changes is not None else None
            if changes is not None:
                connection.sendall(CHANGE_COUNT.pack(-1 if one is None else len(one.places)))
            for part in (payload,) if one is None else (tensor_bytes(one.places), tensor_bytes(one.elements)):
                for start in range(0, len(part), CHUNK_BYTES):
                    connection.sendall(part[start : start + CHUNK_BYTES])

    def _held_image(self, version: int) -> WeightImage | None:
        """Return the image of a version; None if newer versions have replaced it."""
        with self._lock:
            return self._images.get(version)

    def _not_held(self, version: int) -> str:
        """Return the error message for a version that is not among the newest."""
        with self._lock:
            return f"version {version} is not held any more; held are {sorted(self._images)}"


class AuthenticatedListener:
    """Listening port that authenticates workers and serves each worker in a thread of its own.

    The listener uses threads and no event loop, because rank 0's main thread is busy with torch.

    Limits of unproven connections: a connection without a proof holds one thread, for at most `prove_s` seconds,
    whatever it sends. If there are more than `MAX_UNPROVEN` such connections, the oldest is ended. If the process runs
    out of file descriptors or threads, the listener logs this and accepts no connection for `PAUSE_S` seconds. Only
    `close` ends the listener.

    Args:
        host: the address to listen at. A free port is taken.
        token: the secret that both sides prove.
        prove_s: seconds for a proof.
        silence_s: seconds for which a proven connection may be silent.
        serve: serves one proven connection. It may raise OSError and TransportError.
    """

    def __init__(
        self, host: str, token: bytes, prove_s: float, silence_s: float, serve: Callable[[socket.socket], None]
    ) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family)
        self._token = token
        self._prove_s = prove_s
        self._silence_s = silence_s
        self._serve = serve
        self._log = LimitedLog(time.monotonic, LINES_LOGGED)
        self._lock = threading.Lock()
        self._unproven: dict[socket.socket, None] = {}
        """Connections without a proof, oldest first."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="flash-weights", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Port at which the listener accepts connections."""
        return self._listener.getsockname()[1]

    def close(self) -> None:
        """Accept no connection any more. Open connections end on their own."""
        self._closing.set()
        # close() alone does not wake a thread that is blocked in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=self._silence_s)

    def _accept(self) -> None:
        """Wait for connections until `close`, and start a thread with `_serve_connection` for each.

        After descriptors or threads ran out, the loop pauses for `PAUSE_S`; `close` also ends this pause.
        """
        while not self._closing.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    self._pause(error, "let this process open more files (`ulimit -n`)")
                continue
            self._end_oldest(keep=MAX_UNPROVEN - 1)
            with self._lock:
                self._unproven[connection] = None
            try:
                threading.Thread(target=self._serve_connection, args=(connection, peer), daemon=True).start()
            except RuntimeError as error:  # the process may start no more threads
                self._forget(connection)
                connection.close()
                self._pause(error, "let this process start more threads (`ulimit -u`)")

    def _pause(self, error: Exception, advice: str) -> None:
        """Log that descriptors or threads ran out, end the older half of the unproven connections, and wait `PAUSE_S`.

        Without the wait, `_accept` would fail again at once, and use a whole core.
        """
        self._log.warn("no connections are taken for %g s: %s; %s", PAUSE_S, error, advice)
        self._end_oldest(keep=MAX_UNPROVEN // 2)
        self._closing.wait(PAUSE_S)

    def _serve_connection(self, connection: socket.socket, peer: object) -> None:
        """Authenticate and serve one connection, then close it. This runs in the connection's thread."""
        with connection:
            try:
                try:
                    self._authenticate(connection)
                finally:
                    self._forget(connection)
                connection.settimeout(self._silence_s)
                self._serve(connection)
            except (OSError, TransportError) as error:
                # The worker at the other end reports the error to the node loop. Other connections go on.
                self._log.warn("a pull of weights from %s ended early: %s", peer, error)

    def _authenticate(self, connection: socket.socket) -> None:
        """Prove the token both ways. Raises OSError or TransportError if that fails or takes longer than `prove_s`."""
        end = time.monotonic() + self._prove_s

        def set_timeout() -> None:
            # Limit the next call by the rest of `prove_s`, or raise if nothing is left. The whole proof has one
            # deadline, which a byte now and then does not extend.
            seconds = end - time.monotonic()
            if seconds <= 0:
                raise TransportError(f"no proof of the token within {self._prove_s:g} s")
            connection.settimeout(seconds)

        def send(data: bytes) -> None:
            set_timeout()
            connection.sendall(data)

        def receive(count: int) -> bytes:
            # Return exactly `count` bytes, or raise if the connection ends before.
            data = b""
            while len(data) < count:
                set_timeout()
                piece = connection.recv(count - len(data))
                if not piece:
                    raise TransportError("the connection was ended, by either side, before the token was proven")
                data += piece
            return data

        blocking_handshake(server_handshake(self._token), send, receive)

    def _forget(self, connection: socket.socket) -> None:
        """Remove a connection from the unproven connections, so that `_end_oldest` does not end it any more."""
        with self._lock:
            self._unproven.pop(connection, None)

    def _end_oldest(self, keep: int) -> None:
        """End all unproven connections except the newest `keep`. The shutdown wakes their threads, which close them."""
        with self._lock:
            for connection in list(self._unproven)[: max(0, len(self._unproven) - keep)]:
                del self._unproven[connection]
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


# -- the worker's side -----------------------------------------------------------------------------------------------


def pull(source: WeightSource, receive: Receive | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a version, with their names, as they arrive.

    The connection opens with the first tensor and is open until the last one. If the caller takes longer than
    `source.timeout_s` for a tensor, the trainer may end the connection.

    Args:
        source: the announced source.
        receive: fetches the version once the token is proven: `TcpReceiver.receive` or
            `flash.weights.broadcast.BroadcastReceiver.receive`. None: a new `TcpReceiver`, which always gets whole
            tensors.

    Raises:
        VersionGoneError: the trainer does not hold the version any more.
        WeightsError: the manifest, a tensor or all tensors together differ from the published version. tcp checks each
            tensor before it is yielded; a broadcast checks all tensors after the last.
        TransportError: the trainer cannot be reached, does not prove the token, or hangs up.
        DeadlineError: the trainer is silent for `source.timeout_s` seconds.
    """
    address = f"{source.host}:{source.port}"
    try:
        with socket.create_connection((source.host, source.port), timeout=source.timeout_s) as connection:
            handshake = client_handshake(bytes.fromhex(source.token), WORKER_NAME)
            try:
                blocking_handshake(handshake, connection.sendall, partial(_receive, connection))
            except TransportError as error:
                raise TransportError(f"no weights from {address}: {error}") from error
            yield from (receive or TcpReceiver().receive)(connection, source)
    except TimeoutError as error:
        raise DeadlineError(
            f"weights version {source.version} from {address}", source.timeout_s, "the trainer's rank 0"
        ) from error
    except OSError as error:
        raise TransportError(
            f"weights version {source.version} cannot be pulled from {address}: {error}; "
            "is the trainer's rank 0 alive, and its address reachable from this node?"
        ) from error


class TcpReceiver:
    """Worker's side of backend tcp. With deltas it keeps the last version, the whole model, in the host's memory."""

    def __init__(self) -> None:
        self._digest = NO_DIGEST
        """Digest of the version in `_tensors`; `NO_DIGEST` if `_tensors` is not one whole version."""
        self._tensors: dict[str, torch.Tensor] = {}
        """Bytes of each tensor of the last version, by name. Empty without deltas."""

    def receive(self, connection: socket.socket, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        """Request the version and yield its tensors. `pull` calls this after both sides have proven the token.

        Raises:
            VersionGoneError: the trainer does not hold the version any more.
            WeightsError: the manifest or a tensor is damaged.
            OSError, TransportError: the connection was lost, or the trainer sent something unexpected.
        """
        connection.sendall(PULL_REQUEST.pack(source.version, self._digest))
        reply = receive_message(connection, _REPLIES)
        if reply.error is not None:
            raise version_gone(reply.error)
        # Until the last tensor has arrived, `_tensors` has no whole version. So if this pull fails in the middle, the
        # next pull fetches all bytes.
        self._digest, before, self._tensors = NO_DIGEST, self._tensors, {}
        for line in check_manifest(reply.manifest, source):
            # Changes come only for the version that this worker holds, which has tensors of the same names.
            old = before.pop(line.name) if reply.changes else None
            flat = _receive_tensor(connection, line, source.version, old)
            if source.deltas:
                self._tensors[line.name] = flat
                flat = flat.clone()  # the model may write to the tensor that it gets
            yield line.name, line.tensor(flat)
        if source.deltas:
            self._digest = bytes.fromhex(source.digest)


def version_gone(error: str) -> VersionGoneError:
    """Return the VersionGoneError for a worker that requested a version which the trainer does not hold."""
    return VersionGoneError(f"the trainer serves no weights: {error}")


def check_manifest(manifest: bytes, source: WeightSource) -> list[TensorMeta]:
    """Decode a manifest into one `TensorMeta` per tensor.

    Raises:
        WeightsError: the manifest's SHA-256 is not the announced digest.
    """
    digest = hashlib.sha256(manifest).hexdigest()
    if digest != source.digest:
        raise WeightsError(
            f"the manifest of version {source.version} is damaged: its digest is {digest}, "
            f"{source.digest} was announced"
        )
    return msgspec.msgpack.decode(manifest, type=list[TensorMeta])


def _receive_tensor(
    connection: socket.socket, line: TensorMeta, version: int, before: torch.Tensor | None
) -> torch.Tensor:
    """Receive one tensor and return its bytes as a flat uint8 tensor.

    Args:
        connection: connection to the trainer.
        line: the tensor's entry in the manifest.
        version: version of the tensor, for the error message.
        before: bytes of the tensor in the version that this worker holds, if the trainer sends changes. The changes are
            written into these bytes, so the caller must not use them any more. None if whole tensors follow.

    Raises:
        WeightsError: the bytes do not have the CRC-32 of the manifest.
        OSError, TransportError: the connection was lost.
    """
    count = -1 if before is None else CHANGE_COUNT.unpack(_receive(connection, CHANGE_COUNT.size))[0]
    if before is None or count < 0:
        # vLLM's layerwise reload keeps tensors until their layer is complete, so a buffer cannot be used again.
        flat = torch.empty(line.nbytes, dtype=torch.uint8)
        crc32 = _receive_into(connection, tensor_bytes(flat))
    else:
        # The count is bounded by the manifest's size, so that a damaged count cannot make us allocate more.
        flat, changes = before, empty_changes(min(count, line.nbytes), getattr(torch, line.dtype).itemsize)
        for part in (changes.places, changes.elements):
            _receive_into(connection, tensor_bytes(part))
        with suppress(IndexError):  # damaged places also make the checksum below differ, which is then reported
            apply_changes(flat, changes)
        crc32 = zlib.crc32(tensor_bytes(flat))
    if crc32 != line.crc32:
        raise WeightsError(
            f"tensor {line.name} of version {version} is damaged: its crc32 is {crc32:08x}, "
            f"{line.crc32:08x} was published"
        )
    return flat


# -- messages on a blocking connection -------------------------------------------------------------------------------


def send_message(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message: its length as u32, then the message as msgpack."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(struct.pack("!I", len(body)) + body)


def receive_message(
    connection: socket.socket, decoder: msgspec.msgpack.Decoder[MessageT], max_bytes: int = MAX_MESSAGE_BYTES
) -> MessageT:
    """Return the next message.

    Raises:
        TransportError: the peer hung up, the message is longer than `max_bytes`, or it cannot be decoded.
        OSError: the connection was lost, or the peer was silent for the connection's timeout.
    """
    (length,) = struct.unpack("!I", _receive(connection, 4))
    if length > max_bytes:
        raise TransportError(f"the peer sends a message of {length} bytes, {max_bytes} are allowed")
    try:
        return decoder.decode(_receive(connection, length))
    except DECODE_ERRORS as error:
        raise TransportError(f"the peer sent a message that cannot be decoded: {error}") from error


def _receive(connection: socket.socket, count: int) -> bytes:
    """Return exactly `count` bytes. Raises TransportError if the peer hangs up before."""
    data = bytearray(count)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview) -> int:
    """Fill `view` and return its CRC-32. Raises TransportError if the peer hangs up before."""
    crc32, filled = 0, 0
    while filled < len(view):
        got = connection.recv_into(view[filled : filled + CHUNK_BYTES])
        if got == 0:
            raise TransportError(f"the peer hung up after {filled} of {len(view)} bytes")
        crc32 = zlib.crc32(view[filled : filled + got], crc32)
        filled += got
    return crc32
