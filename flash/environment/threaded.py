"""Blocking environments: `Threaded` runs their calls in threads, behind the asynchronous interface.

`LoadedEnvironment.make` passes each environment to `wrap`, so that a blocking one does not stop the event loop of the
node, on which all episodes run. Python cannot end a thread from outside.

Invariant: calls of one environment never overlap. If the deadline of a call passes, the caller does not wait for the
thread: the call is abandoned, and further calls are refused. The thread closes the environment when its call returns.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, TypeVar, cast

from flash.environment.interface import Environment, Info, StepResult, SyncEnvironment
from flash.environment.places import lines_of, place_in
from flash.errors import EnvError
from flash.types import Observation

_T = TypeVar("_T")

IDLE_S = 10.0
"""Seconds after which a thread without a call ends, so that threads of a short burst of calls do not stay."""


class _Worker(threading.Thread):
    """A daemon thread that runs one call after another. Threads without a call are used again by `in_thread`.

    It is a daemon because Python waits for all other threads before it exits: a call that never returns would keep the
    process alive forever.
    """

    idle: ClassVar[deque[_Worker]] = deque()
    """Threads without a call. The thread that was used last is at the end and is taken first, so that the other threads
    become idle and end."""

    def __init__(self) -> None:
        super().__init__(name="flash user code", daemon=True)
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.start()

    def give(self, call: Callable[[], None]) -> None:
        """Let the thread run a call, which must not raise. The thread must not be in `idle`. For `in_thread`."""
        self._calls.put(call)

    def run(self) -> None:
        """Run calls until the thread has had none for `IDLE_S`. This is the body of the thread."""
        while True:
            try:
                call = self._calls.get(timeout=IDLE_S)
            except Empty:
                # Once removed from `idle`, the thread can get no further call. If it is not there, `in_thread` has just
                # taken it, and its call comes next.
                with suppress(ValueError):
                    _Worker.idle.remove(self)
                    return
                continue
            call()
            del call  # an idle thread must not keep the environment of its last call alive
            _Worker.idle.append(self)


async def in_thread(call: Callable[[], _T]) -> _T:
    """Run a user's blocking call in a thread that runs nothing else meanwhile, and return the result.

    Methods of blocking environments and plain agent functions (`envs.agent`) run here. If the caller is cancelled, the
    thread continues without it.

    Raises:
        BaseException: anything that the call raises; for a StopIteration a RuntimeError with it as cause, because a
            coroutine cannot raise it.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = copy_context()

    def set_ended(value: Any, error: BaseException | None) -> None:
        """Give the caller the result, or the exception, of the call. Runs on the event loop."""
        if not ended.done():  # if it is done, the caller was cancelled and nobody waits for the result
            ended.set_result((value, error))

    def work() -> None:
        """Run the call in the thread, and report its end to the event loop."""
        value, error = None, None
        try:
            value = context.run(call)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(set_ended, value, error)

    try:
        worker = _Worker.idle.pop()
    except IndexError:
        worker = _Worker()
    worker.give(work)
    # The future carries an exception as a value: it refuses a StopIteration, and the caller would wait for ever.
    value, error = await ended
    if error is not None:
        raise error
    return value


