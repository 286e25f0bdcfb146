"""Calls of user code in worker processes, because such code may take long, never return, or end its process.

Environments and `envs.rewards.verifier` call `in_worker` in the node's process. Verifiers, games and generators of
problems then run in a worker, which lives until the node ends or a call is late. The code may print, close its standard
streams and fork. None of that disturbs the results of this call and of later calls.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import ParamSpec, TypeVar, cast

import anyio
import anyio.to_process

from flash.environment.calls import describe_error
from flash.errors import EnvError, FlashError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class TimeLimitError(BaseException):
    """Error that `time_limit` raises in a block. It is no Exception, because user code catches those."""


async def in_worker(timeout: float, function: Callable[_P, _T], *arguments: _P.args, **_: _P.kwargs) -> _T:
    """Call a function in a worker process and return its result. Function, arguments and result are pickled.

    The deadline counts from the moment when a worker is free. The number of parallel workers is anyio's default, one
    per core. The worker is killed at its deadline or on a cancellation. Otherwise it is kept for later calls, with all
    that it has imported and cached. `timeout` is in seconds. Keyword arguments are not passed on: only the type of a
    function's parameters needs them here.

    Raises:
        TimeoutError: the function did not return within `timeout` seconds.
        anyio.BrokenWorkerProcess: the worker process died.
        FlashError: the function raised this error.
        EnvError: the function raised another error. The message names it with file and line.
    """
    # The wait for a free worker is before the deadline. So the call itself gets a limiter of its own, which lets it
    # through at once.
    async with anyio.to_process.current_default_process_limiter():
        with anyio.fail_after(timeout):
            value, error = await anyio.to_process.run_sync(
                _guarded, timeout, function, arguments, cancellable=True, limiter=anyio.CapacityLimiter(1)
            )
    if error is not None:
        raise error
    return cast("_T", value)


def _guarded(
    timeout: float, function: Callable[..., object], arguments: tuple[object, ...]
) -> tuple[object, FlashError | None]:
    """Call the function in the worker's main thread. Returns its result and None, or None and the error that it raised.

    Errors are returned and not raised, because anyio could not send one that cannot be pickled.
    """
    # If memory runs out, the kernel then kills this process before the run's own.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # The guard: if the run itself is killed, nothing else kills a hanging worker. SIGALRM's default action ends it
    # then, which no code can catch. The factor of 2 leaves the deadline of `in_worker` to the run.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 2 * timeout)
    # The worker receives calls on stdin and sends results on stdout. The function and its child processes must not use
    # them: they would read the next call, or write between results.
    streams = [os.dup(0), os.dup(1)]
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)
    process = os.getpid()
    value, error = None, None
    try:
        value = function(*arguments)
    except FlashError as raised:
        error = _sendable(raised)
    except BaseException as raised:  # user code may raise anything; SystemExit would end the worker
        error = EnvError(f"it raised {describe_error(raised)}")
    if os.getpid() != process:
        os._exit(0)  # a process that the function forked: its result would be taken for that of the next call
    for stream, kept in enumerate(streams):
        os.dup2(kept, stream)
    for file in (*streams, nothing):
        os.close(file)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return value, error


@contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raise TimeLimitError in the block after `seconds` of real time. For parts of a call, in a worker's main thread.

    The block shares the process's only real-time timer with the guard of `_guarded`. So the guard gets its handler and
    its remaining time back at the end of the block, and also when the time is over: user code may catch the error and
    go on, and then only the guard ends an orphaned worker.
    """
    handler = signal.getsignal(signal.SIGALRM)
    guard_left = signal.getitimer(signal.ITIMER_REAL)[0]
    begun = time.monotonic()

    def restore_guard() -> None:
        """Give the timer back to the guard, with the time that it has left; 0 switches it off if there was none."""
        signal.signal(signal.SIGALRM, handler)
        # A guard whose time is over fires at once: `setitimer` would take 0 or less for no timer.
        left = max(0.001, guard_left - (time.monotonic() - begun)) if guard_left else 0.0
        signal.setitimer(signal.ITIMER_REAL, left)

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Raise TimeLimitError in the block. Python calls this in the main thread when the alarm signal arrives."""
        restore_guard()
        raise TimeLimitError

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        restore_guard()


def _sendable(error: FlashError) -> FlashError:
    """Return the error itself, or an EnvError with its message if a user's error class cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except BaseException:
        return EnvError(f"it raised {describe_error(error)}")
    return error
