"""Requests, replies, and their bytes on a stream: length-prefixed msgpack frames.

    length u32 | kind u8 | call u64 | body (msgpack; empty for CANCEL)

Integers are big-endian. `length` counts all bytes after itself. Nothing here does I/O: `frame_slices` writes to a
buffer that `flash.transport.connection` sends, and `FrameDecoder` is fed the pieces that the network delivers.

Invariants:
- Decoding any split of the concatenated frames gives these frames, in order, byte for byte.
- Encoding a message in slices gives the bytes that `msgspec.msgpack.encode` gives.
- A length is checked against `MAX_FRAME_BYTES` before anything is allocated for the frame's body.
- A call of a request has one reply type, which the request's class names.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from enum import IntEnum
from typing import Any, Generic, TypeVar, get_args

import msgspec

from flash.errors import ContractError, TransportError

MAX_FRAME_BYTES = 1 << 30
"""Longest frame in bytes. The limit is far above every message of a run, because large data travels in parts or in a
file. It is low enough that a corrupt length is refused at once; otherwise the decoder would wait for bytes that never
come."""
SLICE_BYTES = 1 << 20
"""Bytes encoded before the event loop may run other tasks: one or two milliseconds."""
SLICE_ITEMS = 4096
"""Items of a list encoded before the event loop may run other tasks."""

_HEADER = struct.Struct("!IBQ")
_LENGTH_BYTES = 4
_MIN_LENGTH = _HEADER.size - _LENGTH_BYTES
_ENCODER = msgspec.msgpack.Encoder()

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


# -- requests --------------------------------------------------------------------------------------------------------


class Request(msgspec.Struct, Generic[ReplyT], frozen=True):
    """Base of all requests. Its type argument is the struct that answers the request.

    `class Add(Request[Sum], frozen=True, tag=True)` says that a `Sum` answers an `Add`: `Client.call(Add(…))` returns a
    `Sum`, and refuses any other reply. The reply's type is part of the class and is not sent.
    """


def reply_type(request: type[Request[ReplyT]]) -> type[ReplyT]:
    """Return the struct that answers requests of this class."""
    bases: tuple[Any, ...] = vars(request)["__orig_bases__"]
    (reply,) = get_args(bases[0])
    return reply


def check_reply(request: Request[ReplyT], reply: msgspec.Struct) -> ReplyT:
    """Return `reply` if its type is the one that the request's class names.


    Raises:
        ContractError: the reply has another type, so the handler has a bug.
    """
    expected = reply_type(type(request))
    if not isinstance(reply, expected):
        raise ContractError(
            f"{type(request).__name__} was answered with {type(reply).__name__}, not with {expected.__name__}"
        )
    return reply


# -- frames ----------------------------------------------------------------------------------------------------------


class FrameKind(IntEnum):
    """Purpose of a frame. A client sends REQUEST and CANCEL; a server sends REPLY and ERROR."""

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


class Refusal(msgspec.Struct, frozen=True):
    """Body of an ERROR frame: a `FlashError` that the handler raised."""

    error: str
    """Name of the error's class."""
    message: str


def append_frame(
    buffer: bytearray, kind: FrameKind, call: int, body: msgspec.Struct | None, limit: int = MAX_FRAME_BYTES
) -> None:
    """Append one encoded frame to `buffer` without a pause. Raises the errors of `frame_slices`."""
    for _ in frame_slices(buffer, kind, call, body, limit):
        pass


def frame_slices(
    buffer: bytearray, kind: FrameKind, call: int, body: msgspec.Struct | None, limit: int = MAX_FRAME_BYTES
) -> Generator[None]:
    """Append one encoded frame to `buffer`, and yield after each slice of a long frame.

    Nothing else may use `buffer` or change `body` until the generator has ended. On an error `buffer` is left as it
    was.

    Raises:
        TransportError: the frame would be longer than `limit` bytes.
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

    A frame's body is a memoryview, not a copy. The view is of the fed piece itself if no incomplete frame was held
    before it, else of the buffer in which the pieces were collected. The decoder never writes to such a buffer again.
    """

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._partial = bytearray()
        self._wanted = _HEADER.size

    @property
    def partial(self) -> int:
        """Number of bytes held of an incomplete frame."""
        return len(self._partial)

    @property
    def wanted(self) -> int:
        """Size of the incomplete frame in bytes; the size of a header while the frame's length is not known."""
        return self._wanted

    def feed(self, piece: bytes) -> list[Frame]:
        """Take the next bytes of the stream and return the frames that they complete.

        Raises:
            TransportError: the bytes are not frames. The decoder cannot be used any more.
        """
        if not self._partial:
            frames, end = self._split(piece)
            self._partial += memoryview(piece)[end:]
            return frames
        self._partial += piece
        if len(self._partial) < self._wanted:
            return []
        collected = self._partial
        frames, end = self._split(collected)
        if frames:
            self._partial = bytearray(memoryview(collected)[end:])
        return frames

    def _split(self, data: bytes | bytearray) -> tuple[list[Frame], int]:
        """Return the complete frames at the front of `data`, and the offset at which they end."""
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
    """Encode `value` and yield the encoding in pieces of about a slice, so that memory never holds all of it.

    A piece is overwritten when the next one is requested. Nothing may change `value` until the generator has ended.
    """
    buffer = bytearray()
    for _ in encode_slices(value, buffer):
        yield buffer
        buffer.clear()
    yield buffer


def encode_slices(value: Any, buffer: bytearray) -> Generator[None]:
    """Append the encoding of a message, or of a part of one, to `buffer`, and yield after each slice.

    Structs, lists and long bytes are divided; everything else is encoded in one call. The caller may remove encoded
    bytes from `buffer` while the generator is paused, but may not add any, nor change `value`.
    """
    if isinstance(value, msgspec.Struct) and not value.__struct_config__.array_like:
        config = value.__struct_config__
        names = value.__struct_encode_fields__
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
        buffer += struct.pack("!BI", 0xC6, len(value))
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
    # Items are mostly small and of one kind. Dividing each item would be slow, so an item is encoded in one call until
    # one of the items turns out to be longer than a slice. The items after that item are divided.
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
