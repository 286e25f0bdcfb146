"""Threaded: a blocking environment behind the asynchronous interface.

The environment's calls never overlap. A caller whose deadline passes does not wait for the thread: the call is
abandoned, further calls are refused, and the thread that is still inside the environment closes it when it comes back.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import TypeVar, cast

import anyio
import anyio.to_thread

from flash.environment.interface import Environment, Info, StepResult, SyncEnvironment
from flash.errors import EnvError
from flash.types import Observation

_T = TypeVar("_T")


class Threaded:
    """An `Environment` made of a `SyncEnvironment`."""

    def __init__(self, env: SyncEnvironment) -> None:
        self.blocking = env
        # The default limiter holds 40 threads for the whole process: blocked environments would starve the others.
        self._limiter = anyio.CapacityLimiter(1)
        self._state = threading.Lock()
        self._busy = False
        self._closed = False

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Start the problem of this seed and show it."""
        return await self._in_thread(lambda: self._run(lambda: self.blocking.reset(seed)))

    async def step(self, action: str) -> StepResult:
        """Take the policy's answer."""
        return await self._in_thread(lambda: self._run(lambda: self.blocking.step(action)))

    async def close(self) -> None:
        """Release the environment, at once or as soon as an abandoned call has come back."""
        with self._state:
            self._closed = True
            if self._busy:
                return
        await self._in_thread(self.blocking.close)

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)

    def _run(self, call: Callable[[], _T]) -> _T:
        with self._state:
            if self._busy or self._closed:
                raise EnvError("the environment is closed, or still busy with a call that was given up")
            self._busy = True
        try:
            return call()
        finally:
            with self._state:
                self._busy = False
                close_now = self._closed
            if close_now:
                self.blocking.close()


def wrap(env: Environment | SyncEnvironment) -> Environment:
    """An asynchronous environment as it is; a blocking one behind a worker thread, its calls one at a time."""
    if inspect.iscoroutinefunction(env.reset):
        return cast("Environment", env)
    return Threaded(cast("SyncEnvironment", env))
