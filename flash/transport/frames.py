"""Requests and replies, their bytes on a stream, and the connection that carries them.

Each message between the hub and a node loop or trainer rank passes here twice: a `FrameConnection` of
`flash.transport.client` or `flash.transport.server` sends it, and the `FrameConnection` at the other end receives it. A
frame is

    length u32 | kind u8 | call u64 | body (msgpack; empty for CANCEL)

Integers are big-endian. `length` counts all bytes after itself.

Invariants:
- Decoding any split of the concatenated frames gives these frames, in order, byte for byte.
- Encoding a message in slices gives the bytes that `msgspec.msgpack.encode` gives.
- A length is checked against `MAX_FRAME_BYTES` before anything is allocated for the frame's body.
- A request has one reply type, which the request's class names.
- If a peer does not read, its connection holds at most two buffers of `BUFFER_BYTES` (one is being sent, one fills) and
  one frame per sender.

If the peer's machine vanishes, the kernel notices it (keepalive and user timeout), so there is no heartbeat message.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Generator
from enum import IntEnum
from typing import Any, Generic, TypeVar, get_args

import anyio
import msgspec
from anyio.abc import SocketAttribute, SocketStream
from anyio.lowlevel import checkpoint

from flash.errors import ContractError, PeerLostError, TransportError

MAX_FRAME_BYTES = 1 << 30
"""Longest frame in bytes. The limit is far above every message of a run, because large data travels in parts or in a
file. The limit is low enough that a corrupt length is refused at once; otherwise the decoder would wait for bytes that
never come."""
SLICE_BYTES = 1 << 20
"""Bytes encoded before the event loop may run other tasks; encoding them takes one or two milliseconds."""
SLICE_ITEMS = 4096
"""Items of a list encoded before the event loop may run other tasks. Small items need this limit: encoding many of them
takes long although they have few bytes."""

BUFFER_BYTES = 1 << 20
"""Number of unsent bytes at which senders begin to wait, so that a peer that does not read cannot fill our memory."""
CHUNK_BYTES = 1 << 20
"""Bytes given to the socket at once. The bytes are copied, and copying all of a long frame would stop the loop."""
MERGED_BYTES = 1 << 18
"""Longest buffer, in bytes, into which small frames are merged so that they leave in one send. A long frame is not
merged, because copying it would stop the loop."""
RECEIVE_BYTES = 1 << 18
"""Largest piece taken from the socket at once, in bytes: as much as asyncio reads in one call."""
IDLE_SECONDS = 20
"""Seconds of silence after which the kernel begins to probe the peer."""
PROBE_SECONDS = 10
"""Seconds between two probes."""
PROBES = 4
"""Number of unanswered probes after which the connection is given up: a silent peer is lost after 20 + 4 · 10 = 60
seconds."""

_HEADER = struct.Struct("!IBQ")
"""Head of a frame: length, kind and call."""
_LENGTH_BYTES = 4
"""Bytes of the length, which the length itself does not count."""
_MIN_LENGTH = _HEADER.size - _LENGTH_BYTES
"""Length of a frame with an empty body."""
_ENCODER = msgspec.msgpack.Encoder()

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


# -- requests --------------------------------------------------------------------------------------------------------


class Request(msgspec.Struct, Generic[ReplyT], frozen=True):
    """Base of all requests. The type argument is the struct that answers the request.

    `class Add(Request[Sum], frozen=True, tag=True)` says that a `Sum` answers an `Add`: `Client.call(Add(…))` returns a
    `Sum`, and refuses any other reply. The reply's type is part of the class and is not sent.
    """


def reply_type(request: type[Request[ReplyT]]) -> type[ReplyT]:
    """Return the struct that answers requests of this class: the type argument of its first base."""
    bases: tuple[Any, ...] = vars(request)["__orig_bases__"]
    (reply,) = get_args(bases[0])
    return reply


def check_reply(request: Request[ReplyT], reply: msgspec.Struct) -> ReplyT:
    """Return `reply` if its type is the one that the request's class names.

    Raises ContractError if the reply has another type, so that the handler has a bug.
    """
    expected = reply_type(type(request))
    if not isinstance(reply, expected):
        raise ContractError(
            f"{type(request).__name__} was answered with {type(reply).__name__}, not with {expected.__name__}"
        )
    return reply


# -- frames ----------------------------------------------------------------------------------------------------------


class FrameKind(IntEnum):
    """Purpose of a frame. A client begins a call with REQUEST, and may end it with CANCEL if it gives up.

    A server ends the call with REPLY or ERROR.
    """

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    CANCEL = 4


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A message on a connection."""

    kind: FrameKind
    call: int
    """Number of the call on its connection. A request, its reply and its cancellation have the same number."""
    body: memoryview
    """Request, reply or `Refusal` as msgpack; empty for CANCEL."""


