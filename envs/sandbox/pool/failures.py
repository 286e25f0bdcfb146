"""Failures of a pool, and the quarantine of hosts and kinds of sandboxes that keep failing."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable

import anyio
import msgspec

from envs.sandbox.api import Spec
from envs.sandbox.pool.host import warm_key
from envs.sandbox.pool.lease import SandboxLease
from flash.errors import SandboxBusyError, SandboxError, SandboxStartError

_log = logging.getLogger(__name__)

FAILURES_KEPT = 50
"""Failures that are kept with their message."""
MAX_FACTOR = 16
"""Longest quarantine, as a multiple of the first one: 30 s become 8 min. A repaired host returns without a restart."""


class _Record(msgspec.Struct):
    """Failures of one key."""

    failures: int = 0
    factor: int = 1
    until: float = 0.0
    why: str = ""


class Quarantine:
    """Quarantine of keys that keep failing. A pure state machine; the caller passes the time.

    `threshold` failures in a row put a key (a host, an image) in quarantine for `cooldown` seconds. Afterwards it is
    tried again: one further failure puts it in quarantine for twice as long, up to `MAX_FACTOR` times `cooldown`. A
    success clears its record.
    """

    def __init__(self, *, threshold: int, cooldown: float) -> None:
        """Create an empty quarantine. `threshold` counts failures in a row; `cooldown` is the first stay in seconds."""
        self._threshold = threshold
        self._cooldown = cooldown
        self._records: dict[str, _Record] = {}

    def failed(self, key: str, why: str, now: float) -> bool:
        """Record a failure. Returns True if it puts the key in quarantine."""
        record = self._records.setdefault(key, _Record())
        record.failures += 1
        record.why = why
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
    """Failure records of a pool, and its two quarantines.

    Args:
        threshold: failed starts in a row that put a host or a kind in quarantine.
        cooldown: seconds of the first stay in quarantine.
        wall: returns the unix time.
        changed: called after each failure.
    """

    def __init__(self, threshold: int, cooldown: float, wall: Callable[[], float], changed: Callable[[], None]) -> None:
        self._wall = wall
        self._changed = changed
        self._bad_hosts = Quarantine(threshold=threshold, cooldown=cooldown)
        self._bad_kinds = Quarantine(threshold=threshold, cooldown=cooldown)
        self._good_kinds: set[str] = set()
        """Kinds that have started at least once on some host."""
        self.counts: Counter[str] = Counter()
        """Number of failures by class of error."""
        self.recent: deque[PoolFailure] = deque(maxlen=FAILURES_KEPT)

    def images_put_aside(self) -> dict[str, str]:
        """Return the images of the kinds in quarantine, each with the last error message."""
        return {_image_of(kind): self._bad_kinds.why(kind) for kind in self._bad_kinds.listed(anyio.current_time())}

    def quarantine_left(self, name: str) -> float:
        """Return the seconds until a host is tried again; 0 if it is not in quarantine."""
        return self._bad_hosts.remaining(name, anyio.current_time())

    def why_put_aside(self, name: str) -> str:
        """Return the reason why a host is in quarantine; "" if it is not."""
        remaining = self.quarantine_left(name)
        return f"in quarantine for {remaining:.0f} s: {self._bad_hosts.why(name)}" if remaining else ""

    def started(self, lease: SandboxLease) -> None:
        """Record a successful start, which clears the failures of the host and of the kind."""
        kind = _kind(lease.spec)
        self._good_kinds.add(kind)
        self._bad_hosts.succeeded(lease.host)
        self._bad_kinds.succeeded(kind)

    def start_failed(self, lease: SandboxLease, error: SandboxError) -> bool:
        """Record a failed start. Returns True if it puts the host in quarantine.

        If this kind of sandbox has never started, the failure counts against the kind: its spec may be impossible, and
        other kinds must not suffer from that. If it has started before, the failure counts against the host. A start
        that failed for lack of room counts against neither.
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
        """Record a failure of the infrastructure, and log it."""
        cause = type(error).__name__
        self.counts[cause] += 1
        self.recent.append(PoolFailure(self._wall(), cause, where, str(error)))
        _log.warning("%s: %s: %s", where, cause, error)
        self._changed()

    def refuse_bad_kind(self, spec: Spec) -> None:
        """Raise at once for a kind whose start would only fail.

        Raises:
            SandboxStartError: this kind is in quarantine.
        """
        kind = _kind(spec)
        if remaining := self._bad_kinds.remaining(kind, anyio.current_time()):
            raise SandboxStartError(
                f"sandboxes of {spec.image} only fail; it is tried again in {remaining:.0f} s. "
                f"The last time: {self._bad_kinds.why(kind)}"
            )


def _kind(spec: Spec) -> str:
    """Return the key of a kind: the image, and a short digest of everything else that a start depends on."""
    return f"{spec.image} {hashlib.sha256(warm_key(spec).encode()).hexdigest()[:16]}"


def _image_of(kind: str) -> str:
    return kind.rpartition(" ")[0]
