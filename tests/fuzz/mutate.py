"""Hostile inputs: valid ones with something wrong in them, drawn from a seeded generator."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    0.5,
    -0.0,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x",
    "0",
    "node-0",
    "../../etc/passwd",
    "\x00",
    "\x1b[2J",
    "\ud7ff\U0010ffff",
    "%s%n",
    "x" * 70_000,
    b"",
    b"\xff",
    b"\xff" * 4096,
    [],
    [[]],
    [0] * 1000,
    {},
    {"": ""},
    {"type": "Fatal"},
)
"""What a field may hold that its type does not say, or says and nobody thought of."""


def damaged(value: Any, rng: Random) -> Any:
    """A copy of plain data in which one place is something else."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        copy = dict(value)
        name = rng.choice(list(copy))
        roll = rng.random()
        if roll < 0.08:
            del copy[name]
        elif roll < 0.16:
            copy[rng.choice(("", "type", "x" * 300, name + "_"))] = rng.choice(HOSTILE)
        else:
            copy[name] = damaged(copy[name], rng)
        return copy
    if isinstance(value, list) and value and rng.random() < 0.8:
        copy = list(value)
        place = rng.randrange(len(copy))
        roll = rng.random()
        if roll < 0.1:
            del copy[place]
        elif roll < 0.2:
            copy.insert(place, copy[place])
        else:
            copy[place] = damaged(copy[place], rng)
        return copy
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.3:
        return min(max(value + rng.choice((-1, 1, 10, 1000, -(2**40), 2**40)), -(2**63)), 2**64 - 1)
    return rng.choice(HOSTILE)


def deep(rng: Random) -> bytes:
    """msgpack that is nested very deeply, in a field that nobody knows or in place of everything."""
    opening = rng.choice((b"\x91", b"\x81\xa1x", b"\xdc\x00\x01", b"\x81\x91"))
    nested = opening * rng.choice((10, 900, 1100, 200_000))
    return rng.choice((b"", b"\x81\xa1x", b"\x82\xa4type\xacLeaseRequest\xa1x")) + nested


def flipped(data: bytes, rng: Random) -> bytes:
    """A few bits are others."""
    copy = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if copy:
            copy[rng.randrange(len(copy))] ^= 1 << rng.randrange(8)
    return bytes(copy)


def cut(data: bytes, rng: Random) -> bytes:
    """The end is missing, or a piece in the middle."""
    start = rng.randrange(len(data) + 1)
    return data[:start] if rng.random() < 0.5 else data[:start] + data[start + rng.randrange(1, 20) :]


def stuffed(data: bytes, rng: Random) -> bytes:
    """Something stands between."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice((1, 2, 7, 300))) + data[at:]


CHANGES: tuple[Callable[[bytes, Random], bytes], ...] = (flipped, flipped, cut, stuffed)


def body(valid: msgspec.Struct, rng: Random) -> bytes:
    """The bytes of a message, with something wrong in the data or in the bytes."""
    roll = rng.random()
    if roll < 0.03:
        return deep(rng)
    if roll < 0.06:
        return rng.randbytes(rng.choice((0, 1, 10, 1000)))
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(valid))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        plain = damaged(plain, rng)
    data = msgspec.msgpack.encode(plain)
    return rng.choice(CHANGES)(data, rng) if rng.random() < 0.25 else data


def frame(kind: int, call: int, content: bytes, rng: Random) -> bytes:
    """A frame around it, whose head lies now and then."""
    length = len(content) + 9
    if rng.random() < 0.05:
        length = rng.choice((0, 1, 8, length - 1, length + 1, length + 100, 1 << 20, 1 << 30, (1 << 30) + 1, 2**32 - 1))
    if rng.random() < 0.05:
        kind = rng.choice((0, 2, 3, 4, 5, 255))
    return struct.pack("!IBQ", length, kind, call) + content
