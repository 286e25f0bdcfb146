"""The pool: leases on sandboxes of one or several hosts.

Each lease is served by one task of its own from its order to its end; callers only wait for what that task has done and
tell it to end. So a caller that is cancelled, at any await, leaves nothing behind.

Law: every order is answered: by a sandbox, or by an error of `flash.errors.SandboxError` that says what it waited for.
Law: when a lease is `done`, its sandbox is closed, its place on its host is free and the journal has forgotten it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar, cast
from uuid import uuid4

import anyio
import msgspec
from anyio.abc import TaskGroup

from envs.sandbox.api import OnLost, Result, Session, Snapshot, Spec, State
from envs.sandbox.pool.host import Host
from envs.sandbox.pool.journal import KeptSnapshot, MemoryPoolJournal, PoolJournal
from envs.sandbox.pool.lease import LeaseOrder, SandboxLease
from envs.sandbox.pool.recovery import Recovery
from envs.sandbox.pool.serving import LeaseServer
from envs.sandbox.pool.snapshots import SnapshotBook
from envs.sandbox.pool.state import PoolSettings, PoolState
from envs.sandbox.sandbox import (
    MakeForks,
    OpenSession,
    Sandbox,
    SandboxFacts,
    SandboxOpening,
    SandboxRequest,
    TakeSnapshot,
)
from flash.errors import SandboxBusyError, SandboxClosedError, SandboxRefusedError, SandboxStartError
from flash.waiting import unwrapped_group

_T = TypeVar("_T")


class SandboxPool:
    """Leases sandboxes. Made by `open_pool`."""

    def __init__(
        self,
        hosts: Sequence[Host],
        tasks: TaskGroup,
        settings: PoolSettings,
        journal: PoolJournal,
        wall: Callable[[], float],
    ) -> None:
        self.state = PoolState(hosts, settings, wall)
        self.snapshots = SnapshotBook(wall)
        self._server = LeaseServer(self.state, tasks, settings, journal, wall)
        self._tasks = tasks
        self._settings = settings
        self._journal = journal
        self._wall = wall

    async def begin(self, hosts: Sequence[Host]) -> None:
        """Know the snapshots and leases of an earlier run, and let the hosts work."""
        self.snapshots.restore(await self._journal.snapshots.load())
        self._tasks.start_soon(self._forget_expired)
        await Recovery(self._server, self.snapshots).begin(hosts)

    async def _forget_expired(self) -> None:
        """Remove snapshots whose time is over.

        Consumes the book of snapshots. Waits for the next one's time; unblocked by it, and by changes of the book.
        Produces nothing but their removal.
        """
        while True:
            for kept in self.snapshots.expired():
                await self.forget(kept)
            await self.snapshots.next_expiry()

    @asynccontextmanager
    async def acquire(
        self, spec: Spec, *, owner: str = "local", priority: int = 0, deadline: float = 600.0, on_lost: OnLost = "fail"
    ) -> AsyncGenerator[LeasedSandbox]:
        """See `SandboxProvider`; the sandbox is this pool's until the block ends."""
        lease = self.order(LeaseOrder(spec=spec, owner=owner, priority=priority, on_lost=on_lost))
        try:
            await self.wait_ready(lease, deadline)
            yield LeasedSandbox(self, lease)
        finally:
            await self.release(lease)

    def order(self, order: LeaseOrder, *, only: str | None = None) -> SandboxLease:
        """Ask for a sandbox, on one host `only` if that is named, and return at once.

        The same key of the same token gives the same lease.

        Raises:
            SandboxRefusedError: no host could ever hold it, or the key was used for something else.
            SandboxStartError: this image only fails at the moment.
            SandboxBusyError: too many wait already.
        """
        if only is None and (kept := self.snapshots.find(order.spec.image)) is not None:
            only = kept.host
        if (known := self.state.leases.find_by_key(order.token, order.key)) is not None:
            if known.spec != order.spec:
                raise SandboxRefusedError(
                    f"the idempotency key {order.key!r} was used for another sandbox; use a new one"
                )
            return known
        lease = SandboxLease(uuid4().hex[:16], order)
        self.state.submit(lease, only)
        self._server.serve(lease)
        self.state.decide()
        return lease

    async def wait_ready(self, lease: SandboxLease, deadline: float) -> None:
        """Wait until the lease has its sandbox. Ends the lease when it gets none in time.

        Raises:
            SandboxBusyError: the deadline passed.
            SandboxError: what ended the lease.
        """
        with anyio.move_on_after(deadline) as scope:
            await lease.settled()
        if scope.cancelled_caught:
            why = self.state.why_waiting(lease)
            error = SandboxBusyError(f"waited {deadline:g} s for a sandbox of {lease.spec.image}: {why}")
            lease.end("no sandbox in time", error)
            raise error
        if lease.state != "ready":
            raise lease.error or SandboxStartError(f"sandbox {lease.id} was closed before it was ready: {lease.reason}")

    async def release(self, lease: SandboxLease, reason: str = "it was given back") -> None:
        """End a lease and wait until nothing is left of it, also when the caller is being cancelled."""
        lease.end(reason)
        with anyio.move_on_after(self._settings.close_s, shield=True):
            await lease.done.wait()

    async def snapshot(self, lease: SandboxLease) -> Snapshot:
        """Keep the files of a lease's sandbox. The image outlives the lease, by `PoolSettings.snapshot_s` at most.

        Raises:
            SandboxError: it failed.
        """
        async with lease.use() as sandbox:
            snapshot = await sandbox.snapshot()
            now = self._wall()
            kept = KeptSnapshot(
                image=snapshot.spec.image,
                snapshot_id=snapshot.snapshot_id,
                host=lease.host,
                token=lease.token,
                owner=lease.owner,
                lease=lease.id,
                size=snapshot.size,
                made_at=now,
                until=now + self._settings.snapshot_s,
            )
            self.snapshots.add(kept)
            await self._journal.snapshots.put(kept.image, kept)
            return snapshot

    async def forget(self, kept: KeptSnapshot) -> None:
        """Remove a snapshot. Its host removes it later where something still runs from it."""
        self.snapshots.remove(kept.image)
        if kept.host in {host.name for host in self.state.hosts()}:
            await self.state.host(kept.host).forget(kept.image)
        await self._journal.snapshots.drop(kept.image)

    async def fork(self, parent: SandboxLease, count: int) -> list[SandboxLease]:
        """Sandboxes with the parent's files, on its host, which end with it at the latest.

        Raises:
            SandboxError: the snapshot or one of them failed; then none is left.
        """
        async with parent.use() as sandbox:
            snapshot = await sandbox.snapshot()
            parent.snapshots.append((snapshot.spec.image, parent.host))
            await self._server.note(parent)
            if parent.scope.cancel_called:
                # Its end may not have seen this snapshot, and would not see the forks.
                await self.state.host(parent.host).forget(snapshot.spec.image)
                raise _ended_early(parent)
            forks: list[SandboxLease] = []
            try:
                while len(forks) < count:
                    forks.append(self._order_fork(parent, snapshot.spec))
                for fork in forks:
                    await self.wait_ready(fork, self._settings.fork_s)
            except BaseException as error:
                for fork in forks:
                    fork.end("another fork failed")
                for fork in forks:
                    await self.release(fork)
                if isinstance(error, SandboxStartError) and parent.scope.cancel_called:
                    raise _ended_early(parent) from error
                raise
            return forks

    def handle(self, lease: SandboxLease) -> LeasedSandbox:
        """The sandbox of a lease, for its holder."""
        return LeasedSandbox(self, lease)

    def _order_fork(self, parent: SandboxLease, spec: Spec) -> SandboxLease:
        order = msgspec.structs.replace(parent.order, spec=spec, on_lost="fail", key="")
        fork = self.order(order, only=parent.host)
        fork.parent = parent.id
        parent.children.append(fork)
        return fork


