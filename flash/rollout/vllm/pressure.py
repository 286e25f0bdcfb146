"""What a vLLM engine tells of its load after each step: sequences, KV cache, preemptions."""

from __future__ import annotations

from typing import Any

import msgspec

from flash.rollout.engine import Pressure


class PressureGauge:
    """Keeps the last reading."""

    def __init__(self) -> None:
        self._pressure = Pressure(running=0, waiting=0, kv_used=0.0, preemptions=0)
        self._excused = 0

    @property
    def pressure(self) -> Pressure:
        """As of the engine's last step."""
        return self._pressure

    def has_cache(self, tokens: int) -> None:
        """The engine has started, with a KV cache for so many tokens."""
        self._pressure = msgspec.structs.replace(self._pressure, kv_tokens=tokens)

    def all_put_back(self) -> None:
        """The engine forgets its cache, for which it puts all its sequences back: not for want of cache."""
        self._excused = self._pressure.running

    def read(self, *, running: int, waiting: int, kv_used: float, resumed: int) -> None:
        """Take one step's numbers; `resumed`: sequences that went on in it after they had been put back."""
        excused = min(resumed, self._excused)
        # Nobody waits: all that were put back go on, and the excuse has served.
        self._excused = self._excused - excused if waiting else 0
        preemptions = self._pressure.preemptions + resumed - excused
        self._pressure = Pressure(running, waiting, kv_used, preemptions, self._pressure.kv_tokens)

    def record(self, stats: Any) -> None:
        """Take the `SchedulerStats` of one step of vLLM's."""
        self.read(
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            kv_used=stats.kv_cache_usage,
            resumed=stats.prefix_cache_stats.preempted_requests,
        )
