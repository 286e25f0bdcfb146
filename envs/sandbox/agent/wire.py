"""Frames between the agent in a sandbox and its host, in a subset of msgpack that is quick to import.

    length u32 | crc32 u32 | body (msgpack)

Big-endian; `length` counts the body. Part of the program inside a sandbox: Python 3.6, standard library only.
`envs.sandbox.engines.bundle` joins all modules into one text, so top-level names must be unique. The host's side of the
frames is `envs.sandbox.local.channel`.
"""

import binascii
import struct

MAX_FRAME = 1 << 18
"""Longest body in bytes."""
PIECE = 1 << 16
"""Most bytes of data in one frame, so that no call delays the others for long."""

RESULT, FAILURE, CHUNK, CREDIT = 0, 1, 2, 3
"""Kinds of frames to the host. The result or the failure of a call ends it. A chunk is a piece of output or of a
listing. Credit allows the host to send more bytes of input."""
PIECE_COST = 64
"""Bytes of the host's credit that a piece of output takes beyond its data."""

HEADER = struct.Struct(">II")
"""Length and checksum before each body."""

SIZES = {
    0xC4: ("B", "bin"), 0xC5: ("H", "bin"), 0xC6: ("I", "bin"),
    0xD9: ("B", "str"), 0xDA: ("H", "str"), 0xDB: ("I", "str"),
    0xDC: ("H", "list"), 0xDD: ("I", "list"), 0xDE: ("H", "dict"), 0xDF: ("I", "dict"),
    0xCC: ("B", "number"), 0xCD: ("H", "number"), 0xCE: ("I", "number"), 0xCF: ("Q", "number"),
    0xD0: ("b", "number"), 0xD1: ("h", "number"), 0xD2: ("i", "number"), 0xD3: ("q", "number"),
    0xCA: ("f", "number"), 0xCB: ("d", "number"),
}  # fmt: skip
"""Struct format of the number that follows the first byte of a msgpack value, and the meaning of that number."""
SIMPLE = {0xC0: None, 0xC2: False, 0xC3: True}
"""Values without content, by their first byte."""


class WireError(Exception):
    """Error: the bytes are not valid frames."""


def pack(value: object, out: bytearray) -> None:
    """Append the msgpack form of a value to `out`.

    Known types are None, bool, int of at most 64 bits, float, bytes, str, list, tuple and dict. Surrogates in a str are
    escaped: the host decodes strict UTF-8.
    """
    if value is None:
        out.append(0xC0)
    elif isinstance(value, bool):
        out.append(0xC3 if value else 0xC2)
    elif isinstance(value, int):
        if 0 <= value < 128:
            out.append(value)
        else:
            out += struct.pack(">Bq", 0xD3, value)
    elif isinstance(value, float):
        out += struct.pack(">Bd", 0xCB, value)
    elif isinstance(value, (bytes, bytearray, memoryview)):
        out += struct.pack(">BI", 0xC6, len(value))
        out += value
    elif isinstance(value, str):
        encoded = value.encode("utf-8", "backslashreplace")
        out += struct.pack(">BI", 0xDB, len(encoded))
        out += encoded
    elif isinstance(value, (list, tuple)):
        out += struct.pack(">BI", 0xDD, len(value))
        for item in value:
            pack(item, out)
    else:
        assert isinstance(value, dict)
        out += struct.pack(">BI", 0xDF, len(value))
        for key, item in value.items():
            pack(key, out)
            pack(item, out)


def frame(body: object) -> bytearray:
    """Return one frame for the host with this body: [number of the call, kind, value]."""
    out = bytearray(HEADER.size)
    pack(body, out)
    length = len(out) - HEADER.size
    HEADER.pack_into(out, 0, length, binascii.crc32(memoryview(out)[HEADER.size :]))
    return out


def unpack(data: bytes, at: int = 0) -> "tuple[object, int]":
    """Return the msgpack value that begins at position `at` of `data`, and the position of its end.

    `Frames.feed` decodes the body of a frame with it, and the loader the agent's options. If the value is invalid, it
    raises WireError; at the end of the data IndexError or struct.error; for a dict with such a key TypeError.
    """
    first = data[at]
    at += 1
    # The first byte has the type, and for a small value also the number or the count of bytes, items or pairs.
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 256, at  # Numbers from -32 to -1.
    if first in SIMPLE:
        return SIMPLE[first], at
    if first < 0x90:
        return unpack_many(data, at, "dict", first & 0x0F)
    if first < 0xA0:
        return unpack_many(data, at, "list", first & 0x0F)
    if first < 0xC0:
        return unpack_many(data, at, "str", first & 0x1F)
    if first not in SIZES:
        raise WireError("unknown msgpack type {:#x}".format(first))
    form, kind = SIZES[first]
    (number,) = struct.unpack_from(">" + form, data, at)
    at += struct.calcsize(form)
    if kind == "number":
        return number, at
    return unpack_many(data, at, kind, number)


def unpack_many(data: bytes, at: int, kind: str, count: int) -> "tuple[object, int]":
    """Return the content of a value of several bytes or items, which begins at position `at`, and the end's position.

    `kind` is `bin`, `str`, `list` or `dict`, and `count` the number of bytes, items or pairs. Raises WireError if bytes
    are missing, and the errors of `unpack` for an invalid item.
    """
    if kind in ("bin", "str"):
        raw = data[at : at + count]
        if len(raw) < count:
            raise WireError("a value is cut off")
        return (bytes(raw) if kind == "bin" else raw.decode("utf-8", "surrogateescape")), at + count
    items = []
    for _ in range(count if kind == "list" else 2 * count):
        item, at = unpack(data, at)
        items.append(item)
    if kind == "list":
        return items, at
    return {items[i]: items[i + 1] for i in range(0, len(items), 2)}, at


class Frames:
    """Decoder of a byte stream into the bodies of its frames."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        """Bytes of a frame that is not complete."""

    def feed(self, data: bytes) -> "list[object]":
        """Add bytes, and return the bodies that are complete now.

        Raises WireError for a frame that is too long or damaged, and the errors of `unpack` for an invalid body. The
        stream cannot be read further then.
        """
        self.buffer += data
        bodies = []
        start, end = 0, len(self.buffer)
        while end - start >= HEADER.size:
            length, checksum = HEADER.unpack_from(self.buffer, start)
            if length > MAX_FRAME:
                raise WireError("a frame of {} bytes".format(length))
            stop = start + HEADER.size + length
            if stop > end:
                break
            body = bytes(self.buffer[start + HEADER.size : stop])
            if binascii.crc32(body) != checksum:
                raise WireError("a frame was damaged")
            bodies.append(unpack(body)[0])
            start = stop
        del self.buffer[:start]
        return bodies


class CallRefusal(Exception):
    """Error of a call that cannot be carried out. `BoxAgent.carry_out` sends it to the host as the call's failure."""

    def __init__(self, code: str, message: str) -> None:
        """Make the error. `message` is for the host's caller."""
        super().__init__(message)
        self.code = code
        """Code by which the host chooses the class of its exception: `file`, `limit`, `busy`, `gone` or `request`."""
