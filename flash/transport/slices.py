"""msgspec's encoding of a message, in slices: encoding all of a large one at once would hold up the loop.

Byte for byte what msgspec makes of it. Lists, and long bytes, in the structs on the way are cut; the items of a
list are encoded as they are until one is longer than `SLICE_BYTES`, which is looked into from then on. Until it is over
nobody may change what is encoded.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from typing import Any

import msgspec

SLICE_BYTES = 1 << 20
"""Bytes encoded before others are served: a millisecond or two."""
SLICE_ITEMS = 4096
"""Items of a list encoded before others are served."""

_ENCODER = msgspec.msgpack.Encoder()


def encoded_pieces(value: Any) -> Generator[bytearray]:
    """The encoding piece by piece, each a slice, for what is never to lie in memory as a whole.

    The bytes of a piece are gone when the next one is asked for.
    """
    buffer = bytearray()
    for _ in encode_slices(value, buffer):
        yield buffer
        buffer.clear()
    yield buffer


def encode_slices(value: Any, buffer: bytearray) -> Generator[None]:
    """Append the encoding of a message, or of a part of one, to a buffer that nobody else adds to meanwhile.

    What has been encoded may be taken out of it after each slice.
    """
    if isinstance(value, msgspec.Struct) and not value.__struct_config__.array_like:
        yield from _struct(value, buffer)
    elif isinstance(value, list):
        yield from _list(value, buffer)
    elif isinstance(value, bytes | bytearray) and len(value) > SLICE_BYTES:
        buffer += struct.pack("!BI", 0xC6, len(value))
        view = memoryview(value)
        for start in range(0, len(value), SLICE_BYTES):
            buffer += view[start : start + SLICE_BYTES]
            yield
    else:
        _ENCODER.encode_into(value, buffer, -1)


def _struct(value: msgspec.Struct, buffer: bytearray) -> Generator[None]:
    config = value.__struct_config__
    names = value.__struct_encode_fields__
    buffer += _header(len(names) + (config.tag is not None), 0x80, 0xDE)
    if config.tag is not None:
        _ENCODER.encode_into(config.tag_field, buffer, -1)
        _ENCODER.encode_into(config.tag, buffer, -1)
    for field, name in zip(value.__struct_fields__, names, strict=True):
        _ENCODER.encode_into(name, buffer, -1)
        yield from encode_slices(getattr(value, field), buffer)


def _list(items: list[Any], buffer: bytearray) -> Generator[None]:
    buffer += _header(len(items), 0x90, 0xDC)
    end, left = len(buffer) + SLICE_BYTES, SLICE_ITEMS
    long = False
    for item in items:
        start = len(buffer)
        if long:
            yield from encode_slices(item, buffer)
        else:
            _ENCODER.encode_into(item, buffer, -1)
            long = len(buffer) - start > SLICE_BYTES
        left -= 1
        if left == 0 or len(buffer) > end:
            yield
            end, left = len(buffer) + SLICE_BYTES, SLICE_ITEMS


def _header(count: int, short: int, long: int) -> bytes:
    """How a map or an array of so many entries begins."""
    if count < 16:
        return bytes([short | count])
    if count < 1 << 16:
        return struct.pack("!BH", long, count)
    return struct.pack("!BI", long + 1, count)
