"""Wall-clock speed of rollout at full strength over synchronous training, on responses with a long tail of lengths.

The task is envs.counting: the right answer has 24 tokens in the median and up to 480, log-normal, so that a batch waits
for its longest response as it does in RL on reasoning. Synchronous: batches of 128 samples, whole groups to one engine,
nothing asynchronous. Ours: queue scheduling, prompt replication and α = 2; the row between has the techniques at α = 0.
"""

from __future__ import annotations

from benchmarks.form import WORKLOADS, Args, Row, main
from benchmarks.real.compare import compare

WORKLOAD = WORKLOADS / "real_rlvr.toml"
STEPS, QUICK_STEPS = 80, 8
GOAL = 1.7
PAPER = 2.24
"""ROLL Flash, RLVR end to end."""


def run(args: Args) -> list[Row]:
    """All modes."""
    return compare(WORKLOAD, QUICK_STEPS if args.quick else STEPS, GOAL, PAPER)


if __name__ == "__main__":
    main("real_rlvr", __doc__ or "", run)
