"""How we wait: every wait has a deadline that names what was waited for, and errors leave task groups as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

from flash.errors import DeadlineError, FlashError, TransportError

T = TypeVar("T")

Words = str | Callable[[], str]
"""Part of an error's message; a function where it can only be told once the error is there."""


@contextmanager
def deadline(seconds: float, waited_for: Words, look_at: Words) -> Generator[anyio.CancelScope]:
    """Let the block take at most `seconds`; its scope may also be cancelled earlier.

    Raises:
        DeadlineError: it was cancelled. A TimeoutError of the block's own passes as it is.
    """
    with anyio.move_on_after(seconds) as scope:
        yield scope
    if scope.cancelled_caught:
        raise DeadlineError(_text(waited_for), seconds, _text(look_at))


def _text(words: Words) -> str:
    return words if isinstance(words, str) else words()


def run_apart(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """`anyio.run`, also from a thread whose own loop runs, as that of a notebook does: that one waits meanwhile."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.run(function, *args)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(anyio.run, function, *args).result()


@asynccontextmanager
async def unwrapped_group() -> AsyncGenerator[TaskGroup]:
    """A task group that raises the block's own error as it is, not in a group."""
    body_error: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:
            # Raised again below.
            body_error = error
            tasks.cancel_scope.cancel()
    if body_error is not None:
        raise body_error


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a task group that people should see: the most specific of our own, else the first."""
    flat = list(_leaves(group))
    ours = [error for error in flat if isinstance(error, FlashError)]
    # What a lost connection reports is the echo of another error, when there is one.
    telling = [error for error in ours if not isinstance(error, TransportError)]
    return (telling or ours or flat)[0]


def _leaves(error: BaseException) -> Generator[BaseException]:
    left = [error]
    while left:  # a user's code may nest groups deeper than Python recurses
        one = left.pop()
        if isinstance(one, BaseExceptionGroup):
            left += reversed(one.exceptions)
        else:
            yield one
