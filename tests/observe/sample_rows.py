"""Sample rows of a run, as the hub and the trainer write them."""

from __future__ import annotations

from typing import Any

from flash.types import Activity

STARTED = 1_700_000_000.0
"""Unix seconds at which the sample run begins; step n takes the two seconds from STARTED + 2n."""


def metrics_row(step: int, **changes: Any) -> dict[str, Any]:
    """Return a row of metrics, as the hub and the trainer write it."""
    row: dict[str, Any] = {
        "step": step,
        "version": step + 1,
        "time": STARTED + 2.0 * (step + 1),
        "wall_s": 10.0 + 2.0 * (step + 1),
        "interval_s": 2.0,
        "reward_mean": 0.25 + step / 100,
        "loss": -0.0123,
        "entropy": 1.234,
        "ratio_mean": 1.002,
        "clip_fraction": 0.034,
        "masked_old_share": 0.01,
        "masked_correction_share": 0.0,
        "masked_cap_share": 0.002,
        "ess": 0.91,
        "ratio_p1_age_0": 0.9,
        "ratio_p50_age_0": 1.0,
        "ratio_p99_age_0": 1.1,
        "ratio_p1_age_1": 0.5,
        "ratio_p50_age_1": 1.01,
        "ratio_p99_age_1": 2.0,
        "mismatch_kl": 1.5e-6,
        "mismatch_k3_age_0": 2e-6,
        "grad_norm": 0.456,
        "learning_rate": 2e-5,
        "tokens": 4000,
        "trained_tokens": 3000,
        "tokens_per_second": 9812.0,
        "age_mean": 0.75,
        "age_max": 1,
        "age_0": 750,
        "age_1": 2250,
        "trainer_wait_s": 0.5,
        "trainer_step_s": 1.5,
        "trainer_wait_share": 0.25,
        "engine_idle_share": 0.04,
        "samples": 64,
        "stale_share": 0.02,
        "failures": 3,
    }
    return row | changes


def eval_row(step: int, mean: float, **changes: Any) -> dict[str, Any]:
    """Return a row of a held-out evaluation."""
    row: dict[str, Any] = {
        "step": step,
        "time": STARTED + 2.0 * step,
        "wall_s": 10.0 + 2.0 * step,
        "version_min": step,
        "version_max": step,
        "mean_reward": mean,
        "low": mean - 0.05,
        "high": mean + 0.04,
        "best_of_k": mean + 0.1,
        "binary": 1.0,
        "k": 4,
        "problems": 128,
        "samples": 512,
    }
    return row | changes


def spans(steps: int) -> list[Activity]:
    """Return activities: an engine always generates and swaps 0.1 s in a step of 2 s; a trainer waits 0.5 s of it."""
    bars: list[Activity] = []
    for step in range(steps):
        at = STARTED + 2.0 * step
        bars.append(Activity("trainer 0", "wait", at, at + 0.5))
        bars.append(Activity("trainer 0", "train", at + 0.5, at + 2.0))
        bars.append(Activity("engine 0", "generate", at, at + 2.0))
        bars.append(Activity("engine 0", "swap", at + 1.0, at + 1.1))
    return bars
