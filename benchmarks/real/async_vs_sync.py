"""Wall-clock speed of asynchronous over synchronous training, on two cores that stand for two devices.

Both runs go through `flash train` with the same seed, model, environment, batch and number of samples. The first row
pins the node loop with all engine processes to core 0 and the trainer to core 1, in both modes: with generation and
training equally heavy, 2.0 is the limit. The second row lets the synchronous run use both cores in each phase. The
third row compares two synchronous runs: one trains groups while others are sampled. Time runs from the end of the first
evaluation, when rollouts begin, to the last committed step.
"""

from __future__ import annotations

from benchmarks.form import WORKLOADS, Args, Row, main
from benchmarks.training import PINNED, train

WORKLOAD = WORKLOADS / "async_vs_sync.toml"
"""Configuration of all runs."""
GOAL = 1.6
"""Goal of the pinned comparison; 2.0 is the limit."""

SYNCHRONOUS = ["train.async_ratio=0", "rollout.seeded=false"]
"""Overrides. Seeds are off as in the asynchronous run, because they would slow this one down."""
STREAMED = ["train.stream=true"]
"""Overrides of a run whose steps begin while their batches are still sampled."""


def compare(args: Args) -> list[Row]:
    """Make all runs, and return their rows."""
    size = [f"run.steps={8 if args.quick else 30}"]
    runs = {
        "sync, one core each": train(WORKLOAD, "bench-sync", [*size, *PINNED, *SYNCHRONOUS]),
        "async, one core each": train(WORKLOAD, "bench-async", [*size, *PINNED, "train.async_ratio=1"]),
        "sync, both cores": train(WORKLOAD, "bench-sync-both", [*size, *SYNCHRONOUS]),
        "sync streamed, one core each": train(WORKLOAD, "bench-stream", [*size, *PINNED, *SYNCHRONOUS, *STREAMED]),
    }
    pinned, ours, both, streamed = runs.values()
    rows = [
        Row("async over sync, one core each", "speedup", "x", pinned.seconds / ours.seconds, at_least=GOAL),
        Row("async, one core each, over sync, both cores", "speedup", "x", both.seconds / ours.seconds),
        Row("sync streamed over sync, one core each", "speedup", "x", pinned.seconds / streamed.seconds),
    ]
    for case, run in runs.items():
        rows += [
            Row(case, "seconds", "s", run.seconds),
            Row(case, "final_accuracy", "share", run.summary["final_reward"]),
            Row(case, "trainer_busy_share", "share", 1 - run.summary["trainer_wait_share"]),
            Row(case, "engine_busy_share", "share", 1 - run.summary["engine_idle_share"]),
            Row(case, "trainer_wait_s_per_step", "s", run.mean("trainer_wait_s")),
            Row(case, "trainer_step_s_per_step", "s", run.mean("trainer_step_s")),
        ]
    return rows


if __name__ == "__main__":
    main("async_vs_sync", __doc__ or "", compare)
