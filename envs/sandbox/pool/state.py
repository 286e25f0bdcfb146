"""State of a pool: its queue, leases, failures, quarantines, snapshots and hosts. No tasks and no I/O.

`envs.sandbox.pool.pool.SandboxPool` and the tasks that serve leases change it. The live page and the service read
everything that they show here. `version` increases with every change.

A *kind* of sandbox is its image with everything else that a start depends on. A host or a kind whose starts keep
failing is in *quarantine*: for a while no sandbox is started on that host, or requests of that kind are refused.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

import anyio
import msgspec

from envs.sandbox.api import Spec
from envs.sandbox.engines.backend import SNAPSHOT_NAME
from envs.sandbox.engines.machine import MachineLoad
from envs.sandbox.pool.admission import NOTHING, PlaceRequest, SandboxAdmission
from envs.sandbox.pool.host import Host, demand, warm_key
from envs.sandbox.pool.journal import KeptSnapshot
from envs.sandbox.pool.lease import SandboxLease
from flash.errors import SandboxBusyError, SandboxError, SandboxStartError

_log = logging.getLogger(__name__)

FAILURES_KEPT = 50
"""Failures that are kept with their message."""
KINDS_KEPT = 50_000
"""Kinds whose starts or failures are remembered: more than a data set has images. The oldest are forgotten."""
MAX_FACTOR = 16
"""Longest quarantine, as a multiple of the first one: 30 s become 8 min. A repaired host returns without a restart."""

_ANY_SPELLING = re.compile(rf"(.*/)?{re.escape(SNAPSHOT_NAME.rpartition('/')[2])}([:@].*)?", re.IGNORECASE | re.DOTALL)
"""Pattern of every name that finds a snapshot. Engines complete a name without a registry, so there are several."""
REASONS = 3
"""Most hosts whose reasons for taking no sandboxes are listed in the error message of a waiting request."""
ENDED_KEPT = 200
"""Ended leases that are kept, so that the reason of their end can still be read."""


class _Record(msgspec.Struct):
    """Failures of one key of a `Quarantine`."""

    failures: int = 0
    """Failures in a row."""
    factor: int = 1
    """Length of the next quarantine, as a multiple of the first one."""
    until: float = 0.0
    """Time at which the quarantine ends; in the past if the key is not in quarantine."""
    why: str = ""
    """Message of the last failure."""


class Quarantine:
    """Quarantine of keys that keep failing. A pure state machine; the caller passes the time.

    `threshold` failures in a row put a key (a host, an image) in quarantine for `cooldown` seconds. Afterwards it is
    tried again: one further failure puts it in quarantine for twice as long, up to `MAX_FACTOR` times `cooldown`. A
    success clears its record.
    """

    def __init__(self, *, threshold: int, cooldown: float) -> None:
        """Create a quarantine without keys. The class describes `threshold` and `cooldown`."""
        self._threshold = threshold
        self._cooldown = cooldown
        self._records: OrderedDict[str, _Record] = OrderedDict()
        """Failures of each key that has failed since its last success; the key that failed last is the last one."""

    def failed(self, key: str, why: str, now: float) -> bool:
        """Record a failure of `key`, with its message `why`. Returns True if this failure puts the key in quarantine.

        All times of a quarantine are seconds on one clock of the caller, such as the event loop's.
        """
        record = self._records.setdefault(key, _Record())
        self._records.move_to_end(key)
        if len(self._records) > KINDS_KEPT:
            self._records.popitem(last=False)
        record.failures += 1
        record.why = why
        # A start that began before the quarantine may fail in it. That does not make the quarantine longer.
        if record.failures < self._threshold or now < record.until:
            return False
        record.until = now + self._cooldown * record.factor
        record.factor = min(2 * record.factor, MAX_FACTOR)
        return True

    def succeeded(self, key: str) -> None:
        """Delete the record of a key that works again."""
        self._records.pop(key, None)

    def remaining(self, key: str, now: float) -> float:
        """Return the seconds until the key is tried again; 0 if it is not in quarantine."""
        record = self._records.get(key)
        return max(0.0, record.until - now) if record else 0.0

    def why(self, key: str) -> str:
        """Return the message of the last failure; "" if there was none."""
        record = self._records.get(key)
        return record.why if record else ""

    def listed(self, now: float) -> dict[str, float]:
        """Return every key in quarantine with its remaining seconds."""
        return {key: record.until - now for key, record in self._records.items() if record.until > now}


class PoolFailure(msgspec.Struct, frozen=True):
    """A failure of the infrastructure."""

    at: float
    """Unix time of the failure."""
    cause: str
    """Name of the error's class."""
    where: str
    """Name of the host."""
    message: str


