"""What the HTTP service keeps beside the pool: open shells, background jobs, and the answers to repeated calls.

A shell or a job belongs to a lease and ends with it. A call that carries an idempotency key is carried out once, in a
task of the service: a client whose connection broke sends it again and gets the same answer.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from uuid import uuid4

import anyio
from anyio.abc import TaskGroup, TaskStatus

from envs.sandbox.api import Job, Result, Session, Snapshot
from envs.sandbox.pool.journal import KeptSnapshot
from envs.sandbox.pool.lease import Lease
from envs.sandbox.pool.pool import Pool
from envs.sandbox.pool.snapshots import names_snapshot
from envs.sandbox.protocol.problems import ProblemError, problem_of
from envs.sandbox.protocol.tokens import ADMIN, Tokens
from envs.sandbox.protocol.wire import HostStatus, Info, Order, SessionResult, Status
from flash.errors import FlashError, SandboxBusyError, SandboxRefusedError
from flash.waiting import unwrapped_group

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

ANSWERS_KEPT = 32
"""Answers to calls with a key, kept per sandbox for a client that asks again."""
ANSWERS_KEPT_BYTES = 1 << 24
"""Of output in them; the newest answer is kept whatever it holds."""
JOBS_KEPT = 256
"""Background jobs of one sandbox that can be asked for."""
OTHERS = "others"
"""Owners whose names a token may not know."""
SESSIONS_OPEN = 64
"""Shells of one sandbox."""
_ID = re.compile(r"(sha256:)?[0-9a-f]{1,64}", re.IGNORECASE)
_WHOLE_ID = re.compile(r"(sha256:)?[0-9a-f]{64}", re.IGNORECASE)


class _Answer:
    def __init__(self, asked: bytes) -> None:
        self.asked = asked
        self.done = anyio.Event()
        self.scope = anyio.CancelScope()
        self.result: Any = None
        self.error: FlashError | ProblemError | None = None


class _ClientState:
    """What the clients of one lease have open."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.closing: dict[str, anyio.Event] = {}
        self.closed: dict[str, anyio.Event] = {}
        self.jobs: dict[str, Job] = {}
        self.answers: dict[str, _Answer] = {}


