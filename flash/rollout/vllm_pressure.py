"""What a vLLM engine tells of its load after each step: sequences, KV cache, preemptions."""

from __future__ import annotations

from typing import Any

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

    def all_put_back(self) -> None:
        """The engine forgets its cache, for which it puts all its sequences back: not for want of cache."""
        self._excused = self._pressure.running

    def read(self, *, running: int, waiting: int, kv_used: float, resumed: int) -> None:
        """Take one step's numbers; `resumed`: sequences that went on in it after they had been put back."""
        excused = min(resumed, self._excused)
        # Nobody waits: all that were put back go on, and the excuse has served.
        self._excused = self._excused - excused if waiting else 0
        preemptions = self._pressure.preemptions + resumed - excused
        self._pressure = Pressure(running, waiting, kv_used, preemptions)


def stat_logger(gauge: PressureGauge) -> Any:
    """vLLM's kind of class that passes its statistics to the gauge.

    It derives from vLLM's Prometheus logger because that one is made beside all others: it costs time in each step, and
    its registry is shared by all engines of a process.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Reader(PrometheusStatLogger):
        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            """Registers nothing."""

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if scheduler_stats is not None:
                gauge.read(
                    running=scheduler_stats.num_running_reqs,
                    waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                    kv_used=scheduler_stats.kv_cache_usage,
                    resumed=scheduler_stats.prefix_cache_stats.preempted_requests,
                )

        def log_engine_initialized(self) -> None:
            """Says nothing."""

        def log(self) -> None:
            """Says nothing."""

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            """Keeps nothing."""

        def record_admission_rejection(self, reason: str) -> None:
            """Keeps nothing."""

    return Reader
