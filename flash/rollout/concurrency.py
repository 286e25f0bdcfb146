"""How many requests an engine may hold at once, as a pure state machine fed with the engine's own pressure.

The limit starts at the engine's number of sequences, falls by a share when the KV cache overflows or is about to, and
rises slowly while all of it is used and the cache has room. It only keeps requests from starting: none is taken back.
"""

from __future__ import annotations

from flash.rollout.engine import Pressure

HIGH_WATER = 0.95
"""Share of the KV cache from which the engine counts as too full: sequences grow, and the next growth may evict one."""
LOW_WATER = 0.85
"""Share of the KV cache up to which there is room for more sequences."""
CUT = 0.8
"""What is left of the limit after a sign of overflow."""
REGAIN = 1 / 16
"""What each response that ends adds to the limit while there is room: a cut is made good after a few rounds."""


class ConcurrencyLimit:
    """The limit of one engine: at least 1, at most `ceiling`."""

    def __init__(self, ceiling: int) -> None:
        assert ceiling >= 1, "an engine runs at least one sequence"
        self._ceiling = ceiling
        self._limit = float(ceiling)
        self._preemptions = 0

    @property
    def limit(self) -> int:
        """Requests that the engine may hold."""
        return int(self._limit)

    def observe(self, pressure: Pressure, held: int, *, ended: bool) -> None:
        """Take note of the engine's pressure while it holds `held` requests; `ended`: one of them has just ended.

        A cut is followed by another only when the first has taken effect, that is, when no more are held than allowed.
        """
        preempted = pressure.preemptions > self._preemptions
        self._preemptions = pressure.preemptions
        if preempted or pressure.kv_used >= HIGH_WATER:
            if held <= self.limit:
                self._limit = max(1.0, min(self._limit, held) * CUT)
        elif ended and held >= self.limit and pressure.kv_used <= LOW_WATER:
            self._limit = min(float(self._ceiling), self._limit + REGAIN)
