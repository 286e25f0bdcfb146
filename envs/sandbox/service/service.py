"""Service: the state behind the routes. It decides which token may use which lease and snapshot, and reports the pool.

`flash sandbox serve` opens it over a pool with `open_service`, and `envs.sandbox.service.web.make_app` puts the routes
in front.

`LeaseWork` holds the sessions, jobs and calls that the clients of one lease have open. When the lease ends, its
sessions are closed, and its jobs and calls end with the sandbox. A call with an idempotency key is carried out once, in
a task of the service. If the client's connection broke, it sends the call again and gets the same answer.
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
from envs.sandbox.pool.lease import LeaseOrder, SandboxLease
from envs.sandbox.pool.pool import SandboxPool
from envs.sandbox.pool.state import names_snapshot
from envs.sandbox.protocol import Info, ProblemError, SandboxOrder, SessionResult, Status, problem_of
from envs.sandbox.tokens import ADMIN, Tokens
from flash.errors import FlashError, SandboxBusyError, SandboxLostError, SandboxRefusedError
from flash.waiting import unwrapped_group

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
"""Background jobs of one sandbox that clients can ask for. The job that nobody has asked for longest is forgotten."""
SESSIONS_OPEN = 64
"""Sessions that may be open in one sandbox."""

FAILURES_SHOWN = 10
"""Most failures that a status lists with their messages."""
WAITING_SHARE = 0.25
"""Share of the places in the wait queue that the requests of one token may take."""
OTHERS = "others"
"""Name that a token sees in place of the owners of other tokens."""
_ID = re.compile(r"(sha256:)?[0-9a-f]{1,64}", re.IGNORECASE)
"""Beginning of an image's id, or a complete one."""
_WHOLE_ID = re.compile(r"(sha256:)?[0-9a-f]{64}", re.IGNORECASE)
"""Complete id of an image."""


class _KeyedCall:
    """A call with an idempotency key, in progress or ended, and its result."""

    def __init__(self, digest: bytes = b"") -> None:
        """Describe a call that has not ended."""
        self.digest = digest
        """Digest of the call's path and body; empty if only an error is kept for its key (`LeaseWork.keep_error`)."""
        self.done = anyio.Event()
        """Event that is set when there is a result or an error."""
        self.scope = anyio.CancelScope()
        """Cancel scope around the call, for `cancel_call`."""
        self.result: Any = None
        """Value that the call returned."""
        self.error: FlashError | ProblemError | None = None
        """Error of the call; None if it has none, or is in progress."""


