"""Throughput of simulated runs against the capacity bound min(places / mean work, trainer rate), at async ratio 2 to 4.

Random workloads: lognormal responses, two engines, a trainer of a third to three times their speed, group size 8,
batches of 64 samples. The age contract admits at least six times as many samples as there are places. Work is a
response's decoding steps and the one in which its place is filled again. Steady state: between 20 % and 80 % of the
steps; samples that were masked out entirely do not count. The lengths drawn in a run are the workload's, so their mean
varies between runs by about 1 %.
"""

from __future__ import annotations

from typing import Any

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import STEP_S, TWO_ENGINES, configure, decode_s
from flash.config.simulate import uniform
from flash.simulate.world import simulate

BATCH = 64
GOAL = 0.97


def draw(seed: int) -> dict[str, dict[str, Any]]:
    """Tables of a random configuration, the same for the same seed."""

    def between(low: float, high: float, which: int) -> float:
        return low * (high / low) ** uniform(seed, which)

    mean, places = between(150, 600, 0), round(between(4, 14, 1))
    deviation = mean * between(0.3, 1.2, 2)
    return {
        "train": {"async_ratio": 2 + int(uniform(seed, 3) * 3)},
        "engine": {"max_sequences": places, "stream_interval": 1024},
        "simulate": {
            "response_tokens": {"kind": "lognormal", "mean": round(mean), "deviation": round(deviation), "low": 1},
            "train_step_s": decode_s(BATCH, mean, places) * between(1 / 3, 3, 4),
        },
    }


def efficiency(seed: int, steps: int) -> tuple[str, float]:
    """What was run, and the share of its capacity that it reached."""
    drawn = draw(seed)
    config = configure(
        run={"name": "capacity", "steps": steps, "seed": seed},
        rollout={"group_size": 8},
        train={"batch_size": BATCH, **drawn["train"]},
        engine=drawn["engine"],
        simulate=TWO_ENGINES | drawn["simulate"],
    )
    report = simulate(config)
    first, last = report.rows[steps // 5], report.rows[steps * 4 // 5]
    rate = (last["step"] - first["step"]) * BATCH / (last["time"] - first["time"])
    kept = report.samples / (steps * BATCH)
    places, train_s = 2 * drawn["engine"]["max_sequences"], drawn["simulate"]["train_step_s"]
    slots = places / ((report.mean_issued_length + 1) * STEP_S)
    name = f"α {drawn['train']['async_ratio']}, {places} places, {drawn['simulate']['response_tokens']}"
    limit = "places" if slots < BATCH / train_s else "trainer"
    return f"{name}, limited by {limit}", rate * kept / min(slots, BATCH / train_s)


def measure(args: Args) -> list[Row]:
    """One row per workload, and the least of them."""
    runs = [efficiency(seed, 60 if args.quick else 150) for seed in range(4 if args.quick else 12)]
    rows = [Row(case, "efficiency", "share", share) for case, share in runs]
    shares = [share for _, share in runs]
    mean = sum(shares) / len(shares)
    return [
        *rows,
        Row("mean", "efficiency", "share", mean, goal=GOAL),
        Row("least", "efficiency", "share", min(shares)),
    ]


if __name__ == "__main__":
    main("capacity", __doc__ or "", measure)
