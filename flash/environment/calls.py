"""Calls of a user's code: exceptions, hangs and swallowed cancellations become errors that name file and line.

Episodes (`flash.rollout.episode.episode.EpisodePlayer`, which also plays those of the dry run) make every call of an
environment through `call_method`, `call_function` and `check_returned`. Classmethods and the examples of a tiny
model are called inside `typed_errors`. The agents and verifiers of `envs` are called with `UserTask` directly. All of
this runs on the event loop of a node loop or of a command, and `typed_errors` also without a loop.

Invariants: the code runs in an asyncio task of its own and in no task group, so that an exception of the code ends only
the call. A call that does not end by its deadline is cancelled. Code may catch the cancellation (*swallow* it) and go
on. If it does not end in time after that, it is *abandoned*: its coroutine is never resumed, so that it can neither
delay the caller nor keep the event loop busy.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import Context
from typing import Any, ClassVar, Generic, TypeVar, cast

import anyio

from flash.environment.places import awaited_coroutines, is_logged, lines_awaited, place_in, place_of
from flash.environment.threaded import Threaded
from flash.errors import EnvError, FlashError, RewardError
from flash.foreign.abandoned import are_delivering, disarm, keep_for_ever, scopes_within, unregister
from flash.waiting import first_error

_T = TypeVar("_T")

MAX_MESSAGE = 2000
"""Largest number of characters that are kept of a user's error message, half from each end. The limit is needed because
many processes hold a copy."""

CLEANUP_S = 6.0
"""Seconds that cancelled user code has for its cleanup. The time is longer than `envs.programs.REST_S`, so that a
program which the code has started can end first."""

MAX_SWALLOWED = 100
"""Number of cancellations that a call may swallow before it is abandoned. An orderly cleanup also swallows some: one at
each of its `await`s."""

SPIN_S = 0.5
"""Seconds after which a call is abandoned if its tasks swallow one cancellation on each turn of the event loop."""

CLOSING_TURNS = 3
"""Number of turns of the event loop that a task needs to end after its coroutine was closed."""

_log = logging.getLogger(__name__)

_abandoned_at: Counter[str] = Counter()
"""Number of calls that this process has abandoned, by the line that `UserTask.where` gives, such as `, at
file.py:12`."""


class EnvTimeoutError(EnvError):
    """A call of an environment took longer than its deadline."""


class UserTask(Generic[_T]):
    """A running call of a user's code. It ends by itself, or its owner ends it with `end`.

    Lifecycle: the constructor starts the call in a task of its own; the owner calls `wait`, and `end` if the time is
    over. Then `value` or `error` has the result.

    Args:
        name: name of the call in a warning.
        call: function that calls the code. It may return an awaitable, which is then awaited.
        context: the context variables that the code sees and may set; by default a copy of the current context.
        on_end: called once, when the code has ended or was abandoned.
    """

    abandoned: ClassVar[int] = 0
    """Number of calls that this process has abandoned. The node reports the number to the hub."""

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
        """True since `end` was called."""
        self._abandoned = False
        """True since the code was abandoned, or since it is to be abandoned at its next step."""
        self._swallowed = 0
        """Number of cancellations that were thrown into the code since `end` was called. The code has swallowed all but
        the last of them."""
        self._awaitable: object = None
        """Coroutine, or other awaitable, that `call` has returned; None before that, or if the result is not
        awaitable."""
        self.value: _T | None = None
        """The code's result, if it has returned. None, as is `error`, if the code was cancelled or abandoned."""
        self.error: BaseException | None = None
        """The exception that the code has raised, if any."""
        self._task = asyncio.get_running_loop().create_task(self._run(), context=context)
        if on_end is not None:
            self._task.add_done_callback(lambda _: self._report_end())

    def _report_end(self) -> None:
        """Call `on_end`, the first time that this is called.

        The task calls this at its end, and `end` when it abandons the code. The second call does nothing: an abandoned
        task may still end after `end` has returned.
        """
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    async def _run(self) -> None:
        """Call the code, and store the result or the exception. A cancellation by `end` is neither.

        This is the body of the task.
        """
        try:
            with self._scope:
                if self._ending:  # `end` was called before the task has begun
                    return
                result = self._call()
                if inspect.isawaitable(result):
                    self._awaitable = result
                    result = await self._drive(result)
                self.value = cast("_T", result)
        except BaseException as error:
            # User code may raise SystemExit or KeyboardInterrupt. In a task, asyncio would end the whole loop with it.
            self.error = error

    @types.coroutine
    def _drive(self, awaitable: Awaitable[_T]) -> Generator[Any, Any, _T | None]:
        """Resume the code whenever the thing that it awaits is ready, until the code ends or is abandoned.

        This generator stands between asyncio and the code. The generator passes the futures that the code awaits up to
        asyncio, and cancellations down to the code. So it can leave the code suspended for ever. A task of asyncio that
        ran the code directly would end only with the code.

        `_run` awaits this. Returns the result of the code; None if the code was abandoned.
        """
        steps = _steps_of(awaitable)  # runs the code up to its next `await` of a future
        thrown: BaseException | None = None  # exception that is thrown into the code at the next step
        # A loop that was blocked lately lets other tasks run before user code (`flash.run.loop_watch.WatchedLoop`).
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
                if self._ending:
                    self._swallowed += 1
            if self._abandoned or self._swallowed > MAX_SWALLOWED:
                yield from self._abandon(steps)
                return None

    def _abandon(self, steps: Any) -> Generator[None]:
        """Abandon the code where it stands, and its child tasks with it. `steps` is the iterator that runs the code.

        `_drive` calls this in the code's task, because a cancel scope can only be left in its task.
        """
        self._abandoned = True
        # First stop the scopes of the code from cancelling its tasks again and again, then close the child tasks.
        scopes = scopes_within(self._scope, self._task)
        for child in disarm(scopes, self._task):
            _close(child.get_coro(), child)
            unregister(child)
            child.cancel()
        # Child tasks report their ends to task groups that are in `steps`: close it only when all have ended.
        for _ in range(CLOSING_TURNS):
            with suppress(BaseException):
                yield
        disarm(scopes, self._task)
        _close(steps, self._awaitable)

    def where(self) -> str:
        """Return `, at file.py:12`, the line of the user's code that waits now; empty if the line is not known.

        Errors and warnings contain it. Owners call this before they end the code.
        """
        place = place_in(lines_awaited(self._awaitable))
        return f", at {place}" if place else ""

    async def wait(self, seconds: float, *, shield: bool = False) -> bool:
        """Wait until the code has ended; return False if it is still running after `seconds`.

        The owner calls this after the constructor. If the caller is cancelled during this wait, the code is ended first
        (`end`), and then the cancellation goes on. `shield`: True if a cancellation of the caller takes effect only
        after the wait, because the code has to run even then.
        """
        try:
            # Most calls end at their first step, on the next turn of the loop. They need no deadline, whose timer costs
            # more than the call.
            if shield:
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(0)
            if not self._task.done():
                await self._rest(seconds, shield=shield)
        except BaseException:
            await self.end()
            raise
        return self._task.done()

    async def _rest(self, seconds: float, *, shield: bool = True) -> None:
        """Wait until the task has ended, but at most `seconds`. `shield`: True if the caller cannot be cancelled."""
        with anyio.move_on_after(seconds, shield=shield):
            await asyncio.wait([self._task])

    async def end(self, seconds: float = CLEANUP_S) -> bool:
        """Cancel the code, and wait until it has ended. Returns True if it has; False if it was abandoned.

        The owner calls this if the time of the call is over. Code that still runs after `seconds` is abandoned. Code
        that swallows a cancellation on each turn of the loop is abandoned sooner, after `SPIN_S` or MAX_SWALLOWED
        cancellations. A warning names the line; of calls that are abandoned at one line, the 1st, 10th, 100th … is
        logged. A cancellation of the caller takes effect only after the wait.
        """
        where = self.where()  # before the cancellation, which moves the code to its cleanup
        self._ending = True
        self._scope.cancel()
        # During each wait the code may end by itself, or `_drive` may abandon it.
        await self._rest(min(SPIN_S, seconds))
        # Code that still swallows a cancellation on each turn of the loop keeps the loop busy, so it gets no more time.
        # Code that awaits something, in a shielded scope for example, may be cleaning up.
        if not self._task.done() and not are_delivering(scopes_within(self._scope, self._task)):
            await self._rest(seconds)
        if not self._task.done():
            self._abandoned = True
            # `_drive` abandons the code when it gets this cancellation, which no shield of the code holds back. That
            # takes some turns of the loop, for which the caller does not wait.
            self._task.cancel()
            self._report_end()
        if self._abandoned:
            UserTask.abandoned += 1
            _abandoned_at[where] += 1
            if is_logged(_abandoned_at[where]):
                count = _abandoned_at[where]
                so_far = f" ({count} calls were abandoned there so far)" if count > 1 else ""
                warning = "%s still runs after it was cancelled%s: it is abandoned%s; do not catch CancelledError there"
                _log.warning(warning, self.name, where, so_far)
        return not self._abandoned


