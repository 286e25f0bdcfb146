"""Calls into code that is not ours: what it raises, and its silence, become errors that say where they come from."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from flash.environment.threaded import Threaded
from flash.errors import EnvError
from flash.waiting import first_error

_T = TypeVar("_T")

TOLD = 2000
"""Characters of a message that is not ours: many processes keep it."""


class EnvTimeoutError(EnvError):
    """A call of an environment outlived its deadline."""


async def called(what: str, timeout: float, key: str, call: Callable[[], Awaitable[_T]], *, shield: bool = False) -> _T:
    """One call of an environment, within `timeout` seconds, which `deadlines.{key}` is. `what` names it in errors.

    `shield`: also while the caller is being cancelled.

    Raises:
        EnvTimeoutError: it took longer.
        EnvError: it failed, called `sys.exit`, or was cancelled from within.
    """
    with anyio.move_on_after(timeout, shield=shield):
        try:
            result = call()
            if not inspect.isawaitable(result):
                raise EnvError(f"environment {what}: make reset, step and close all `async def`, or none of them")
            return await result
        except BaseException as error:  # the supervised boundary to code that is not ours
            if (failure := _failure(what, error)) is None:
                raise
            raise failure from error
    advice = f"look at the environment's class, or raise deadlines.{key}"
    raise EnvTimeoutError(f"environment {what} took longer than {timeout:g} s; {advice}")


def made(what: str, make: Callable[[], _T]) -> _T:
    """An environment, made in one go: what waits for nothing has no deadline. Raises EnvError as `called` does."""
    try:
        return make()
    except BaseException as error:  # as in `called`
        if (failure := _failure(what, error)) is None:
            raise
        raise failure from error


def _failure(what: str, error: BaseException) -> EnvError | None:
    """What an error is that a call of code that is not ours has ended with; None: what it is already."""
    if isinstance(error, EnvError):
        return None
    if is_theirs(error):
        return EnvError(f"environment {what} raised {told_of(error)}")
    if not isinstance(error, anyio.get_cancelled_exc_class()) or anyio.current_effective_deadline() == -math.inf:
        return None
    # Something inside the environment was cancelled, not this episode. Passed on it would end the episode without a
    # result, and its lease would never come home.
    return EnvError(f"environment {what} was cancelled from within{place_of(error)}")


def is_theirs(error: BaseException) -> bool:
    """Whether the code that was called has failed, `sys.exit` included, which would end the whole node; all else is a
    cancellation or an interrupt."""
    if isinstance(error, BaseExceptionGroup):
        return error.split((Exception, SystemExit))[1] is None
    return isinstance(error, (Exception, SystemExit))


def told_of(error: BaseException) -> str:
    """What was raised, and where; of a task group the first error."""
    if isinstance(error, BaseExceptionGroup):
        error = first_error(error)
    try:
        text = str(error)
    except Exception:  # a class that is not ours may fail at that too
        text = "it cannot be shown"
    text = text if len(text) <= TOLD else f"{text[:TOLD]}…"
    return f"{type(error).__name__}: {text}{place_of(error)}"


def checked(env: object, method: str, seed: int, check: Callable[[], _T]) -> _T:
    """What an environment's method returned, checked.

    Raises:
        EnvError: the check's, with the method and where it stands.
    """
    try:
        return check()
    except EnvError as error:
        place = _place_of_method(env, method)
        raise type(error)(f"environment {method} (seed {seed}): {error}; returned by {place}") from None


def _place_of_method(env: object, method: str) -> str:
    """`Class.step (file.py:12)`: where the method of an environment, or of the blocking one in it, begins."""
    kind = type(env.blocking if isinstance(env, Threaded) else env)
    code = getattr(inspect.unwrap(getattr(kind, method)), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{kind.__qualname__}.{method}{place}"


def place_of(error: BaseException) -> str:
    """` (file.py:12)`: the line of the code that is not ours; nothing where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
