"""The state of a pool: who waits, who has what, what failed, what is put aside. No tasks and no I/O.

Everything that the live page and the service show is read here; `version` grows with every change of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import anyio
import msgspec

from envs.sandbox.pool.admission import PlaceRequest, SandboxAdmission
from envs.sandbox.pool.failures import PoolFailures
from envs.sandbox.pool.host import Host, HostReport, demand, warm_key
from envs.sandbox.pool.lease import SandboxLease
from envs.sandbox.pool.placement import NOTHING, Demand

REASONS = 3
"""Hosts that take no sandboxes of which a waiting request is told why."""
ENDED_KEPT = 200
"""Leases that have ended and can still be asked why."""


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a pool behaves."""

    max_waiting: int = 10_000
    """Requests that may wait for a sandbox."""
    patience: int = 256
    """Grants by which a request may be overtaken unfairly before it comes first; the law is in `admission`."""
    start_attempts: int = 3
    """How often a start is tried, on different hosts where there are several."""
    recreate_attempts: int = 3
    """How often a lost sandbox is made again for one lease that wants it."""
    quarantine_threshold: int = 3
    """Failed starts in a row that put a host or an image aside."""
    quarantine_s: float = 30.0
    """First stay in quarantine."""
    close_s: float = 60.0
    """Seconds for a sandbox to be closed; what is left then is removed by its host."""
    fork_s: float = 300.0
    """Seconds for the forks of a sandbox to be ready."""
    snapshot_s: float = 86_400.0
    """Seconds for which a snapshot is kept."""
    recover_retry_s: float = 5.0
    """Seconds between two attempts to reach a host after a restart."""


class HostState(msgspec.Struct, frozen=True):
    """One host as the pool sees it."""

    name: str
    report: HostReport
    granted: Demand
    """Promised by this pool."""
    why_not: str
    """Why it takes no sandboxes; "" when it does."""
    sandboxes: int


class LeaseBook:
    """The leases of a pool, by their ids and idempotency keys."""

    def __init__(self) -> None:
        self._leases: dict[str, SandboxLease] = {}
        self._ended: dict[str, SandboxLease] = {}
        self._by_key: dict[tuple[str, str], SandboxLease] = {}

    def all(self) -> list[SandboxLease]:
        """Every lease that is not done, oldest first."""
        return list(self._leases.values())

    def of(self, id: str) -> SandboxLease:
        """One that is not done."""
        return self._leases[id]

    def find(self, id: str) -> SandboxLease | None:
        """A lease, also for a while after its end."""
        return self._leases.get(id) or self._ended.get(id)

    def find_by_key(self, token: str, key: str) -> SandboxLease | None:
        """The lease that was ordered with this idempotency key."""
        return self._by_key.get((token, key)) if key else None

    def add(self, lease: SandboxLease) -> None:
        """Know a lease from now on."""
        self._leases[lease.id] = lease
        if lease.order.key:
            self._by_key[lease.token, lease.order.key] = lease

    def end(self, lease: SandboxLease) -> None:
        """Know it as one that has ended, for a while."""
        del self._leases[lease.id]
        self._ended[lease.id] = lease
        while len(self._ended) > ENDED_KEPT:
            oldest = self._ended.pop(next(iter(self._ended)))
            self._by_key.pop((oldest.token, oldest.order.key), None)


class PoolState:
    """What a pool knows: its `leases`, its `failures`, who is admitted (`admission`), and its hosts."""

    def __init__(self, hosts: Sequence[Host], settings: PoolSettings, wall: Callable[[], float]) -> None:
        self._hosts = {host.name: host for host in hosts}
        self.admission = SandboxAdmission(max_waiting=settings.max_waiting, patience=settings.patience)
        self.leases = LeaseBook()
        self.failures = PoolFailures(settings.quarantine_threshold, settings.quarantine_s, wall, self.changed)
        self.version = 0
        self._newer = anyio.Event()

    # ---- reading

    def host(self, name: str) -> Host:
        """A host by its name."""
        return self._hosts[name]

    def why_waiting(self, lease: SandboxLease) -> str:
        """What a lease waits for."""
        if self.admission.is_waiting(lease.id):
            closed = [f"; {host.name}: {host.why_not}" for host in self.hosts() if host.why_not]
            return self.admission.why_waiting(lease.id) + "".join(closed[:REASONS])
        return f"it is starting on {lease.host}" if lease.host else "its host does not answer"

    def position(self, lease: SandboxLease) -> int | None:
        """How many requests in the queue are older; None when it is not in the queue."""
        return self.admission.position(lease.id) if self.admission.is_waiting(lease.id) else None

    def hosts(self) -> list[HostState]:
        """Each host at this moment."""
        views = {view.name: view for view in self.admission.hosts()}
        number = Counter(lease.host for lease in self.leases.all())
        listed: list[HostState] = []
        for name, host in self._hosts.items():
            report = host.report()
            why = self.failures.why_put_aside(name) or report.why
            granted = views[name].granted if name in views else NOTHING
            listed.append(HostState(name, report, granted, why, number[name]))
        return listed

    async def changed_since(self, version: int) -> int:
        """Wait until there is a newer version; its number."""
        while self.version == version:
            await self._newer.wait()
        return self.version

    # ---- leases

    def submit(self, lease: SandboxLease, only: str | None = None) -> None:
        """Let a lease wait for a host.

        Raises:
            SandboxError: it would wait in vain, or too many do.
        """
        self.failures.refuse_bad_kind(lease.spec)
        self.admission.submit(request_of(lease, only))
        self.leases.add(lease)

    def restore(self, lease: SandboxLease, host: str) -> None:
        """A lease that had its place on this host before a restart."""
        lease.host = host
        # Nothing is decided yet: those that wait are given what is left.
        self._measure(host)
        self.admission.restore(request_of(lease), host)
        self.changed()

    def put_back(self, lease: SandboxLease, avoid: set[str]) -> None:
        """A lease needs a host again, and keeps its place in the queue."""
        lease.granted = anyio.Event()
        self.admission.put_back(lease.id, avoid=avoid)
        self.decide()

    def remove(self, lease: SandboxLease) -> None:
        """A lease has ended."""
        self.admission.remove(lease.id)
        self.leases.end(lease)
        self.decide()

    def decide(self) -> None:
        """Hand out what can be handed out."""
        for grant in self.admission.decide():
            lease = self.leases.of(grant.id)
            lease.host = grant.host
            lease.granted.set()
        self.changed()

    def changed(self) -> None:
        """Something that is shown has changed."""
        self.version += 1
        self._newer.set()
        self._newer = anyio.Event()

    # ---- hosts

    def refresh(self, name: str) -> None:
        """Ask a host how it stands."""
        self._measure(name)
        self.decide()

    def _measure(self, name: str) -> None:
        report = self._hosts[name].report()
        accepts = report.accepts and not self.failures.quarantine_left(name)
        self.admission.set_host(name, report.capacity, accepts=accepts, warm=report.warm)


def request_of(lease: SandboxLease, only: str | None = None) -> PlaceRequest:
    """A lease, as admission sees it."""
    return PlaceRequest(lease.id, lease.owner, demand(lease.spec), lease.order.priority, warm_key(lease.spec), only)
