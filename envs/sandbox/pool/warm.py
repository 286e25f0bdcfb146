"""How many sandboxes to keep ready, of which kind. A pure state machine; the caller says what time it is.

A kind (`warm_key`) has a fixed number, or as many as were asked for within the last `window` seconds, whichever is
larger, the learned part up to `learned_max`: the sandboxes of a rollout group come in bursts, and the next burst looks
like the last one. A kind nobody asks for any more is given up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping


class WarmPolicy:
    """Hits, misses and wanted numbers by kind."""

    def __init__(self, *, fixed: Mapping[str, int], learned_max: int, window: float) -> None:
        """`window` in seconds; `learned_max` 0 keeps only the fixed numbers."""
        self._fixed = dict(fixed)
        self._learned_max = learned_max
        self._window = window
        self._asked: dict[str, deque[float]] = {}
        self.hits: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()

    def asked(self, key: str, *, hit: bool, now: float) -> None:
        """A sandbox of this kind was asked for; `hit`: one stood ready."""
        (self.hits if hit else self.misses)[key] += 1
        if self._learned_max:
            self._asked.setdefault(key, deque(maxlen=self._learned_max)).append(now)

    def target(self, key: str, now: float) -> int:
        """How many to keep ready."""
        asked = self._asked.get(key)
        while asked and asked[0] <= now - self._window:
            asked.popleft()
        if asked is not None and not asked:
            del self._asked[key]
        return max(self._fixed.get(key, 0), len(asked or ()))

    def targets(self, now: float) -> dict[str, int]:
        """Every kind that is to be kept ready."""
        wanted = {key: self.target(key, now) for key in [*self._fixed, *self._asked]}
        return {key: number for key, number in wanted.items() if number}

    def next_change(self, now: float) -> float | None:
        """Seconds until a target falls because time passes; None: it does not."""
        oldest = min((asked[0] for asked in self._asked.values() if asked), default=None)
        return None if oldest is None else max(0.0, oldest + self._window - now)
