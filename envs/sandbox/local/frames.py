"""The host's end of the agent's frames. Whatever a sandbox sends is only ever decoded as the types that are expected.

    length u32 | crc32 u32 | body (msgpack)

To the agent the body is [call, operation, argument], from it [call, kind, value]; call 0 is the end of the channel.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum

import msgspec

from flash.errors import SandboxLimitError, SandboxLostError, SandboxRefusedError

MAX_FRAME = 1 << 18
"""Longest body in bytes, both ways. A longer one ends the channel."""
PIECE = 1 << 16
"""Bytes of data sent in one frame."""

PIECE_COST = 64
"""Bytes of credit that a piece of output takes beyond its data: many small pieces are more to hold than a large one."""

_HEADER = struct.Struct(">II")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[int, int, msgspec.Raw])


class AgentFrameKind(IntEnum):
    """What a frame of the agent is: the end of a call, well or badly, output, or room for more input."""

    RESULT = 0
    FAILURE = 1
    CHUNK = 2
    CREDIT = 3


def encode(call: int, operation: str, argument: object) -> bytes:
    """One frame to the agent.

    Raises:
        SandboxLimitError: it would be too long. SandboxRefusedError: something in it cannot be encoded.
    """
    try:
        body = _ENCODER.encode((call, operation, argument))
    except (OverflowError, UnicodeEncodeError) as error:
        raise SandboxRefusedError(f"`{operation}` cannot be asked for: {error}") from None
    if len(body) > MAX_FRAME:
        raise SandboxLimitError(
            f"`{operation}` needs {len(body)} bytes with all its arguments; a sandbox takes {MAX_FRAME} at once"
        )
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


class Decoder:
    """Cuts what the agent sends into (call, kind, value)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, int, msgspec.Raw]]:
        """The frames that are complete now.

        Raises:
            SandboxLostError: this is not what an agent sends.
        """
        self._buffer += data
        frames: list[tuple[int, int, msgspec.Raw]] = []
        start, end = 0, len(self._buffer)
        while end - start >= _HEADER.size:
            length, checksum = _HEADER.unpack_from(self._buffer, start)
            if length > MAX_FRAME:
                raise SandboxLostError(f"the agent announces a frame of {length} bytes, more than {MAX_FRAME}")
            stop = start + _HEADER.size + length
            if stop > end:
                break
            body = bytes(memoryview(self._buffer)[start + _HEADER.size : stop])
            if zlib.crc32(body) != checksum:
                raise SandboxLostError("a frame of the agent was damaged")
            try:
                frames.append(_DECODER.decode(body))
            except (msgspec.DecodeError, RecursionError) as error:
                raise SandboxLostError(f"the agent sent what is no frame: {error}") from error
            start = stop
        del self._buffer[:start]
        return frames
