"""Places in a user's code: the file and line to look at, from tracebacks, stacks and suspended coroutines.

Errors of calls (`flash.environment.calls`) and warnings about a blocked event loop (`flash.run.loop_watch`) name such a
place, so that a user whose environment fails or hangs knows where to look. Lines of Flash, of Python and of installed
packages seldom help, so such a line is chosen last.
"""

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
_PACKAGES = (_PATHS["purelib"], _PATHS["platlib"])
"""Folders of installed packages."""
_FLASH = f"{Path(__file__).parents[1]}/"
"""Folder of Flash's own code. The slash distinguishes it from a user's folder beside it with a longer name."""
# "<string>" is code that Python or Flash has generated. It is at the bottom of the stack of each forked process.
_PYTHON_AND_FLASH = (_PATHS["stdlib"], _PATHS["platstdlib"], _FLASH, "<frozen ", "<string>")
"""Beginnings of the names of files that belong to Python's library or to Flash."""


def place_in(lines: Iterable[Line]) -> str:
    """Return `file.py:12`, the innermost line of a user's code; empty if `lines` is empty. Errors and warnings name it.

    The innermost line is the last one of `lines`. A line of an installed package is returned only if no line is the
    user's, and a line of Python's library or of Flash only if there is no other: `json/decoder.py:355` does not show a
    user where to look.
    """
    innermost_first = [*lines][::-1]
    for distance in range(3):
        for file, line in innermost_first:
            if _distance(file) == distance:
                return f"{file}:{line}"
    return ""


def is_users(place: str) -> bool:
    """Return True if `place`, such as `file.py:12`, is a line of a user's code, so that the user can change it.
    Warnings about a blocked event loop give advice then."""
    return _distance(place) == 0


def is_logged(count: int) -> bool:
    """Return True if `count` is 1, 10, 100, …. An event that repeats at one place is logged only when its count is such
    a number, so that it does not fill the log."""
    return str(count).strip("0") == "1"


def _distance(file: str) -> int:
    """Return how far a file is from the user: 0 for a user's file, 1 for a file of an installed package, 2 for a file
    of Python or Flash."""
    if "site-packages" in file or "dist-packages" in file or file.startswith(_PACKAGES):
        return 1
    return 2 if file.startswith(_PYTHON_AND_FLASH) else 0


def place_of(error: BaseException) -> str:
    """Return ` (file.py:12)`, the line of the user's code that raised an error, for the error's message; empty if the
    line is not known."""
    place = place_in((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    return f" ({place})" if place else ""


def lines_of(frame: FrameType | None) -> list[Line]:
    """Return the lines of a thread's stack, the innermost last, for `place_in`. `frame` is the innermost frame; None
    gives no lines."""
    lines: list[Line] = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return lines[::-1]


def awaited_coroutines(awaitable: object) -> Iterator[Any]:
    """Yield a suspended coroutine, then the coroutine that it awaits, and so on.

    A task stands for its coroutine. Yields nothing for an awaitable that is no coroutine, generator or task.
    """
    waiting: Any = awaitable
    for _ in range(1000):  # tasks that await each other in a circle would never end this loop
        if (get_coro := getattr(waiting, "get_coro", None)) is not None:  # `waiting` is a task
            waiting = get_coro()
        # Python's names of the attributes of coroutines, generators and asynchronous generators have these prefixes.
        prefix = next((one for one in ("cr", "gi", "ag") if hasattr(waiting, f"{one}_frame")), None)
        if prefix is None:
            return
        yield waiting
        waiting = getattr(waiting, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")


def lines_awaited(awaitable: object) -> Iterator[Line]:
    """Yield the line at which a suspended coroutine waits, then the line of the coroutine that it awaits, and so on,
    for `place_in`. Coroutines that have ended have no line."""
    for one in awaited_coroutines(awaitable):
        frame = next(getattr(one, name) for name in ("cr_frame", "gi_frame", "ag_frame") if hasattr(one, name))
        if frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno
