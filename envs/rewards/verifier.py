"""Verifiers: functions `(completion, answer) -> float`, named by import path, which run outside of the event loop.

`envs.dataset` scores each completion with `verify`. The `answer` is the reference from the data set: its text, or for
the option `reward` the whole row as a dict.

A verifier is user code: it may take long, never return or end its process. So it runs in a worker process under a
deadline. Every failure is a `RewardError` and never a reward of 0, with one exception: a completion that is proven to
make its verifier compute without end is worth 0. Otherwise its sample would be retried until it is given up.

A function marked `@inline` is trusted to be fast and is called directly, which saves the cost of another process. An
`async def` is awaited directly, under the deadline. It waits for another judge, such as a sandbox or a model, and must
not compute for long. If that judge fails, it raises an `EnvError` of another class than `RewardError`.
"""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar, cast

import anyio

from envs.workers import TimeLimitError, in_worker, time_limit
from flash.config.objects import load_object
from flash.environment.calls import UserTask, describe_error, message_of
from flash.environment.results import check_reward
from flash.environment.threaded import is_async
from flash.errors import ConfigError, EnvError, RewardError

Reference = str | dict[str, Any]
"""Reference of a completion: the answer as text, or a whole row of the data set."""
_Plain = Callable[[str, Any], float]
"""Verifier that is not asynchronous."""
Verifier = _Plain | Callable[[str, Any], Awaitable[float]]
"""Function that takes a completion and its reference, and returns or awaits the reward."""

_F = TypeVar("_F", bound=_Plain)


START_S = 30.0
"""Seconds that a worker has to start and to import a verifier, on a busy machine."""

_INLINE = "__flash_inline__"
"""Attribute that `inline` sets."""


class _Scored(NamedTuple):
    """Result of one call of a verifier. It is a value and no exception, because not every exception can be pickled."""

    score: object
    """Score as the verifier returned it; None if it failed."""
    problem: str | None
    """Reason of the failure, as the end of an error message; None if the verifier returned a score."""


def inline(verifier: _F) -> _F:
    """Mark a verifier that answers in well under a millisecond for any input and cannot hang. Used as a decorator."""
    setattr(verifier, _INLINE, True)
    return verifier


@functools.cache
def load_verifier(path: str) -> Verifier:
    """Return the verifier at `module:function`. The first call in a process imports it.

    Raises:
        ConfigError: the path names nothing that is callable with two arguments.
    """
    try:
        verifier = load_object(path)
    except ConfigError as error:
        raise ConfigError(f"there is no verifier {path!r}: {error}") from error
    if not callable(verifier):
        raise ConfigError(f"{path!r} is not a function (completion, answer) -> float")
    try:
        inspect.signature(verifier).bind("completion", "answer")
    except TypeError as error:
        raise ConfigError(f"{path!r} must take two arguments, completion and answer: {error}") from None
    except ValueError:  # a function in C without a signature: only the first call can show a mismatch
        pass
    return cast("Verifier", verifier)


async def verify(
    path: str, completion: str, answer: Reference, timeout: float, *, solution: str | None = None
) -> float:
    """Score a completion with the verifier at `path`.

    The deadline counts from the moment when a worker process is free: see `envs.workers`.

    Args:
        path: `module:function`.
        completion: text of the model.
        answer: the reference, which the verifier gets too.
        timeout: seconds that the verifier has.
        solution: completion that must get a reward, for the proof that another completion makes the verifier compute
            without end. None: `answer`, if that is text; if it is a row, nothing can be proven.

    Raises:
        ConfigError: `load_verifier` refuses the path.
        RewardError: the verifier raised an error, returned no finite number, died, or did not answer within `timeout`
            seconds while the completion is not proven to be the cause.
        EnvError: an asynchronous verifier raised it.
    """
    verifier = load_verifier(path)
    if is_async(verifier):
        judge = cast("Callable[[str, Any], Awaitable[float]]", verifier)
        score, problem = await _awaited(path, judge, completion, answer, timeout)
    elif getattr(verifier, _INLINE, False):
        score, problem = _score(cast("_Plain", verifier), completion, answer)
    else:
        known = answer if solution is None and isinstance(answer, str) else solution
        score, problem = await _in_process(path, completion, answer, timeout, known)
    if problem is not None:
        raise RewardError(f"verifier {path}: {problem}")
    try:
        return check_reward(score)
    except RewardError as error:
        raise RewardError(f"verifier {path}: {error}") from None


