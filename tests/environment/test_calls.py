"""Calls of a user's code, and error messages about its exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

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