class PoolFailures:
    """Failure records of a pool, and its two quarantines. `LeaseServer` and `Recovery` report to it.

    Args:
        threshold: failed starts in a row that put a host or a kind in quarantine.
        cooldown: seconds of the first quarantine.
        wall: returns the unix time.
        changed: called after each failure.
    """

    def __init__(self, threshold: int, cooldown: float, wall: Callable[[], float], changed: Callable[[], None]) -> None:
        self._wall = wall
        self._changed = changed
        self._bad_hosts = Quarantine(threshold=threshold, cooldown=cooldown)
        """Quarantine of hosts."""
        self._bad_kinds = Quarantine(threshold=threshold, cooldown=cooldown)
        """Quarantine of kinds of sandboxes that have never started."""
        self._good_kinds: OrderedDict[str, None] = OrderedDict()
        """Kinds that have started at least once on some host; the kind that started last is the last one."""
        self.counts: Counter[str] = Counter()
        """Number of failures by class of error."""
        self.recent: deque[PoolFailure] = deque(maxlen=FAILURES_KEPT)
        """Latest failures, oldest first."""

    def images_put_aside(self) -> dict[str, str]:
        """Return the images of the kinds in quarantine, each with the last error message."""
        return {_image_of(kind): self._bad_kinds.why(kind) for kind in self._bad_kinds.listed(anyio.current_time())}

    def quarantine_left(self, name: str) -> float:
        """Return the seconds until a host is tried again; 0 if it is not in quarantine."""
        return self._bad_hosts.remaining(name, anyio.current_time())

    def why_quarantined(self, name: str) -> str:
        """Return the reason why a host is in quarantine; "" if it is not."""
        remaining = self.quarantine_left(name)
        return f"in quarantine for {remaining:.0f} s: {self._bad_hosts.why(name)}" if remaining else ""

    def started(self, lease: SandboxLease) -> None:
        """Record a successful start, which clears the failures of the host and of the kind."""
        kind = _kind(lease.spec)
        self._good_kinds[kind] = None
        self._good_kinds.move_to_end(kind)
        if len(self._good_kinds) > KINDS_KEPT:
            self._good_kinds.popitem(last=False)
        self._bad_hosts.succeeded(lease.host)
        self._bad_kinds.succeeded(kind)

    def start_failed(self, lease: SandboxLease, error: SandboxError) -> bool:
        """Record a failed start. Returns True if it puts the host in quarantine.

        If this kind of sandbox has never started, the failure counts against the kind: its spec may be impossible, and
        other kinds must not suffer from that. If it has started before, the failure counts against the host. A start
        that failed for lack of room counts against neither. The caller, `LeaseServer`, tries the start again elsewhere.
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
        """Record a failure of the infrastructure on the host `where`, which the service's status shows, and log it."""
        cause = type(error).__name__
        self.counts[cause] += 1
        self.recent.append(PoolFailure(self._wall(), cause, where, str(error)))
        _log.warning("%s: %s: %s", where, cause, error)
        self._changed()

    def refuse_bad_kind(self, spec: Spec) -> None:
        """Raise at once for a kind whose start would only fail, so that no holder waits in the queue for it.

        Raises:
            SandboxStartError: this kind is in quarantine.
        """
        kind = _kind(spec)
        if remaining := self._bad_kinds.remaining(kind, anyio.current_time()):
            raise SandboxStartError(
                f"every start of a sandbox of {spec.image} with these settings has failed; the next one is tried in "
                f"{remaining:.0f} s. Last error: {self._bad_kinds.why(kind)}"
            )


def _kind(spec: Spec) -> str:
    """Return the key of a kind: the image, and a short digest of everything else that a start depends on."""
    return f"{spec.image} {hashlib.sha256(warm_key(spec).encode()).hexdigest()[:16]}"


def _image_of(kind: str) -> str:
    """Return the image in the key of a kind."""
    return kind.rpartition(" ")[0]


def names_snapshot(image: str) -> bool:
    """Return True if an image's name could be the name of a snapshot of any service."""
    return _ANY_SPELLING.fullmatch(image) is not None


