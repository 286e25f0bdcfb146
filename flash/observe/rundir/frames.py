"""Records one after the other in a file: `length u32, CRC-32 u32, msgpack`, little-endian."""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

HEADER = struct.Struct("<II")

_ENCODER = msgspec.msgpack.Encoder()


def append_frame(buffer: bytearray, value: Any) -> None:
    """Encode a record to the end of a buffer."""
    data = _ENCODER.encode(value)
    buffer += HEADER.pack(len(data), zlib.crc32(data))
    buffer += data


def read_frames(source: BinaryIO) -> Iterator[bytes]:
    """The records from here to the end of a file.

    Raises:
        ValueError: one is cut off, or is not what was written. Those before it have been yielded.
    """
    while header := source.read(HEADER.size):
        if len(header) < HEADER.size:
            raise ValueError("a record is cut off")
        length, crc = HEADER.unpack(header)
        # Nothing that we write is empty, and zeros, which a lost write leaves, would look like empty records.
        if length == 0:
            raise ValueError("a record is empty")
        data = source.read(length)
        if len(data) < length:
            raise ValueError("a record is cut off")
        if zlib.crc32(data) != crc:
            raise ValueError(f"the checksum of a record of {length} bytes is wrong")
        yield data


def whole_frame_after(file: Path, start: int) -> bool:
    """Whether a whole record begins anywhere behind this byte: what is wrong there is no torn end then."""
    size = file.stat().st_size
    if size - start <= HEADER.size:
        return False
    with (
        file.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        return any(_whole_at(view, offset, size) for offset in range(start + 1, size - HEADER.size))


def _whole_at(view: memoryview, offset: int, size: int) -> bool:
    length, crc = HEADER.unpack_from(view, offset)
    begin = offset + HEADER.size
    # Our records are short arrays and maps, as their first byte says: most bytes are passed over for that.
    if not 0 < length <= size - begin or not 0x80 <= view[begin] <= 0x9F:
        return False
    with view[begin : begin + length] as data:
        return zlib.crc32(data) == crc
