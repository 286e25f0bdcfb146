"""Calls of a user's code, and error messages about its exceptions."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Awaitable, Generator
from typing import Self, cast

import anyio
import pytest

from flash.environment.calls import UserTask, describe_error


async def ends_early() -> None:
    """Raise an exception that Python replaces by a RuntimeError when it leaves a coroutine."""
    raise StopIteration("over")


def chained(error: Exception) -> Exception:
    """Return the error with a StopIteration as its cause."""
    error.__cause__ = StopIteration()
    return error


def test_a_stop_iteration_that_left_a_coroutine_is_shown_as_raised() -> None:
    with pytest.raises(RuntimeError) as caught:
        ends_early().send(None)
    assert describe_error(caught.value).startswith("StopIteration: over")


async def rows(end: Exception) -> AsyncIterator[int]:
    """Raise `end` in an asynchronous generator."""
    raise end
    yield 0


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
def test_an_end_of_iteration_that_left_an_async_generator_is_shown_as_raised(kind: type[Exception]) -> None:
    with pytest.raises(RuntimeError) as caught:
        rows(kind("over")).__anext__().__await__().send(None)
    assert describe_error(caught.value).startswith(f"{kind.__name__}: over")


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_an_error_that_a_stop_iteration_caused_keeps_its_message(kind: type[Exception]) -> None:
    error = chained(kind("the data set has no rows for seed 5"))
    assert describe_error(error) == f"{kind.__name__}: the data set has no rows for seed 5"


class Bare:
    """Awaitable whose iterator has `__next__` alone: no `send`, `throw` or `close`.

    Args:
        future: the thing that it waits for.
        value: the value that it returns.
    """

    def __init__(self, future: asyncio.Future[None], value: str) -> None:
        self._future, self._value = future, value

    def __await__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> object:
        """Pass the future to the loop as a coroutine does, until it is done."""
        if self._future.done():
            raise StopIteration(self._value)
        self._future._asyncio_future_blocking = True
        return self._future


def test_an_awaitable_may_have_an_iterator_without_send() -> None:
    async def main() -> UserTask[str]:
        """Await it until its future is done, a few turns of the loop later."""
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, future.set_result, None)
        call: UserTask[str] = UserTask("a call", lambda: cast("Awaitable[str]", Bare(future, "done")))
        assert await call.wait(5.0)
        return call

    call = anyio.run(main)
    assert (call.value, call.error) == ("done", None)


def test_an_awaitable_without_an_iterator_is_an_error() -> None:
    async def main() -> UserTask[str]:
        """Await an object whose `__await__` returns a list."""

        class Wrong:
            def __await__(self) -> list[str]:
                return []

        call: UserTask[str] = UserTask("a call", lambda: cast("Awaitable[str]", Wrong()))
        assert await call.wait(5.0)
        return call

    call = anyio.run(main)
    assert isinstance(call.error, TypeError)
    assert "non-iterator of type 'list'" in str(call.error)


@types.coroutine
def old_style() -> Generator[None, None, str]:
    """Let the loop run once, and return a text."""
    yield
    return "done"


def test_a_generator_that_is_a_coroutine_is_awaited() -> None:
    async def main() -> UserTask[str]:
        """Await the generator itself, which has no method `__await__`."""
        call: UserTask[str] = UserTask("a call", old_style)
        assert await call.wait(5.0)
        return call

    call = anyio.run(main)
    assert (call.value, call.error) == ("done", None)


def test_a_call_ends_that_waits_in_an_iterator_without_throw() -> None:
    async def main() -> bool:
        """Wait for a future that nobody sets, and end the call."""
        never = Bare(asyncio.get_running_loop().create_future(), "done")
        call: UserTask[str] = UserTask("a call", lambda: cast("Awaitable[str]", never))
        assert not await call.wait(0.01)
        return await call.end()

    assert anyio.run(main)


@pytest.mark.parametrize("shield", [False, True])
def test_a_cancelled_caller_gets_the_result_of_a_call_only_if_the_call_is_shielded(shield: bool) -> None:
    ended: list[bool] = []

    async def main() -> None:
        """Wait in a cancelled scope for a call that ends at its first step."""
        with anyio.CancelScope() as scope:
            scope.cancel()
            ended.append(await UserTask("a call", lambda: None).wait(5.0, shield=shield))

    anyio.run(main)
    assert ended == [True] * shield


def test_a_call_whose_task_is_cancelled_before_its_first_step_has_ended() -> None:
    async def main() -> None:
        """Cancel all other tasks of the loop, as a user's code may do."""
        reported: list[str] = []
        call = UserTask("a call", lambda: None, on_end=lambda: reported.append("end"))
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        assert await call.wait(5.0)
        assert await call.end()
        assert reported == ["end"]
        assert (call.value, call.error) == (None, None)

    anyio.run(main)