def _steps_of(awaitable: Any) -> Any:
    """Return the iterator of an awaitable. It has `send`, `throw` and `close`, as that of a coroutine has.

    Python awaits iterators without them, too, and the generators of functions with the decorator `types.coroutine`.
    """
    steps = awaitable if isinstance(awaitable, types.GeneratorType) else awaitable.__await__()
    return steps if all(hasattr(steps, name) for name in ("send", "throw", "close")) else _awaited(_Given(steps))


class _Given:
    """Awaitable whose `__await__` returns a given object.

    Args:
        steps: result of the `__await__` of the user's awaitable. Python raises a TypeError if it is no iterator.
    """

    def __init__(self, steps: Any) -> None:
        self._steps = steps

    def __await__(self) -> Any:
        """Return the given object."""
        return self._steps


async def _awaited(given: _Given) -> object:
    """Await an iterator as Python does, in a coroutine, which has the methods that the iterator lacks."""
    return await given


def _close(steps: Any, awaitable: object) -> None:
    """End a suspended coroutine with GeneratorExit, and keep the coroutines that ignore it in memory for ever.

    This is how a call is abandoned (`UserTask._abandon`). Python complains when it deletes a coroutine that has not
    ended (`keep_for_ever`). `steps` is the iterator of the coroutine, `awaitable` the coroutine itself.
    """
    # The coroutine, and the ones that it awaits, down to the innermost.
    suspended = [*awaited_coroutines(awaitable)]
    with suppress(BaseException):  # the cleanup of a user's code may raise anything, and the call has failed already
        steps.close()
    for one in suspended:
        if getattr(one, "cr_frame", None) is not None:  # the coroutine has not ended
            keep_for_ever(one)


