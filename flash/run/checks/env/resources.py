"""Resources of this process that an environment may leave behind, and the lines that block its event loop.

`flash.run.checks.env.checks` compares two `Holdings` to find leaks, and asks `BlockSampler` which code blocks the loop.
Memory is counted twice. Python's own count (`tracing`) is exact and knows the line of each object, but misses memory
that libraries in C take by themselves. The resident memory has all of it, but also what allocators keep.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import reprlib
import sys
import tempfile
import threading
import tracemalloc
from asyncio import events
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from types import ModuleType

import anyio
import msgspec

from flash.environment.places import is_users, lines_awaited, lines_of, place_in

KINDS = ("open file", "thread", "task", "child process")
"""Kinds of resources in `Holdings`, in words for the user."""
POOLED = ("flash ", "AnyIO worker", "asyncio_")
"""Beginnings of the names of threads that are used again, of which a pool keeps a bounded number."""
SETTLE_S = 1.0
"""Longest time in seconds for processes, transports and threads to end after an episode."""
SAMPLE_S = 0.005
"""Seconds between two looks at the event loop."""
TRACED_FRAMES = 8
"""Number of innermost lines that are kept of each allocation. One of them should be the user's."""
BLOCK_S = 0.1
"""Seconds that one callback of the event loop may take."""

_CONTAINER = reprlib.Repr()
"""Printer of containers that leaves out most of a large one, so that it takes little time."""
_CONTAINER.maxlist = _CONTAINER.maxtuple = _CONTAINER.maxdict = _CONTAINER.maxset = 20

