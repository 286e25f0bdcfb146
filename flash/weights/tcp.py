"""The tcp backend: the trainer serves immutable host copies of a version, engine workers pull them.

Wire, all integers big-endian. Both sides prove that they know the token before anything else is said
(`flash.transport.auth`, where the trainer is the server):

    worker → trainer   version, and the digest of the one that it holds, 0 for none
    trainer → worker   reply: an error, or the manifest, and whether changes of that one follow
    trainer → worker   the tensors' bytes, in the manifest's order; where changes follow, before each tensor how many of
                       its elements have changed, and then their places and bits; −1: all its bytes

The announcement carries the manifest's digest, and the manifest each tensor's crc32: what is loaded is what was
published.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
import torch

from flash.errors import DeadlineError, TransportError, WeightsError
from flash.transport.auth import blocking_handshake, client_handshake, new_token
from flash.weights.changes import Changes, empty_changes, find_changes, put_changes
from flash.weights.fingerprint import Fingerprint
from flash.weights.listener import WeightsListener
from flash.weights.staging import VERSIONS_KEPT, Announce, NamedTensors, dtype_name, stage
from flash.weights.update import DAMAGED, NOT_HELD, UpdateInfo, encode_update

CHUNK_BYTES = 4 << 20
"""Bytes per send and receive: each chunk has its own deadline, so that a slow link is not mistaken for a dead one."""
WORKER_NAME = "engine worker"
"""What a worker calls itself when it proves the token."""
MAX_MANIFEST_BYTES = 256 << 20
"""Longest reply a worker accepts."""
ASKED, COUNT = struct.Struct("!q32s"), struct.Struct("!q")
"""What a worker asks with, and what stands before a tensor's changes."""
NOTHING = bytes(32)
"""The digest of a worker that holds no version."""

WordT = TypeVar("WordT")


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """One line of the manifest."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    crc32: int
    """0: of a backend that does not look at it."""


class Reply(msgspec.Struct, frozen=True):
    """The trainer's answer to a worker that proved the token."""

    error: str | None = None
    manifest: bytes = b""
    changes: bool = False


_REPLIES = msgspec.msgpack.Decoder(Reply)


@dataclass
class TcpSource:
    """Where a worker finds a version: what the announcement holds."""

    host: str
    port: int
    token: str
    """Hexadecimal."""
    version: int
    digest: str
    """SHA-256 of the manifest, hexadecimal."""
    timeout_s: float
    """Longest silence of the other side, in seconds."""
    backend: str = "tcp"
    fingerprint: list[int] = field(default_factory=list[int])
    """Of all tensors, for a backend that holds what arrives to it."""
    deltas: bool = False
    """Whether workers are to keep the version, as the next one is sent as its changes."""


Receive = Callable[[socket.socket, TcpSource], Iterator[tuple[str, torch.Tensor]]]
"""Fetches a version over a connection that both ends have proven."""


@dataclass(frozen=True)
class Image:
    """One version, as it is served. Never changed after it was made."""

    manifest: bytes
    payloads: list[memoryview]
    tensors: list[torch.Tensor]
    """Whose memory that is."""

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest."""
        return hashlib.sha256(self.manifest).hexdigest()

    def changes_since(self, before: Image) -> list[Changes | None]:
        """Of each tensor; both versions are of one model."""
        return [find_changes(old, new) for old, new in zip(before.tensors, self.tensors, strict=True)]


def make_image(tensors: NamedTensors, *, summed: bool = True) -> Image:
    """Turn staged host tensors, which it takes over, into an image, with their checksums or without."""
    lines: list[TensorMeta] = []
    payloads: list[memoryview] = []
    held: list[torch.Tensor] = []
    for name, tensor in tensors:
        payload = _bytes(tensor)
        held.append(tensor)
        crc32 = zlib.crc32(payload) if summed else 0
        lines.append(TensorMeta(name, dtype_name(tensor.dtype), list(tensor.shape), len(payload), crc32))
        payloads.append(payload)
    return Image(msgspec.msgpack.encode(lines), payloads, held)


class TcpPublisher:
    """Trainer side. Rank 0 stages and serves; the other ranks only take part in the gather.

    Args:
        rank: this process among the trainer ranks.
        host: as of `WeightServer`, like the next two.
        dtype: of the engines.
        prove_s: seconds.
        timeout_s: seconds.
        serve: makes rank 0's server.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        dtype: torch.dtype,
        prove_s: float,
        timeout_s: float,
        serve: Callable[[str, float, float], WeightServer] | None = None,
    ) -> None:
        self._dtype = dtype
        self._server = (serve or WeightServer)(host, prove_s, timeout_s) if rank == 0 else None

    def publish(self, version: int, tensors: NamedTensors, announce: Announce) -> int:
        """Hold `version` ready for the engines. Returns as soon as they may pull."""
        if self._server is None:
            for _ in tensors:
                pass
            return 0
        fingerprint = Fingerprint()
        image = make_image(stage(tensors, self._dtype, fingerprint), summed=self._server.summed)
        source = self._server.hold(version, image, fingerprint.sums)
        announce(encode_update(UpdateInfo(vars(source), fingerprint.sums)))
        return self._server.newest_bytes

    def close(self) -> None:
        """Stop serving; pulls that have begun go on while this process lives."""
        if self._server is not None:
            self._server.close()


