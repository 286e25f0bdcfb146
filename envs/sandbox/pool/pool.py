"""The pool: leases on sandboxes of one or several hosts.

Each lease is served by one task of its own from its order to its end; callers only wait for what that task has done and
tell it to end. So a caller that is cancelled, at any await, leaves nothing behind.

Law: every order is answered: by a sandbox, or by an error of `flash.errors.SandboxError` that says what it waited for.
Law: when a lease is `done`, its sandbox is closed, its place on its host is free and the journal has forgotten it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from uuid import uuid4

import anyio
from anyio.abc import TaskGroup

from envs.sandbox.api import OnLost, Snapshot, Spec
from envs.sandbox.pool.entries import entry_of, lease_of
from envs.sandbox.pool.host import Host, Ticket, new_sandbox_id
from envs.sandbox.pool.journal import Entry, Journal, KeptSnapshot, MemoryJournal
from envs.sandbox.pool.lease import Lease
from envs.sandbox.pool.leased import LeasedSandbox
from envs.sandbox.pool.snapshots import SnapshotBook
from envs.sandbox.pool.state import PoolSettings, PoolState
from envs.sandbox.sandbox import Sandbox
from flash.errors import (
    SandboxBusyError,
    SandboxClosedError,
    SandboxError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxStartError,
)
from flash.waiting import unwrapped_group

_log = logging.getLogger(__name__)


class Pool:
    """Leases sandboxes. Made by `open_pool`."""

    def __init__(
        self,
        hosts: Sequence[Host],
        tasks: TaskGroup,
        settings: PoolSettings,
        journal: Journal,
        wall: Callable[[], float],
    ) -> None:
        self.state = PoolState(hosts, settings, wall)
        self.snapshots = SnapshotBook(wall)
        self._tasks = tasks
        self._settings = settings
        self._journal = journal
        self._wall = wall

    # ---- for callers

    @asynccontextmanager
    async def acquire(
        self,
        spec: Spec,
        *,
        owner: str = "local",
        priority: int = 0,
        deadline: float = 600.0,
        on_lost: OnLost = "fail",
    ) -> AsyncGenerator[LeasedSandbox]:
        """See `SandboxProvider`; the sandbox is this pool's until the block ends."""
        lease = self.order(spec, owner=owner, priority=priority, on_lost=on_lost)
        try:
            await self.wait_ready(lease, deadline)
            yield LeasedSandbox(self, lease)
        finally:
            await self.release(lease)

    def order(
        self,
        spec: Spec,
        *,
        owner: str,
        token: str = "",
        priority: int = 0,
        on_lost: OnLost = "fail",
        lease_s: float = math.inf,
        key: str = "",
        only: str | None = None,
    ) -> Lease:
        """Ask for a sandbox, and return at once. The same `key` of the same token gives the same lease.

        Raises:
            SandboxRefusedError: no host could ever hold it, or the key was used for something else.
            SandboxStartError: this image only fails at the moment.
            SandboxBusyError: too many wait already.
        """
        if only is None and (kept := self.snapshots.find(spec.image)) is not None:
            only = kept.host
        if (known := self.state.leases.find_by_key(token, key)) is not None:
            if known.spec != spec:
                raise SandboxRefusedError(f"the idempotency key {key!r} was used for another sandbox; use a new one")
            return known
        lease = Lease(
            uuid4().hex[:16],
            spec,
            owner=owner,
            token=token,
            priority=priority,
            on_lost=on_lost,
            lease_s=lease_s,
            key=key,
        )
        self.state.submit(lease, only)
        self._tasks.start_soon(self._serve, lease, name=f"lease {lease.id}")
        self.state.decide()
        return lease

    async def wait_ready(self, lease: Lease, deadline: float) -> None:
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

    async def release(self, lease: Lease, reason: str = "it was given back") -> None:
        """End a lease and wait until nothing is left of it, also when the caller is being cancelled."""
        lease.end(reason)
        with anyio.move_on_after(self._settings.close_s, shield=True):
            await lease.done.wait()

    async def snapshot(self, lease: Lease) -> Snapshot:
        """Keep the files of a lease's sandbox. The image outlives the lease, by `PoolSettings.snapshot_s` at most.

        Raises:
            SandboxError: it failed.
        """
        async with lease.use("snapshot", "") as use:
            snapshot = await use.sandbox.snapshot()
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
            await self._journal.put_snapshot(kept)
            return snapshot

    async def forget(self, kept: KeptSnapshot) -> None:
        """Remove a snapshot. Its host removes it later where something still runs from it."""
        self.snapshots.remove(kept.image)
        if kept.host in {host.name for host in self.state.hosts()}:
            await self.state.host(kept.host).forget(kept.image)
        await self._journal.drop_snapshot(kept.image)

    async def fork(self, parent: Lease, count: int) -> list[Lease]:
        """Sandboxes with the parent's files, on its host, which end with it at the latest.

        Raises:
            SandboxError: the snapshot or one of them failed; then none is left.
        """
        async with parent.use("fork", f"{count} ways") as use:
            snapshot = await use.sandbox.snapshot()
            parent.snapshots.append((snapshot.spec.image, parent.host))
            await self._note(parent)
            if parent.scope.cancel_called:
                # Its end may not have seen this snapshot, and would not see the forks.
                await self.state.host(parent.host).forget(snapshot.spec.image)
                raise _ended_early(parent)
            forks: list[Lease] = []
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

    def handle(self, lease: Lease) -> LeasedSandbox:
        """The sandbox of a lease, for its holder."""
        return LeasedSandbox(self, lease)

    def _order_fork(self, parent: Lease, spec: Spec) -> Lease:
        fork = self.order(
            spec,
            owner=parent.owner,
            token=parent.token,
            priority=parent.priority,
            lease_s=parent.lease_s,
            only=parent.host,
        )
        fork.parent = parent.id
        parent.children.append(fork)
        return fork

    # ---- one lease

    async def _serve(self, lease: Lease) -> None:
        """One lease from its order to its end.

        Consumes its grants. Waits for a host, for the sandbox to start, and then for its end: lost, given back, not
        renewed, idle, or at the end of its life. Produces a ready sandbox, and in the end nothing: all is closed.
        """
        try:
            with lease.scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._keep_time, lease)
                    try:
                        await self._note(lease)
                        await self._keep_serving(lease)
                    except SandboxError as error:
                        lease.end(str(error), error)
        finally:
            with anyio.CancelScope(shield=True):
                await self._finish(lease)

    async def _keep_time(self, lease: Lease) -> None:
        """End the lease when one of its times is over. Unblocked by them, and by changes of its state."""
        while True:
            due, reason = lease.due()
            if due <= anyio.current_time():
                lease.end(reason)
                return
            with anyio.CancelScope(deadline=due):
                await lease.change()

    async def _keep_serving(self, lease: Lease) -> None:
        """Returns only by an error, or by the end of the lease."""
        while True:
            sandbox = lease.sandbox or await self._obtain(lease)
            self._hand_out(lease, sandbox)
            await sandbox.wait_ended()
            error = SandboxLostError(f"sandbox {lease.id} on {lease.host} is gone: its container or its agent ended")
            self.state.failures.failed(error, lease.host)
            lease.lost(sandbox, error)
            if lease.on_lost != "recreate" or lease.generation >= self._settings.recreate_attempts:
                raise error
            lease.generation += 1
            lease.set("starting", str(error))
            await self._close_sandbox(sandbox)
            lease.sandbox = None
            self.state.put_back(lease, avoid=set())

    def _hand_out(self, lease: Lease, sandbox: Sandbox) -> None:
        lease.sandbox = sandbox
        if math.isinf(lease.hard_until):
            lease.hard_until = anyio.current_time() + lease.spec.deadline_s
        again = f", made again ({lease.generation})" if lease.generation else ""
        lease.set("ready", f"on {lease.host}{again}")
        self.state.changed()

    async def _obtain(self, lease: Lease) -> Sandbox:
        """A started sandbox, tried on several hosts."""
        avoid: set[str] = set()
        while True:
            await lease.granted.wait()
            lease.set("starting", f"on {lease.host}")
            try:
                sandbox = await self._start(lease)
            except SandboxRefusedError:
                raise
            except SandboxError as error:
                if self.state.failures.start_failed(lease, error):
                    self._tasks.start_soon(self._reopen, lease.host)
                avoid.add(lease.host)
                lease.starts += 1
                if lease.starts >= self._settings.start_attempts:
                    raise
            else:
                self.state.failures.started(lease)
                lease.starts = 0
                return sandbox
            self.state.failures.refuse_bad_kind(lease.spec)
            lease.set("queued", "to be tried again")
            self.state.put_back(lease, avoid)

    async def _start(self, lease: Lease) -> Sandbox:
        host = self.state.host(lease.host)
        sandbox = host.take(lease.spec)
        lease.sandbox = sandbox
        lease.sandbox_id = sandbox.sandbox_id if sandbox else new_sandbox_id()
        # Announced before it is made: after a crash in between, the container is found by its label.
        await self._note(lease)
        if sandbox is None:
            sandbox = lease.sandbox = await host.start(Ticket(lease.sandbox_id, lease.id, lease.owner, lease.spec))
            await self._note(lease)
        return sandbox

    async def _finish(self, lease: Lease) -> None:
        """Close what is left of a lease, in the order: forks, sandbox, snapshots, journal, state."""
        for child in lease.children:
            child.end("the sandbox it was forked from ended")
        lease.set("failed" if lease.error is not None else "closed", lease.ending)
        for child in lease.children:
            await child.done.wait()
        if lease.sandbox is not None:
            await self._close_sandbox(lease.sandbox)
        lease.cleared = True
        await self._forget_snapshots(lease)
        await self._journal.drop(lease.id)
        lease.sandbox = None
        self.state.remove(lease)
        lease.done.set()

    async def _forget_snapshots(self, lease: Lease) -> None:
        for image, host in lease.snapshots:
            await self.state.host(host).forget(image)

    async def _close_sandbox(self, sandbox: Sandbox) -> None:
        try:
            with anyio.fail_after(self._settings.close_s):
                await sandbox.close()
        except (SandboxError, TimeoutError) as error:
            # Its host still lists the container, and removes what no lease has.
            _log.warning("sandbox %s could not be closed: %s", sandbox.sandbox_id, error or "no answer")

    async def _reopen(self, name: str) -> None:
        """Leave a host alone while it is in quarantine, then ask it again."""
        self.state.refresh(name)
        await anyio.sleep(self.state.failures.quarantine_left(name))
        self.state.refresh(name)

    async def _note(self, lease: Lease) -> None:
        """Write to the journal how the lease stands now."""
        if not lease.cleared:
            await self._journal.put(entry_of(lease, self._wall()))

    # ---- hosts, and what an earlier run left

    async def begin(self, hosts: Sequence[Host]) -> None:
        """Know the leases of an earlier run, and let the hosts work."""
        self.snapshots.restore(await self._journal.load_snapshots())
        self._tasks.start_soon(self._forget_expired)
        entries = {entry.lease: entry for entry in await self._journal.load()}
        leases = {id: lease_of(entry, self._wall()) for id, entry in entries.items()}
        placed: dict[str, list[tuple[Entry, Lease]]] = {host.name: [] for host in hosts}
        for id, lease in leases.items():
            entry = entries[id]
            if (parent := leases.get(entry.parent)) is not None:
                parent.children.append(lease)
            elif entry.parent:
                lease.end("the sandbox it was forked from ended")
            if entry.ready and entry.host in placed:
                self.state.leases.add(lease)
                placed[entry.host].append((entry, lease))
            else:
                origin = entries.get(entry.parent)
                await self._resume(lease, entry, origin.host if origin else None)
        for host in hosts:
            self._tasks.start_soon(self._run_host, host, placed[host.name], name=f"host {host.name}")

    async def _forget_expired(self) -> None:
        """Remove snapshots whose time is over.

        Consumes the book of snapshots. Waits for the next one's time; unblocked by it, and by changes of the book.
        Produces nothing but their removal.
        """
        while True:
            for kept in self.snapshots.expired():
                await self.forget(kept)
            await self.snapshots.next_expiry()

    async def _run_host(self, host: Host, placed: Sequence[tuple[Entry, Lease]]) -> None:
        """Go on with what an earlier run left on a host, then let it work.

        Consumes the journal's entries of this host. Waits for the host to answer. Produces leases with their old
        sandboxes; those whose sandbox is gone are served like any lost one.
        """
        tickets = [
            Ticket(e.sandbox_id, e.lease, e.owner, e.spec, (*dict(e.snapshots), *self.snapshots.made_of(e.lease)))
            for e, _ in placed
        ]
        left = {entry.sandbox_id: lease for entry, lease in placed}

        places = [*left.values()]

        def answered() -> None:
            # Their places first: others are given what is left.
            while places:
                self.state.restore(places.pop(), host.name)
            self.state.refresh(host.name)

        def settled(sandbox_id: str, sandbox: Sandbox | None) -> None:
            if (lease := left.pop(sandbox_id, None)) is not None:
                self._go_on(lease, sandbox)

        try:
            while True:
                try:
                    sandboxes = await host.recover(tickets, answered=answered, settled=settled)
                    break
                except (SandboxError, TimeoutError) as error:
                    _log.warning("host %s cannot be reached: %s", host.name, error or "no answer")
                await anyio.sleep(self._settings.recover_retry_s)
        except BaseException:
            # The pool ends: what they are forks of must not wait for them. The next start goes on with them.
            for lease in left.values():
                lease.done.set()
            raise
        answered()
        for sandbox_id in [*left]:
            settled(sandbox_id, sandboxes.get(sandbox_id))
        await host.run(partial(self.state.refresh, host.name), task_status=anyio.TASK_STATUS_IGNORED)

    def _go_on(self, lease: Lease, sandbox: Sandbox | None) -> None:
        """Serve a lease of an earlier run, with its sandbox if that still lives."""
        lease.sandbox = sandbox
        if sandbox is None:
            self._lost_in_restart(lease)
        elif lease.generation:
            # Whether its holder was told that it is not the first one died with the earlier run.
            lease.lost(None, SandboxLostError(f"sandbox {lease.id} was made again, before its service restarted"))
        self._tasks.start_soon(self._serve, lease, name=f"lease {lease.id}")

    def _lost_in_restart(self, lease: Lease) -> None:
        error = SandboxLostError(f"sandbox {lease.id} did not outlive the restart of its service")
        self.state.failures.failed(error, lease.host)
        lease.lost(None, error)
        lease.generation += 1
        lease.granted.set()
        if lease.on_lost != "recreate":
            lease.end(str(error), error)

    async def _resume(self, lease: Lease, entry: Entry, only: str | None) -> None:
        """A lease of an earlier run that had no sandbox yet, or whose host is no longer ours: it waits again."""
        if entry.ready or entry.generation:
            self._lost_in_restart(lease)
        lease.sandbox_id, lease.hard_until, lease.granted = "", math.inf, anyio.Event()
        # Those that its forks began from before it was lost: removed with it, as far as their hosts are still ours.
        ours = {host.name for host in self.state.hosts()}
        lease.snapshots[:] = [(image, host) for image, host in lease.snapshots if host in ours]
        try:
            self.state.submit(lease, only)
        except SandboxError as error:
            _log.warning("lease %s of an earlier run is given up: %s", lease.id, error)
            # Not here: an engine that does not answer must not hold up the start of the service.
            self._tasks.start_soon(self._give_up, lease, name=f"lease {lease.id}")
            return
        self._tasks.start_soon(self._serve, lease, name=f"lease {lease.id}")

    async def _give_up(self, lease: Lease) -> None:
        await self._forget_snapshots(lease)
        await self._journal.drop(lease.id)
        lease.done.set()


def _ended_early(parent: Lease) -> SandboxClosedError:
    return SandboxClosedError(f"sandbox {parent.id} ended while it was forked: {parent.ending}")


@asynccontextmanager
async def open_pool(
    hosts: Sequence[Host],
    *,
    settings: PoolSettings | None = None,
    journal: Journal | None = None,
    wall: Callable[[], float] = time.time,
) -> AsyncGenerator[Pool]:
    """A pool for the time of the block. At its end every sandbox is closed.

    `wall` gives the unix time, for what outlives the process.
    """
    journal = journal or MemoryJournal()
    async with unwrapped_group() as tasks:
        pool = Pool(hosts, tasks, settings or PoolSettings(), journal, wall)
        await pool.begin(hosts)
        yield pool
        tasks.cancel_scope.cancel()