class LeasedSandbox(Sandbox):
    """A sandbox under a lease of a pool, as its holder uses it: every call goes through the lease."""

    def __init__(self, pool: SandboxPool, lease: SandboxLease) -> None:
        self._pool = pool
        self.lease = lease

    @property
    def facts(self) -> SandboxFacts:
        return SandboxFacts(self.lease.id, self.lease.spec, self._state())

    @property
    def generation(self) -> int:
        """How often the sandbox was made again after a loss."""
        return self.lease.generation

    def _state(self) -> State:
        match self.lease.state:
            case "queued" | "starting":
                return "starting"
            case "ready":
                return self.lease.sandbox.state if self.lease.sandbox else "starting"
            case "failed":
                return "lost"
            case "closed":
                return "closed"

    async def ask(self, request: SandboxRequest[_T]) -> _T:
        return cast("_T", await self._answer(request))

    async def _answer(self, request: SandboxRequest[Any]) -> object:
        match request:
            case TakeSnapshot():
                return await self._pool.snapshot(self.lease)
            case MakeForks(count):
                # On the same host, closed with this one at the latest.
                return [LeasedSandbox(self._pool, lease) for lease in await self._pool.fork(self.lease, count)]
            case _:
                pass
        async with self.lease.use() as sandbox:
            return await sandbox.ask(request)

    def open(self, opening: SandboxOpening[_T]) -> AbstractAsyncContextManager[_T]:
        return cast("AbstractAsyncContextManager[_T]", self._opened(opening))

    @asynccontextmanager
    async def _opened(self, opening: SandboxOpening[Any]) -> AsyncGenerator[object]:
        if isinstance(opening, OpenSession):
            # Its commands are uses of their own.
            async with self.lease.use() as sandbox:
                pass
            async with sandbox.open(opening) as session:
                yield LeasedSession(self.lease, session)
            return
        async with self.lease.use() as sandbox, sandbox.open(opening) as held:
            yield held

    async def wait_ended(self) -> None:
        await self.lease.done.wait()

    async def close(self) -> None:
        """End the lease, and wait until nothing is left of the sandbox."""
        await self._pool.release(self.lease)


class LeasedSession:
    """A `Session` whose commands are uses of the lease."""

    def __init__(self, lease: SandboxLease, session: Session) -> None:
        self.lease = lease
        self._session = session

    @property
    def name(self) -> str:
        return self._session.name

    @property
    def restarts(self) -> int:
        return self._session.restarts

    async def run(self, command: str, *, timeout: float) -> Result:
        async with self.lease.use():
            return await self._session.run(command, timeout=timeout)

    async def interrupt(self) -> bool:
        return await self._session.interrupt()

    async def close(self) -> None:
        await self._session.close()


def _ended_early(parent: SandboxLease) -> SandboxClosedError:
    return SandboxClosedError(f"sandbox {parent.id} ended while it was forked: {parent.ending}")


@asynccontextmanager
async def open_pool(
    hosts: Sequence[Host],
    *,
    settings: PoolSettings | None = None,
    journal: PoolJournal | None = None,
    wall: Callable[[], float] = time.time,
) -> AsyncGenerator[SandboxPool]:
    """A pool for the time of the block. At its end every sandbox is closed.

    `wall` gives the unix time, for what outlives the process.
    """
    journal = journal or MemoryPoolJournal()
    async with unwrapped_group() as tasks:
        pool = SandboxPool(hosts, tasks, settings or PoolSettings(), journal, wall)
        await pool.begin(hosts)
        yield pool
        tasks.cancel_scope.cancel()
