"""Queue scheduling with dynamic filtering, compared with whole batches that are issued until enough prompts have
passed.

All is simulated. The baseline issues whole batches and waits for all of their samples. ROLL Flash keeps as many prompts
running as a batch needs, plus the extra ones, until enough have passed; it discards the rest of the step. Flash has as
many prompts in flight as ROLL Flash starts in a step, and cancels prompts that are not needed at once.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import capacity_s, change, ours, workload
from benchmarks.simulated.figure import bars, speedup
from benchmarks.simulated.peers.roll_flash import Rules, roll_flash
from benchmarks.simulated.peers.synchronous import Rules as Baseline
from benchmarks.simulated.peers.synchronous import synchronous

CASES = ((8, 0, 58.0, 125 / 58), (8, 16, 37.0, 125 / 37), (128, 0, None, 2.5))
"""Prompts per batch, extra prompts, published seconds, published speed-up."""
BATCHES_S = 125.0
"""Published seconds of whole batches of 8×8."""


def measure(args: Args) -> list[Row]:
    """Return the baseline as both simulate it, then seconds and speed-up of each case."""
    rows: list[Row] = []
    for groups, extra, seconds, published in CASES:
        steps = (12 if args.quick else 60) if groups == 8 else (2 if args.quick else 6)
        config = workload("queue_scheduling", run={"steps": steps}, train={"batch_size": groups * 8})
        batches_s = synchronous(config, Baseline(colocated=False, env_async=True, replicate=True)).step_s
        if extra == 0:
            own_s = ours(config, barriers=["batch"]).step_s
            known = BATCHES_S if groups == 8 else None
            rows.append(Row(f"{groups}x8, whole batches", "step_s", "s", own_s, known, peer=batches_s))
        case = f"{groups}x8, {extra} extra prompts"
        config = change(config, rollout={"extra_groups": groups + extra})
        peer_s = roll_flash(config, Rules(extra_prompts=extra)).step_s
        report = ours(config)
        rows.append(Row(case, "step_s", "s", report.step_s, seconds, peer=peer_s))
        rows += speedup(case, batches_s, report.step_s, peer_s, capacity_s(config, report), published)
    return rows


if __name__ == "__main__":
    main("queue_scheduling", __doc__ or "", measure, plot=bars("Queue scheduling", "speed-up over whole batches"))
