"""Error messages about exceptions of the user's code."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flash.environment.calls import describe_error


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