class Service:
    """The state behind the routes. Made by `open_service`."""

    def __init__(self, pool: Pool, tokens: Tokens, tasks: TaskGroup, name: str) -> None:
        self.pool = pool
        self.tokens = tokens
        self.name = name
        self.boot = uuid4().hex[:12]
        self._tasks = tasks
        self._client_states: dict[str, _ClientState] = {}
        self._snapshots_begun: Counter[str] = Counter()
        """By token: those that are being made."""

    # ---- leases

    def order(self, order: Order, token: str, key: str) -> Lease:
        """Ask for a sandbox on behalf of a token.

        Raises:
            SandboxError: as of `Pool.order`; or the token was not granted this kind, or the image could be a snapshot
                that is not its own.
        """
        self.tokens.named(token).check(token, order.spec)
        self._check_image(order.spec.image, token)
        owner = f"{token}/{order.owner}" if order.owner else token
        return self.pool.order(
            order.spec,
            owner=owner,
            token=token,
            priority=order.priority,
            on_lost=order.on_lost,
            lease_s=order.lease_s,
            key=key,
        )

    def _check_image(self, image: str, token: str) -> None:
        """Refuse every name by which a token would get the files of another one."""
        if _ID.fullmatch(image) and not (token == ADMIN and _WHOLE_ID.fullmatch(image)):
            # Engines complete the beginning of an id: a few digits, tried one after another, would find snapshots.
            raise SandboxRefusedError(
                f"{image!r} could be an image's id, or the beginning of one; give a name with its tag, such as "
                f"{image[:40]}:latest"
            )
        kept = self.pool.snapshots.find(image)
        if names_snapshot(image) and token != ADMIN and (kept is None or kept.token != token):
            raise SandboxRefusedError(f"token {token} has no snapshot {image!r}; GET /v1/snapshots lists those it has")

    def lease(self, id: str, token: str) -> Lease:
        """A lease that this token may use. A use renews it.

        Raises:
            ProblemError: there is none, or it is somebody else's; the answer does not tell which.
        """
        lease = self.look_at(id, token)
        lease.renew()
        return lease

    def look_at(self, id: str, token: str) -> Lease:
        """The same without a use: who only watches keeps nothing alive."""
        lease = self.pool.state.find(id)
        if lease is None or not may_use(lease, token):
            raise ProblemError(404, f"there is no sandbox {id}", "SandboxClosedError")
        return lease

    def visible(self, token: str) -> list[Lease]:
        """The leases that a token may use."""
        return [lease for lease in self.pool.state.leases() if may_use(lease, token)]

    def info(self, lease: Lease) -> Info:
        """A lease, as it is shown."""
        state = self.pool.state
        return Info(
            id=lease.id,
            owner=lease.owner,
            state=lease.state,
            sandbox_state=self.pool.handle(lease).state,
            reason=lease.reason,
            spec=lease.spec,
            host=lease.host,
            generation=lease.generation,
            created_at=lease.created_at,
            lease_s=min(lease.lease_s, 1e9),
            position=state.position(lease),
            key=lease.key,
            waiting_for=state.why_waiting(lease) if lease.state == "queued" and not lease.done.is_set() else "",
            problem=problem_of(lease.error) if lease.error is not None else None,
        )

    # ---- snapshots

    async def snapshot(self, lease: Lease) -> Snapshot:
        """Keep the files of a lease's sandbox, for its token.

        Raises:
            SandboxRefusedError: the token has as many snapshots as it may have.
            SandboxError: it failed.
        """
        token, most = lease.token, self.tokens.named(lease.token).snapshots
        if token != ADMIN and len(self.snapshots(token)) + self._snapshots_begun[token] >= most:
            raise SandboxRefusedError(
                f"token {token} may have {most} snapshots, and has them; remove some (GET and DELETE /v1/snapshots), "
                "or have `snapshots=NUMBER` granted in the service's token file"
            )
        self._snapshots_begun[token] += 1
        try:
            return await self.pool.snapshot(lease)
        finally:
            self._snapshots_begun[token] -= 1

    def snapshots(self, token: str) -> list[KeptSnapshot]:
        """The snapshots that a token may use."""
        return [kept for kept in self.pool.snapshots.all() if token in (ADMIN, kept.token)]

    async def forget(self, snapshot_id: str, token: str) -> None:
        """Remove a snapshot. Nothing when the token has none of this id."""
        for kept in self.snapshots(token):
            if kept.snapshot_id == snapshot_id:
                await self.pool.forget(kept)

    # ---- shells

    async def open_session(self, lease: Lease, name: str) -> Session:
        """Open a shell that lives until it is closed, or the lease ends."""
        clients = self._client_state(lease)
        if name in clients.closed:
            raise SandboxBusyError(f"a session {name!r} is open already; close it, or use another name")
        if len(clients.closed) >= SESSIONS_OPEN:
            raise SandboxRefusedError(f"{SESSIONS_OPEN} sessions are open; close one")
        clients.closing[name], clients.closed[name] = anyio.Event(), anyio.Event()
        outcome = await self._tasks.start(self._hold_session, lease, clients, name)
        if isinstance(outcome, FlashError | ProblemError):
            raise outcome
        return outcome

    async def _hold_session(
        self,
        lease: Lease,
        clients: _ClientState,
        name: str,
        *,
        task_status: TaskStatus[FlashError | ProblemError | Session],
    ) -> None:
        """Waits for the shell to be closed, or for the end of the lease's sandbox."""
        started = False
        try:
            sandbox = lease.sandbox
            async with self.pool.handle(lease).session(name) as session:
                clients.sessions[name] = session
                started = True
                task_status.started(session)
                await _first_of(clients.closing[name].wait, lease.done.wait, *([sandbox.wait_ended] if sandbox else ()))
        except FlashError as error:
            if not started:
                task_status.started(error)
        except Exception:  # the boundary of a shell
            _log.exception("shell %r of sandbox %s failed", name, lease.id)
            if not started:
                task_status.started(_failed())
        finally:
            clients.sessions.pop(name, None)
            clients.closing.pop(name)
            clients.closed.pop(name).set()

    def session(self, lease: Lease, name: str) -> Session:
        """The open shell of this name. Raises ProblemError when there is none."""
        session = self._client_state(lease).sessions.get(name)
        if session is None:
            raise ProblemError(404, f"no session {name!r} is open in sandbox {lease.id}", "SandboxClosedError")
        return session

    def sessions(self, lease: Lease) -> list[Session]:
        return list(self._client_state(lease).sessions.values())

    async def close_session(self, lease: Lease, name: str) -> None:
        """Close a shell and wait for it. Nothing when none is open."""
        clients = self._client_state(lease)
        if (closed := clients.closed.get(name)) is not None:
            clients.closing[name].set()
            await closed.wait()

    # ---- jobs

    def add_job(self, lease: Lease, job: Job) -> None:
        """Remember a job for later questions."""
        jobs = self._client_state(lease).jobs
        jobs[job.job_id] = job
        if len(jobs) > JOBS_KEPT:
            del jobs[next(iter(jobs))]

    def job(self, lease: Lease, job_id: str) -> Job:
        """A job that was started."""
        job = self._client_state(lease).jobs.get(job_id)
        if job is None:
            raise ProblemError(404, f"there is no job {job_id} in sandbox {lease.id}", "SandboxRefusedError")
        return job

    # ---- calls that are carried out once

    async def once(self, lease: Lease, key: str, asked: bytes, call: Callable[[], Awaitable[_T]]) -> _T:
        """The answer to the call with this key: carried out if it is new, waited for if it is known.

        Raises:
            SandboxRefusedError: what was `asked` with this key before is something else.
            SandboxError: as of the call.
        """
        answers = self._client_state(lease).answers
        answer = answers.get(key)
        if answer is None:
            answer = answers[key] = _Answer(asked)
            self._tasks.start_soon(self._carry_out, answers, answer, call)
        elif answer.asked != asked:
            raise SandboxRefusedError(f"the idempotency key {key!r} was used for another call; use a new one")
        await answer.done.wait()
        if answer.error is not None:
            raise answer.error
        return answer.result

    async def _carry_out(
        self, answers: dict[str, _Answer], answer: _Answer, call: Callable[[], Awaitable[Any]]
    ) -> None:
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
            _drop_old(answers)

    def knows_call(self, lease: Lease, key: str) -> bool:
        """Whether a call with this key was begun."""
        return key in self._client_state(lease).answers

    async def cancel_call(self, lease: Lease, key: str) -> None:
        """Cancel a call and wait for its end; its command is killed."""
        if (answer := self._client_state(lease).answers.get(key)) is not None:
            answer.scope.cancel()
            await answer.done.wait()

    def _client_state(self, lease: Lease) -> _ClientState:
        if lease.id not in self._client_states:
            self._client_states[lease.id] = _ClientState()
            self._tasks.start_soon(self._clear, lease)
        return self._client_states[lease.id]

    async def _clear(self, lease: Lease) -> None:
        """Forget what was open in a lease once it has ended."""
        await lease.done.wait()
        self._client_states.pop(lease.id, None)

    # ---- the whole

    def status(self, token: str) -> Status:
        """The pool at this moment."""
        state = self.pool.state
        hosts = [
            HostStatus(
                name=host.name,
                cpus=host.report.capacity.millicpus / 1000,
                memory_mib=host.report.capacity.memory_mib,
                cpus_promised=(host.granted + host.report.others).millicpus / 1000,
                memory_mib_promised=(host.granted + host.report.others).memory_mib,
                why_not=host.why_not,
                sandboxes=host.sandboxes,
                warm=sum(host.report.warm.values()),
                hits=host.report.hits,
                misses=host.report.misses,
                orphans_removed=host.report.orphans_removed,
                load=host.report.load,
            )
            for host in state.hosts()
        ]
        states: dict[str, int] = {}
        for lease in state.leases():
            states[lease.state] = states.get(lease.state, 0) + 1
        hits, asked = sum(host.hits for host in hosts), sum(host.hits + host.misses for host in hosts)
        return Status(
            version=state.version,
            service=self.name,
            boot=self.boot,
            hosts=hosts,
            states=states,
            queue=_queue_for(token, state.queue()),
            hit_rate=hits / asked if asked else None,
            failures=dict(state.failures),
            recent_failures=list(state.recent_failures)[-10:] if token == ADMIN else [],
            images_put_aside=state.images_put_aside() if token == ADMIN else {},
            sandboxes=[self.info(lease) for lease in self.visible(token)],
        )


