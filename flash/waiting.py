"""Helpers for waiting: deadlines whose errors name the awaited event, long work in slices, task groups, and pools.

All asynchronous parts of Flash use them. A wait gets a deadline with `deadline`. Work that takes long is a generator,
which yields after each slice, so that the event loop can run other tasks in between (`run_in_slices`).
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from flash.errors import DeadlineError, FlashError, TransportError

T = TypeVar("T")

ITEMS_PER_SLICE = 4096
"""Number of items that `free_in_slices` frees in one slice, which blocks the event loop."""

GC_THRESHOLDS = (500, 3_600, 10)
"""Thresholds of the garbage collector's three generations inside a block of `rare_garbage_collection`.

Episodes and samples leave no reference cycles, but they live long enough to be scanned again and again: with Python's
own thresholds a collection stops a loop of 10,000 episodes for a second. Scanning 10,000 new objects takes 30 ms. So
new objects are scanned after 500 allocations, and objects that survived one scan only after 500 · 3,600 = 1.8
million. The last number, for objects that survived two scans, is Python's own."""

MessagePart = str | Callable[[], str]
"""Part of an error's message. A function is called only when the error happens, so that it can describe that moment."""


@contextmanager
def deadline(seconds: float, waited_for: MessagePart, look_at: MessagePart) -> Generator[anyio.CancelScope]:
    """Let the block take at most `seconds`. The block gets the scope, and may cancel it to end earlier.

    Args:
        seconds: largest duration of the block.
        waited_for: noun phrase for the event that the block waits for.
        look_at: place where the user can find the cause.

    Raises:
        DeadlineError: the deadline passed, or the block has cancelled the scope. A TimeoutError that the block itself
            raises passes unchanged.
    """
    with anyio.move_on_after(seconds) as scope:
        yield scope
    if scope.cancelled_caught:
        raise DeadlineError(_text(waited_for), seconds, _text(look_at))


def _text(part: MessagePart) -> str:
    """Return a part of a message as text. A function is called now."""
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
    """Run a generator to its end without a pause, and return its result.

    Callers use it for little work, and where no event loop is blocked.
    """
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def free_in_slices(items: list[T]) -> Generator[None]:
    """Empty a list, `ITEMS_PER_SLICE` items in each slice. Freeing many objects at once would block the event loop."""
    while items:
        del items[-ITEMS_PER_SLICE:]
        yield


def run_apart(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine function to its end, from code that is not asynchronous. Returns its result.

    If an event loop runs in this thread already, as in a notebook, a second one cannot run in it. Then the function
    runs in another thread, and the loop of this thread is blocked until the function ends.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.run(function, *args)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(anyio.run, function, *args).result()


@contextmanager
def worker_deaths_named(work: str) -> Generator[None]:
    """Raise a FlashError in place of the error of a pool of processes of which one has died. The block uses the pool.

    `work`: the work of the processes, as a phrase with a verb for the error, such as `tokenizes the rows`.
    """
    try:
        yield
    except BrokenProcessPool as error:
        raise FlashError(
            f"a process that {work} has ended before its work was done: lines above may say why; without such lines "
            "memory has probably run out (see dmesg)"
        ) from error


@asynccontextmanager
async def unwrapped_group() -> AsyncGenerator[TaskGroup]:
    """Open a task group that raises an error of the block as it is, and not inside an exception group.

    So callers can catch the error by its type. The tasks are cancelled then. Errors of the tasks are still raised in an
    exception group, which takes the place of an error of the block.
    """
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
    """Return the error of a task group that is shown to people or raised instead of the group.

    An error of Flash that is no `TransportError` comes first, then any error of Flash, then any other error. If there
    are several errors of one kind, the first of them is returned.
    """
    flat = list(_single_errors(group))
    ours = [error for error in flat if isinstance(error, FlashError)]
    # A lost connection is mostly the consequence of another error, which says more.
    causes = [error for error in ours if not isinstance(error, TransportError)]
    return (causes or ours or flat)[0]


def _single_errors(error: BaseException) -> Generator[BaseException]:
    """Yield the errors inside nested exception groups, in their order."""
    left = [error]
    # This is a loop and not a recursion, because code of users may nest groups deeper than Python can recurse.
    while left:
        one = left.pop()
        if isinstance(one, BaseExceptionGroup):
            left += reversed(one.exceptions)
        else:
            yield one


class _GarbageCollection:
    """State of `rare_garbage_collection` in this process."""

    blocks = 0
    """Number of blocks that have begun and not ended."""
    thresholds = gc.get_threshold()
    """Thresholds before the first of these blocks. The end of the last block restores them."""
    unfreezes = True
    """True if the end of the last block lets the collector scan all objects again."""


@contextmanager
def rare_garbage_collection() -> Generator[None]:
    """Collect reference cycles rarely inside the block, and do not scan objects that existed before it.

    Otherwise Python's collector would stop the event loop of a node for up to a second, again and again. The setting is
    for the whole process. Blocks may overlap; the last one to end restores the former thresholds.
    """
    if _GarbageCollection.blocks == 0:
        _GarbageCollection.thresholds = gc.get_threshold()
        # torch and vLLM load objects that live as long as the process. A full collection over them takes 0.3 s. It
        # takes 2 s in a process that was forked from a server with these objects, because it copies their memory pages.
        # So objects that the server has excluded from collections stay excluded.
        _GarbageCollection.unfreezes = gc.get_freeze_count() == 0
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
    _GarbageCollection.blocks += 1
    try:
        yield
    finally:
        _GarbageCollection.blocks -= 1
        if _GarbageCollection.blocks == 0:
            gc.set_threshold(*_GarbageCollection.thresholds)
            if _GarbageCollection.unfreezes:
                gc.unfreeze()
