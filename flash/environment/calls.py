"""Calls of a user's code: its exceptions, hangs and swallowed cancellations become errors that name file and line.

The code runs in an asyncio task of its own, in no task group. Nothing that it raises can end anything but the call, and
a call that does not end is abandoned: its coroutine is never resumed, so it can neither hold its caller nor keep the
event loop busy.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from contextvars import Context
from typing import Any, ClassVar, Generic, TypeVar, cast

import anyio

from flash.environment.places import awaited, is_told, lines_awaited, place_in, place_of
from flash.environment.threaded import Threaded
from flash.errors import EnvError, RewardError
from flash.foreign.abandoned import are_delivering, disarm, keep_for_ever, scopes_within, unregister
from flash.waiting import first_error

_T = TypeVar("_T")

TOLD = 2000
"""Characters kept of a user's error message: many processes hold a copy. Both ends are kept."""

END_S = 6.0
"""Seconds that cancelled user code has for its cleanup: more than `envs.programs.REST_S`, in which a program ends."""

MOST_SWALLOWED = 100
"""Cancellations that a call may swallow before it is abandoned. Each `await` of an orderly cleanup swallows one."""

SPIN_S = 0.5
"""Seconds after which a call is abandoned whose tasks swallow one cancellation on each turn of the loop."""

TURNS = 3
"""Turns of the loop in which a task ends whose coroutine was closed."""

_log = logging.getLogger(__name__)

_places: Counter[str] = Counter()
"""Calls that were abandoned at each place of a user's code."""


class EnvTimeoutError(EnvError):
    """A call of an environment outlived its deadline."""


