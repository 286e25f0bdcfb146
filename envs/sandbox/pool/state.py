"""State of a pool: its queue, leases, failures, quarantines and hosts. No tasks and no I/O.

The live page and the service read everything that they show here. `version` increases with every change.
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
"""Most hosts whose reasons for taking no sandboxes are listed in the error message of a waiting request."""
ENDED_KEPT = 200
"""Ended leases that are kept, so that the reason of their end can still be read."""


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a pool."""

    max_waiting: int = 10_000
    """Most requests that may wait for a sandbox."""
    patience: int = 256
    """Grants by which a request may be overtaken unfairly before it comes first; the law is in `admission`."""
    start_attempts: int = 3
    """Failed starts in a row after which a lease ends. Each try prefers a host that has not failed yet."""
    recreate_attempts: int = 3
    """Most replacements of a lost sandbox for one lease with `on_lost="recreate"`."""
    quarantine_threshold: int = 3
    """Failed starts in a row that put a host or a kind of sandbox in quarantine."""
    quarantine_s: float = 30.0
    """Seconds of the first quarantine."""
    close_s: float = 60.0
    """Seconds that closing a sandbox may take. Its host removes the container later if that is too short."""
    fork_s: float = 300.0
    """Seconds that each fork of a sandbox has to become ready."""
    snapshot_s: float = 86_400.0
    """Seconds for which a snapshot is kept."""
    recover_retry_s: float = 5.0
    """Seconds between two attempts to reach a host after a restart."""


class HostState(msgspec.Struct, frozen=True):
    """State of one host, as the pool sees it."""

    name: str
    report: HostReport
    granted: Demand
    """Resources that this pool has promised on the host."""
    why_not: str
    """Reason why the host takes no sandboxes; "" if it takes them."""
    sandboxes: int


class LeaseBook:
    """Index of a pool's leases by id and by idempotency key."""

    def __init__(self) -> None:
        self._leases: dict[str, SandboxLease] = {}
        self._ended: dict[str, SandboxLease] = {}
        self._by_key: dict[tuple[str, str], SandboxLease] = {}

    def all(self) -> list[SandboxLease]:
        """Return every lease that is not done, oldest first."""
        return list(self._leases.values())

    def of(self, id: str) -> SandboxLease:
        """Return a lease that is not done. Raises KeyError."""
        return self._leases[id]

    def find(self, id: str) -> SandboxLease | None:
        """Return a lease, also one that is among the last that have ended."""
        return self._leases.get(id) or self._ended.get(id)

    def find_by_key(self, token: str, key: str) -> SandboxLease | None:
        """Return the lease that was ordered with this idempotency key."""
        return self._by_key.get((token, key)) if key else None

    def add(self, lease: SandboxLease) -> None:
        """Add a lease that is not done."""
        self._leases[lease.id] = lease
        if lease.order.key:
            self._by_key[lease.token, lease.order.key] = lease

    def end(self, lease: SandboxLease) -> None:
        """Move a lease to the ended ones. The oldest of more than `ENDED_KEPT` is dropped."""
        del self._leases[lease.id]
        self._ended[lease.id] = lease
        while len(self._ended) > ENDED_KEPT:
            oldest = self._ended.pop(next(iter(self._ended)))
            self._by_key.pop((oldest.token, oldest.order.key), None)


class PoolState:
    """State of a pool: `leases`, `failures`, the queue and grants (`admission`), and the hosts."""

    def __init__(self, hosts: Sequence[Host], settings: PoolSettings, wall: Callable[[], float]) -> None:
        self._hosts = {host.name: host for host in hosts}
        self.admission = SandboxAdmission(max_waiting=settings.max_waiting, patience=settings.patience)
        self.leases = LeaseBook()
        self.failures = PoolFailures(settings.quarantine_threshold, settings.quarantine_s, wall, self.changed)
        self.version = 0
        self._newer = anyio.Event()

    # ---- reading

    def host(self, name: str) -> Host:
        """Return a host by its name."""
        return self._hosts[name]

    def why_waiting(self, lease: SandboxLease) -> str:
        """Return the reason why a lease has no sandbox yet."""
        if self.admission.is_waiting(lease.id):
            closed = [f"; {host.name}: {host.why_not}" for host in self.hosts() if host.why_not]
            return self.admission.why_waiting(lease.id) + "".join(closed[:REASONS])
        return f"it is starting on {lease.host}" if lease.host else "its host does not answer"

    def position(self, lease: SandboxLease) -> int | None:
        """Return the number of older requests in the queue; None if the lease is not in the queue."""
        return self.admission.position(lease.id) if self.admission.is_waiting(lease.id) else None

    def hosts(self) -> list[HostState]:
        """Return the current state of each host."""
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
        """Wait until there is a newer version, and return its number."""
        while self.version == version:
            await self._newer.wait()
        return self.version

    # ---- leases

    def submit(self, lease: SandboxLease, only: str | None = None) -> None:
        """Add a lease and queue its request for a host.

        Raises:
            SandboxError: no host could ever hold the sandbox, its kind is in quarantine, or the queue is full.
        """
        self.failures.refuse_bad_kind(lease.spec)
        self.admission.submit(request_of(lease, only))
        self.leases.add(lease)

    def restore(self, lease: SandboxLease, host: str) -> None:
        """Record the place that a lease had on this host before a restart."""
        lease.host = host
        # No decision yet: all recovered leases must have their places before waiting requests get the rest.
        self._measure(host)
        self.admission.restore(request_of(lease), host)
        self.changed()

    def put_back(self, lease: SandboxLease, avoid: set[str]) -> None:
        """Queue a lease that needs a host again. It keeps its age."""
        lease.granted = anyio.Event()
        self.admission.put_back(lease.id, avoid=avoid)
        self.decide()

    def remove(self, lease: SandboxLease) -> None:
        """Remove a lease that has ended."""
        self.admission.remove(lease.id)
        self.leases.end(lease)
        self.decide()

    def decide(self) -> None:
        """Grant every request that can be granted now, and wake the tasks of the leases."""
        for grant in self.admission.decide():
            lease = self.leases.of(grant.id)
            lease.host = grant.host
            lease.granted.set()
        self.changed()

    def changed(self) -> None:
        """Increase `version`, and wake every task that waits for a newer one."""
        self.version += 1
        self._newer.set()
        self._newer = anyio.Event()

    # ---- hosts

    def refresh(self, name: str) -> None:
        """Read a host's report, and decide again."""
        self._measure(name)
        self.decide()

    def _measure(self, name: str) -> None:
        report = self._hosts[name].report()
        accepts = report.accepts and not self.failures.quarantine_left(name)
        self.admission.set_host(name, report.capacity, accepts=accepts, warm=report.warm)


def request_of(lease: SandboxLease, only: str | None = None) -> PlaceRequest:
    """Return the lease's request for admission."""
    return PlaceRequest(lease.id, lease.owner, demand(lease.spec), lease.order.priority, warm_key(lease.spec), only)
