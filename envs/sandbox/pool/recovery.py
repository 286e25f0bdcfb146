"""Recovery of a pool after a restart: leases get their old sandboxes again, or are treated as lost."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial

import anyio

from envs.sandbox.pool.host import Host, Ticket
from envs.sandbox.pool.journal import Entry, lease_of
from envs.sandbox.pool.lease import SandboxLease
from envs.sandbox.pool.serving import LeaseServer
from envs.sandbox.pool.snapshots import SnapshotBook
from envs.sandbox.sandbox import Sandbox
from flash.errors import SandboxError, SandboxLostError

_log = logging.getLogger(__name__)


class Recovery:
    """Recovery of the leases of `server` and of the snapshots of its pool. The hosts run from `begin` on."""

    def __init__(self, server: LeaseServer, snapshots: SnapshotBook) -> None:
        self._server = server
        self._snapshots = snapshots
        self._state = server.state

    async def begin(self, hosts: Sequence[Host]) -> None:
        """Restore the leases of an earlier run, and start the hosts."""
        entries = {entry.lease: entry for entry in await self._server.journal.leases.load()}
        leases = {id: lease_of(entry, self._server.wall()) for id, entry in entries.items()}
        placed: dict[str, list[tuple[Entry, SandboxLease]]] = {host.name: [] for host in hosts}
        for id, lease in leases.items():
            entry = entries[id]
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

        Consumes the journal's entries of this host. Waits for the host to answer. Produces leases with their old
        sandboxes; a lease whose sandbox is gone is treated as lost.
        """
        tickets = [
            Ticket(e.sandbox_id, e.lease, e.owner, e.spec, (*dict(e.snapshots), *self._snapshots.made_of(e.lease)))
            for e, _ in placed
        ]
        left = {entry.sandbox_id: lease for entry, lease in placed}

        places = [*left.values()]

        def answered() -> None:
            # Reserve the places of the recovered leases first: other requests get only the remaining room.
            while places:
                self._state.restore(places.pop(), host.name)
            self._state.refresh(host.name)

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
                await anyio.sleep(self._server.settings.recover_retry_s)
        except BaseException:
            # The pool ends. Parents of these leases must not wait for them. The next run recovers them.
            for lease in left.values():
                lease.done.set()
            raise
        answered()
        for sandbox_id in [*left]:
            settled(sandbox_id, sandboxes.get(sandbox_id))
        await host.run(partial(self._state.refresh, host.name), task_status=anyio.TASK_STATUS_IGNORED)

    def _go_on(self, lease: SandboxLease, sandbox: Sandbox | None) -> None:
        """Serve a lease of an earlier run, with its sandbox if it still lives."""
        lease.sandbox = sandbox
        if sandbox is None:
            self._lost_in_restart(lease)
        elif lease.generation:
            # Whether the holder already knew of the replacement was lost with the earlier process, so the next call
            # reports it.
            lease.lost(None, SandboxLostError(f"sandbox {lease.id} was made again, before its service restarted"))
        self._server.serve(lease)

    def _lost_in_restart(self, lease: SandboxLease) -> None:
        """Record the loss of a lease's sandbox in a restart. Ends the lease unless it wants a replacement."""
        error = SandboxLostError(f"sandbox {lease.id} did not outlive the restart of its service")
        self._state.failures.failed(error, lease.host)
        lease.lost(None, error)
        lease.generation += 1
        lease.granted.set()
        if lease.order.on_lost != "recreate":
            lease.end(str(error), error)

    async def _resume(self, lease: SandboxLease, entry: Entry, only: str | None) -> None:
        """Queue a lease of an earlier run again: it had no sandbox yet, or its host is no longer in the pool."""
        if entry.ready or entry.generation:
            self._lost_in_restart(lease)
        lease.sandbox_id, lease.hard_until, lease.granted = "", math.inf, anyio.Event()
        # Snapshots that forks began from before the loss are removed with the lease, as far as their hosts are in the
        # pool.
        ours = {host.name for host in self._state.hosts()}
        lease.snapshots[:] = [(image, host) for image, host in lease.snapshots if host in ours]
        try:
            self._state.submit(lease, only)
        except SandboxError as error:
            _log.warning("lease %s of an earlier run is given up: %s", lease.id, error)
            # In a task: an engine that does not answer must not delay the start of the service.
            self._server.tasks.start_soon(self._give_up, lease, name=f"lease {lease.id}")
            return
        self._server.serve(lease)

    async def _give_up(self, lease: SandboxLease) -> None:
        await self._server.forget_snapshots(lease)
        await self._server.journal.leases.drop(lease.id)
        lease.done.set()
