"""Pool: leases on sandboxes of one or several hosts.

`open_sandboxes` opens a pool for the programs of one process, and `flash sandbox serve` one for its clients. A host is
a place that starts sandboxes: this machine's engine, or another service.

One task serves each lease from its order to its end. Callers only wait for the results of that task, and ask it to end.
So a caller that is cancelled, at any await, leaves nothing behind.

Law: every order is answered: by a sandbox, or by an error of `flash.errors.SandboxError` that says what it waited for.
Law: when a lease is `done`, its sandbox is closed, its place on its host is free and its journal entry is deleted.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

import anyio
import msgspec
from anyio.abc import TaskGroup

from envs.sandbox.api import OnLost, Snapshot, Spec
from envs.sandbox.pool.host import Host
from envs.sandbox.pool.journal import KeptSnapshot, MemoryPoolJournal, PoolJournal
from envs.sandbox.pool.lease import LeasedSandbox, LeaseOrder, SandboxLease
from envs.sandbox.pool.serving import LeaseServer, Recovery
from envs.sandbox.pool.state import PoolSettings, PoolState, SnapshotBook
from flash.errors import SandboxBusyError, SandboxClosedError, SandboxError, SandboxRefusedError, SandboxStartError
from flash.waiting import unwrapped_group


class SandboxPool:
    """A pool that leases sandboxes. `open_pool` creates it."""

    def __init__(
        self,
        hosts: Sequence[Host],
        tasks: TaskGroup,
        settings: PoolSettings,
        journal: PoolJournal,
        wall: Callable[[], float],
    ) -> None:
        """Create a pool; `open_pool` describes the other parameters. `tasks` is the group of all tasks of the pool."""
        self.state = PoolState(hosts, settings, wall)
        """Queue, leases, failures and hosts."""
        self.snapshots = SnapshotBook(wall)
        """Snapshots that holders know."""
        self._server = LeaseServer(self.state, tasks, settings, journal, wall)
        """Runs the task of each lease."""
        self._tasks = tasks
        self._settings = settings
        self._journal = journal
        self._wall = wall

    async def begin(self, hosts: Sequence[Host]) -> None:
        """Restore the snapshots and leases of an earlier run, and start the hosts."""
        self.snapshots.restore(await self._journal.snapshots.load())
        self._tasks.start_soon(self._forget_expired)
        await Recovery(self._server, self.snapshots).begin(hosts)

    async def _forget_expired(self) -> None:
        """Remove expired snapshots, until cancelled.

        Between two removals it waits until the next snapshot expires or the book of snapshots changes.
        """
        while True:
            for kept in self.snapshots.expired():
                await self.forget(kept)
            await self.snapshots.next_expiry()

    @asynccontextmanager
    async def acquire(
        self, spec: Spec, *, owner: str = "local", priority: int = 0, deadline: float = 600.0, on_lost: OnLost = "fail"
    ) -> AsyncGenerator[LeasedSandbox]:
        """Lease a sandbox for the time of the block, as `SandboxProvider` says."""
        lease = self.order(LeaseOrder(spec=spec, owner=owner, priority=priority, on_lost=on_lost))
        try:
            await self.wait_ready(lease, deadline)
            yield LeasedSandbox(self, lease)
        finally:
            await self.release(lease)

    def order(self, order: LeaseOrder, *, only: str | None = None) -> SandboxLease:
        """Order a sandbox and return its lease at once. `only` names the single host that may hold it.

        A second order with the same token and idempotency key returns the same lease.

        Raises:
            SandboxRefusedError: no host could ever hold the sandbox, or the key was used for another spec.
            SandboxStartError: this kind of sandbox is in quarantine, because its starts failed.
            SandboxBusyError: the queue is full.
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
        """Wait until the lease has its sandbox. Ends the lease if the deadline passes first.

        Clients of the service do not need this: they wait with repeated requests.

        Raises:
            SandboxBusyError: the deadline passed.
            SandboxError: the error that ended the lease.
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
        """End a lease and wait until its sandbox and records are removed, also when the caller is being cancelled.

        It waits for at most `PoolSettings.close_s`; the task of the lease goes on afterwards.
        """
        lease.end(reason)
        with anyio.move_on_after(self._settings.close_s, shield=True):
            await lease.done.wait()

    async def snapshot(self, lease: SandboxLease) -> Snapshot:
        """Save the files of a lease's sandbox as an image.

        The image is kept for `PoolSettings.snapshot_s` seconds, also after the lease has ended.

        Raises:
            SandboxError: the snapshot failed, or cannot be recorded in the journal, or the lease has no usable sandbox.
        """
        async with lease.use() as sandbox:
            snapshot = await sandbox.snapshot()
            # Recorded before it is reported to the holder: a restarted service removes snapshots that it does not know.
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
            try:
                await self._journal.snapshots.put(kept.image, kept)
            except SandboxError:
                await self.forget(kept)
                raise
            return snapshot

    async def forget(self, kept: KeptSnapshot) -> None:
        """Remove the snapshot `kept`. If a sandbox still runs from it, its host removes it later."""
        self.snapshots.remove(kept.image)
        # A host that is not in the pool any more removes it when it is too old.
        if kept.host in {host.name for host in self.state.hosts()}:
            await self.state.host(kept.host).forget(kept.image)
        await self._journal.snapshots.drop(kept.image)

    async def fork(self, parent: SandboxLease, count: int) -> list[SandboxLease]:
        """Start `count` sandboxes with the parent's files on its host. They end with the parent at the latest.

        Raises:
            SandboxError: the snapshot or a fork failed. All forks of this call are removed then.
        """
        async with parent.use() as sandbox:
            snapshot = await sandbox.snapshot()
            parent.snapshots.append((snapshot.spec.image, parent.host))
            await self._server.note(parent)
            if parent.scope.cancel_called:
                # The task that ends the parent may have missed this snapshot, and would not see the forks.
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
        """Return the sandbox of a lease, for the lease's holder."""
        return LeasedSandbox(self, lease)

    def _order_fork(self, parent: SandboxLease, spec: Spec) -> SandboxLease:
        """Order one fork with the parent's token, owner and priority, on the parent's host.

        A fork that is lost is not replaced: an empty sandbox would be no fork.
        """
        order = msgspec.structs.replace(parent.order, spec=spec, on_lost="fail", key="")
        fork = self.order(order, only=parent.host)
        fork.parent = parent.id
        parent.children.append(fork)
        return fork


def _ended_early(parent: SandboxLease) -> SandboxClosedError:
    """Return the error of a fork whose parent ended meanwhile."""
    return SandboxClosedError(f"sandbox {parent.id} ended while it was forked: {parent.ending}")


@asynccontextmanager
async def open_pool(
    hosts: Sequence[Host],
    *,
    settings: PoolSettings | None = None,
    journal: PoolJournal | None = None,
    wall: Callable[[], float] = time.time,
) -> AsyncGenerator[SandboxPool]:
    """Open a pool for the time of the block. At its end every sandbox is closed.

    Args:
        hosts: places that start sandboxes. Each must have its own name.
        settings: settings of the pool.
        journal: records of leases and snapshots, from which a restarted service goes on; None: in memory.
        wall: function that returns the unix time, which dates everything that outlives the process.
    """
    journal = journal or MemoryPoolJournal()
    async with unwrapped_group() as tasks:
        pool = SandboxPool(hosts, tasks, settings or PoolSettings(), journal, wall)
        await pool.begin(hosts)
        yield pool
        tasks.cancel_scope.cancel()