class Refusal(msgspec.Struct, frozen=True):
    """Body of an ERROR frame: a `FlashError` that the handler raised."""

    error: str
    """Name of the error's class."""
    message: str


def append_frame(
    buffer: bytearray, kind: FrameKind, call: int, body: msgspec.Struct | None, limit: int = MAX_FRAME_BYTES
) -> None:
    """Append one small encoded frame to `buffer`, without a pause. Raises TransportError if it is longer than `limit`
    bytes."""
    for _ in frame_slices(buffer, kind, call, body, limit):
        pass


def frame_slices(
    buffer: bytearray, kind: FrameKind, call: int, body: msgspec.Struct | None, limit: int = MAX_FRAME_BYTES
) -> Generator[None]:
    """Append one encoded frame to `buffer`, and yield after each slice of a long frame.

    Nothing else may use `buffer` or change `body` until the generator has ended. On an error `buffer` is left as it
    was. Raises TransportError if the frame would be longer than `limit` bytes.
    """
    start = len(buffer)
    try:
        buffer += _HEADER.pack(0, kind, call)
        if body is not None:
            yield from encode_slices(body, buffer)
        length = len(buffer) - start - _LENGTH_BYTES
        if length > limit:
            raise TransportError(
                f"a {type(body).__name__} of {length} bytes does not fit a frame of {limit}; send it in parts"
            )
        _HEADER.pack_into(buffer, start, length, kind, call)
    except BaseException:
        del buffer[start:]
        raise


class FrameDecoder:
    """Turns pieces of a byte stream into frames.

    A frame's body is a memoryview, not a copy. The view shows the piece that was fed. If the frame came in several
    pieces, it shows the buffer in which these were collected. The decoder never writes to such a buffer again, so
    bodies stay valid.

    Args:
        limit: longest frame that is accepted, in bytes.
    """

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._partial = bytearray()
        """Bytes of the incomplete frame at the end of the stream so far."""
        self._wanted = _HEADER.size

    @property
    def partial(self) -> int:
        """Number of bytes held of an incomplete frame, for error messages."""
        return len(self._partial)

    @property
    def wanted(self) -> int:
        """Size of the incomplete frame in bytes; the size of a header while the frame's length is not known."""
        return self._wanted

    def feed(self, piece: bytes) -> list[Frame]:
        """Take the next bytes of the stream and return the frames that they complete.

        Raises TransportError if the bytes are not frames. The decoder cannot be used any more then.
        """
        if not self._partial:  # the usual case: the piece begins with a frame
            frames, end = self._split(piece)
            self._partial += memoryview(piece)[end:]
            return frames
        # A long frame comes in many pieces. The frame is decoded only when all of it has arrived, because trying after
        # each piece would be slow.
        self._partial += piece
        if len(self._partial) < self._wanted:
            return []
        collected = self._partial
        frames, end = self._split(collected)
        if frames:
            self._partial = bytearray(memoryview(collected)[end:])
        return frames

    def _split(self, data: bytes | bytearray) -> tuple[list[Frame], int]:
        """Return the complete frames at the front of `data`, and the offset at which they end.

        Sets `_wanted` for the incomplete frame that follows. Raises TransportError if the bytes are not frames.
        """
        frames: list[Frame] = []
        start, size = 0, len(data)
        self._wanted = _HEADER.size
        while size - start >= _HEADER.size:
            length, number, call = _HEADER.unpack_from(data, start)
            kind = _KINDS.get(number)
            if kind is None or length < _MIN_LENGTH:
                raise TransportError(f"received bytes that are no frame (kind {number}, length {length})")
            # The length is checked before the body arrives, so that a peer cannot make us hold more than the limit.
            if length > self._limit:
                raise TransportError(
                    f"a frame announces {length} bytes, more than the {self._limit} that a frame may have"
                )
            stop = start + _LENGTH_BYTES + length
            if stop > size:
                self._wanted = stop - start
                break
            frames.append(Frame(kind, call, memoryview(data)[start + _HEADER.size : stop]))
            start = stop
        return frames, start


# -- msgpack in slices: encoding a large message in one call would stop the event loop -------------------------------