async def _awaited(
    path: str, verifier: Callable[[str, Any], Awaitable[float]], completion: str, answer: Reference, timeout: float
) -> _Scored:
    """Await an asynchronous verifier for at most `timeout` seconds. Raises an EnvError that the verifier raises.

    If this is cancelled, the verifier is ended first. Every other failure is the `problem` of the result.
    """
    task = UserTask(f"verifier {path}", lambda: verifier(completion, answer))
    if not await task.wait(timeout):
        where = task.where()
        abandoned = "" if await task.end() else "; it goes on though it was cancelled, and was abandoned"
        return _Scored(None, f"no answer within {timeout:g} s{where}{abandoned}; raise the environment's timeout")
    if isinstance(task.error, EnvError):
        raise task.error
    return _Scored(task.value, None if task.error is None else f"it raised {describe_error(task.error)}")


async def _in_process(path: str, completion: str, answer: Reference, timeout: float, solution: str | None) -> _Scored:
    """Call a verifier in a worker process for at most `timeout` seconds. No failure raises an error."""
    try:
        return await in_worker(timeout, _score_in_worker, path, completion, answer)
    except TimeoutError:
        late = f"no answer within {timeout:g} s; make it faster, or raise the environment's timeout"
        again = solution is not None and await _call_again(path, completion, answer, timeout, solution)
        return again or _Scored(None, late)
    except anyio.BrokenWorkerProcess:
        return _Scored(None, "its worker process died")
    except (ConfigError, EnvError) as error:  # the worker cannot import the verifier; `_score` returns its own errors
        return _Scored(None, str(error))


async def _call_again(path: str, completion: str, answer: Reference, timeout: float, solution: str) -> _Scored | None:
    """Call a verifier again after a timeout, to find out if the completion caused it.

    Returns a score of 0 if that is proven, the verifier's result if it ends this time, and None if neither.

    Without this, a completion on which the verifier never ends would be retried until it is given up. The proof has two
    parts. The solution, scored as a completion, must pass. Then the completion must use up a quarter of the deadline
    in processor time. A busy machine does not add to processor time, and waiting for a server uses none.
    """
    try:
        # The worker that hung was killed. This worker has to start and import the verifier, and is kept for the next
        # call. A solution that hangs, too, has a time limit of its own, which does not wait for the time of a start.
        limit = 2 * timeout
        passed, problem = await in_worker(limit + START_S, _score_in_time, limit, path, solution, answer)
        if problem is not None or not isinstance(passed, float) or passed <= 0:
            return None
    except (ConfigError, EnvError, TimeoutError, anyio.BrokenWorkerProcess):
        return None
    try:
        return await in_worker(2 * timeout, _score_within, timeout / 4, path, completion, answer)
    except (ConfigError, EnvError, TimeoutError):
        return None
    except anyio.BrokenWorkerProcess:
        return _Scored(0.0, None)


def _score_in_time(seconds: float, path: str, completion: str, answer: Reference) -> _Scored:
    """Load a verifier in a worker process and score a completion within `seconds`, not counting the load."""
    verifier = cast("_Plain", load_verifier(path))
    try:
        with time_limit(seconds):
            return _score(verifier, completion, answer)
    # `_score` catches an error that is raised within the verifier. Here the time was over just before or after it.
    except TimeLimitError:
        return _Scored(None, f"no answer within {seconds:g} s")


def _score_within(seconds: float, path: str, completion: str, answer: Reference) -> _Scored:
    """Score in a worker that SIGPROF's default action ends after `seconds` of processor time.

    The end of the worker is the proof that the completion makes the verifier compute for so long.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return _score_in_worker(path, completion, answer)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _score_in_worker(path: str, completion: str, answer: Reference) -> _Scored:
    """Load a verifier in a worker process and score a completion with `_score`."""
    return _score(cast("_Plain", load_verifier(path)), completion, answer)


def _score(verifier: _Plain, completion: str, answer: Reference) -> _Scored:
    """Call a verifier in this process. No failure raises an error."""
    try:
        return _Scored(check_reward(verifier(completion, answer)), None)
    except RewardError as error:
        return _Scored(None, message_of(error))
    except BaseException as error:  # user code may raise anything, also SystemExit and KeyboardInterrupt
        return _Scored(None, f"it raised {describe_error(error)}")
