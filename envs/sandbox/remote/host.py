"""RemoteHost: a service on another machine, used as a `Host` by a front service over HTTP.

`flash sandbox serve --host …` makes one for each such service and gives it to the front's pool.

The front decides which request gets a sandbox and on which host. The host keeps its own warm pool, checks its own
engine, and removes a sandbox whose lease the front does not renew. So nothing leaks when the front, the host, or the
network between them fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import anyio
import msgspec
from anyio.abc import TaskStatus

from envs.sandbox.api import Spec
from envs.sandbox.engines.machine import MachineLoad
from envs.sandbox.pool.admission import NOTHING, Demand
from envs.sandbox.pool.host import HostReport, Settled, Ticket, ignore
from envs.sandbox.protocol import Info, SandboxOrder, Status
from envs.sandbox.remote.client import LEASE_S, POLL_S, SandboxClient
from envs.sandbox.sandbox import Sandbox
from flash.errors import SandboxError

_log = logging.getLogger(__name__)

START_S = 180.0
"""Seconds that a sandbox has to start on the host."""
RETRY_S = 2.0
"""Seconds between two attempts to reach a host."""


class RemoteHost:
    """A `Host` over a client of its service."""

    def __init__(self, name: str, client: SandboxClient, service: str) -> None:
        """Create a host, which takes no sandboxes until `recover`.

        Args:
            name: name of the host in the front's pool.
            client: open client of the remote service.
            service: id of the front, which is the owner of the front's sandboxes there.
        """
        self._name = name
        self._client = client
        self._service = service
        self._report = HostReport(NOTHING, accepts=False, why="the host was not asked yet")
        """Report of the last status of the service."""

    @property
    def name(self) -> str:
        """Name of the host in the front's pool."""
        return self._name

    def report(self) -> HostReport:
        """Return the report of the last status that was received."""
        return self._report

    def take(self, spec: Spec) -> Sandbox | None:
        """Return None: the remote service hands out its ready sandboxes itself, in `start`."""
        return None

    async def start(self, ticket: Ticket) -> Sandbox:
        """Start a sandbox on the host, for the front's `LeaseServer`. The ticket's id is the idempotency key.

        Raises:
            SandboxError: the sandbox did not become ready. It is ended at the host, also if this is cancelled.
        """
        order = SandboxOrder(spec=ticket.spec, owner=self._service, lease_s=LEASE_S)
        info = None
        try:
            info = await self._client.order(order, ticket.sandbox_id, wait=POLL_S)
            return self._client.attach(await self._client.wait_ready(info, START_S, whole_wait=START_S))
        except BaseException:
            with anyio.move_on_after(POLL_S, shield=True):
                await self._give_up(order, ticket.sandbox_id)
            raise

    async def forget(self, image: str) -> None:
        """Remove a snapshot on the host. If that fails, the host removes it when it expires."""
        try:
            await self._client.forget(image.rpartition(":")[2])
        except SandboxError as error:
            _log.debug("snapshot %s on %s is left to its time: %s", image, self._name, error)

    async def recover(
        self, tickets: Sequence[Ticket], *, answered: Callable[[], None] = ignore, settled: Settled = ignore
    ) -> dict[str, Sandbox]:
        """Attach to the sandboxes of `tickets` that still live, and end all other sandboxes of this front.

        The idempotency key of each order was the id of its ticket, by which the sandbox is found. A sandbox without a
        ticket has no lease at this front any more. Returns the living sandboxes by the ids of their tickets.

        Args:
            tickets: tickets of the sandboxes that this front's leases had.
            answered: called once the host has answered, before any sandbox is attached.
            settled: called with the id of a ticket and its sandbox, only if the sandbox lives when the host answers.
                The sandbox is None if it then does not become ready.

        Raises:
            SandboxError: the host cannot be reached.
        """
        status = await self._client.status()
        self._report = report_of(status)
        wanted = {ticket.sandbox_id for ticket in tickets}
        found: dict[str, Sandbox] = {}
        answered()

        async def attach(info: Info) -> None:
            """Wait for one sandbox of an earlier run, or end it if it does not become ready."""
            try:
                # The sandbox may not be ready yet: the host was restarted as well, or got the order just before this
                # front ended.
                found[info.key] = self._client.attach(await self._client.wait_ready(info, START_S, whole_wait=START_S))
            except SandboxError as error:
                _log.warning("sandbox %s on %s was lost in the restart: %s", info.key, self._name, error)
                await self._end(info.id)
            settled(info.key, found.get(info.key))

        async with anyio.create_task_group() as tasks:
            for info in status.sandboxes:
                if info.owner.endswith(f"/{self._service}"):
                    if info.key in wanted and info.state in ("queued", "starting", "ready"):
                        tasks.start_soon(attach, info)
                    else:
                        tasks.start_soon(self._end, info.id)
        return found

    async def run(
        self, changed: Callable[[], None], *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep the report up to date, until cancelled.

        Each request for the service's status returns when the status has changed, or after `POLL_S`. If the service
        cannot be reached, the report says that it takes no sandboxes. The pool starts this in a task, and passes
        `changed`, which is called after each new report.
        """
        task_status.started()
        version = -1
        while True:
            try:
                status = await self._client.status(since=version, wait=POLL_S)
                version, self._report = status.version, report_of(status)
                changed()
            except SandboxError as error:
                if self._report.accepts:
                    _log.warning("host %s: %s", self._name, error)
                self._report = msgspec.structs.replace(self._report, accepts=False, why=str(error), warm={}, load=None)
                version = -1
                changed()
                await anyio.sleep(RETRY_S)

    async def _give_up(self, order: SandboxOrder, key: str) -> None:
        """End the sandbox of an order whose start failed or was cancelled. Repeats the order to learn its id."""
        try:
            await self._end((await self._client.order(order, key, wait=0.0)).id)
        except SandboxError as error:
            _log.debug("sandbox %s on %s is left to its lease: %s", key, self._name, error)

    async def _end(self, id: str) -> None:
        """End a sandbox of the remote service. A failure is only logged: the lease then expires there."""
        try:
            await self._client.end(id)
        except SandboxError as error:
            _log.debug("sandbox %s on %s is left to its lease: %s", id, self._name, error)


def report_of(status: Status) -> HostReport:
    """Return the report of a service's status, for placement.

    The service counts as one host with the sums of its hosts. If none of them takes sandboxes, the report says why.
    """
    hosts = status.hosts
    accepts = any(not host.why_not for host in hosts)
    return HostReport(
        _sum(status),
        accepts=accepts,
        why="" if accepts else "; ".join(f"{host.name}: {host.why_not}" for host in hosts) or "it has no hosts",
        # The service does not report kinds. No request has the empty key, so the number is only for the status.
        warm={"": sum(host.warm for host in hosts)},
        # Hosts that take no sandboxes count too: the sum of a counter must never fall.
        hits=sum(host.hits for host in hosts),
        misses=sum(host.misses for host in hosts),
        orphans_removed=sum(host.orphans_removed for host in hosts),
        load=_load(status),
    )


def _sum(status: Status) -> Demand:
    """Return the resources of all hosts of the service together, in thousandths of a CPU and in MiB.

    Hosts that take no sandboxes count too: a request that fits only on such a host waits for it, and is not refused.
    """
    return Demand(sum(round(1000 * host.cpus) for host in status.hosts), sum(host.memory_mib for host in status.hosts))


def _load(status: Status) -> MachineLoad | None:
    """Return the total load of all machines of the service; None unless each machine is measured.

    The number of busy CPUs alone is None if one machine was read too shortly ago to measure it.
    """
    loads = [host.load for host in status.hosts if host.load is not None]
    if not loads or len(loads) < len(status.hosts):
        return None
    busy = [load.cpus_busy for load in loads if load.cpus_busy is not None]
    return MachineLoad(
        cpus_busy=sum(busy) if len(busy) == len(loads) else None,
        cpus=sum(load.cpus for load in loads),
        memory_used_mib=sum(load.memory_used_mib for load in loads),
        memory_mib=sum(load.memory_mib for load in loads),
    )