class LeaseWork:
    """Sessions, jobs and calls that clients have open in the sandbox of one lease. `Service.work` makes it.

    The functions of `envs.sandbox.service.routes` call its methods, one for each request.
    """

    def __init__(self, pool: SandboxPool, lease: SandboxLease, tasks: TaskGroup) -> None:
        """Begin without sessions, jobs and calls. `pool` has the lease."""
        self._pool = pool
        self._lease = lease
        self._tasks = tasks
        """Task group of the service, in which sessions are held and calls are carried out."""
        self._sessions: dict[str, Session] = {}
        """Open sessions by their names."""
        self._close_asked: dict[str, anyio.Event] = {}
        """For each session, the event by which `close_session` asks its task to close it."""
        self._ended: dict[str, anyio.Event] = {}
        """For each session that is open or being opened, the event that is set when it is closed."""
        self._jobs: dict[str, Job] = {}
        """Background jobs by their ids, in the order in which clients last asked for them."""
        self._calls: dict[str, _KeyedCall] = {}
        """Calls by idempotency key: ended ones in the order of their ends."""

    # ---- sessions

    async def open_session(self, name: str) -> Session:
        """Open a session that lives until it is closed, or until the lease ends.

        Raises:
            SandboxBusyError: a session of this name is open or being opened.
            SandboxRefusedError: too many sessions are open.
            SandboxError: the session cannot be opened.
            ProblemError: a bug of the service ended the session.
        """
        if name in self._ended:
            raise SandboxBusyError(f"a session {name!r} is open already; close it, or use another name")
        if len(self._ended) >= SESSIONS_OPEN:
            raise SandboxRefusedError(f"{SESSIONS_OPEN} sessions are open; close one")
        self._close_asked[name], self._ended[name] = anyio.Event(), anyio.Event()
        outcome = await self._tasks.start(self._hold_session, name)
        if isinstance(outcome, FlashError | ProblemError):
            raise outcome
        return outcome

    async def _hold_session(self, name: str, *, task_status: TaskStatus[FlashError | ProblemError | Session]) -> None:
        """Open a session and hold it until it is closed, or the lease or its sandbox ends.

        Reports the session, or the error that prevented it, as its started value. If its sandbox is lost, the session
        ends, although the lease may get another sandbox.
        """
        started = False
        try:
            sandbox = self._lease.sandbox  # None if a lost one is just being replaced.
            async with self._pool.handle(self._lease).session(name) as session:
                self._sessions[name] = session
                started = True
                task_status.started(session)
                await _first_of(
                    self._close_asked[name].wait, self._lease.done.wait, *([sandbox.wait_ended] if sandbox else ())
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
            self._close_asked.pop(name)
            self._ended.pop(name).set()

    def session(self, name: str) -> Session:
        """Return the open session of this name. Raises ProblemError if there is none."""
        session = self._sessions.get(name)
        if session is None:
            raise ProblemError(404, f"no session {name!r} is open in sandbox {self._lease.id}", "SandboxClosedError")
        return session

    def sessions(self) -> list[Session]:
        """Return the open sessions, without those that are being opened."""
        return list(self._sessions.values())

    async def close_session(self, name: str) -> None:
        """Close a session and wait until it is closed, also one that is being opened. Does nothing if there is none."""
        if (closed := self._ended.get(name)) is not None:
            self._close_asked[name].set()
            await closed.wait()

    # ---- jobs

    def add_job(self, job: Job) -> None:
        """Remember a job, so that clients can ask for it later. Beyond `JOBS_KEPT` the job that nobody has asked for
        longest is forgotten, but goes on."""
        jobs = self._jobs
        jobs[job.job_id] = job
        if len(jobs) > JOBS_KEPT:
            del jobs[next(iter(jobs))]

    def job(self, job_id: str) -> Job:
        """Return a job that was started. Raises ProblemError if it is unknown."""
        if job_id not in self._jobs:
            raise ProblemError(404, f"there is no job {job_id} in sandbox {self._lease.id}", "SandboxRefusedError")
        # Moved to the end: a job that runs for long is not forgotten for the many after it.
        job = self._jobs[job_id] = self._jobs.pop(job_id)
        return job

    # ---- calls that are carried out once

    async def once(self, key: str, digest: bytes, call: Callable[[], Awaitable[_T]]) -> _T:
        """Return the answer to the call with this key.

        The first call with a key is carried out. A later one waits for the answer to the first. If this caller is
        cancelled, for example because its client has left, the call goes on.

        Args:
            key: idempotency key that the client has chosen.
            digest: digest of the call's path and body, which must be the same in each call with this key.
            call: function that carries out the call.

        Raises:
            SandboxRefusedError: the key was used before for a call with another digest, or the call was cancelled.
            SandboxBusyError: too many calls with keys are in progress.
            SandboxLostError: the service ended during the call.
            SandboxError, ProblemError: the call failed.
        """
        answer = self._calls.get(key)
        if answer is None:
            if sum(not each.done.is_set() for each in self._calls.values()) >= CALLS_OPEN:
                raise SandboxBusyError(f"{CALLS_OPEN} calls are in progress in this sandbox; wait for some of them")
            answer = self._calls[key] = _KeyedCall(digest)
            self._tasks.start_soon(self._carry_out, key, call)
        elif answer.digest not in (digest, b""):
            raise SandboxRefusedError(f"the idempotency key {key!r} was used for another call; use a new one")
        await answer.done.wait()
        if answer.error is not None:
            raise answer.error
        return answer.result

    async def _carry_out(self, key: str, call: Callable[[], Awaitable[Any]]) -> None:
        """Carry out the call of `once` in a task of its own, which goes on when the client disconnects.

        Stores the result or an error, also when the call or the service is cancelled, and wakes all callers of `once`.
        """
        # The entry of this key stays until `done` is set: `once` and `keep_error` replace none, and `_drop_old` drops
        # only ended calls.
        answer = self._calls[key]
        try:
            with answer.scope:
                answer.result = await call()
            if answer.scope.cancelled_caught:
                answer.error = _cancelled()
        except anyio.get_cancelled_exc_class():
            # The service ends. Without an error, a caller of `once` would take None as the result.
            answer.error = SandboxLostError("the service ended during the call, which may have been carried out")
            raise
        except (FlashError, ProblemError) as error:
            answer.error = error
        except Exception:  # the boundary of a call: a bug ends this call, not the service
            _log.exception("a call failed")
            answer.error = _failed()
        finally:
            answer.done.set()
            # Moved to the end: the answer of a long call must outlive its end, whatever calls began after it.
            self._calls[key] = self._calls.pop(key)
            self._drop_old()

    def knows_call(self, key: str) -> bool:
        """Return True if a call with this key is in progress, or its answer or an error is kept."""
        return key in self._calls

    async def cancel_call(self, key: str) -> None:
        """Cancel a call and wait for its end. Its command is killed. Does nothing to a call that has ended.

        A call that has not arrived yet is refused when it arrives. A client that is cancelled closes the connection of
        the call, and its cancellation on another connection may overtake the call.
        """
        if key not in self._calls:
            self.keep_error(key, _cancelled())
        answer = self._calls[key]
        answer.scope.cancel()
        await answer.done.wait()

    def keep_error(self, key: str, error: FlashError) -> None:
        """Keep an error as the answer to every further call with this key.

        `cancel_call` calls this for a call that has not arrived, and a download that has broken off calls it for the
        client that asks why. Does nothing if the key has a call, in progress or ended: a client may have used the key
        of a call for a download, too.
        """
        if key in self._calls:
            return
        answer = self._calls[key] = _KeyedCall()
        answer.error = error
        answer.done.set()
        self._drop_old()

    def kept_error(self, key: str) -> FlashError | ProblemError | None:
        """Return the error that is the answer to calls with this key; None if the key is unknown, or its call is in
        progress or has a result."""
        return answer.error if (answer := self._calls.get(key)) is not None else None

    def _drop_old(self) -> None:
        """Drop the answers that ended first, beyond `ANSWERS_KEPT` and `ANSWERS_KEPT_BYTES`.

        Calls in progress are never dropped, and neither is the newest answer.
        """
        finished = [(key, answer) for key, answer in reversed(self._calls.items()) if answer.done.is_set()]
        size = 0
        for place, (key, answer) in enumerate(finished):
            size += _output_bytes(answer.result)
            if place >= ANSWERS_KEPT or (place and size > ANSWERS_KEPT_BYTES):
                del self._calls[key]


def _cancelled() -> SandboxRefusedError:
    """Return the error for a client that asks for the result of a call which was cancelled."""
    return SandboxRefusedError("the call was cancelled (DELETE .../calls/KEY)")


def _failed() -> ProblemError:
    """Return the error for a client whose session or call ended by a bug of the service."""
    return ProblemError(500, "the service failed; its log says why")


async def _first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Wait until the first of several waits returns, and cancel the others."""
    async with anyio.create_task_group() as tasks:

        async def wait(one: Callable[[], Awaitable[object]]) -> None:
            """Wait for `one`, and then leave the block."""
            await one()
            tasks.cancel_scope.cancel()

        for each in waits:
            tasks.start_soon(wait, each)


def _output_bytes(result: object) -> int:
    """Return the bytes of output in the answer to a call; 0 if it has none, as an error (None) or a small struct."""
    if isinstance(result, SessionResult):
        result = result.result
    return len(result.stdout) + len(result.stderr) if isinstance(result, Result) else 0


class Service:
    """State behind the routes. Made by `open_service`.

    Its methods take the name of the caller's token, which `envs.sandbox.service.web.Guard` has checked.
    """

    def __init__(self, pool: SandboxPool, tokens: Tokens, tasks: TaskGroup, name: str) -> None:
        """Create a service over `pool` for the callers that have one of `tokens`. `tasks` ends with the service."""
        self.pool = pool
        self.tokens = tokens
        self.name = name
        """Name of the service in its status: that of its machine."""
        self.boot = uuid4().hex[:12]
        """Identifier of this start of the service. A client that repeats a call sends the one that it knows."""
        self._tasks = tasks
        """Task group of sessions and calls, and of the tasks that wait for the ends of leases."""
        self._works: dict[str, LeaseWork] = {}
        """Sessions, jobs and calls of each lease, by the lease's id."""
        self._snapshots_begun: Counter[str] = Counter()
        """Number of snapshots in progress, by token."""

    # ---- leases

    def order(self, order: SandboxOrder, token: str, key: str) -> SandboxLease:
        """Order a sandbox on behalf of a token, and return its lease, which may still wait for a sandbox.

        `key` is the idempotency key of the order; empty: none. With a known key the lease of before is returned.

        Raises:
            SandboxError: the token was not granted this kind, the image could be a snapshot of another token, the token
                has too many requests in the queue, or an error of `SandboxPool.order`.
        """
        self.tokens.named(token).check(token, order.spec)
        self._check_image(order.spec.image, token)
        leases = self.pool.state.leases
        # A repeated order takes no further place in the queue, so it is not counted.
        if token != ADMIN and leases.find_by_key(token, key) is None:
            waiting = sum(lease.token == token and lease.state == "queued" for lease in leases.all())
            if waiting >= (most := int(WAITING_SHARE * self.pool.state.admission.max_waiting)):
                raise SandboxBusyError(
                    f"token {token} may have {most} requests waiting for a sandbox, and has them; ask again later"
                )
        owner = f"{token}/{order.owner}" if order.owner else token
        return self.pool.order(
            LeaseOrder(
                spec=order.spec,
                owner=owner,
                token=token,
                priority=order.priority,
                on_lost=order.on_lost,
                lease_s=order.lease_s,
                key=key,
            )
        )

    def _check_image(self, image: str, token: str) -> None:
        """Refuse every image name by which a token could get the files of another token. Raises SandboxRefusedError."""
        if _ID.fullmatch(image) and not (token == ADMIN and _WHOLE_ID.fullmatch(image)):
            # Engines complete the beginning of an id. A token could find snapshots by trying short beginnings.
            raise SandboxRefusedError(
                f"{image!r} could be an image's id, or the beginning of one; give a name with its tag, such as "
                f"{image[:40]}:latest"
            )
        kept = self.pool.snapshots.find(image)
        if names_snapshot(image) and token != ADMIN and (kept is None or kept.token != token):
            raise SandboxRefusedError(f"token {token} has no snapshot {image!r}; GET /v1/snapshots lists those it has")

    def renewed_lease(self, id: str, token: str) -> SandboxLease:
        """Renew the lease with this id, and return it.

        Each request about a sandbox shows that its holder still lives.

        Raises:
            ProblemError: there is no such lease, or the token may not use it. The answer does not reveal which.
        """
        lease = self.pool.state.leases.find(id)
        if lease is None or not may_use(lease, token):
            raise ProblemError(404, f"there is no sandbox {id}", "SandboxClosedError")
        lease.renew()
        return lease

    def visible(self, token: str) -> list[SandboxLease]:
        """Return the leases that a token may use."""
        return [lease for lease in self.pool.state.leases.all() if may_use(lease, token)]

    def info(self, lease: SandboxLease) -> Info:
        """Return a lease in the form that clients see."""
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
            lease_s=min(lease.lease_s, 1e9),  # A lease without renewals has infinity, which JSON cannot carry.
            position=state.position(lease),
            key=lease.order.key,
            waiting_for=state.why_waiting(lease) if lease.state == "queued" and not lease.done.is_set() else "",
            problem=problem_of(lease.error) if lease.error is not None else None,
        )

    # ---- snapshots

    async def snapshot(self, lease: SandboxLease) -> Snapshot:
        """Keep the files of a lease's sandbox as a snapshot that belongs to the lease's token.

        Snapshots in progress count, because several calls may run at the same time.

        Raises:
            SandboxRefusedError: the token already has as many snapshots as it may have.
            SandboxError: the snapshot failed.
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
        """Return the snapshots that a token may use."""
        return [kept for kept in self.pool.snapshots.all() if token in (ADMIN, kept.token)]

    async def forget(self, snapshot_id: str, token: str) -> None:
        """Remove a snapshot. Does nothing if the token has no snapshot with this id, so that it can be repeated.

        Raises the errors of `SandboxPool.forget`, such as those of the host.
        """
        for kept in self.snapshots(token):
            if kept.snapshot_id == snapshot_id:
                await self.pool.forget(kept)

    # ---- open sessions, jobs and calls

    def work(self, lease: SandboxLease) -> LeaseWork:
        """Return the sessions, jobs and calls of a lease. They are forgotten when the lease has ended."""
        if lease.id not in self._works:
            self._works[lease.id] = LeaseWork(self.pool, lease, self._tasks)
            self._tasks.start_soon(self._clear, lease)
        return self._works[lease.id]

    async def _clear(self, lease: SandboxLease) -> None:
        """Wait until a lease has ended, and then forget its sessions, jobs and calls."""
        await lease.done.wait()
        self._works.pop(lease.id, None)

    # ---- status of the pool

    def status(self, token: str) -> Status:
        """Return the state of the pool at this moment, with only the details that the token may see."""
        state, hosts = self.pool.state, self.pool.state.hosts()
        states: dict[str, int] = {}
        for lease in state.leases.all():
            states[lease.state] = states.get(lease.state, 0) + 1
        hits, requests = sum(host.hits for host in hosts), sum(host.hits + host.misses for host in hosts)
        return Status(
            version=state.version,
            service=self.name,
            boot=self.boot,
            hosts=hosts,
            states=states,
            queue=_queue_for(token, state.admission.waiting()),
            hit_rate=hits / requests if requests else None,
            failures=dict(state.failures.counts),
            recent_failures=list(state.failures.recent)[-FAILURES_SHOWN:] if token == ADMIN else [],
            images_put_aside=state.failures.images_put_aside() if token == ADMIN else {},
            sandboxes=[self.info(lease) for lease in self.visible(token)],
        )


def may_use(lease: SandboxLease, token: str) -> bool:
    """Return True if a token gives access to a lease."""
    return token in (ADMIN, lease.token)


def _queue_for(token: str, queue: dict[str, int]) -> dict[str, int]:
    """Return `queue`, the number of waiting requests by owner, as the token may see it.

    Owners of other tokens are one entry, `OTHERS`, except for `admin`.
    """
    if token == ADMIN:
        return queue
    shown: dict[str, int] = {}
    for owner, number in queue.items():
        name = owner if owner.partition("/")[0] == token else OTHERS
        shown[name] = shown.get(name, 0) + number
    return shown


@asynccontextmanager
async def open_service(pool: SandboxPool, tokens: Tokens, name: str = "sandboxes") -> AsyncGenerator[Service]:
    """Open a service over a pool for the time of the block. At the end, calls in progress are cancelled and sessions
    are closed. `name` is the name of the service in its status."""
    async with unwrapped_group() as tasks:
        yield Service(pool, tokens, tasks, name)
        tasks.cancel_scope.cancel()
