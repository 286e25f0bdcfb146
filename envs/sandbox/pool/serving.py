"""Serving of leases: one task for each, from its order to its end, and their recovery after a restart.

`LeaseServer` obtains the sandbox of a lease, watches it, replaces it after a loss, and cleans up at the end. `Recovery`
gives the leases of an earlier run their sandboxes back, or treats the sandboxes as lost, and hands the leases to the
server. `envs.sandbox.pool.pool.SandboxPool` calls both.

Law: when a lease is `done`, its sandbox is closed, its place on its host is free and its journal entry is deleted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

import anyio
from anyio.abc import TaskGroup

from envs.sandbox.pool.host import Host, Ticket, new_sandbox_id
from envs.sandbox.pool.journal import Entry, PoolJournal, entry_of, lease_of
from envs.sandbox.pool.lease import SandboxLease
from envs.sandbox.pool.state import PoolSettings, PoolState, SnapshotBook
from envs.sandbox.sandbox import Sandbox
from flash.errors import SandboxError, SandboxLostError, SandboxRefusedError

_log = logging.getLogger(__name__)


class LeaseServer:
    """Runs one task for each lease of a pool. The task obtains the sandbox, watches it, and cleans up at the end."""

    def __init__(
        self,
        state: PoolState,
        tasks: TaskGroup,
        settings: PoolSettings,
        journal: PoolJournal,
        wall: Callable[[], float],
    ) -> None:
        """Create a server without leases.

        Args:
            state: state of the pool, which the tasks change.
            tasks: task group of the pool, in which the leases are served.
            settings: settings of the pool.
            journal: journal of the leases.
            wall: function that returns the unix time.
        """
        self.state = state
        self.tasks = tasks
        self.settings = settings
        self.journal = journal
        self.wall = wall

    def serve(self, lease: SandboxLease) -> None:
        """Start the task that serves a lease."""
        self.tasks.start_soon(self._serve, lease, name=f"lease {lease.id}")

    async def _serve(self, lease: SandboxLease) -> None:
        """Serve one lease from its order to its end.

        The lease waits for a place on a host, then for its sandbox to start, and then for its end. It ends if it is
        given back, not renewed, idle for too long or out of lifetime, or if its sandbox is lost and not replaced. At
        the end everything of the lease is closed and removed. Each lease has one task that runs this.
        """
        try:
            with lease.scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._keep_time, lease)
                    try:
                        await self.note(lease)
                        await self._keep_serving(lease)
                    except SandboxError as error:
                        lease.end(str(error), error)
        finally:
            with anyio.CancelScope(shield=True):
                await self._finish(lease)

    async def _keep_time(self, lease: SandboxLease) -> None:
        """End the lease when one of its times has passed. A change of its state sets new times.

        A call that begins or ends, and a renewal, are seen only when the old time has come.
        """
        while True:
            due, reason = lease.due()
            if due <= anyio.current_time():
                lease.end(reason)
                return
            with anyio.CancelScope(deadline=due):
                await lease.change()

    async def _keep_serving(self, lease: SandboxLease) -> None:
        """Obtain a sandbox and replace it after a loss, until an error or the end of the lease.

        Raises:
            SandboxError: no sandbox could be started, or it was lost and is not replaced.
        """
        while True:
            # A lease that was recovered after a restart has its sandbox already.
            sandbox = lease.sandbox or await self._obtain(lease)
            self._hand_out(lease, sandbox)
            await sandbox.wait_ended()
            error = SandboxLostError(f"sandbox {lease.id} on {lease.host} is gone: its container or its agent ended")
            self.state.failures.failed(error, lease.host)
            lease.lost(sandbox, error)
            if not self.replaces(lease):
                raise error
            lease.generation += 1
            lease.set("starting", str(error))
            await self._close_sandbox(sandbox)
            lease.sandbox = None
            self.state.put_back(lease, avoid=set())

    def replaces(self, lease: SandboxLease) -> bool:
        """Return True if the lost sandbox of a lease must be replaced."""
        return lease.order.on_lost == "recreate" and lease.generation < self.settings.recreate_attempts

    def _hand_out(self, lease: SandboxLease, sandbox: Sandbox) -> None:
        """Give the lease its sandbox, and set it `ready`. The lifetime of the lease begins with its first sandbox."""
        lease.sandbox = sandbox
        if math.isinf(lease.hard_until):
            lease.hard_until = anyio.current_time() + lease.spec.deadline_s
        again = f", replaced ({lease.generation})" if lease.generation else ""
        lease.set("ready", f"on {lease.host}{again}")
        self.state.changed()

    async def _obtain(self, lease: SandboxLease) -> Sandbox:
        """Return a started sandbox. Failed starts are retried, on other hosts if there are any.

        Raises:
            SandboxError: the start was refused, or failed `start_attempts` times.
        """
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
                    self.tasks.start_soon(self._reopen, lease.host)
                avoid.add(lease.host)
                lease.failed_starts += 1
                if lease.failed_starts >= self.settings.start_attempts:
                    raise
            else:
                self.state.failures.started(lease)
                lease.failed_starts = 0
                return sandbox
            self.state.failures.refuse_bad_kind(lease.spec)
            lease.set("queued", "to be tried again")
            self.state.put_back(lease, avoid)

    async def _start(self, lease: SandboxLease) -> Sandbox:
        """Take a ready sandbox of the granted host, or start one there. Records it in the journal before and after.

        Raises the SandboxError of a failed start; the lease has no sandbox then.
        """
        host = self.state.host(lease.host)
        sandbox = host.take(lease.spec)
        lease.sandbox = sandbox
        lease.sandbox_id = sandbox.sandbox_id if sandbox else new_sandbox_id()
        # Write the id to the journal before the sandbox is created: after a crash in between, its label finds the
        # container.
        await self.note(lease)
        if sandbox is None:
            sandbox = lease.sandbox = await host.start(Ticket(lease.sandbox_id, lease.id, lease.owner, lease.spec))
            await self.note(lease)
        return sandbox

    async def _finish(self, lease: SandboxLease) -> None:
        """Remove everything of a lease, in this order: forks, sandbox, snapshots, journal entry, place on its host."""
        lease.set("failed" if lease.error is not None else "closed", lease.ending)
        await self.end_forks(lease)
        if lease.sandbox is not None:
            await self._close_sandbox(lease.sandbox)
        lease.cleared = True
        await self.forget_snapshots(lease)
        await self.journal.leases.drop(lease.id)
        lease.sandbox = None
        self.state.remove(lease)
        lease.done.set()

    async def end_forks(self, lease: SandboxLease) -> None:
        """End the forks of a lease, and wait until everything of them is removed."""
        for child in lease.children:
            child.end("the sandbox it was forked from ended")
        for child in lease.children:
            await child.done.wait()

    async def forget_snapshots(self, lease: SandboxLease) -> None:
        """Remove the snapshots that the lease's forks began from."""
        for image, host in lease.snapshots:
            await self.state.host(host).forget(image)

    async def _close_sandbox(self, sandbox: Sandbox) -> None:
        """Close a sandbox. A failure is only logged."""
        try:
            with anyio.fail_after(self.settings.close_s):
                await sandbox.close()
        except (SandboxError, TimeoutError) as error:
            # The host still lists the container, and removes containers that no lease has.
            _log.warning("sandbox %s could not be closed: %s", sandbox.sandbox_id, error or "no answer")

    async def _reopen(self, name: str) -> None:
        """Take a host out of decisions while it is in quarantine, then let it take sandboxes again.

        Each refresh reads if the host is still in quarantine.
        """
        self.state.refresh(name)
        await anyio.sleep(self.state.failures.quarantine_left(name))
        self.state.refresh(name)

    async def note(self, lease: SandboxLease) -> None:
        """Write the current state of the lease to the journal, for the next run of the service.

        A failure is only logged: the lease goes on, but would not outlive a restart. The next run then removes its
        container, as one without a lease.
        """
        # A fork in progress may call this after `_finish` has deleted the entry.
        if lease.cleared:
            return
        try:
            await self.journal.leases.put(lease.id, entry_of(lease, self.wall()))
        except SandboxError as error:
            _log.warning("lease %s: %s", lease.id, error)