def may_use(lease: Lease, token: str) -> bool:
    """Whether a token gives access to a lease."""
    return token in (ADMIN, lease.token)


def _queue_for(token: str, queue: dict[str, int]) -> dict[str, int]:
    """Who waits, as a token may know it: its own owners by name, everybody else in one."""
    if token == ADMIN:
        return queue
    shown: dict[str, int] = {}
    for owner, number in queue.items():
        name = owner if owner.partition("/")[0] == token else OTHERS
        shown[name] = shown.get(name, 0) + number
    return shown


def _failed() -> ProblemError:
    return ProblemError(500, "the service failed; its log says why")


async def _first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    async with anyio.create_task_group() as tasks:

        async def wait(one: Callable[[], Awaitable[object]]) -> None:
            await one()
            tasks.cancel_scope.cancel()

        for each in waits:
            tasks.start_soon(wait, each)


@asynccontextmanager
async def open_service(pool: Pool, tokens: Tokens, name: str = "sandboxes") -> AsyncGenerator[Service]:
    """A service over a pool for the time of the block. Calls in progress are cancelled at its end."""
    async with unwrapped_group() as tasks:
        yield Service(pool, tokens, tasks, name)
        tasks.cancel_scope.cancel()


def _drop_old(answers: dict[str, _Answer]) -> None:
    """Keep the newest answers, as many as are to be kept and as large."""
    given = [(key, answer) for key, answer in reversed(answers.items()) if answer.done.is_set()]
    size = 0
    for place, (key, answer) in enumerate(given):
        size += _output(answer.result)
        if place >= ANSWERS_KEPT or (place and size > ANSWERS_KEPT_BYTES):
            del answers[key]


def _output(result: object) -> int:
    """Bytes of output in the answer to a call."""
    if isinstance(result, SessionResult):
        result = result.result
    return len(result.stdout) + len(result.stderr) if isinstance(result, Result) else 0
