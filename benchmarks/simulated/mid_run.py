"""Throughput between a quarter and seven eighths of a run, against the bound on capacity.

Long-tailed answers (mean 11k tokens, cut at 32k), three of four GPUs with engines of 400k tokens of KV cache each;
batches of 32 samples per GPU. Beginning and drain, which short runs consist of, do not count. `engines` has a trainer
four times as fast, so that the engines alone set the pace, and what counts is how full their caches are.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import capacity_s, run_world, workload

GOALS = {4: 0.95, 128: 0.92}
FAST_TRAINER = {"train_token_s": 5e-5}


def measure(args: Args) -> list[Row]:
    """A row or two for each size and async ratio."""
    rows = case(4, 4, "engines", 12 if args.quick else 24)
    if args.quick:
        return rows
    for gpus, ratio in ((4, 1), (4, 2), (4, 4), (16, 2)):
        rows += case(gpus, ratio, "balanced", 24)
    return rows


def case(gpus: int, ratio: int, limit: str, steps: int) -> list[Row]:
    """One run."""
    batch = 32 * gpus
    config = workload(
        "rlvr_long",
        run={"steps": steps},
        train={"batch_size": batch, "async_ratio": ratio},
        simulate={"gpus": gpus, "rollout_gpus": gpus * 3 // 4} | (FAST_TRAINER if limit == "engines" else {}),
    )
    world, report = run_world(config)
    first, last = report.rows[steps // 4], report.rows[steps * 7 // 8]
    rate = (last["step"] - first["step"]) * batch / (last["time"] - first["time"])
    preemptions = sum(engine.pressure.preemptions for engine in world.engines)
    name = f"{gpus} GPUs, async ratio {ratio}, {limit}"
    return [
        Row(name, "efficiency", "share", rate * capacity_s(config, report) / batch, goal=GOALS.get(gpus)),
        Row(name, "preemptions", "per sample", preemptions / report.samples),
        Row(name, "stale_share", "share", report.stale_share),
    ]


if __name__ == "__main__":
    main("mid_run", __doc__ or "", measure)
