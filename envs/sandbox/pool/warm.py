"""Warm policy: how many sandboxes of each kind to keep ready. Pure state machine; the caller passes the time.

A kind (`warm_key`) has a fixed number, or the number of requests of the last `window` seconds, whichever is larger; the
second is at most `learned_max`. The sandboxes of a rollout group are requested in bursts, and the next burst is like
the last one. A kind that is no longer requested is no longer kept ready.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping


class WarmPolicy:
    """Requests and targets by kind; `hits` and `misses` count requests that found a ready sandbox or none."""

    def __init__(self, *, fixed: Mapping[str, int], learned_max: int, window: float) -> None:
        """Create a policy. `window` is in seconds; `learned_max` 0 keeps only the fixed numbers."""
        self._fixed = dict(fixed)
        self._learned_max = learned_max
        self._window = window
        self._asked: dict[str, deque[float]] = {}
        self.hits: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()

    def asked(self, key: str, *, hit: bool, now: float) -> None:
        """Record a request for a sandbox of this kind. `hit` is True if a ready one was found."""
        (self.hits if hit else self.misses)[key] += 1
        if self._learned_max:
            self._asked.setdefault(key, deque(maxlen=self._learned_max)).append(now)

    def target(self, key: str, now: float) -> int:
        """Return the number of sandboxes of this kind to keep ready."""
        asked = self._asked.get(key)
        while asked and asked[0] <= now - self._window:
            asked.popleft()
        if asked is not None and not asked:
            del self._asked[key]
        return max(self._fixed.get(key, 0), len(asked or ()))

    def targets(self, now: float) -> dict[str, int]:
        """Return the target of every kind whose target is not 0."""
        wanted = {key: self.target(key, now) for key in [*self._fixed, *self._asked]}
        return {key: number for key, number in wanted.items() if number}

    def next_change(self, now: float) -> float | None:
        """Return the seconds until a target falls because time passes; None: no target will."""
        oldest = min((asked[0] for asked in self._asked.values() if asked), default=None)
        return None if oldest is None else max(0.0, oldest + self._window - now)
