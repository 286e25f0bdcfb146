"""Wall-clock speed of rollouts with all techniques over synchronous training, on responses with a long tail of lengths.

The task is envs.counting. The right answer has 24 tokens in the median and up to 480, log-normal, so a batch waits for
its longest response as in RL on reasoning. Synchronous training has batches of 128 samples and whole groups on one
engine. All techniques are queue scheduling, prompt replication and α = 2. The row between has the techniques at α = 0.
"""

from __future__ import annotations

from benchmarks.form import WORKLOADS, main
from benchmarks.real.compare import compare

WORKLOAD = WORKLOADS / "real_rlvr.toml"
"""Configuration of all runs."""
GOAL = 1.7
"""Goal of the speed-up over synchronous training."""
PAPER = 2.24
"""ROLL Flash, RLVR end to end."""

if __name__ == "__main__":
    main("real_rlvr", __doc__ or "", lambda args: compare(WORKLOAD, 8 if args.quick else 80, GOAL, PAPER))