_TRIM: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Function of glibc that gives freed memory back to the system; None with another C library."""


class Holdings(msgspec.Struct, frozen=True):
    """Resources that this process holds at one moment."""

    named: dict[str, Counter[str]]
    """For each of `KINDS`, the number of resources by their description: the path of a file, the name of a thread, the
    coroutine and line of a task, or the command of a process."""
    resident: int
    """Resident memory in bytes."""
    temporary: int
    """Number of files and folders in the folder for temporary files. Other processes make some, too."""

    @staticmethod
    def now() -> Holdings:
        """Return the resources that this process holds now. Must be called by a task of the event loop, which itself
        is not counted."""
        gc.collect()  # files and sockets in unreachable cycles are no leak: Python would close them later
        files = Counter[str]()
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the descriptor of this listing is closed by now
                target = os.readlink(link)
                # A path, or a kind and a number such as `socket:[4711]`. The number would make each one different.
                files[target if target.startswith("/") else target.partition(":")[0]] += 1
        threads = Counter(one.name for one in threading.enumerate() if not one.name.startswith(POOLED))
        tasks = Counter(_task_name(one) for one in asyncio.all_tasks() if one is not asyncio.current_task())
        # Freed memory that the C library keeps would be used again, and so hide what is taken meanwhile.
        if _TRIM is not None:
            _TRIM(0)
        # The second number of statm is the resident memory in pages.
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        named: dict[str, Counter[str]] = dict(zip(KINDS, (files, threads, tasks, _children()), strict=True))
        temporary = len(os.listdir(tempfile.gettempdir()))
        return Holdings(named, resident, temporary)

    @staticmethod
    async def settled(before: Holdings | None = None) -> Holdings:
        """Wait until resources that are still being closed are gone, and return the remaining ones.

        Waits for some `SETTLE_S`, or less as soon as this process holds nothing more than in `before`. Without `before`
        it always waits for the whole time.
        """
        end = perf_counter() + SETTLE_S
        while True:
            await anyio.sleep(0.02)
            found = Holdings.now()
            if perf_counter() > end or (before is not None and not found.more_than(before)):
                return found

    def more_than(self, before: Holdings) -> dict[str, tuple[int, str]]:
        """Return the kinds of which this process holds more resources than in `before`.

        The result is a dict from the kind to the number of additional resources and the description of a new one. The
        memory and the temporary files are not compared.
        """
        more: dict[str, tuple[int, str]] = {}
        for kind, names in self.named.items():
            if (count := names.total() - before.named[kind].total()) > 0:
                more[kind] = count, next(iter(names - before.named[kind]), "")
        return more


@contextmanager
def tracing() -> Generator[None]:
    """Count the bytes of all Python objects that are made while the block runs, and keep the lines that made them.

    If Python counts them already, for the user, its count simply goes on.
    """
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start(TRACED_FRAMES)
    try:
        yield
    finally:
        if started:
            tracemalloc.stop()


@contextmanager
def own_temporary_folder() -> Generator[None]:
    """Let this process make its temporary files in a new folder while the block runs, where no other program makes any.

    Child processes inherit it as TMPDIR. The folder is deleted at the end, with its files.
    """
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="flash-check-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            tempfile.tempdir = before
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable


def variables() -> dict[str, object]:
    """Return the plain values that the user's modules, their classes and the objects of these classes hold.

    The result is a dict from the name, such as `Quiz.answer (quiz.py)`, to the value. A container is represented by a
    text, because the code may change it later. Values of other types are left out, and containers that show an address
    of memory, which is used again for other objects.
    """
    values: dict[str, object] = {}
    modules: list[object] = [*sys.modules.values()]  # a program may put other objects than modules there
    for module in modules:
        file = getattr(module, "__file__", None)
        if not isinstance(module, ModuleType) or file is None or not is_users(file):
            continue
        for name, value in [*vars(module).items()]:
            # The methods of a user's objects, such as `__repr__`, may raise anything. Such a variable is left out.
            with suppress(BaseException):
                kind = value if isinstance(value, type) else type(value)
                # A class or an object whose class this module defines. Other modules may have imported it.
                inner = vars(value) if kind.__module__ == module.__name__ and hasattr(value, "__dict__") else {}
                for path, one in [(name, value), *((f"{name}.{key}", one) for key, one in inner.items())]:
                    if "__" in path:  # a name of Python's, such as `__file__`
                        continue
                    if type(one) in (str, bytes, bool, int, float):
                        values[f"`{path}` ({os.path.basename(file)})"] = one
                    elif type(one) in (list, tuple, dict, set) and " at 0x" not in (text := _CONTAINER.repr(one)):
                        values[f"`{path}` ({os.path.basename(file)})"] = text
    return values


def traced_bytes() -> int:
    """Return the bytes of the objects that were made since `tracing` began, and still exist after a collection."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def growth_without_jumps(sizes: Sequence[int]) -> float:
    """Return the mean growth from one size to the next, in the unit of the sizes, without the largest and the smallest
    tenth of the growths.

    A table that is made larger once, such as Python's own table of names, is no leak. A cache that is emptied once must
    not hide a leak. At least one growth is left out at each end, so the result is 0 for fewer than four sizes.
    """
    steps = sorted(after - before for before, after in pairwise(sizes))
    tenth = max(1, len(steps) // 10)
    kept = steps[tenth : len(steps) - tenth]
    return sum(kept) / len(kept) if kept else 0.0


def growing_place(before: tracemalloc.Snapshot, after: tracemalloc.Snapshot) -> str:
    """Return the line whose objects grew most in bytes between two snapshots; empty if none did.

    `place_in` prefers a line of the user's code that called the line which made the objects.
    """
    grown = max(after.compare_to(before, "traceback"), key=lambda one: one.size_diff, default=None)
    if grown is None or grown.size_diff <= 0:
        return ""
    return place_in((frame.filename, frame.lineno) for frame in grown.traceback)


def said(more: dict[str, tuple[int, str]]) -> str:
    """Return the result of `Holdings.more_than` in words, such as `2 open files (/tmp/a.log)`."""
    plural = {"child process": "child processes"}
    return ", ".join(
        f"{count} {kind if count == 1 else plural.get(kind, f'{kind}s')} ({name})"
        for kind, (count, name) in more.items()
    )


def _task_name(task: asyncio.Task[object]) -> str:
    """Return the name of a task's coroutine, and the line at which it waits."""
    return f"{getattr(task.get_coro(), '__qualname__', task.get_name())} at {place_in(lines_awaited(task))}"


def _children() -> Counter[str]:
    """Return the number of processes below this one by their command: its children, their children, and so on.

    A *zombie*, which has ended and was not waited for, is marked as such.
    """
    parents: dict[int, tuple[int, str]] = {}  # from a process's id to its parent's id and its own command
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # the process has ended
                # The line is `ID (COMMAND) STATE PARENT …`, and the command may have parentheses in it.
                command, _, rest = (folder / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
                state, parent = rest.split()[:2]
                parents[int(folder.name)] = int(parent), command + " (ended, but not waited for)" * (state == "Z")
    below = {os.getpid()}
    while more := {pid for pid, (parent, _) in parents.items() if parent in below} - below:
        below |= more
    return Counter(parents[pid][1] for pid in below - {os.getpid()})


class BlockSampler:
    """Sampler of the event loop: it finds callbacks that take `BLOCK_S` or longer in the user's code, and their line.

    A *block* is one such callback, during which the loop runs nothing else. The sampling thread looks every `SAMPLE_S`
    seconds if a callback has begun or ended, so blocks are measured with about this precision.

    The watch of a run (`flash.run.loop_watch`) reports only blocks of a second, because shorter ones do no harm to its
    peers. Many short ones make a run slow.
    """

    def __init__(self) -> None:
        self.places: dict[str, list[float]] = {}
        """Seconds of each block, by the line that was seen most often in it. Read after `watching`."""
        self._over = threading.Event()
        """Set at the end of `watching`, which can be used once."""

    @contextmanager
    def watching(self) -> Generator[None]:
        """Sample the event loop of this thread while the body of the `with` statement runs."""
        thread = threading.Thread(target=self._sample, args=(threading.get_ident(),), name="flash check", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _sample(self, loop_thread: int) -> None:
        """Look at the loop's thread until the watch is over. The body of the sampling thread.

        `loop_thread` is the thread's identifier. A block that lasts when the watch ends is not recorded.
        """
        callback: object = None  # frame of the callback that runs now; keeping it keeps its identity
        since, seen = 0.0, Counter[str]()
        while not self._over.wait(SAMPLE_S):
            frame = innermost = sys._current_frames().get(loop_thread)  # pyright: ignore[reportPrivateUsage]
            # The outermost frame of a callback is `Handle._run` of asyncio. Without it, the loop waits for events.
            while frame is not None and frame.f_code is not events.Handle._run.__code__:  # pyright: ignore[reportPrivateUsage]
                frame = frame.f_back
            if frame is not callback or frame is None:
                self._note(perf_counter() - since, seen)
                callback, since = frame, perf_counter()
                seen.clear()
            if frame is not None:
                seen[place_in(lines_of(innermost))] += 1

    def _note(self, seconds: float, seen: Counter[str]) -> None:
        """Record the end of a callback that took `seconds`, if it was a block and its line is the user's.

        `seen` counts the samples at each line; empty if no callback was seen, since the loop waited for events.
        """
        if seen and seconds >= BLOCK_S and is_users(place := seen.most_common(1)[0][0]):
            self.places.setdefault(place, []).append(seconds)