class WeightServer:
    """Serves the newest `VERSIONS_KEPT` images to workers that prove the token.

    Threads: one accepts, one per connected worker sends. They end with `close`.

    Args:
        host: an address of this machine that workers reach.
        prove_s: seconds for a worker to prove the token.
        timeout_s: longest silence of a worker that has.
        deltas: whether a worker that holds the version before the newest is sent what has changed.
    """

    backend = "tcp"
    summed = True
    """Whether workers look at the checksum of each tensor."""

    def __init__(self, host: str, prove_s: float, timeout_s: float, *, deltas: bool = False) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._deltas = deltas
        self._token = new_token()
        self._lock = threading.Lock()
        self._images: dict[int, Image] = {}
        self._changes: tuple[int, bytes, list[Changes | None]] | None = None
        """The newest version, the digest of the one before, and what has changed between them."""
        self.newest_bytes = 0
        """Of the newest version, as they travel to a worker that holds the one before."""
        self._listener = WeightsListener(host, self._token, prove_s, timeout_s, self._answer)

    def hold(self, version: int, image: Image, fingerprint: Sequence[int] = ()) -> TcpSource:
        """Serve `image` as `version`, and forget all but the newest versions."""
        before = self._images[max(self._images)] if self._deltas and self._images else None
        changes: list[Changes | None] = [None] * len(image.payloads)
        if before is not None:
            changes = image.changes_since(before)
        sizes = zip(image.payloads, changes, strict=True)
        self.newest_bytes = sum(payload.nbytes if one is None else one.nbytes for payload, one in sizes)
        with self._lock:
            self._changes = None if before is None else (version, bytes.fromhex(before.digest), changes)
            self._images[version] = image
            for old in sorted(self._images)[:-VERSIONS_KEPT]:
                del self._images[old]
        return TcpSource(
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
        """Accept no one any more; connections that are open end on their own."""
        self._listener.close()

    def _answer(self, connection: socket.socket) -> None:
        version, digest = ASKED.unpack(_receive(connection, ASKED.size))
        with self._lock:
            known = self._changes
        if (image := self._held(version)) is None:
            send_frame(connection, Reply(error=self._not_held(version)))
            return
        changes = known[2] if known is not None and known[:2] == (version, digest) else None
        send_frame(connection, Reply(manifest=image.manifest, changes=changes is not None))
        for number, payload in enumerate(image.payloads):
            one = changes[number] if changes is not None else None
            if changes is not None:
                connection.sendall(COUNT.pack(-1 if one is None else len(one.places)))
            for part in (payload,) if one is None else (_bytes(one.places), _bytes(one.elements)):
                for start in range(0, len(part), CHUNK_BYTES):
                    connection.sendall(part[start : start + CHUNK_BYTES])

    def _held(self, version: int) -> Image | None:
        with self._lock:
            return self._images.get(version)

    def _not_held(self, version: int) -> str:
        with self._lock:
            return f"version {version} {NOT_HELD}; held are {sorted(self._images)}"


def pull(source: TcpSource, receive: Receive | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Fetch a version, tensor by tensor; each is verified before it is given out.

    Args:
        source: what was announced.
        receive: how, once the token is proven; None: over the connection itself.

    Raises:
        WeightsError: the trainer does not hold the version, or a manifest or tensor is not what was published.
        TransportError: the trainer does not prove the token, or hangs up.
        DeadlineError: the trainer falls silent.
    """
    address = f"{source.host}:{source.port}"
    try:
        with socket.create_connection((source.host, source.port), timeout=source.timeout_s) as connection:
            _prove(connection, source)
            yield from (receive or Held().receive)(connection, source)
    except TimeoutError as error:
        raise DeadlineError(
            f"weights version {source.version} from {address}", source.timeout_s, "the trainer's rank 0"
        ) from error
    except OSError as error:
        raise TransportError(
            f"weights version {source.version} cannot be pulled from {address}: {error}; "
            "is the trainer's rank 0 alive, and its address reachable from this node?"
        ) from error


def _receive(connection: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes.

    Raises:
        TransportError: the peer hung up before.
    """
    data = bytearray(count)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _prove(connection: socket.socket, source: TcpSource) -> None:
    """Prove the token both ways."""
    handshake = client_handshake(bytes.fromhex(source.token), WORKER_NAME)
    try:
        blocking_handshake(handshake, connection.sendall, partial(_receive, connection))
    except TransportError as error:
        raise TransportError(f"no weights from {source.host}:{source.port}: {error}") from error


class Held:
    """What a worker was sent last, in the host's memory: the whole model, in the engine's dtype."""

    def __init__(self) -> None:
        self._digest = NOTHING
        self._tensors: dict[str, torch.Tensor] = {}
        """Flat bytes."""

    def receive(self, connection: socket.socket, source: TcpSource) -> Iterator[tuple[str, torch.Tensor]]:
        """Ask for the version, and read it, for `pull`, whose errors it raises."""
        connection.sendall(ASKED.pack(source.version, self._digest))
        reply = receive_frame(connection, _REPLIES)
        if reply.error is not None:
            raise refused(reply.error)
        # Until the end of this version, and where it does not come to it, nothing is held.
        self._digest, before, self._tensors = NOTHING, self._tensors, {}
        for line in check_manifest(reply.manifest, source):
            old = before.pop(line.name) if reply.changes else None
            flat = _receive_tensor(connection, line, source.version, old)
            if source.deltas:
                self._tensors[line.name] = flat
                flat = flat.clone()  # whatever the model does with what it is given
            yield line.name, flat.view(getattr(torch, line.dtype)).view(line.shape)
        if source.deltas:
            self._digest = bytes.fromhex(source.digest)


def refused(error: str) -> WeightsError:
    """What a worker raises that the trainer has no version for."""
    return WeightsError(f"the trainer serves no weights: {error}")


def check_manifest(manifest: bytes, source: TcpSource) -> list[TensorMeta]:
    """What it says. Raises WeightsError: it is not the one that was announced."""
    digest = hashlib.sha256(manifest).hexdigest()
    if digest != source.digest:
        raise WeightsError(
            f"the manifest of version {source.version} {DAMAGED}: its digest is {digest}, {source.digest} was announced"
        )
    return msgspec.msgpack.decode(manifest, type=list[TensorMeta])


def _receive_tensor(
    connection: socket.socket, line: TensorMeta, version: int, before: torch.Tensor | None
) -> torch.Tensor:
    """Its bytes; `before`, which it takes over, are those of the version whose changes follow."""
    count = -1 if before is None else COUNT.unpack(_receive(connection, COUNT.size))[0]
    if before is None or count < 0:
        # A buffer of its own for each tensor: the layerwise reload keeps tensors until their layer is complete.
        flat = torch.empty(line.nbytes, dtype=torch.uint8)
        crc32 = _receive_into(connection, _bytes(flat))
    else:
        flat, changes = before, empty_changes(min(count, line.nbytes), getattr(torch, line.dtype).itemsize)
        for part in (changes.places, changes.elements):
            _receive_into(connection, _bytes(part))
        with suppress(IndexError):  # of places that are damaged, as the checksum tells
            put_changes(flat, changes)
        crc32 = zlib.crc32(_bytes(flat))
    if crc32 != line.crc32:
        raise WeightsError(
            f"tensor {line.name} of version {version} {DAMAGED}: its crc32 is {crc32:08x}, "
            f"{line.crc32:08x} was published"
        )
    return flat


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # pyright: ignore[reportArgumentType]


def _receive_into(connection: socket.socket, view: memoryview) -> int:
    """Fill `view`; returns its crc32."""
    crc32, filled = 0, 0
    while filled < len(view):
        got = connection.recv_into(view[filled : filled + CHUNK_BYTES])
        if got == 0:
            raise TransportError(f"the peer hung up after {filled} of {len(view)} bytes")
        crc32 = zlib.crc32(view[filled : filled + got], crc32)
        filled += got
    return crc32


def send_frame(connection: socket.socket, word: msgspec.Struct) -> None:
    """Send it with its length."""
    body = msgspec.msgpack.encode(word)
    connection.sendall(struct.pack("!I", len(body)) + body)


def receive_frame(
    connection: socket.socket, decoder: msgspec.msgpack.Decoder[WordT], most: int = MAX_MANIFEST_BYTES
) -> WordT:
    """The other end's next word. Raises TransportError: the peer hung up, or this is longer, or something else."""
    (length,) = struct.unpack("!I", _receive(connection, 4))
    if length > most:
        raise TransportError(f"the peer sends {length} bytes at once, {most} are allowed")
    try:
        return decoder.decode(_receive(connection, length))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(f"the peer sends what cannot be read: {error}") from error
