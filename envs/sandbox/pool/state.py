"""The state of a pool: who waits, who has what, what failed, what is put aside. No tasks and no I/O.

Everything that the live page and the service show is read here; `version` grows with every change of it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

import anyio
import msgspec

from envs.sandbox.api import Spec
from envs.sandbox.pool.admission import Admission, SandboxRequest
from envs.sandbox.pool.host import Host, Report, demand, warm_key
from envs.sandbox.pool.lease import Lease
from envs.sandbox.pool.placement import NOTHING, Demand
from envs.sandbox.pool.quarantine import Quarantine
from flash.errors import SandboxBusyError, SandboxError, SandboxStartError

_log = logging.getLogger(__name__)

REASONS = 3
"""Hosts that take no sandboxes of which a waiting request is told why."""
FAILURES_KEPT = 50
"""Failures shown with their message."""
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


class Failure(msgspec.Struct, frozen=True):
    """One failure of the infrastructure."""

    at: float
    """Unix time."""
    cause: str
    """Class of the error."""
    where: str
    """The host."""
    message: str


class HostState(msgspec.Struct, frozen=True):
    """One host as the pool sees it."""

    name: str
    report: Report
    granted: Demand
    """Promised by this pool."""
    why_not: str
    """Why it takes no sandboxes; "" when it does."""
    sandboxes: int


class PoolState:
    """What a pool knows."""

    def __init__(self, hosts: Sequence[Host], settings: PoolSettings, wall: Callable[[], float]) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._wall = wall
        self._admission = Admission(max_waiting=settings.max_waiting, patience=settings.patience)
        self._leases: dict[str, Lease] = {}
        self._ended: dict[str, Lease] = {}
        self._by_key: dict[tuple[str, str], Lease] = {}
        self._bad_hosts = Quarantine(threshold=settings.quarantine_threshold, cooldown=settings.quarantine_s)
        self._bad_kinds = Quarantine(threshold=settings.quarantine_threshold, cooldown=settings.quarantine_s)
        self._good_kinds: set[str] = set()
        """Started somewhere at least once."""
        self.failures: Counter[str] = Counter()
        """By class of error."""
        self.recent_failures: deque[Failure] = deque(maxlen=FAILURES_KEPT)
        self.version = 0
        self._newer = anyio.Event()

    # ---- reading

    def host(self, name: str) -> Host:
        """A host by its name."""
        return self._hosts[name]

    def leases(self) -> list[Lease]:
        """Every lease that is not done, oldest first."""
        return list(self._leases.values())

    def ended(self) -> list[Lease]:
        """The leases that ended last, oldest first."""
        return list(self._ended.values())

    def find(self, id: str) -> Lease | None:
        """A lease, also for a while after its end."""
        return self._leases.get(id) or self._ended.get(id)

    def find_by_key(self, token: str, key: str) -> Lease | None:
        """The lease that was ordered with this idempotency key."""
        return self._by_key.get((token, key)) if key else None

    def why_waiting(self, lease: Lease) -> str:
        """What a lease waits for."""
        if self._admission.is_waiting(lease.id):
            closed = [f"; {host.name}: {host.why_not}" for host in self.hosts() if host.why_not]
            return self._admission.why_waiting(lease.id) + "".join(closed[:REASONS])
        return f"it is starting on {lease.host}" if lease.host else "its host does not answer"

    def position(self, lease: Lease) -> int | None:
        """How many requests in the queue are older; None when it is not in the queue."""
        return self._admission.position(lease.id) if self._admission.is_waiting(lease.id) else None

    def queue(self) -> dict[str, int]:
        """Waiting requests by owner."""
        return self._admission.waiting()

    def usage(self) -> dict[str, Demand]:
        """What each owner was promised."""
        return self._admission.usage()

    def hosts(self) -> list[HostState]:
        """Each host at this moment."""
        now = anyio.current_time()
        views = {view.name: view for view in self._admission.hosts()}
        number = Counter(lease.host for lease in self._leases.values())
        listed: list[HostState] = []
        for name, host in self._hosts.items():
            report = host.report()
            why = report.why
            if remaining := self._bad_hosts.remaining(name, now):
                why = f"in quarantine for {remaining:.0f} s: {self._bad_hosts.why(name)}"
            granted = views[name].granted if name in views else NOTHING
            listed.append(HostState(name, report, granted, why, number[name]))
        return listed

    def images_put_aside(self) -> dict[str, str]:
        """Images of the kinds in quarantine, and why."""
        return {_image_of(kind): self._bad_kinds.why(kind) for kind in self._bad_kinds.listed(anyio.current_time())}

    async def changed_since(self, version: int) -> int:
        """Wait until there is a newer version; its number."""
        while self.version == version:
            await self._newer.wait()
        return self.version

    # ---- leases

    def submit(self, lease: Lease, only: str | None = None) -> None:
        """Let a lease wait for a host.

        Raises:
            SandboxError: it would wait in vain, or too many do.
        """
        self.refuse_bad_kind(lease.spec)
        self._admission.submit(request_of(lease, only))
        self.add(lease)

    def add(self, lease: Lease) -> None:
        """Know a lease from now on, by its id and its idempotency key."""
        self._leases[lease.id] = lease
        if lease.key:
            self._by_key[lease.token, lease.key] = lease

    def restore(self, lease: Lease, host: str) -> None:
        """A lease that had its place on this host before a restart."""
        lease.host = host
        # Nothing is decided yet: those that wait are given what is left.
        self._measure(host)
        self._admission.restore(request_of(lease), host)
        self.changed()

    def put_back(self, lease: Lease, avoid: set[str]) -> None:
        """A lease needs a host again, and keeps its place in the queue."""
        lease.granted = anyio.Event()
        self._admission.put_back(lease.id, avoid=avoid)
        self.decide()

    def remove(self, lease: Lease) -> None:
        """A lease has ended."""
        if self._admission.is_waiting(lease.id):
            self._admission.withdraw(lease.id)
        else:
            self._admission.release(lease.id)
        del self._leases[lease.id]
        self._ended[lease.id] = lease
        while len(self._ended) > ENDED_KEPT:
            oldest = self._ended.pop(next(iter(self._ended)))
            self._by_key.pop((oldest.token, oldest.key), None)
        self.decide()

    def decide(self) -> None:
        """Hand out what can be handed out."""
        for grant in self._admission.decide():
            lease = self._leases[grant.id]
            lease.host = grant.host
            lease.granted.set()
        self.changed()

    def changed(self) -> None:
        """Something that is shown has changed."""
        self.version += 1
        self._newer.set()
        self._newer = anyio.Event()

    # ---- hosts and failures

    def refresh(self, name: str) -> None:
        """Ask a host how it stands."""
        self._measure(name)
        self.decide()

    def _measure(self, name: str) -> None:
        report = self._hosts[name].report()
        accepts = report.accepts and not self.quarantine_left(name)
        self._admission.set_host(name, report.capacity, others=report.others, accepts=accepts, warm=report.warm)

    def quarantine_left(self, name: str) -> float:
        """Seconds until a host is tried again."""
        return self._bad_hosts.remaining(name, anyio.current_time())

    def started(self, lease: Lease) -> None:
        """A start succeeded: its host and its kind of sandbox are good again."""
        kind = _kind(lease.spec)
        self._good_kinds.add(kind)
        self._bad_hosts.succeeded(lease.host)
        self._bad_kinds.succeeded(kind)

    def start_failed(self, lease: Lease, error: SandboxError) -> bool:
        """Book a failed start; whether the host is put aside by it.

        A kind of sandbox that never started is blamed itself: it may ask for what cannot be, and nobody else must
        suffer from that. If it has started before, its host is blamed. A host without room is nobody's fault.
        """
        self.failed(error, lease.host)
        if isinstance(error, SandboxBusyError):
            return False
        now = anyio.current_time()
        if (kind := _kind(lease.spec)) not in self._good_kinds:
            self._bad_kinds.failed(kind, str(error), now)
            return False
        return self._bad_hosts.failed(lease.host, str(error), now)

    def failed(self, error: SandboxError, where: str) -> None:
        """Book a failure of the infrastructure."""
        cause = type(error).__name__
        self.failures[cause] += 1
        self.recent_failures.append(Failure(self._wall(), cause, where, str(error)))
        _log.warning("%s: %s: %s", where, cause, error)
        self.changed()

    def refuse_bad_kind(self, spec: Spec) -> None:
        """Answer at once where a start would only fail.

        Raises:
            SandboxStartError: this kind is in quarantine.
        """
        kind = _kind(spec)
        if remaining := self._bad_kinds.remaining(kind, anyio.current_time()):
            raise SandboxStartError(
                f"sandboxes of {spec.image} only fail; it is tried again in {remaining:.0f} s. "
                f"The last time: {self._bad_kinds.why(kind)}"
            )


def request_of(lease: Lease, only: str | None = None) -> SandboxRequest:
    """A lease, as admission sees it."""
    return SandboxRequest(lease.id, lease.owner, demand(lease.spec), lease.priority, warm_key(lease.spec), only)


def _kind(spec: Spec) -> str:
    """The image, and a short mark of everything else that a start depends on."""
    return f"{spec.image} {hashlib.sha256(warm_key(spec).encode()).hexdigest()[:16]}"


def _image_of(kind: str) -> str:
    return kind.rpartition(" ")[0]
