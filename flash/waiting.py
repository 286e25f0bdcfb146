"""Waiting: deadlines that name what was waited for, a loop that is not stopped for long, and errors of task groups."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from flash.errors import DeadlineError, FlashError, TransportError

T = TypeVar("T")

ITEMS_AT_ONCE = 4096
"""Items that `free_in_slices` frees in one slice."""

GC_THRESHOLDS = (500, 3_600, 10)
"""Thresholds of the garbage collector's three generations while `rare_garbage_collection` is in force.

Episodes and samples leave no reference cycles, but they live long enough to be scanned again and again: with Python's
own thresholds a collection stops a loop of 10,000 episodes for a second. Scanning 10,000 new objects takes 30 ms, so
new objects are scanned in small groups, and objects that survived one scan only after 1.8 million allocations."""

MessagePart = str | Callable[[], str]
"""Part of an error's message. A function is called once the error has happened, when more may be known."""


@contextmanager
def deadline(seconds: float, waited_for: MessagePart, look_at: MessagePart) -> Generator[anyio.CancelScope]:
    """Let the block take at most `seconds`. The scope that it yields may also be cancelled earlier.

    Raises:
        DeadlineError: the scope was cancelled. A TimeoutError that the block itself raises passes unchanged.
    """
    with anyio.move_on_after(seconds) as scope:
        yield scope
    if scope.cancelled_caught:
        raise DeadlineError(_text(waited_for), seconds, _text(look_at))


def _text(part: MessagePart) -> str:
    return part if isinstance(part, str) else part()


async def run_in_slices(work: Generator[None, None, T]) -> T:
    """Run a generator to its end, and return its result. Other tasks that are ready run after each `yield`."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
        await anyio.lowlevel.checkpoint()


def run_to_end(work: Generator[None, None, T]) -> T:
    """Run a generator to its end without a pause, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def free_in_slices(items: list[T]) -> Generator[None]:
    """Empty a list, some items at a time: freeing many objects at once blocks the event loop."""
    while items:
        del items[-ITEMS_AT_ONCE:]
        yield


def run_apart(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine function with `anyio.run`, also where an event loop runs already, as in a notebook.

    In that case it runs in a thread of its own, and the loop of this thread is blocked until it ends.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.run(function, *args)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(anyio.run, function, *args).result()


@asynccontextmanager
async def unwrapped_group() -> AsyncGenerator[TaskGroup]:
    """Open a task group that raises an error of the block as it is, and not inside an exception group."""
    body_error: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:
            # The error is raised below, after the group has ended: inside it would be wrapped.
            body_error = error
            tasks.cancel_scope.cancel()
    if body_error is not None:
        raise body_error


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error of a task group that people should see: the most specific one of Flash, else the first one."""
    flat = list(_leaves(group))
    ours = [error for error in flat if isinstance(error, FlashError)]
    # A lost connection mostly reports the consequence of another error; that one says more, if there is one.
    causes = [error for error in ours if not isinstance(error, TransportError)]
    return (causes or ours or flat)[0]


def _leaves(error: BaseException) -> Generator[BaseException]:
    """Yield the errors inside nested exception groups, in their order."""
    left = [error]
    while left:  # not recursive, since a user's code may nest groups deeper than Python recurses
        one = left.pop()
        if isinstance(one, BaseExceptionGroup):
            left += reversed(one.exceptions)
        else:
            yield one


class _GarbageCollection:
    """State of `rare_garbage_collection` in this process."""

    blocks = 0
    """Number of blocks that are in force."""
    thresholds = gc.get_threshold()
    """Thresholds before the first of these blocks."""


@contextmanager
def rare_garbage_collection() -> Generator[None]:
    """Collect reference cycles rarely inside the block, and never scan objects that existed before it.

    Keeps Python's collector from stopping the event loop. Blocks may overlap; the last one to end restores the former
    thresholds.
    """
    if _GarbageCollection.blocks == 0:
        _GarbageCollection.thresholds = gc.get_threshold()
        # torch and vLLM load objects that live as long as the process. A full collection over them takes 0.3 s.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
    _GarbageCollection.blocks += 1
    try:
        yield
    finally:
        _GarbageCollection.blocks -= 1
        if _GarbageCollection.blocks == 0:
            gc.set_threshold(*_GarbageCollection.thresholds)
            gc.unfreeze()
