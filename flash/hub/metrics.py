"""The row of metrics of one committed step: what the trainer measured, and what only the hub sees."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from flash.hub.buffer import SampleBuffer
from flash.hub.protocol import EngineStatus
from flash.types import Outcome, Trajectory

ENV_PREFIX = "env/"
"""Begins the names of what environments measure, so that they meet no other metric."""


def env_metrics(measured: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for metrics in measured:
        for name, value in metrics.items():
            values.setdefault(ENV_PREFIX + name, []).append(value)
    return {name: math.fsum(each) / len(each) for name, each in sorted(values.items())}


class StepMetrics:
    """Remembers where the last step ended. Waiting and rates count from the first lease: before, nothing ran."""

    def __init__(self, generated_tokens: int) -> None:
        self._generated_tokens = generated_tokens
        self._since: float | None = None
        self._canary_error = 0.0

    def began(self, now: float) -> None:
        """A training sample was handed out."""
        self._since = now if self._since is None else self._since

    def canaries(self, engines: Sequence[EngineStatus]) -> None:
        """Engines have passed their canaries."""
        self._canary_error = max([self._canary_error, *(engine.canary_error for engine in engines)])

    def row(
        self,
        version: int,
        trajectories: Sequence[Trajectory],
        trainer: Mapping[str, float],
        buffer: SampleBuffer,
        engines: Sequence[EngineStatus],
        now: float,
    ) -> dict[str, float]:
        """The row of the step that made `version` out of these. Times in seconds, `now` in Unix seconds."""
        ledger = buffer.ledger
        elapsed = max(now - (self._since if self._since is not None else now), 1e-9)
        generated = ledger.generated_tokens - self._generated_tokens
        self._since, self._generated_tokens = now, ledger.generated_tokens
        lifetime = sum(engine.lifetime_s for engine in engines)
        wait = max(0.0, min(trainer.get("trainer_wait_s", 0.0), elapsed - trainer.get("trainer_step_s", 0.0)))
        return {
            **trainer,
            "step": version - 1,
            "version": version,
            "time": now,
            "samples": len(trajectories),
            "trainer_wait_s": wait,
            "trainer_wait_share": wait / elapsed,
            "interval_s": elapsed,
            "tokens_per_second": generated / elapsed,
            "generated_tokens": ledger.generated_tokens,
            "engine_idle_share": sum(e.idle_s for e in engines) / lifetime if lifetime else math.nan,
            "canary_max": self._canary_error,
            "queue_ready_groups": buffer.ready_groups,
            "in_flight": buffer.in_flight,
            "stale_tokens": ledger.discarded_tokens.get(Outcome.STALE, 0),
            "wasted_tokens": sum(ledger.discarded_tokens.values()),
            "filtered": ledger.filtered,
            "given_up": sum(ledger.given_up.values()),
            **env_metrics(trajectory.env_metrics() for trajectory in trajectories),
        }
