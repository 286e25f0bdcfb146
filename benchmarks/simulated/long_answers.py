"""What is trained of long answers, and what swaps cost them: a bound on tokens above α, and KV caches that are kept.

Simulated, for async ratios of 1, 2 and 4, in two workloads. `fast steps` is that of `length_bias`: a mean answer takes
four steps of the trainer. `full caches` is `rlvr_long` on 4 GPUs, 32 samples per GPU: what runs fills the KV cache,
which a swap computes again or keeps. `bound` is `train.max_token_age`, four times the ratio. Speed is over that of the
same ratio without; `trained` is the share of the generated tokens that entered a loss, of the run, and among trained
samples of each quarter of their lengths and of the longest hundredth; `recomputed` is the tokens that swaps had
computed again, per generated token; `oldest` and `mean_age` are of trained tokens. Runs end, which costs the answers
then on their way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import run_world, workload
from benchmarks.simulated.length_bias import configured
from flash.config.tree import Config
from flash.simulate.report import SimReport
from flash.simulate.world import SimObserver, World
from flash.types import Batch

RATIOS = (1, 2, 4)
STEPS = 60
TIMES = 4
"""The bound, over the async ratio."""
GOAL_TRAINED, GOAL_SPEED = 0.95, 0.93
"""At an async ratio of 2 with fast steps."""
PARTS = (("shortest quarter", 0.0, 0.25), ("second", 0.25, 0.5), ("third", 0.5, 0.75), ("longest quarter", 0.75, 1.0))
PARTS_AND_TAIL = (*PARTS, ("longest hundredth", 0.99, 1.0))


class Lengths(SimObserver):
    """Remembers what was trained of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[tuple[int, int]] = []
        """Tokens, and how many of them were trained."""

    def batch(self, batch: Batch) -> None:
        """Look at a step's samples."""
        self.lengths += [(one.action_count, one.trained_tokens(batch.min_version)) for one in batch.trajectories]


def configurations(ratio: int, steps: int) -> list[tuple[str, Config]]:
    """Each workload without and with what is compared; the first of each name is what the others are measured by."""
    bound = TIMES * ratio
    full = {
        (None, "recompute"): "full caches",
        (None, "keep"): "full caches, kept",
        (bound, "recompute"): f"full caches, bound {bound}",
    }
    return [
        ("fast steps", configured(ratio, None, steps)),
        (f"fast steps, bound {bound}", configured(ratio, None, steps, max_token_age=bound)),
        *(
            (
                name,
                workload(
                    "rlvr_long",
                    run={"steps": steps * 2 // 5},
                    rollout={"swap": swap},
                    train={"batch_size": 128, "async_ratio": ratio, "max_token_age": limit},
                    simulate={"gpus": 4, "rollout_gpus": 3},
                ),
            )
            for (limit, swap), name in full.items()
        ),
    ]


def measure(args: Args) -> list[Row]:
    """Rows per async ratio and workload."""
    rows: list[Row] = []
    for ratio in (2,) if args.quick else RATIOS:
        before: dict[str, float] = {}
        for name, config in configurations(ratio, STEPS):
            seen = Lengths()
            world, report = run_world(config, seen)
            base = before.setdefault(name.partition(",")[0], report.samples_per_s)
            goals = ratio == 2 and name.startswith("fast steps, bound")
            rows += described(f"α = {ratio}, {name}", world, report, seen.lengths, base, goals=goals)
    return rows


def described(
    case: str, world: World, report: SimReport, samples: Sequence[tuple[int, int]], base: float, *, goals: bool
) -> list[Row]:
    """The rows of one run, whose speed is compared with samples per second."""
    generated, ages = report.generated_tokens, report.ages
    recomputed = sum(engine.recomputed for engine in world.engines)
    mean_age = sum(age * tokens for age, tokens in ages.items()) / report.trained_tokens
    return [
        Row(case, "speed", "share", report.samples_per_s / base, goal=GOAL_SPEED if goals else None),
        Row(case, "trained", "share", report.trained_tokens / generated, goal=GOAL_TRAINED if goals else None),
        *(Row(case, f"trained, {name}", "share", share) for name, share in by_length(samples)),
        Row(case, "recomputed", "per generated token", recomputed / generated),
        Row(case, "oldest", "versions", max(ages)),
        Row(case, "mean_age", "versions", mean_age),
    ]


def by_length(samples: Sequence[tuple[int, int]]) -> list[tuple[str, float]]:
    """The trained share of the tokens of each part, by the lengths of its samples."""
    ordered, shares = sorted(samples), list[tuple[str, float]]()
    for name, low, high in PARTS_AND_TAIL:
        part = ordered[math.floor(low * len(ordered)) : math.ceil(high * len(ordered))]
        shares.append((name, sum(trained for _, trained in part) / sum(tokens for tokens, _ in part)))
    return shares


if __name__ == "__main__":
    main("long_answers", __doc__ or "", measure)
