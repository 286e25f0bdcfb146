"""Throughput from 16 to 128 GPUs, for long-tailed and for short answers, in a simulation.

The batch is the same at every size, so a larger machine has less work per GPU and the same longest answer. The share of
engines is the same, too. `scaling` is the throughput at 128 GPUs divided by that at 16; 8 is the limit. At α = 2 the
longest answers do not fit into three steps of 128 GPUs. The rows with α = 4 give them five steps.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import capacity_s, ours, workload
from benchmarks.simulated.figure import LARGEST_ERROR, lines
from benchmarks.simulated.peers.roll_flash import Rules, roll_flash
from benchmarks.simulated.peers.synchronous import Rules as Baseline
from benchmarks.simulated.peers.synchronous import synchronous

PUBLISHED = 7.6
"""Scaling from 16 to 128 GPUs in the paper of ROLL Flash, for long answers."""
GOAL = 7.9
"""Goal of the scaling for long answers; 8 is the limit."""
SHARES = {"long": 0.75, "short": 0.5625}
"""Share of the GPUs that serve engines."""
SIZES = (16, 32, 64, 128)
"""Numbers of GPUs."""
ENDS = (16, 128)
"""Numbers of GPUs of a short comparison."""


def measure(args: Args) -> list[Row]:
    """Return throughput by size and the scaling, for each workload and async ratio."""
    sizes = ENDS if args.quick else SIZES
    rows = [*scale("long", 2, sizes, args.quick), *scale("short", 2, ENDS, args.quick)]
    return rows if args.quick else [*rows, *scale("long", 4, ENDS, args.quick)]


def scale(kind: str, ratio: int, sizes: tuple[int, ...], quick: bool) -> list[Row]:
    """Simulate one workload at one async ratio on each number of GPUs.

    Returns a row with the throughput of each size, and a row with the scaling from the first size to the last. `kind`
    is `long` or `short`, the lengths of answers.
    """
    label = kind if ratio == 2 else f"{kind}, async ratio {ratio}"
    rows: list[Row] = []
    # Samples per second on each number of GPUs: of ROLL Flash's rules, under the bound, and of synchronous training.
    peers: list[float] = []
    bounds: list[float] = []
    sync: list[float] = []
    for gpus in sizes:
        config = workload(
            f"rlvr_{kind}",
            run={"steps": 4 if quick else 5 + ratio},
            train={"batch_size": 1024 if quick else 4096, "async_ratio": ratio},
            simulate={"gpus": gpus, "rollout_gpus": round(SHARES[kind] * gpus)},
        )
        report = ours(config)
        peers.append(roll_flash(config, Rules(async_ratio=ratio)).samples_per_s)
        bounds.append(config.train.batch_size / capacity_s(config, report))
        case, speed = f"{gpus} GPUs, {label}", report.samples_per_s
        rows.append(Row(case, "samples_per_s", "samples/s", speed, peer=peers[-1], bound=bounds[-1]))
        if ratio == 2:
            sync.append(synchronous(config, Baseline(env_async=True)).samples_per_s)
    case, scaling = f"16 to 128 GPUs, {label}", rows[-1].ours / rows[0].ours
    peer, bound = peers[-1] / peers[0], bounds[-1] / bounds[0]
    published, goal = (PUBLISHED, GOAL) if kind == "long" else (None, None)
    rows.append(Row(case, "scaling", "x", scaling, published, at_least=goal, peer=peer, bound=bound))
    if published is not None and ratio == 2:
        rows.append(Row(case, "reproduction_error", "share", abs(peer / published - 1), at_most=LARGEST_ERROR))
    if sync:
        rows.append(Row(f"{case}, synchronous", "scaling", "x", sync[-1] / sync[0]))
    return rows


if __name__ == "__main__":
    main("scaling", __doc__ or "", measure, plot=lines("Throughput by size", "GPUs", "samples/s", "samples_per_s"))