async def call_method(
    call_name: str,
    seconds: float,
    deadline_key: str,
    call: Callable[[], Awaitable[_T]],
    *,
    env: object,
    context: Context | None = None,
    shield: bool = False,
) -> _T:
    """Call a method of an environment, and return the result.

    Each `reset`, `step` and `close` goes through here; functions that await nothing go through `call_function`. If the
    caller is cancelled, the call is ended before the cancellation goes on.

    Args:
        call_name: name of the call in errors, such as `step 2 (seed 5)`.
        seconds: deadline of the call.
        deadline_key: key of `[deadlines]` that has the deadline, for the error message.
        call: function that calls the method.
        env: the environment. If it is a blocking one, an error names the line at which its thread stands.
        context: the context that all calls of one environment share, so that variables that `reset` has set are seen in
            `step`. None: a copy of the current context.
        shield: True if the call goes on until its deadline while the caller is being cancelled, as `close` must.

    Raises:
        EnvTimeoutError: the call took longer than `seconds`. The call is cancelled, and abandoned if it does not end
            after that.
        RewardError: the call raised a `RewardError`.
        EnvError: the call raised anything else, was cancelled from within, or returned nothing to await.
    """

    def awaitable_call() -> Awaitable[_T]:
        """Call the method, and return the awaitable that it gives. Raises EnvError if it gives something else."""
        result = call()
        if not inspect.isawaitable(result):
            raise EnvError(
                f"environment {call_name} returned {type(result).__name__}, which cannot be awaited; make reset, step "
                "and close all `async def`, or none of them"
            )
        return result

    task = UserTask(f"environment {call_name}", awaitable_call, context)
    if not await task.wait(seconds, shield=shield):
        where = (env.where() if isinstance(env, Threaded) else "") or task.where()
        ended = await task.end()
        abandoned = "" if ended else "; it went on after it was cancelled, and was abandoned"
        advice = f"look at the environment's class, or raise deadlines.{deadline_key}"
        raise EnvTimeoutError(f"environment {call_name} took longer than {seconds:g} s{where}{abandoned}; {advice}")
    if task.error is not None:
        raise _failure(call_name, task.error) from task.error
    return cast("_T", task.value)


def call_function(call_name: str, call: Callable[[], _T]) -> _T:
    """Call a function of an environment that awaits nothing, and return the result. Such a call has no deadline.

    The constructor goes through here, and a function that listens to a response.

    Args:
        call_name: name of the call in errors, such as `start (seed 5)`.
        call: function that calls the environment's function.

    Raises:
        RewardError: the function raised a `RewardError`.
        EnvError: the function raised anything else.
    """
    try:
        return call()
    except BaseException as error:  # a user's function may raise anything, such as SystemExit
        raise _failure(call_name, error) from error


