"""Calls of somebody else's code, in worker processes: it may take long, never return or take its process with it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_process

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def in_worker(timeout: float, function: Callable[_P, _T], *arguments: _P.args, **_: _P.kwargs) -> _T:
    """What a function returns that a worker process calls; function, arguments and result are pickled.

    The deadline counts from the moment a worker is free; how many run at once is anyio's default, one per core. On a
    deadline or a cancellation the worker is killed. Workers are kept, with what they have imported and cached.

    Raises:
        TimeoutError: it did not return within `timeout` seconds.
        anyio.BrokenWorkerProcess: its process died.
        Exception: what it raised.
    """
    async with anyio.to_process.current_default_process_limiter():
        with anyio.fail_after(timeout):
            return await anyio.to_process.run_sync(
                _with_alarm, timeout, function, arguments, cancellable=True, limiter=anyio.CapacityLimiter(1)
            )


def _with_alarm(timeout: float, function: Callable[..., _T], arguments: tuple[object, ...]) -> _T:
    """Runs in the worker's main thread."""
    # Where memory runs out, the kernel ends this process before the run's own.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # Nobody kills a hanging worker when this run is killed itself: its own alarm does, by SIGALRM's default action.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 2 * timeout)
    try:
        return function(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
