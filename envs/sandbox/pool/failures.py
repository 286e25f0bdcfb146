"""What failed in a pool, and what is put aside for that: hosts, and kinds of sandboxes."""

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
"""Failures shown with their message."""
MAX_FACTOR = 16
"""How many cooldowns the longest quarantine lasts: 30 s become 8 min. A repaired host comes back without a restart."""


class _Record(msgspec.Struct):
    failures: int = 0
    factor: int = 1
    until: float = 0.0
    why: str = ""


class Quarantine:
    """What keeps failing is left alone for a while. A pure state machine; the caller says what time it is.

    `threshold` failures in a row put a key (a host, an image) aside for `cooldown` seconds. Afterwards it is tried
    again: a single further failure puts it aside for twice as long, up to `MAX_FACTOR` times, a success clears it.
    """

    def __init__(self, *, threshold: int, cooldown: float) -> None:
        """`threshold` failures in a row; the first `cooldown` in seconds."""
        self._threshold = threshold
        self._cooldown = cooldown
        self._records: dict[str, _Record] = {}

    def failed(self, key: str, why: str, now: float) -> bool:
        """Book a failure; whether the key is put aside by it."""
        record = self._records.setdefault(key, _Record())
        record.failures += 1
        record.why = why
        if record.failures < self._threshold or now < record.until:
            return False
        record.until = now + self._cooldown * record.factor
        record.factor = min(2 * record.factor, MAX_FACTOR)
        return True

    def succeeded(self, key: str) -> None:
        """It works again: its failures are forgotten."""
        self._records.pop(key, None)

    def remaining(self, key: str, now: float) -> float:
        """Seconds until the key is tried again; 0 when it is not in quarantine."""
        record = self._records.get(key)
        return max(0.0, record.until - now) if record else 0.0

    def why(self, key: str) -> str:
        """What the last failure said."""
        record = self._records.get(key)
        return record.why if record else ""

    def listed(self, now: float) -> dict[str, float]:
        """Every key in quarantine, with the seconds that remain."""
        return {key: record.until - now for key, record in self._records.items() if record.until > now}


class PoolFailure(msgspec.Struct, frozen=True):
    """One failure of the infrastructure."""

    at: float
    """Unix time."""
    cause: str
    """Class of the error."""
    where: str
    """The host."""
    message: str


class PoolFailures:
    """See the module.

    Args:
        threshold: failed starts in a row that put a host or a kind aside.
        cooldown: seconds of the first stay in quarantine.
        wall: gives the unix time.
        changed: told of each failure.
    """

    def __init__(self, threshold: int, cooldown: float, wall: Callable[[], float], changed: Callable[[], None]) -> None:
        self._wall = wall
        self._changed = changed
        self._bad_hosts = Quarantine(threshold=threshold, cooldown=cooldown)
        self._bad_kinds = Quarantine(threshold=threshold, cooldown=cooldown)
        self._good_kinds: set[str] = set()
        """Started somewhere at least once."""
        self.counts: Counter[str] = Counter()
        """By class of error."""
        self.recent: deque[PoolFailure] = deque(maxlen=FAILURES_KEPT)

    def images_put_aside(self) -> dict[str, str]:
        """Images of the kinds in quarantine, and why."""
        return {_image_of(kind): self._bad_kinds.why(kind) for kind in self._bad_kinds.listed(anyio.current_time())}

    def quarantine_left(self, name: str) -> float:
        """Seconds until a host is tried again."""
        return self._bad_hosts.remaining(name, anyio.current_time())

    def why_put_aside(self, name: str) -> str:
        """Why a host is in quarantine; empty when it is not."""
        remaining = self.quarantine_left(name)
        return f"in quarantine for {remaining:.0f} s: {self._bad_hosts.why(name)}" if remaining else ""

    def started(self, lease: SandboxLease) -> None:
        """A start succeeded: its host and its kind of sandbox are good again."""
        kind = _kind(lease.spec)
        self._good_kinds.add(kind)
        self._bad_hosts.succeeded(lease.host)
        self._bad_kinds.succeeded(kind)

    def start_failed(self, lease: SandboxLease, error: SandboxError) -> bool:
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
        self.counts[cause] += 1
        self.recent.append(PoolFailure(self._wall(), cause, where, str(error)))
        _log.warning("%s: %s: %s", where, cause, error)
        self._changed()

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


def _kind(spec: Spec) -> str:
    """The image, and a short mark of everything else that a start depends on."""
    return f"{spec.image} {hashlib.sha256(warm_key(spec).encode()).hexdigest()[:16]}"


def _image_of(kind: str) -> str:
    return kind.rpartition(" ")[0]
