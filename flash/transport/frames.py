"""How messages lie on a byte stream: length-prefixed msgpack frames.

    length u32 | kind u8 | call u64 | body (msgpack; empty for CANCEL)

Big-endian; `length` counts everything after itself. Nothing here does I/O: `append_frame` writes to a buffer,
`FrameDecoder` is fed whatever pieces the network delivers.

Invariant: decoding any split of the concatenated frames gives the frames, in order, byte for byte.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from enum import IntEnum

import msgspec

from flash.errors import TransportError
from flash.transport.slices import encode_slices

MAX_FRAME_BYTES = 1 << 30
"""Longest frame in bytes. Far above any message of ours (what has no bound travels in parts, or through a file), low
enough that a corrupt length is noticed before it is waited for."""

_HEADER = struct.Struct("!IBQ")
_LENGTH_BYTES = 4
_MIN_LENGTH = _HEADER.size - _LENGTH_BYTES


class FrameKind(IntEnum):
    """What a frame is for. Client to server: REQUEST, CANCEL. Server to client: REPLY, ERROR."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    CANCEL = 4


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One message. `call` joins a request with its reply."""

    kind: FrameKind
    call: int
    body: memoryview


class Refusal(msgspec.Struct, frozen=True):
    """The body of an ERROR frame: a `FlashError` of the handler, by class name and message."""

    error: str
    message: str


def append_frame(
    buffer: bytearray, kind: FrameKind, call: int, body: msgspec.Struct | None, limit: int = MAX_FRAME_BYTES
) -> None:
    """Encode one frame to the end of `buffer`, all of it at once. See `frame_slices`."""
    for _ in frame_slices(buffer, kind, call, body, limit):
        pass


def frame_slices(
    buffer: bytearray, kind: FrameKind, call: int, body: msgspec.Struct | None, limit: int = MAX_FRAME_BYTES
) -> Generator[None]:
    """Encode one frame to the end of `buffer`, which is left as it was on an error.

    Yields after each slice of a long one. Nobody else may use the buffer until it is over.

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

    Bodies are views, not copies: of the piece itself when it begins at a frame's first byte, else of the gathered
    buffer, which is given away with the frames and never written again.
    """

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._partial = bytearray()
        self._wanted = _HEADER.size

    @property
    def partial(self) -> int:
        """Bytes held of a frame that is not complete."""
        return len(self._partial)

    @property
    def wanted(self) -> int:
        """Bytes that the incomplete frame needs before anything more can be said."""
        return self._wanted

    def feed(self, piece: bytes) -> list[Frame]:
        """Take the next bytes; return the frames they complete.

        Raises:
            TransportError: the bytes are no frames. The decoder is of no use afterwards.
        """
        if not self._partial:
            frames, end = self._split(piece)
            self._partial += memoryview(piece)[end:]
            return frames
        self._partial += piece
        if len(self._partial) < self._wanted:
            return []
        gathered = self._partial
        frames, end = self._split(gathered)
        if frames:
            self._partial = bytearray(memoryview(gathered)[end:])
        return frames

    def _split(self, data: bytes | bytearray) -> tuple[list[Frame], int]:
        """The complete frames at the front of `data`, and where they end."""
        frames: list[Frame] = []
        start, size = 0, len(data)
        self._wanted = _HEADER.size
        while size - start >= _HEADER.size:
            length, number, call = _HEADER.unpack_from(data, start)
            kind = self._check(length, number)
            stop = start + _LENGTH_BYTES + length
            if stop > size:
                self._wanted = stop - start
                break
            frames.append(Frame(kind, call, memoryview(data)[start + _HEADER.size : stop]))
            start = stop
        return frames, start

    def _check(self, length: int, number: int) -> FrameKind:
        kind = _KINDS.get(number)
        if kind is None or length < _MIN_LENGTH:
            raise TransportError(f"received bytes that are no frame (kind {number}, length {length})")
        if length > self._limit:
            raise TransportError(f"a frame announces {length} bytes, more than the {self._limit} that a frame may have")
        return kind