class Recovery:
    """Recovery of the leases of an earlier run of the service. `SandboxPool.begin` makes it once, at the start."""

    def __init__(self, server: LeaseServer, snapshots: SnapshotBook) -> None:
        """Prepare the recovery. `server` goes on with the leases; `snapshots` are those of the earlier run."""
        self._server = server
        self._snapshots = snapshots
        self._state = server.state

    async def begin(self, hosts: Sequence[Host]) -> None:
        """Restore the leases of an earlier run from the journal, and start the hosts.

        A lease whose sandbox is on a host of this pool waits for that host's recovery. Any other lease is queued again.
        """
        entries = {entry.lease: entry for entry in await self._server.journal.leases.load()}
        leases = {id: lease_of(entry, self._server.wall()) for id, entry in entries.items()}
        placed: dict[str, list[tuple[Entry, SandboxLease]]] = {host.name: [] for host in hosts}
        for id, lease in leases.items():
            entry = entries[id]
            # A snapshot on a host that is not in the pool any more cannot be removed.
            lease.snapshots[:] = [(image, host) for image, host in lease.snapshots if host in placed]
            if (parent := leases.get(entry.parent)) is not None:
                parent.children.append(lease)
            elif entry.parent:
                lease.end("the sandbox it was forked from ended")
            if entry.ready and entry.host in placed:
                self._state.leases.add(lease)
                placed[entry.host].append((entry, lease))
            else:
                origin = entries.get(entry.parent)
                await self._resume(lease, entry, origin.host if origin else None)
        for host in hosts:
            self._server.tasks.start_soon(self._run_host, host, placed[host.name], name=f"host {host.name}")

    async def _run_host(self, host: Host, placed: Sequence[tuple[Entry, SandboxLease]]) -> None:
        """Recover the sandboxes of an earlier run on a host, then run the host until cancelled.

        `placed` has the journal's entries of this host, each with its new lease. Once the host answers, each lease gets
        its old sandbox; a lease whose sandbox is gone is treated as lost.
        """
        tickets: list[Ticket] = []
        for entry, _ in placed:
            images = [image for image, _ in entry.snapshots] + [*self._snapshots.made_of(entry.lease)]
            tickets.append(Ticket(entry.sandbox_id, entry.lease, entry.owner, entry.spec, tuple(images)))
        left = {entry.sandbox_id: lease for entry, lease in placed}
        """Leases whose recovery has no result yet, by sandbox id."""
        places = [*left.values()]
        """Leases whose places on the host are not reserved yet."""

        def answered() -> None:
            """Let the host take sandboxes, after the places of all recovered leases are reserved.

            The host calls this in `recover`, again in each attempt. A repeated call finds no places left.
            """
            # Reserve the places of the recovered leases first: other requests get only the remaining room.
            while places:
                self._state.restore(places.pop(), host.name)
            self._state.refresh(host.name)

        def settled(sandbox_id: str, sandbox: Sandbox | None) -> None:
            """Serve the lease of a sandbox again; None: the sandbox is lost."""
            if (lease := left.pop(sandbox_id, None)) is not None:
                self._go_on(lease, sandbox)

        try:
            while True:
                try:
                    sandboxes = await host.recover(tickets, answered=answered, settled=settled)
                    break
                except (SandboxError, TimeoutError) as error:
                    _log.warning("host %s cannot be reached: %s", host.name, error or "no answer")
                await anyio.sleep(self._server.settings.recover_retry_s)
        except BaseException:
            # The pool ends. Parents of these leases must not wait for them. The next run recovers them.
            for lease in left.values():
                lease.done.set()
            raise
        for sandbox_id in [*left]:
            settled(sandbox_id, sandboxes.get(sandbox_id))
        self._state.refresh(host.name)  # The recovery has removed containers, so the host may have more room.
        await host.run(partial(self._state.refresh, host.name), task_status=anyio.TASK_STATUS_IGNORED)

    def _go_on(self, lease: SandboxLease, sandbox: Sandbox | None) -> None:
        """Serve a lease of an earlier run, with its old sandbox; None: the sandbox is lost."""
        lease.sandbox = sandbox
        if sandbox is None:
            self._lost_in_restart(lease, lease.host)
            lease.granted.set()  # It still has its place on its host, where `_obtain` starts the replacement.
        elif lease.generation:
            # Whether the holder already knew of the replacement was lost with the earlier process, so the next call
            # reports it.
            lease.lost(None, SandboxLostError(f"sandbox {lease.id} was replaced before its service restarted"))
        self._server.serve(lease)

    def _lost_in_restart(self, lease: SandboxLease, host: str) -> None:
        """Record the loss of a lease's sandbox on `host` in a restart. Ends the lease unless it gets another one."""
        error = SandboxLostError(f"sandbox {lease.id} did not outlive the restart of its service")
        self._state.failures.failed(error, host)
        lease.lost(None, error)
        if not self._server.replaces(lease):
            lease.end(str(error), error)
        lease.generation += 1

    async def _resume(self, lease: SandboxLease, entry: Entry, only: str | None) -> None:
        """Queue a lease of an earlier run again.

        It had no sandbox yet, its sandbox was being replaced, or its host is no longer in the pool. In the last two
        cases the next call of the holder reports the loss, and a lease without a further replacement ends. A lease that
        the pool does not accept any more is given up. `only` names the single host for a fork.
        """
        if entry.ready or entry.generation:
            lease.generation -= not entry.ready  # A replacement that was under way is counted already.
            self._lost_in_restart(lease, entry.host)
        lease.sandbox_id = ""
        try:
            self._state.submit(lease, only)
        except SandboxError as error:
            _log.warning("lease %s of an earlier run is given up: %s", lease.id, error)
            # In a task: an engine that does not answer must not delay the start of the service.
            self._server.tasks.start_soon(self._give_up, lease, name=f"lease {lease.id}")
            return
        self._server.serve(lease)

    async def _give_up(self, lease: SandboxLease) -> None:
        """End the forks of a lease that is not served, and remove its snapshots and its journal entry."""
        await self._server.end_forks(lease)
        await self._server.forget_snapshots(lease)
        await self._server.journal.leases.drop(lease.id)
        lease.done.set()