class SnapshotBook:
    """Snapshots that were reported to a holder, and are not removed yet."""

    def __init__(self, wall: Callable[[], float]) -> None:
        """Create an empty book. `wall` returns the unix time."""
        self._wall = wall
        self._kept: dict[str, KeptSnapshot] = {}
        """Snapshots by the names of their images."""
        self._changed = anyio.Event()
        """Event that is set, and replaced by a new one, at each change."""

    def restore(self, snapshots: Iterable[KeptSnapshot]) -> None:
        """Add the snapshots of an earlier run."""
        self._kept |= {kept.image: kept for kept in snapshots}
        self._change()

    def add(self, kept: KeptSnapshot) -> None:
        """Add a snapshot."""
        self._kept[kept.image] = kept
        self._change()

    def remove(self, image: str) -> None:
        """Remove a snapshot. Does nothing if it is unknown."""
        self._kept.pop(image, None)
        self._change()

    def find(self, image: str) -> KeptSnapshot | None:
        """Return an unexpired snapshot by the exact name of its image; None if there is none."""
        kept = self._kept.get(image)
        return kept if kept is not None and kept.until > self._wall() else None

    def all(self) -> list[KeptSnapshot]:
        """Return the unexpired snapshots, oldest first."""
        return [kept for kept in self._kept.values() if kept.until > self._wall()]

    def made_of(self, lease: str) -> tuple[str, ...]:
        """Return the images of the lease's sandbox that were reported to the holder."""
        return tuple(kept.image for kept in self._kept.values() if kept.lease == lease)

    def expired(self) -> list[KeptSnapshot]:
        """Return the expired snapshots that are not removed yet."""
        return [kept for kept in self._kept.values() if kept.until <= self._wall()]

    async def next_expiry(self) -> None:
        """Wait until a snapshot expires, or until the book changes, since the next expiry may then be earlier."""
        changed = self._changed
        left = min((kept.until for kept in self._kept.values()), default=math.inf) - self._wall()
        with anyio.move_on_after(max(0.0, left)):
            await changed.wait()

    def _change(self) -> None:
        """Wake the tasks that wait in `next_expiry`."""
        self._changed.set()
        self._changed = anyio.Event()


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


class HostStatus(msgspec.Struct, frozen=True):
    """Resources, sandboxes and counters of one host, as the pool sees it. A part of the service's status."""

    name: str
    cpus: float
    """CPUs that sandboxes may be granted on this host."""
    memory_mib: int
    """Memory in MiB that sandboxes may be granted on this host."""
    cpus_promised: float
    """CPUs that are promised to sandboxes now."""
    memory_mib_promised: int
    """Memory in MiB that is promised to sandboxes now."""
    why_not: str
    """Reason why the host takes no sandboxes; empty if it takes them."""
    sandboxes: int
    """Number of leases that have a place on this host."""
    warm: int
    """Number of ready sandboxes that no lease has."""
    hits: int
    """Number of starts that were served by a ready sandbox."""
    misses: int
    """Number of starts for which no ready sandbox was there."""
    orphans_removed: int
    """Number of containers and snapshots without an owner that were removed."""
    load: MachineLoad | None
    """Load of the host's machine; null if it is not measured."""


class LeaseBook:
    """Index of a pool's leases by id and by idempotency key. A lease is done when everything of it is removed."""

    def __init__(self) -> None:
        self._leases: dict[str, SandboxLease] = {}
        """Leases that are not done, by id."""
        self._ended: dict[str, SandboxLease] = {}
        """Last ended leases, by id, oldest first."""
        self._by_key: dict[tuple[str, str], SandboxLease] = {}
        """Leases by the name of the token and the idempotency key, also ended ones."""

    def all(self) -> list[SandboxLease]:
        """Return every lease that is not done, oldest first."""
        return list(self._leases.values())

    def of(self, id: str) -> SandboxLease:
        """Return a lease that is not done. Raises KeyError for any other id."""
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
        """Move a lease to the ended ones. The oldest of more than `ENDED_KEPT` is dropped.

        Clients may still ask for an ended lease, to learn why it ended.
        """
        del self._leases[lease.id]
        self._ended[lease.id] = lease
        while len(self._ended) > ENDED_KEPT:
            oldest = self._ended.pop(next(iter(self._ended)))
            self._by_key.pop((oldest.token, oldest.order.key), None)


