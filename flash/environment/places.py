"""Places in a user's code: the file and line to look at, found in tracebacks, stacks and suspended coroutines."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

Line = tuple[str, int]
"""A file name and a line number."""

_PATHS = sysconfig.get_paths()
_OURS = str(Path(__file__).parents[1])
_PACKAGES = (_PATHS["purelib"], _PATHS["platlib"])
_PYTHON = (_PATHS["stdlib"], _PATHS["platstdlib"], _OURS, "<frozen ")


def place_in(lines: Iterable[Line]) -> str:
    """Return `file.py:12`, the innermost line of a user's code; empty without lines. The innermost line comes last.

    Lines of Python's library and of Flash are passed over, and those of installed packages as far as others are there:
    `json/decoder.py:355` would not tell a user where to look.
    """
    innermost = [*lines][::-1]
    for strangeness in range(3):
        for file, line in innermost:
            if _strangeness(file) == strangeness:
                return f"{file}:{line}"
    return ""


def is_users(place: str) -> bool:
    """Return True if `file.py:12` is a line of a user's code."""
    return _strangeness(place) == 0


def is_told(count: int) -> bool:
    """Return True the first time, the tenth, the hundredth, …: what happens at one place is told that often."""
    return str(count).strip("0") == "1"


def _strangeness(file: str) -> int:
    if "site-packages" in file or "dist-packages" in file or file.startswith(_PACKAGES):
        return 1
    return 2 if file.startswith(_PYTHON) else 0


def place_of(error: BaseException) -> str:
    """Return ` (file.py:12)`, the line of the user's code that raised an error; empty if that is not known."""
    place = place_in((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    return f" ({place})" if place else ""


def lines_of(frame: FrameType | None) -> list[Line]:
    """Return the lines of a stack whose innermost frame is given."""
    lines: list[Line] = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return lines[::-1]


def awaited(awaitable: object) -> Iterator[Any]:
    """Yield a suspended coroutine, the coroutine that it awaits, and so on."""
    waiting: Any = awaitable
    for _ in range(1000):  # a cycle of tasks that await each other has no end
        if (get_coro := getattr(waiting, "get_coro", None)) is not None:  # a task
            waiting = get_coro()
        prefix = next((one for one in ("cr", "gi", "ag") if hasattr(waiting, f"{one}_frame")), None)
        if prefix is None:
            return
        yield waiting
        waiting = getattr(waiting, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")


def lines_awaited(awaitable: object) -> Iterator[Line]:
    """Yield the lines at which a suspended coroutine, and the coroutines that it awaits, stand."""
    for one in awaited(awaitable):
        frame = next(getattr(one, name) for name in ("cr_frame", "gi_frame", "ag_frame") if hasattr(one, name))
        if frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno
