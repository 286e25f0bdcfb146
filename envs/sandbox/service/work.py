"""LeaseWork: sessions, background jobs and repeated calls of one lease.

All of them end with the lease. A call with an idempotency key is carried out once, in a task of the service. If the
client's connection broke, it sends the call again and gets the same answer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup, TaskStatus

from envs.sandbox.api import Job, Result, Session
from envs.sandbox.pool.lease import SandboxLease
from envs.sandbox.pool.pool import SandboxPool
from envs.sandbox.protocol.problems import ProblemError
from envs.sandbox.protocol.wire import SessionResult
from flash.errors import FlashError, SandboxBusyError, SandboxRefusedError

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

ANSWERS_KEPT = 32
"""Answers to calls with a key that are kept for each sandbox, for a client that sends its call again."""
ANSWERS_KEPT_BYTES = 1 << 24
"""Bytes of output in the kept answers. The newest answer is kept whatever its size."""
CALLS_OPEN = 256
"""Calls with a key that may be in progress in one sandbox. They go on after their client has disconnected, so no
connection limits their number."""
JOBS_KEPT = 256
"""Background jobs of one sandbox that clients can ask for. Older ones are forgotten."""
SESSIONS_OPEN = 64
"""Sessions that may be open in one sandbox."""


class _Answer:
    """Answer to a call with an idempotency key, which may still be in progress."""

    def __init__(self, asked: bytes) -> None:
        self.asked = asked
        self.done = anyio.Event()
        self.scope = anyio.CancelScope()
        self.result: Any = None
        self.error: FlashError | ProblemError | None = None


class LeaseWork:
    """Sessions, jobs and calls of one lease. Made by `Service`."""

    def __init__(self, pool: SandboxPool, lease: SandboxLease, tasks: TaskGroup) -> None:
        self._pool = pool
        self._lease = lease
        self._tasks = tasks
        self._sessions: dict[str, Session] = {}
        self._closing: dict[str, anyio.Event] = {}
        self._closed: dict[str, anyio.Event] = {}
        self._jobs: dict[str, Job] = {}
        self._answers: dict[str, _Answer] = {}

    # ---- sessions

    async def open_session(self, name: str) -> Session:
        """Open a session that lives until it is closed, or until the lease ends.

        Raises:
            SandboxBusyError: a session of this name is open.
            SandboxRefusedError: too many sessions are open.
            SandboxError: the session cannot be opened.
        """
        if name in self._closed:
            raise SandboxBusyError(f"a session {name!r} is open already; close it, or use another name")
        if len(self._closed) >= SESSIONS_OPEN:
            raise SandboxRefusedError(f"{SESSIONS_OPEN} sessions are open; close one")
        self._closing[name], self._closed[name] = anyio.Event(), anyio.Event()
        outcome = await self._tasks.start(self._hold_session, name)
        if isinstance(outcome, FlashError | ProblemError):
            raise outcome
        return outcome

    async def _hold_session(self, name: str, *, task_status: TaskStatus[FlashError | ProblemError | Session]) -> None:
        """Open a session and hold it until it is closed, or the lease or its sandbox ends.

        Reports the session, or the error that prevented it, as its started value.
        """
        started = False
        try:
            sandbox = self._lease.sandbox
            async with self._pool.handle(self._lease).session(name) as session:
                self._sessions[name] = session
                started = True
                task_status.started(session)
                await _first_of(
                    self._closing[name].wait, self._lease.done.wait, *([sandbox.wait_ended] if sandbox else ())
                )
        except FlashError as error:
            if not started:
                task_status.started(error)
        except Exception:  # the boundary of a session: a bug ends this session, not the service
            _log.exception("shell %r of sandbox %s failed", name, self._lease.id)
            if not started:
                task_status.started(_failed())
        finally:
            self._sessions.pop(name, None)
            self._closing.pop(name)
            self._closed.pop(name).set()

    def session(self, name: str) -> Session:
        """Return the open session of this name. Raises ProblemError if there is none."""
        session = self._sessions.get(name)
        if session is None:
            raise ProblemError(404, f"no session {name!r} is open in sandbox {self._lease.id}", "SandboxClosedError")
        return session

    def sessions(self) -> list[Session]:
        """Return the open sessions."""
        return list(self._sessions.values())

    async def close_session(self, name: str) -> None:
        """Close a session and wait until it is closed. Does nothing if none is open."""
        if (closed := self._closed.get(name)) is not None:
            self._closing[name].set()
            await closed.wait()

    # ---- jobs

    def add_job(self, job: Job) -> None:
        """Remember a job, so that clients can ask for it later."""
        jobs = self._jobs
        jobs[job.job_id] = job
        if len(jobs) > JOBS_KEPT:
            del jobs[next(iter(jobs))]

    def job(self, job_id: str) -> Job:
        """Return a job that was started. Raises ProblemError if it is unknown."""
        job = self._jobs.get(job_id)
        if job is None:
            raise ProblemError(404, f"there is no job {job_id} in sandbox {self._lease.id}", "SandboxRefusedError")
        return job

    # ---- calls that are carried out once

    async def once(self, key: str, asked: bytes, call: Callable[[], Awaitable[_T]]) -> _T:
        """Return the answer to the call with this key.

        The first call with a key is carried out. A later one waits for the answer to the first.

        Raises:
            SandboxRefusedError: the key was used before for a call with another `asked` digest.
            SandboxBusyError: too many calls with keys are in progress.
            SandboxError: the call failed.
        """
        answer = self._answers.get(key)
        if answer is None:
            if sum(not each.done.is_set() for each in self._answers.values()) >= CALLS_OPEN:
                raise SandboxBusyError(f"{CALLS_OPEN} calls are in progress in this sandbox; wait for some of them")
            answer = self._answers[key] = _Answer(asked)
            self._tasks.start_soon(self._carry_out, answer, call)
        elif answer.asked != asked:
            raise SandboxRefusedError(f"the idempotency key {key!r} was used for another call; use a new one")
        await answer.done.wait()
        if answer.error is not None:
            raise answer.error
        return answer.result

    async def _carry_out(self, answer: _Answer, call: Callable[[], Awaitable[Any]]) -> None:
        """Carry out a call in a task of the service, and store its answer."""
        try:
            with answer.scope:
                answer.result = await call()
            if answer.scope.cancelled_caught:
                answer.error = SandboxRefusedError("the call was cancelled by its caller")
        except FlashError as error:
            answer.error = error
        except Exception:  # the boundary of a call: a bug ends this call, not the service
            _log.exception("a call failed")
            answer.error = _failed()
        finally:
            answer.done.set()
            self._drop_old()

    def knows_call(self, key: str) -> bool:
        """Return True if a call with this key was begun, and its answer was not dropped."""
        return key in self._answers

    async def cancel_call(self, key: str) -> None:
        """Cancel a call and wait for its end. Its command is killed."""
        if (answer := self._answers.get(key)) is not None:
            answer.scope.cancel()
            await answer.done.wait()

    def _drop_old(self) -> None:
        """Drop the oldest answers beyond `ANSWERS_KEPT` and `ANSWERS_KEPT_BYTES`."""
        given = [(key, answer) for key, answer in reversed(self._answers.items()) if answer.done.is_set()]
        size = 0
        for place, (key, answer) in enumerate(given):
            size += _output(answer.result)
            if place >= ANSWERS_KEPT or (place and size > ANSWERS_KEPT_BYTES):
                del self._answers[key]


def _failed() -> ProblemError:
    return ProblemError(500, "the service failed; its log says why")


async def _first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Wait until the first of several waits returns, and cancel the others."""
    async with anyio.create_task_group() as tasks:

        async def wait(one: Callable[[], Awaitable[object]]) -> None:
            await one()
            tasks.cancel_scope.cancel()

        for each in waits:
            tasks.start_soon(wait, each)


def _output(result: object) -> int:
    """Return the bytes of output in the answer to a call."""
    if isinstance(result, SessionResult):
        result = result.result
    return len(result.stdout) + len(result.stderr) if isinstance(result, Result) else 0
