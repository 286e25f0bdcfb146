"""Wall-clock speed of rollouts with all techniques over synchronous training, with slow environments.

The task is envs.chain: five sums in turn. A step of the environment takes 0.3 s in the mean, about as long as a turn of
a batch takes to generate. It is log-normal with a standard deviation of 0.2 s, so the slowest of 128 takes three to
four times the mean, as under the paper's N(10, 10). In synchronous training, 128 environments step together, and
generation waits for the slowest. With all techniques, each environment steps on its own, and α is 2. The row between
has the techniques at α = 0.
"""

from __future__ import annotations

from benchmarks.form import WORKLOADS, main
from benchmarks.real.compare import compare

WORKLOAD = WORKLOADS / "real_agentic.toml"
"""Configuration of all runs."""
GOAL = 2.72
"""Goal of the speed-up over synchronous training."""
PAPER = 2.72
"""ROLL Flash, ALFWorld end to end."""

if __name__ == "__main__":
    main("real_agentic", __doc__ or "", lambda args: compare(WORKLOAD, 5 if args.quick else 24, GOAL, PAPER))