def encoded_pieces(value: Any) -> Generator[bytearray]:
    """Encode `value` and yield the encoding in pieces of about a slice, so that memory never holds the whole encoding.

    A piece is overwritten when the next one is requested. Nothing may change `value` until the generator has ended.
    """
    buffer = bytearray()
    for _ in encode_slices(value, buffer):
        yield buffer
        buffer.clear()
    yield buffer


def encode_slices(value: Any, buffer: bytearray) -> Generator[None]:
    """Append the encoding of a message, or of a part of one, to `buffer`, and yield after each slice.

    Structs, lists and long bytes are divided; everything else is encoded in one call, also a struct that is encoded as
    an array. The caller may remove encoded bytes from `buffer` while the generator is paused, but may not add any, nor
    change `value`. `msgspec.msgpack.encode` gives the same bytes, so the receiver decodes them in the usual way. A
    struct with `omit_defaults` would be encoded with its defaults, which decodes to the same struct.
    """
    if isinstance(value, msgspec.Struct) and not value.__struct_config__.array_like:
        config = value.__struct_config__
        names = value.__struct_encode_fields__
        # A struct is a msgpack map from the names of its fields to their values. The tag of the struct, if any, comes
        # first.
        buffer += _msgpack_header(len(names) + (config.tag is not None), 0x80, 0xDE)
        if config.tag is not None:
            _ENCODER.encode_into(config.tag_field, buffer, -1)
            _ENCODER.encode_into(config.tag, buffer, -1)
        for field, name in zip(value.__struct_fields__, names, strict=True):
            _ENCODER.encode_into(name, buffer, -1)
            yield from encode_slices(getattr(value, field), buffer)
    elif isinstance(value, list):
        yield from _encode_list(value, buffer)
    elif isinstance(value, bytes | bytearray) and len(value) > SLICE_BYTES:
        buffer += struct.pack("!BI", 0xC6, len(value))  # the msgpack type of bytes with a 32-bit length
        view = memoryview(value)
        for start in range(0, len(value), SLICE_BYTES):
            buffer += view[start : start + SLICE_BYTES]
            yield
    else:
        _ENCODER.encode_into(value, buffer, -1)


def _encode_list(items: list[Any], buffer: bytearray) -> Generator[None]:
    """Append the encoding of a list, and yield after `SLICE_ITEMS` items or `SLICE_BYTES` bytes."""
    buffer += _msgpack_header(len(items), 0x90, 0xDC)
    end, items_left = len(buffer) + SLICE_BYTES, SLICE_ITEMS
    # Items are mostly small and of one kind. Dividing each item would be slow, so an item is encoded in one call. Once
    # an item turns out to be longer than a slice, the items after it are divided.
    long = False
    for item in items:
        start = len(buffer)
        if long:
            yield from encode_slices(item, buffer)
        else:
            _ENCODER.encode_into(item, buffer, -1)
            long = len(buffer) - start > SLICE_BYTES
        items_left -= 1
        if items_left == 0 or len(buffer) > end:
            yield
            end, items_left = len(buffer) + SLICE_BYTES, SLICE_ITEMS


def _msgpack_header(count: int, short: int, long: int) -> bytes:
    """Return the first bytes of a msgpack map or array of `count` entries.

    Args:
        count: number of entries.
        short: type byte for fewer than 16 entries, which holds the count in its low bits.
        long: type byte before a 16-bit count. The next type byte stands before a 32-bit count.
    """
    if count < 16:
        return bytes([short | count])
    if count < 1 << 16:
        return struct.pack("!BH", long, count)
    return struct.pack("!BI", long + 1, count)


# -- connections -----------------------------------------------------------------------------------------------------


