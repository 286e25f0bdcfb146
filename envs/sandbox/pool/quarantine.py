"""Quarantine: what keeps failing is left alone for a while. A pure state machine; the caller says what time it is.

`threshold` failures in a row put a key (a host, an image) aside for `cooldown` seconds. Afterwards it is tried again: a
single further failure puts it aside for twice as long, up to `MAX_FACTOR` times, a success clears it.
"""

from __future__ import annotations

import msgspec

MAX_FACTOR = 16
"""How many cooldowns the longest quarantine lasts: 30 s become 8 min. A repaired host comes back without a restart."""


class _Record(msgspec.Struct):
    failures: int = 0
    factor: int = 1
    until: float = 0.0
    why: str = ""


class Quarantine:
    """Failures in a row by key."""

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