class UserTask(Generic[_T]):
    """A call of a user's code at work, which ends by itself or is ended.

    Args:
        name: names the call in a warning.
        call: calls the code. Its result may be awaitable.
        context: the context variables that the code sees and may set; a copy of the current ones by default.
        on_end: called when the code has ended or was abandoned; by then `over` is set.
    """

    abandoned: ClassVar[int] = 0
    """Calls that this process has abandoned."""

    def __init__(
        self,
        name: str,
        call: Callable[[], Awaitable[_T] | _T],
        context: Context | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._call = call
        self._on_end = on_end
        self._scope = anyio.CancelScope()
        self._ending = False
        self._abandoned = False
        self._swallowed = 0
        self._awaitable: object = None
        self.over = anyio.Event()
        """Set when the code has ended or was abandoned."""
        self.value: _T | None = None
        """The code's result, if it has returned."""
        self.error: BaseException | None = None
        """The exception that the code has raised."""
        self._task = asyncio.get_running_loop().create_task(self._run(), context=context)
        self._task.add_done_callback(lambda _: self._ended())

    def _ended(self) -> None:
        if not self.over.is_set():
            self.over.set()
            if self._on_end is not None:
                self._on_end()

    async def _run(self) -> None:
        try:
            with self._scope:
                if self._ending:
                    return
                result = self._call()
                if inspect.isawaitable(result):
                    self._awaitable = result
                    result = await self._driven(result)
                self.value = cast("_T", result)
        except BaseException as error:  # whatever a user's code raises, asyncio must not see it: it ends loops
            self.error = error
        finally:
            self._ended()

    @types.coroutine
    def _driven(self, awaitable: Awaitable[_T]) -> Generator[Any, Any, _T | None]:
        """Resume the code each time that what it awaits is there, until it ends or is abandoned."""
        steps: Any = awaitable.__await__()
        thrown: BaseException | None = None
        # A loop that was blocked lets other tasks have turns before (`flash.run.loop_watch.WatchedLoop`).
        turn: Callable[[], Awaitable[None]] | None = getattr(asyncio.get_running_loop(), "turn", None)
        while True:
            if turn is not None and thrown is None:
                try:
                    yield from turn().__await__()
                except BaseException as error:
                    thrown = error
            try:
                awaited = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                return end.value
            thrown = None
            try:
                yield awaited
            except BaseException as error:
                thrown = error
                self._swallowed += self._ending
            if self._abandoned or self._swallowed > MOST_SWALLOWED:
                yield from self._leave(steps)
                return None

    def _leave(self, steps: Any) -> Generator[None]:
        """Abandon the code where it stands. Runs in its task, in which alone its cancel scopes can be left."""
        self._abandoned = True
        scopes = scopes_within(self._scope, self._task)
        for child in disarm(scopes, self._task):
            _close(child.get_coro(), child)
            unregister(child)
            child.cancel()
        for _ in range(TURNS):  # task groups are told of their tasks' ends, and must still be there
            with suppress(BaseException):
                yield
        disarm(scopes, self._task)
        _close(steps, self._awaitable)

    def where(self) -> str:
        """Return `, at file.py:12`, the line of the user's code that waits now; empty if that is not known."""
        place = place_in(lines_awaited(self._awaitable))
        return f", at {place}" if place else ""

    async def wait(self, seconds: float, *, shield: bool = False) -> bool:
        """Wait until the code has ended; return False if it has not after so many seconds.

        A caller that is cancelled meanwhile ends the code first. `shield`: the caller is not cancelled meanwhile.
        """
        try:
            with anyio.move_on_after(seconds, shield=shield):
                await self.over.wait()
        except BaseException:
            await self.end()
            raise
        return self.over.is_set()

    async def end(self, seconds: float = END_S) -> bool:
        """Cancel the code. Abandon it, and return False, if it has not ended after so many seconds."""
        where = self.where()
        self._ending = True
        self._scope.cancel()
        with anyio.move_on_after(min(SPIN_S, seconds), shield=True):
            await self.over.wait()
        if not self.over.is_set() and not are_delivering(scopes_within(self._scope, self._task)):
            with anyio.move_on_after(seconds, shield=True):
                await self.over.wait()
        if not self.over.is_set():
            self._abandoned = True
            self._task.cancel()  # past its shields
            self._ended()
        if self._abandoned:
            UserTask.abandoned += 1
            _places[where] += 1
            if is_told(_places[where]):
                so_far = f", as {_places[where]} calls there so far" if _places[where] > 1 else ""
                said = "%s was cancelled and goes on%s: it is abandoned%s; let CancelledError pass"
                _log.warning(said, self.name, where, so_far)
        return not self._abandoned


def _close(steps: Any, awaitable: object) -> None:
    """End a suspended coroutine by GeneratorExit, and keep what ignores it."""
    suspended = [*awaited(awaitable)]
    with suppress(BaseException):  # its cleanup may raise anything: nobody is interested any more
        steps.close()
    for one in suspended:
        if getattr(one, "cr_frame", None) is not None:
            keep_for_ever(one)


async def called(
    what: str,
    timeout: float,
    key: str,
    call: Callable[[], Awaitable[_T]],
    *,
    env: object = None,
    context: Context | None = None,
    shield: bool = False,
) -> _T:
    """Make one call of an environment, within `timeout` seconds, which `deadlines.{key}` is. `what` names the call.

    `env`: the environment, whose thread is named if it is a blocking one. `context`: the context variables of its
    calls. `shield`: the call goes on while the caller is being cancelled.

    Raises:
        EnvTimeoutError: the call took longer. One that does not even end when it is cancelled is abandoned.
        EnvError: the call raised anything, was cancelled from within, or is not awaitable.
    """

    def asynchronous() -> Awaitable[_T]:
        result = call()
        if not inspect.isawaitable(result):
            raise EnvError(f"environment {what}: make reset, step and close all `async def`, or none of them")
        return result

    task = UserTask(f"environment {what}", asynchronous, context)
    if not await task.wait(timeout, shield=shield):
        where = (env.where() if isinstance(env, Threaded) else "") or task.where()
        ended = await task.end()
        abandoned = "" if ended else "; it goes on though it was cancelled, and was abandoned"
        advice = f"look at the environment's class, or raise deadlines.{key}"
        raise EnvTimeoutError(f"environment {what} took longer than {timeout:g} s{where}{abandoned}; {advice}")
    if task.error is not None:
        raise _failure(what, task.error) from task.error
    return cast("_T", task.value)


def made(what: str, make: Callable[[], _T]) -> _T:
    """Make an environment. A constructor awaits nothing, so it has no deadline. Raises EnvError as `called` does."""
    try:
        return make()
    except BaseException as error:  # as in `UserTask`
        raise _failure(what, error) from error


def _failure(what: str, error: BaseException) -> EnvError:
    """Return the EnvError that an exception of a user's code becomes."""
    if isinstance(error, asyncio.CancelledError):
        # Passed on it would end the episode without a result, and its lease would never be returned.
        return EnvError(f"environment {what} was cancelled from within{place_of(error)}")
    if isinstance(error, EnvError) and len(_text(error) or "x" * TOLD) < TOLD:
        return error
    kind = RewardError if isinstance(error, RewardError) else EnvError
    return kind(f"environment {what} raised {told_of(error)}")


def told_of(error: BaseException) -> str:
    """Return the type, the message and the place of an exception; of a group the first one's."""
    first = first_error(error) if isinstance(error, BaseExceptionGroup) else error
    if isinstance(first.__cause__, StopIteration):  # a coroutine that raises one raises a RuntimeError instead
        first = first.__cause__
    # An error that was put into a group without being raised has no place of its own.
    return f"{type(first).__name__}: {message_of(first)}{place_of(first) or place_of(error)}"


def message_of(error: BaseException) -> str:
    """Return the message of an exception, shortened in the middle; its class may be a user's, and fail at that too."""
    text = _text(error)
    return "it cannot be shown" if text is None else shortened(text, TOLD)


def _text(error: BaseException) -> str | None:
    try:
        return str(error)
    except BaseException:
        return None


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters and a few: both ends of a longer one."""
    left = len(text) - most
    return text if left <= 0 else f"{text[: most // 2]} … {left} characters … {text[-most // 2 :]}"


def checked(env: object, method: str, seed: int, check: Callable[[], _T]) -> _T:
    """Check the result of an environment's method.

    Raises:
        EnvError: the check's, with the method and its place.
    """
    try:
        return check()
    except EnvError as error:
        place = _place_of_method(env, method)
        raise type(error)(f"environment {method} (seed {seed}): {error}; returned by {place}") from None
    except BaseException as error:  # a value of a user's class: its methods may raise anything
        raise _failure(f"{method} (seed {seed})", error) from error


def _place_of_method(env: object, method: str) -> str:
    """Return `Class.step (file.py:12)`, the first line of a method of an environment, or of the blocking one in it."""
    kind = type(env.blocking if isinstance(env, Threaded) else env)
    code = getattr(inspect.unwrap(getattr(kind, method)), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{kind.__qualname__}.{method}{place}"
