"""Tests that call a function of the program: what runs in the sandbox, and the comparison, which runs outside of it.

The program runs in a process of its own, and all that comes back is text. What the function should have returned never
enters the sandbox, and nothing in there decides about the test: a program can only answer.
"""

from __future__ import annotations

import json
import math
from typing import Any, cast

CALL_PYTHON = """
import json, os, sys
answer = os.dup(1)
os.dup2(2, 1)  # What the program prints is not the answer.
asked = json.load(sys.stdin)
import main as found
*parts, name = asked["call"].split(".")
for part in parts:
    found = getattr(found, part)
    found = found() if isinstance(found, type) else found
returned = getattr(found, name)(*asked["args"])
try:
    text = json.dumps(returned)
except (TypeError, ValueError):
    sys.exit(f"{asked['call']} returned a {type(returned).__name__}, which has no form in JSON")
with open(answer, "w") as file:
    file.write("\\n" + text + "\\n")
"""
"""Reads `{"call", "args"}` and writes what the function of `main.py` returned, as JSON, on the last line."""

TOLERANCE = 1e-9
"""Relative difference up to which a number is one that was expected to have a fraction; an integer is exact."""


def question(call: str, args: list[Any]) -> bytes:
    """What the runner of a language reads."""
    return json.dumps({"call": call, "args": args}).encode()


def returned_this(output: bytes, expected: Any) -> bool:
    """Whether the last line of a runner's output is this value."""
    try:
        found = json.loads(output.rstrip().rpartition(b"\n")[2])
    except (ValueError, RecursionError):
        return False
    return _same(found, expected)


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(expected, float):
        return isinstance(found, int | float) and _close(found, expected)
    if isinstance(expected, int):
        # 12.0 is 12; Python compares the two exactly.
        return isinstance(found, int | float) and found == expected
    if isinstance(found, list) and isinstance(expected, list):
        ours, theirs = cast("list[Any]", found), cast("list[Any]", expected)
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(found, dict) and isinstance(expected, dict):
        table, wanted = cast("dict[str, Any]", found), cast("dict[str, Any]", expected)
        return table.keys() == wanted.keys() and all(_same(table[key], wanted[key]) for key in table)
    return type(found) is type(expected) and found == expected


def _close(found: float, expected: float) -> bool:
    try:
        return math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # An integer that no float can hold.
        return False
