"""Calls of a user's code in worker processes: it may take long, never return, or end its process.

The code may print, close its standard streams and fork: none of it reaches the answers to this call and to later ones.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import anyio
import anyio.to_process

from flash.environment.calls import describe_error
from flash.errors import EnvError, FlashError

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def in_worker(timeout: float, function: Callable[_P, _T], *arguments: _P.args, **_: _P.kwargs) -> _T:
    """Call a function in a worker process and return its result; function, arguments and result are pickled.

    The deadline counts from the moment a worker is free; how many run at once is anyio's default, one per core. On a
    deadline or a cancellation the worker is killed. Workers are kept, with what they have imported and cached.

    Raises:
        TimeoutError: it did not return within `timeout` seconds.
        anyio.BrokenWorkerProcess: its process died.
        FlashError: it raised this error.
        EnvError: it raised anything else, which the message names with file and line.
    """
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
    """Call the function in the worker's main thread, and return its result or the error that it raised."""
    # Where memory runs out, the kernel ends this process before the run's own.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # Nobody kills a hanging worker when this run is killed itself: its own alarm does, by SIGALRM's default action.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 2 * timeout)
    # The function, and processes that it starts, would read calls from these and write between the answers.
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
    except BaseException as raised:  # whatever a user's code raises: SystemExit would end the worker
        error = EnvError(f"it raised {describe_error(raised)}")
    if os.getpid() != process:
        os._exit(0)  # forked by the function: a second answer to this call would be taken for that to the next one
    for stream, kept in enumerate(streams):
        os.dup2(kept, stream)
    for file in (*streams, nothing):
        os.close(file)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return value, error


def _sendable(error: FlashError) -> FlashError:
    """Return the error, or one with its message where its class cannot be pickled, as a user's may not."""
    try:
        pickle.loads(pickle.dumps(error))
    except BaseException:
        return EnvError(f"it raised {describe_error(error)}")
    return error