class FrameConnection:
    """Sends and receives frames over one stream. The owner runs `write` as a task, else no queued frame is sent.

    Queued frames wait in a bounded buffer, and one writer task sends them. So frames that are queued together leave in
    one send, and cancelling the task that queued a frame never sends half of the frame. A sender waits for room while
    `BUFFER_BYTES` are unsent.

    Args:
        stream: an authenticated stream. The owner of the stream closes it.
        peer: description of the other end, for error messages.
    """

    def __init__(self, stream: SocketStream, peer: str) -> None:
        self._stream = stream
        self._peer = peer
        self._decoder = FrameDecoder()
        self._outgoing: list[bytearray] = []
        """Queued frames. A buffer may hold several small frames."""
        self._waiting_bytes = 0
        """Bytes in `_outgoing`."""
        self._ready = anyio.Event()
        """Set when a frame is queued."""
        self._drained = anyio.Event()
        """Set, and replaced by a new event, when the writer has taken or sent the queued frames."""
        self._sending = False
        """True while the writer sends frames that it has taken from `_outgoing`."""
        self._broken = False
        """True if the writer has ended, so that no frame is sent any more."""

    async def wait_for_room(self) -> None:
        """Wait until a frame may be queued or the connection broke. The caller may set a deadline.

        If there is room, returns at once and lets no other task run. `write` ends the wait.
        """
        while self._waiting_bytes >= BUFFER_BYTES and not self._broken:
            await self._drained.wait()

    async def flush(self) -> None:
        """Wait until `write` has sent all queued frames, or has lost them. The caller may set a deadline."""
        while (self._outgoing or self._sending) and not self._broken:
            await self._drained.wait()

    async def send(self, kind: FrameKind, call: int, body: msgspec.Struct) -> None:
        """Wait for room, encode one frame while other tasks run in between, and queue it.

        If the task is cancelled, nothing is queued. On a broken connection the frame is dropped silently; `receive`
        raises the loss. Raises TransportError, and queues nothing, if the frame is too long.
        """
        await self.wait_for_room()
        frame = bytearray()
        for _ in frame_slices(frame, kind, call, body):
            await checkpoint()
        self._queue(frame)

    def post(self, kind: FrameKind, call: int, body: msgspec.Struct | None = None) -> None:
        """Queue one small frame without waiting.

        Use this for frames that must be queued without awaiting: CANCEL while a task is cancelled, and ERROR. There is
        no check for room, because these frames are small. The caller may await `wait_for_room` before. On a broken
        connection the frame is dropped silently; `receive` raises the loss. Raises TransportError, and queues nothing,
        if the frame is too long.
        """
        frame = bytearray()
        append_frame(frame, kind, call, body)
        self._queue(frame)

    def _queue(self, frame: bytearray) -> None:
        """Append an encoded frame to the buffer that `write` sends, or drop it if the connection is broken."""
        if self._broken:
            return
        if self._outgoing and len(self._outgoing[-1]) + len(frame) <= MERGED_BYTES:
            self._outgoing[-1] += frame
        else:
            self._outgoing.append(frame)
        self._waiting_bytes += len(frame)
        self._ready.set()

    async def write(self) -> None:
        """Send queued frames until the connection breaks or the task is cancelled. Frames that are left are dropped.

        The writer waits for a queued frame, then until the peer has read enough for the socket to take the frame. When
        the writer takes the queued frames, it wakes the senders that wait for room.
        """
        try:
            while True:
                await self._ready.wait()
                self._ready = anyio.Event()
                outgoing, self._outgoing, self._waiting_bytes = self._outgoing, [], 0
                self._sending = True
                self._notify_drained()
                for data in outgoing:
                    view = memoryview(data)
                    for start in range(0, len(data), CHUNK_BYTES):
                        await self._stream.send(bytes(view[start : start + CHUNK_BYTES]))
                self._sending = False
                self._notify_drained()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # `receive` raises the loss.
        finally:
            # This block also runs when the task is cancelled. Otherwise a sender would wait for ever for a writer that
            # has ended.
            self._broken = True
            self._outgoing, self._waiting_bytes = [], 0
            self._drained.set()

    def _notify_drained(self) -> None:
        """Wake the tasks in `wait_for_room` and `flush`, which then look again at the buffer."""
        self._drained.set()
        self._drained = anyio.Event()

    async def receive(self) -> list[Frame]:
        """Wait for the next bytes, and return the frames that they complete. Sets no deadline.

        The list is empty while a long frame arrives. Only one task may call this at a time. If it is cancelled, no
        bytes are lost.

        Raises:
            PeerLostError: the connection ended.
            TransportError: the bytes are not frames.
        """
        try:
            piece = await self._stream.receive(RECEIVE_BYTES)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            partial = self._decoder.partial
            inside = f" inside a frame, after {partial} of {self._decoder.wanted} bytes" if partial else ""
            raise PeerLostError(
                f"the connection to {self._peer} ended{inside}{cause}; look at the log of that process"
            ) from error
        return self._decoder.feed(piece)

    async def close(self) -> None:
        """Close the connection at once. Unsent frames are dropped."""
        await self._stream.aclose()


def set_socket_options(stream: SocketStream) -> None:
    """Set the socket's options: small frames are sent without delay, and the kernel notices a machine that vanished."""
    raw = stream.extra(SocketAttribute.raw_socket)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        # The kernel does not probe while sent data is unacknowledged. Without this limit it then waits 15 minutes.
        lost_after_ms = (IDLE_SECONDS + PROBES * PROBE_SECONDS) * 1000
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_after_ms)