class PoolState:
    """State of a pool: `leases`, `failures`, the queue and grants (`admission`), and the hosts.

    A grant is the decision that a lease gets a place on a host. `decide` is called after each change that could allow
    one: a new request, a lease that has ended, a new report of a host.
    """

    def __init__(self, hosts: Sequence[Host], settings: PoolSettings, wall: Callable[[], float]) -> None:
        """Create the state of a pool without leases. `SandboxPool` makes it; `wall` returns the unix time."""
        self._hosts = {host.name: host for host in hosts}
        """Hosts by name."""
        self.admission = SandboxAdmission(max_waiting=settings.max_waiting, patience=settings.patience)
        """Queue of requests, and the grants."""
        self.leases = LeaseBook()
        """Leases by id and idempotency key."""
        self.failures = PoolFailures(settings.quarantine_threshold, settings.quarantine_s, wall, self.changed)
        """Failures and quarantines."""
        self.version = 0
        """Number of changes so far. Clients wait for a version that is newer than the one they know."""
        self._newer = anyio.Event()
        """Event that is set, and replaced by a new one, with each new version."""

    # ---- reading

    def host(self, name: str) -> Host:
        """Return a host by its name."""
        return self._hosts[name]

    def why_waiting(self, lease: SandboxLease) -> str:
        """Return the reason why a lease has no sandbox yet."""
        if self.admission.is_waiting(lease.id):
            closed = [f"; {name}: {why}" for name in self._hosts if (why := self._why_not(name))]
            return self.admission.why_waiting(lease.id) + "".join(closed[:REASONS])
        # A lease of an earlier run gets its host back only when that host has answered.
        return f"it is starting on {lease.host}" if lease.host else "its host does not answer"

    def position(self, lease: SandboxLease) -> int | None:
        """Return the number of older requests in the queue; None if the lease is not in the queue."""
        return self.admission.position(lease.id) if self.admission.is_waiting(lease.id) else None

    def hosts(self) -> list[HostStatus]:
        """Return the current state of each host."""
        views = {view.name: view for view in self.admission.hosts()}
        number = Counter(lease.host for lease in self.leases.all())
        listed: list[HostStatus] = []
        for name, host in self._hosts.items():
            report = host.report()
            promised = views[name].granted if name in views else NOTHING
            listed.append(
                HostStatus(
                    name=name,
                    cpus=report.capacity.millicpus / 1000,
                    memory_mib=report.capacity.memory_mib,
                    cpus_promised=promised.millicpus / 1000,
                    memory_mib_promised=promised.memory_mib,
                    why_not=self._why_not(name),
                    sandboxes=number[name],
                    warm=sum(report.warm.values()),
                    hits=report.hits,
                    misses=report.misses,
                    orphans_removed=report.orphans_removed,
                    load=report.load,
                )
            )
        return listed

    def _why_not(self, name: str) -> str:
        """Return the reason why a host takes no sandboxes now; empty if it takes some."""
        return self.failures.why_quarantined(name) or self._hosts[name].report().why

    async def changed_since(self, version: int) -> int:
        """Wait until the version is not `version` any more, and return its number; -1 differs from every version."""
        while self.version == version:
            await self._newer.wait()
        return self.version

    # ---- leases

    def submit(self, lease: SandboxLease, only: str | None = None) -> None:
        """Add a lease and queue its request for a host, which a later `decide` grants.

        `only` names the single host that the request accepts; None: any.

        Raises:
            SandboxError: no host could ever hold the sandbox, its kind is in quarantine, or the queue is full.
        """
        self.failures.refuse_bad_kind(lease.spec)
        self.admission.submit(request_of(lease, only))
        self.leases.add(lease)

    def restore(self, lease: SandboxLease, host: str) -> None:
        """Record the place that a lease had on this host before a restart. Only recovery calls this."""
        lease.host = host
        # No decision yet: all recovered leases must have their places before waiting requests get the rest.
        self._measure(host)
        self.admission.restore(request_of(lease), host)
        self.changed()

    def put_back(self, lease: SandboxLease, avoid: set[str]) -> None:
        """Queue a lease that needs a host again, because its start failed or its sandbox was lost. It keeps its age.

        Hosts in `avoid` are taken only if there is no other.
        """
        lease.granted = anyio.Event()
        self.admission.put_back(lease.id, avoid=avoid)
        self.decide()

    def remove(self, lease: SandboxLease) -> None:
        """Free the place of a lease that has ended, and move the lease to the ended ones."""
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
        """Read a host's report, and decide again. Called when the report has changed, when recovery has reserved the
        places of its leases, and around a quarantine."""
        self._measure(name)
        self.decide()

    def _measure(self, name: str) -> None:
        """Give admission the current report of a host. A host in quarantine counts as one that takes no sandboxes."""
        report = self._hosts[name].report()
        accepts = report.accepts and not self.failures.quarantine_left(name)
        self.admission.set_host(name, report.capacity, accepts=accepts, warm=report.warm)


def request_of(lease: SandboxLease, only: str | None = None) -> PlaceRequest:
    """Return the lease's request for admission. `only` names the single host that it accepts; None: any."""
    return PlaceRequest(
        id=lease.id,
        owner=lease.owner,
        demand=demand(lease.spec),
        priority=lease.order.priority,
        warm_key=warm_key(lease.spec),
        only=only,
    )