class Threaded:
    """An `Environment` around an environment of which some or all methods are blocking."""

    def __init__(self, env: SyncEnvironment) -> None:
        self.blocking = env
        """The wrapped environment. Errors name the lines of its class."""
        self._state_lock = threading.Lock()
        """Lock of the fields below, which the event loop and threads change."""
        self._thread: int | None = None
        """Id of the thread that runs a call of the environment now; None if no thread does."""
        self._closed = False
        """True since `close` was called."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop on which `close` was called while a thread ran a call of the environment; else None."""

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Start the problem of this seed and show it. Implements `Environment.reset`."""
        return await self._call(self.blocking.reset, seed)

    async def step(self, action: str) -> StepResult:
        """Take the policy's answer. Implements `Environment.step`."""
        return await self._call(self.blocking.step, action)

    async def close(self) -> None:
        """Close the environment: at once, or as soon as an abandoned call has returned. Implements `Environment.close`.

        If a call was abandoned, this returns at once, and the thread of that call closes the environment (`_run`).
        Raises any error of the environment's own `close`.
        """
        with self._state_lock:
            self._closed = True
            if self._thread is not None:
                self._loop = asyncio.get_running_loop()
                return
        closing: object = self.blocking.close() if is_async(self.blocking.close) else await in_thread(self._close)
        if inspect.isawaitable(closing):  # as in `_call`
            await closing

    async def _call(self, method: Callable[..., Any], argument: object) -> Any:
        """Call a method with its argument: await an `async def`, or run a `def` in a thread. Return the result.

        A class may have both, if it inherits some methods. Raises the errors of the method, and of `_run`.
        """
        if is_async(method):
            return await method(argument)
        result = await in_thread(lambda: self._run(lambda: method(argument)))
        # A decorator may hide an `async def` behind a `def`, which then returns a coroutine.
        return await result if inspect.isawaitable(result) else result

    def where(self) -> str:
        """Return `, at file.py:12, in a thread, …`, the line at which the environment's thread stands; empty if no call
        runs in a thread.

        `flash.environment.calls.call_method` puts it into the error about a call that has passed its deadline.
        """
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        place = place_in(lines_of(frames.get(self._thread or 0)))
        return f", at {place}, in a thread, which nothing can end" if place else ""

    def _run(self, call: Callable[[], _T]) -> _T:
        """Run a call of the environment in the present thread, one of `in_thread`, and return its result.

        Then close the environment if `close` was called meanwhile, because the call was abandoned.

        Raises:
            EnvError: the environment is closed, or another thread still runs an abandoned call of it.
            BaseException: anything that the call raises.
        """
        with self._state_lock:
            if self._thread is not None or self._closed:
                raise EnvError(
                    "the environment is closed, or still busy with a call that was abandoned at its deadline; make the "
                    "call return sooner, or raise its key of [deadlines]"
                )
            self._thread = threading.get_ident()
        try:
            return call()
        finally:
            with self._state_lock:
                self._thread = None
                close_now = self._closed
            if close_now:
                # `close` was called during this call, and has left it to this thread. If it is an `async def`, it gives
                # a coroutine, which must run on the event loop.
                closing = self.blocking.close()
                if inspect.iscoroutine(closing) and self._loop is not None:
                    asyncio.run_coroutine_threadsafe(closing, self._loop)

    def _close(self) -> object:
        """Close the environment, in a thread that `close` waits for, and return the result, which may be an awaitable.
        Meanwhile `where` can name the line at which it stands."""
        # No lock is needed: `close` has seen that no call runs, and `_run` refuses calls of a closed environment.
        self._thread = threading.get_ident()
        try:
            return self.blocking.close()
        finally:
            self._thread = None


def is_async(called: object) -> bool:
    """Return True if a call of this object gives a coroutine: an `async def`, or an object whose `__call__` is one."""
    while isinstance(called, partial):
        called = cast("partial[object]", called).func
    return inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None))  # noqa: B004


def wrap(env: Environment | SyncEnvironment) -> Environment:
    """Return an asynchronous environment unchanged. Return a `Threaded` around an environment with a blocking method.

    `LoadedEnvironment.make` calls this for each episode, and environments call it for the ones that they wrap.

    Raises:
        EnvError: an environment with `inform` (`Informed`) has a blocking method.
    """
    if all(map(is_async, (env.reset, env.step, env.close))):
        return cast("Environment", env)
    if hasattr(env, "inform"):  # `Threaded` does not pass `inform` on
        raise EnvError(f"{type(env).__qualname__} has `inform`, so its reset, step and close must be `async def`")
    return Threaded(cast("SyncEnvironment", env))
