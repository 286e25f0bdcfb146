"""What keeps an event loop from everything else: its slow callbacks, by name.

A coroutine is named by the task that runs it and by the place from which it went on, both ours rather than a library's.
Nothing is watched outside of `CallbackWatch.watching`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import anyio

from flash.foreign.asyncio import around_callbacks
from flash.profile.order import RecordingFacts, resident_peak, write_part

SLOW_S = 0.005
"""Callbacks that take longer are kept: a few of them in a row are felt by every timer of the loop."""
MOST = 100_000
"""Slow callbacks that are kept of one recording."""
LIBRARIES = tuple(os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in (asyncio, anyio))
"""Whose coroutines say less than those of ours around and in them."""
COLLECTION = "garbage collection"
"""The name of a pause for it, which lies within a callback."""


class CodePlace(NamedTuple):
    """A place in the code."""

    code: CodeType
    line: int

    @property
    def text(self) -> str:
        """The file, as imports see it, and the line."""
        return f"{_short(self.code.co_filename)}:{self.line}"


class Slow(NamedTuple):
    """A slow callback."""

    name: str
    where: str
    start: float
    """Unix seconds."""
    seconds: float
    cpu_s: float
    """Seconds in which its thread had a processor."""
    thread: int


class CallbackWatch:
    """The callbacks of all event loops of this process.

    Conservation: every callback is counted with its seconds, and those over `slow_s` are kept up to `MOST`.

    Args:
        who: these loops belong to, for people.
        slow_s: what is kept.
        clock: seconds.
        cpu_clock: the same of the thread's processor time.
    """

    def __init__(
        self,
        who: str,
        slow_s: float = SLOW_S,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._who = who
        self._slow_s = slow_s
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._offset = 0.0
        self._begun = 0.0
        self._collecting: dict[int, tuple[float, float]] = {}
        self.slow: list[Slow] = []
        self.count = 0
        self.busy_s = 0.0

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watch within the block."""
        self._begun = time.time()
        self._offset = self._begun - self._clock()
        gc.callbacks.append(self._collects)
        try:
            with around_callbacks(self._timed):
                yield
        finally:
            gc.callbacks.remove(self._collects)

    def write(self, file: Path) -> None:
        """Write them as trace events; without a place for the file they are lost, and the run is not."""
        facts = RecordingFacts(self._who, self._begun, time.time(), self.count, resident_peak(), busy_s=self.busy_s)
        write_part(file, facts, self._events())

    def _events(self) -> Iterator[dict[str, Any]]:
        process = os.getpid()
        for thread in {each.thread for each in self.slow}:
            name = {"name": "slow callbacks"}
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": name}
        for each in self.slow:
            yield {
                "ph": "X",
                "cat": "callback",
                "name": each.name,
                "pid": process,
                "tid": each.thread,
                "ts": (each.start - self._begun) * 1e6,
                "dur": each.seconds * 1e6,
                "args": {"where": each.where, "cpu_ms": each.cpu_s * 1e3},
            }

    def _timed(self, callback: Any, run: Callable[[], None]) -> None:
        # Looked up before: afterwards a coroutine stands elsewhere, or has ended.
        found = _chain(callback)
        start, cpu = self._clock(), self._cpu_clock()
        try:
            run()
        finally:
            seconds = self._clock() - start
            self.count += 1
            self.busy_s += seconds
            if seconds > self._slow_s:
                name, where = _named(callback, found)
                self._keep(name, where, start, seconds, self._cpu_clock() - cpu)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        thread = threading.get_ident()
        if phase == "start":
            self._collecting[thread] = self._clock(), self._cpu_clock()
            return
        start, cpu = self._collecting.pop(thread, (self._clock(), 0.0))
        seconds = self._clock() - start
        if seconds > self._slow_s:
            where = f"generation {info['generation']}"
            self._keep(COLLECTION, where, start, seconds, self._cpu_clock() - cpu)

    def _keep(self, name: str, where: str, start: float, seconds: float, cpu_s: float) -> None:
        if len(self.slow) < MOST:
            self.slow.append(Slow(name, where, start + self._offset, seconds, cpu_s, threading.get_native_id()))


def _chain(callback: Any) -> list[CodePlace]:
    """Where a task's coroutines stand, the task's own first; empty of another callback."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return []
    places: list[CodePlace] = []
    inner: Any = task.get_coro()
    while inner is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(inner, f"{kind}_frame")), None)
        if kind is None:
            break
        frame, code = getattr(inner, f"{kind}_frame"), getattr(inner, f"{kind}_code")
        places.append(CodePlace(code, code.co_firstlineno if frame is None else frame.f_lineno or code.co_firstlineno))
        inner = getattr(inner, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return places


def _named(callback: Any, found: list[CodePlace]) -> tuple[str, str]:
    """The name of a callback and where it is, or went on."""
    if found:
        ours = [place for place in found if not place.code.co_filename.startswith(LIBRARIES)]
        if not ours:  # it has not begun yet: the library calls it next
            return callback.__self__.get_name(), found[-1].text
        first, last = ours[0], ours[-1]
        names = dict.fromkeys((first.code.co_qualname, last.code.co_qualname))
        return " › ".join(names), last.text
    while isinstance(callback, partial):
        callback = callback.func
    function = getattr(callback, "__func__", callback)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(callback).__qualname__)
    where = CodePlace(code, code.co_firstlineno).text if isinstance(code, CodeType) else "not in Python"
    return name, where


def _short(file: str) -> str:
    """A file's path from the folder on from which it is imported."""
    folders = [folder for folder in map(os.path.abspath, sys.path) if file.startswith(folder + os.sep)]
    return os.path.relpath(file, max(folders, key=len)) if folders else file
