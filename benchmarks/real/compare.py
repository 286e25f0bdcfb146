"""Real runs of one workload, synchronous and asynchronous, for `benchmarks.real.rlvr` and `benchmarks.real.agentic`.

All runs go through `flash train` with the same seed, model, environment, batch and number of samples. The node loop and
its engine run on core 0, and the trainer on core 1: each core stands for one device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.form import Args, Row
from benchmarks.training import PINNED, Train, train

SYNCHRONOUS = [
    "train.async_ratio=0",
    "rollout.seeded=false",
    'rollout.barriers=["batch", "group", "turn"]',
]
"""Overrides of synchronous training without any technique."""
MODES = {
    "synchronous": SYNCHRONOUS,
    "techniques, α = 0": ["train.async_ratio=0", "rollout.seeded=false"],
    "techniques, α = 0, streamed": ["train.async_ratio=0", "rollout.seeded=false", "train.stream=true"],
    "techniques, α = 2": ["train.async_ratio=2"],
}
"""Overrides of each mode. The techniques are on by default."""
STREAMED = 1.3
"""Goal of the speed-up of streamed over unstreamed steps at α = 0."""
SOME_STEPS = 10
"""Number of steps whose samples `first_rewards` and `last_rewards` average, at the beginning and at the end."""


def comparison(
    workload: Path, *, steps: int, quick_steps: int, goal: float, reference: float
) -> Callable[[Args], list[Row]]:
    """Return a benchmark that compares all modes on one workload."""
    return lambda args: compare(workload, quick_steps if args.quick else steps, goal, reference)


def compare(workload: Path, steps: int, goal: float, reference: float, train: Train = train) -> list[Row]:
    """Run all modes, and return their rows. `reference` is the paper's speed-up."""
    runs = {
        case: train(workload, f"bench-{workload.stem}-{number}", [*PINNED, *overrides, f"run.steps={steps}"])
        for number, (case, overrides) in enumerate(MODES.items())
    }
    synchronous, between, streamed, ours = runs.values()
    rows = [
        Row("α = 2 over synchronous", "speedup", "x", synchronous.seconds / ours.seconds, reference, at_least=goal),
        Row("techniques alone over synchronous", "speedup", "x", synchronous.seconds / between.seconds),
        Row("streamed over unstreamed, α = 0", "speedup", "x", between.seconds / streamed.seconds, at_least=STREAMED),
        # Of their intervals: 1 when the final accuracies cannot be told apart.
        Row("final accuracies agree", "overlap", "0 or 1", _overlap(synchronous.evals[-1], ours.evals[-1]), at_least=1),
    ]
    for case, run in runs.items():
        first, last = run.evals[0], run.evals[-1]
        rows += [
            Row(case, "seconds", "s", run.seconds),
            Row(case, "samples", "samples", run.summary["samples"]),
            Row(case, "first_accuracy", "share", first["mean_reward"]),
            Row(case, "final_accuracy", "share", last["mean_reward"]),
            Row(case, "final_accuracy_low", "share", last["low"]),
            Row(case, "final_accuracy_high", "share", last["high"]),
            Row(case, "first_rewards", "reward", run.mean("reward_mean", slice(SOME_STEPS))),
            Row(case, "last_rewards", "reward", run.mean("reward_mean", slice(-SOME_STEPS, None))),
            Row(case, "trainer_busy_share", "share", 1 - run.summary["trainer_wait_share"]),
            Row(case, "engine_busy_share", "share", 1 - run.summary["engine_idle_share"]),
            Row(case, "trainer_wait_s_per_step", "s", run.mean("trainer_wait_s")),
            Row(case, "trainer_step_s_per_step", "s", run.mean("trainer_step_s")),
            Row(case, "oldest_trained_age", "versions", run.summary["max_age"]),
        ]
    return rows


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> float:
    return float(one["low"] <= other["high"] and other["low"] <= one["high"])
