"""Synchronous training compared with ROLL Flash's techniques, added one after the other, and with Flash, in a
simulation.

RLVR has 128 GPUs and long answers. Agentic training has environments that step on their own, then asynchronous
training, then redundant environments; Flash has the same settings at each step. The baseline uses all GPUs for
generation and then for training, sends a prompt as one request, and steps its environments together. Its step takes the
sum of both phases. Quick runs have smaller batches, whose ratios differ from the published ones.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import capacity_s, change, ours, workload
from benchmarks.simulated.figure import bars, speedup
from benchmarks.simulated.peers.roll_agentic import Rules as Agentic
from benchmarks.simulated.peers.roll_agentic import roll_agentic
from benchmarks.simulated.peers.roll_flash import Rules, roll_flash
from benchmarks.simulated.peers.synchronous import Rules as Baseline
from benchmarks.simulated.peers.synchronous import synchronous
from flash.config.tree import Config

CHAINS = {"alfworld": ((1.58, 2.27, 2.72), (8, 1)), "swe": ((1.23, 1.68, 1.81), (2, 1))}
"""Published speed-ups of each technique on top of the others; extra groups and members of the last one."""


def rlvr(quick: bool) -> list[Row]:
    """Simulate the single-turn workload: synchronous, asynchronous, and asynchronous with streamed steps."""
    smaller = {"batch_size": 512} if quick else {}
    fewer = {"gpus": 16, "rollout_gpus": 12} if quick else {}
    config = workload("rlvr_long", run={"steps": 5 if quick else 7}, train=smaller, simulate=fewer)
    baseline_s = synchronous(config, Baseline(env_async=True)).step_s
    peer_s = roll_flash(config, Rules(async_ratio=config.train.async_ratio)).step_s
    report, streamed = ours(config), ours(change(config, train={"stream": True}))
    bound_s = capacity_s(config, report)
    return [
        *speedup("RLVR, async", baseline_s, report.step_s, peer_s, bound_s, None if quick else 2.24),
        Row("RLVR, async, streamed", "speedup", "x", baseline_s / streamed.step_s, bound=baseline_s / bound_s),
    ]


def agentic(name: str, quick: bool) -> list[Row]:
    """Simulate a multi-turn workload, technique by technique."""
    published, (groups, members) = CHAINS[name]
    smaller = {"batch_size": 128} if quick else {}
    config = workload(name, run={"steps": 3 if quick else 8}, train=smaller)
    ratio = config.train.async_ratio
    more = change(config, rollout={"extra_groups": groups, "extra_per_group": members})
    baseline_s = synchronous(config, Baseline()).step_s
    steps: tuple[tuple[str, Agentic, Config], ...] = (
        ("environments on their own", Agentic(colocated=True), _turns(config)),
        ("+ async training", Agentic(async_ratio=ratio), config),
        ("+ redundant envs", Agentic(async_ratio=ratio, extra_groups=groups, extra_per_group=members), more),
    )
    rows: list[Row] = []
    for (technique, rules, mine), known in zip(steps, published, strict=True):
        report = ours(mine)
        own_s = report.step_s
        bound_s = capacity_s(mine, report) if mine.train.async_ratio else None
        peer_s = roll_agentic(config, rules).step_s
        rows += speedup(f"{name}, {technique}", baseline_s, own_s, peer_s, bound_s, None if quick else known)
    return rows


def _turns(config: Config) -> Config:
    """Configure phases that take turns on all GPUs, for code that gives each phase GPUs of its own.

    The engines get all GPUs, and the trainer is as fast as all of them. At an async ratio of 0 phases never overlap.
    """
    simulate = config.simulate
    assert simulate is not None
    gpus = {
        "gpus": simulate.gpus + 1,
        "rollout_gpus": simulate.gpus,
        "train_token_s": simulate.train_token_s / simulate.gpus,
    }
    return change(config, train={"async_ratio": 0}, simulate=gpus)


def measure(args: Args) -> list[Row]:
    """Return the rows of RLVR, then of both agentic chains."""
    return [*rlvr(args.quick), *agentic("alfworld", args.quick), *agentic("swe", args.quick)]


if __name__ == "__main__":
    main("end_to_end", __doc__ or "", measure, plot=bars("End to end", "speed-up over synchronous"))