@contextmanager
def typed_errors(call_name: str) -> Generator[None]:
    """Turn each exception that the block raises into an EnvError. The block calls a method of an environment outside of
    an episode, such as a classmethod about the problems.

    Errors of Flash pass unchanged: such a method raises a ConfigError to say which option or row is wrong. A
    cancellation and the user's interrupt pass, too.

    Args:
        call_name: name of the call in errors, such as `kind_of (seed 5)`.

    Raises:
        EnvError: the block raised anything else. The error names the line.
    """
    try:
        yield
    except (FlashError, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's method may raise anything, such as SystemExit
        raise EnvError(f"environment {call_name} raised {describe_error(error)}") from error


def _failure(call_name: str, error: BaseException) -> EnvError:
    """Return the EnvError that an exception of a user's code becomes. A RewardError stays a RewardError.

    An EnvError with a message of fewer than MAX_MESSAGE characters is returned unchanged: Flash or the user has raised
    it for this purpose. `call_name` names the call in the message.
    """
    if isinstance(error, asyncio.CancelledError):
        # If it were raised again, the episode would end without a result, and its lease would never be returned.
        return EnvError(
            f"environment {call_name} was cancelled from within{place_of(error)}: the code has cancelled its own task; "
            "raise an error instead"
        )
    if isinstance(error, EnvError) and (text := _text(error)) and len(text) < MAX_MESSAGE:
        return error
    kind = RewardError if isinstance(error, RewardError) else EnvError
    return kind(f"environment {call_name} raised {describe_error(error)}")


def describe_error(error: BaseException) -> str:
    """Return `ValueError: message (file.py:12)` for an exception of a user's code, for error messages.

    Of an exception group, only the exception that `first_error` chooses is described: an error of Flash if there is
    one, else the first.
    """
    chosen = first_error(error) if isinstance(error, BaseExceptionGroup) else error
    cause = chosen.__cause__
    # Python replaces an end of iteration that leaves a coroutine or a generator by a RuntimeError whose message ends in
    # this way. The user's own exception says more. A RuntimeError that the user has raised is kept.
    if type(chosen) is RuntimeError and isinstance(cause, (StopIteration, StopAsyncIteration)):
        replaced = message_of(chosen).endswith((" raised StopIteration", " raised StopAsyncIteration"))
        chosen = cause if replaced else chosen
    # An error that was put into a group without being raised has no traceback of its own.
    return f"{type(chosen).__name__}: {message_of(chosen)}{place_of(chosen) or place_of(error)}"


def message_of(error: BaseException) -> str:
    """Return the message of an exception, shortened in the middle if it has more than `MAX_MESSAGE` characters. It says
    so if the message itself cannot be made."""
    text = _text(error)
    return "it cannot be shown" if text is None else shortened(text, MAX_MESSAGE)


def _text(error: BaseException) -> str | None:
    """Return the message of an exception; None if its class is a user's and its `__str__` raises an error."""
    try:
        return str(error)
    except BaseException:
        return None


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters unchanged; of a longer text only its two ends, of about `most`
    characters together.

    The ends of an error message usually say the most. Between them stands how many characters were left out.
    """
    left_out = len(text) - most
    return text if left_out <= 0 else f"{text[: most // 2]} … {left_out} characters … {text[-most // 2 :]}"


def check_returned(env: object, method: str, seed: int, check: Callable[[], _T]) -> _T:
    """Check the result of an environment's method with `check`, and return the value that `check` returns.

    The player of episodes calls this after each `reset` and `step`.

    Args:
        env: the environment.
        method: name of the method.
        seed: seed of the problem, which errors name.
        check: calls a function of `flash.environment.results` with the result.

    Raises:
        EnvError, RewardError: the check failed; the error names the method and the place where it is defined.
    """
    try:
        return check()
    except EnvError as error:
        place = _place_of_method(env, method)
        raise type(error)(f"environment {method} (seed {seed}): {error}; returned by {place}") from None
    except BaseException as error:  # the value may be of a user's class, whose methods may raise anything
        raise _failure(f"{method} (seed {seed})", error) from error


def _place_of_method(env: object, method: str) -> str:
    """Return `Class.step (file.py:12)`: the first line of a method, of the blocking environment if `env` wraps one.
    Without the line if the method is not written in Python."""
    kind = type(env.blocking if isinstance(env, Threaded) else env)
    code = getattr(inspect.unwrap(getattr(kind, method)), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{kind.__qualname__}.{method}{place}"
