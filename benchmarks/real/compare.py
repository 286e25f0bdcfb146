"""Real runs of one workload, synchronous and asynchronous, for `benchmarks.real.rlvr` and `benchmarks.real.agentic`.

All runs go through `flash train` with the same seed, model, environment, batch and number of samples. The node loop and
its engine run on core 0, and the trainer on core 1: each core stands for one device. The *techniques* are those of ROLL
Flash: queue scheduling, prompt replication and environments that step on their own. α is `train.async_ratio`.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.form import Row
from benchmarks.training import PINNED, Train, speed_rows, train

ALPHA_0 = ["train.async_ratio=0", "rollout.seeded=false"]
"""Overrides of synchronous training. Seeds are off, as they are in asynchronous runs, because they cost time."""
MODES = {
    "synchronous": [*ALPHA_0, 'rollout.barriers=["batch", "group", "turn"]'],
    "techniques, α = 0": ALPHA_0,
    "techniques, α = 0, streamed": [*ALPHA_0, "train.stream=true"],
    "techniques, α = 2": ["train.async_ratio=2"],
}
"""Overrides of each mode. The techniques are on by default, and barriers switch them off."""
STREAMED = 1.3
"""Goal of the speed-up of streamed over unstreamed steps at α = 0."""
SOME_STEPS = 10
"""Number of steps whose samples `first_rewards` and `last_rewards` average, at the beginning and at the end."""


def compare(workload: Path, steps: int, goal: float, reference: float, train: Train = train) -> list[Row]:
    """Run all modes on one workload, and return their rows. The main programs of both benchmarks call this.

    Args:
        workload: configuration file of all runs.
        steps: training steps of each run.
        goal: least speed-up over synchronous training.
        reference: the paper's speed-up.
        train: runs `flash train`; tests replace it.
    """
    runs = {
        case: train(workload, f"bench-{workload.stem}-{number}", [*PINNED, *overrides, f"run.steps={steps}"])
        for number, (case, overrides) in enumerate(MODES.items())
    }
    synchronous, alpha_0, streamed, alpha_2 = runs.values()
    before, after = synchronous.evals[-1], alpha_2.evals[-1]
    # True if the 95 % intervals of the final accuracies overlap: they cannot be told apart.
    agree = before["low"] <= after["high"] and after["low"] <= before["high"]
    rows = [
        Row("α = 2 over synchronous", "speedup", "x", synchronous.seconds / alpha_2.seconds, reference, at_least=goal),
        Row("techniques alone over synchronous", "speedup", "x", synchronous.seconds / alpha_0.seconds),
        Row("streamed over unstreamed, α = 0", "speedup", "x", alpha_0.seconds / streamed.seconds, at_least=STREAMED),
        Row("final accuracies agree", "overlap", "0 or 1", float(agree), at_least=1),
    ]
    for case, run in runs.items():
        first, last = run.evals[0], run.evals[-1]
        rows += [
            *speed_rows(case, [run]),
            Row(case, "samples", "samples", run.summary["samples"]),
            Row(case, "first_accuracy", "share", first["mean_reward"]),
            Row(case, "final_accuracy", "share", last["mean_reward"]),
            Row(case, "final_accuracy_low", "share", last["low"]),
            Row(case, "final_accuracy_high", "share", last["high"]),
            Row(case, "first_rewards", "reward", run.mean("reward_mean", slice(SOME_STEPS))),
            Row(case, "last_rewards", "reward", run.mean("reward_mean", slice(-SOME_STEPS, None))),
            Row(case, "trainer_wait_s_per_step", "s", run.mean("trainer_wait_s")),
            Row(case, "oldest_trained_age", "versions", run.summary["max_age"]),
        ]
    return rows
