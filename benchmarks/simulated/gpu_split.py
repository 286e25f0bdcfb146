"""Throughput by the number of GPUs that serve engines, of 40 GPUs, at α = 2, in a simulation of long-tailed answers.

`best_rollout_gpus` compares the best split that was simulated with β*, which the published formula predicts from the
workload alone.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import capacity_s, ours, workload
from benchmarks.simulated.figure import lines
from benchmarks.simulated.peers.roll_flash import Rules, roll_flash
from flash.simulate.bounds import best_split, quantities

GPUS = 40
"""Number of GPUs of the machine."""


def measure(args: Args) -> list[Row]:
    """Return the throughput by split, and the best split."""
    batch, steps = (512, 5) if args.quick else (1024, 8)
    rows: list[Row] = []
    trainers = 0.0  # share of the GPUs that should train, by the published formula
    for serving in (20, 28, 32) if args.quick else (16, 20, 24, 28, 32, 36):
        config = workload(
            "rlvr_long",
            run={"steps": steps},
            train={"batch_size": batch},
            simulate={"gpus": GPUS, "rollout_gpus": serving},
        )
        report = ours(config)
        peer = roll_flash(config, Rules(async_ratio=config.train.async_ratio)).samples_per_s
        bound = batch / capacity_s(config, report)
        case = f"{serving} of {GPUS}"
        rows.append(Row(case, "samples_per_s", "samples/s", report.samples_per_s, peer=peer, bound=bound))
        # The prediction of each turn is nearly the same: it does not depend on the split that is simulated.
        q = quantities(config, report.ledger)
        trainers = best_split(q.samples, q.generate_all_s, q.longest_s, q.train_s, q.gpus, q.async_ratio)
    best = float(max(rows, key=lambda row: row.ours).case.split()[0])
    return [*rows, Row("best split", "best_rollout_gpus", "GPUs", best, GPUS * (1 - trainers))]


if __name__ == "__main__":
    plot = lines("Split of 40 GPUs", "GPUs that serve engines", "samples/s", "samples_per_s")
    main("gpu_split", __doc__ or "", measure, plot=plot)
