"""The same engines on one node and on many.

Simulated, 16 engines of a 7B model, long-tailed answers, 256 samples a step. The hub deals what admission allows by the
room that nodes have, so that the engines of 16 nodes are filled like those of one. `share_of_one_node` is the number of
trained tokens per second over that of one node, the mean over three runs of other samples.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import configure
from flash.simulate.world import simulate

ENGINES = 16
GOAL = 0.98


def measure(args: Args) -> list[Row]:
    """Speed by the number of nodes, for each async ratio."""
    rows: list[Row] = []
    for ratio in (0, 1, 2):
        one = tokens_per_s(1, ratio, quick=args.quick)
        for nodes in (8, 16):
            share = tokens_per_s(nodes, ratio, quick=args.quick) / one
            rows.append(Row(f"{nodes} nodes, async ratio {ratio}", "share_of_one_node", "share", share, None, GOAL))
    return rows


def tokens_per_s(nodes: int, ratio: int, *, quick: bool) -> float:
    """Trained tokens per second."""
    tokens, seconds = 0, 0.0
    for seed in range(1 if quick else 3):
        report = simulate(
            configure(
                run={"steps": 6 if quick else 24, "seed": seed},
                rollout={"group_size": 16},
                train={"batch_size": 256, "async_ratio": ratio},
                simulate={"gpus": 2 * ENGINES, "rollout_gpus": ENGINES, "nodes": nodes},
            )
        )
        tokens += report.trained_tokens
        seconds += report.seconds
    return tokens / seconds


if __name__ == "__main__":
    main("nodes", __doc__ or "", measure)
