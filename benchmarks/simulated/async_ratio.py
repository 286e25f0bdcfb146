"""Throughput and age by async ratio, at 40 GPUs, in a simulation.

The peer's column has the figures of ROLL Flash's rules. Rows named *streamed* train each batch while it is still
sampled (`train.stream`). Rows named AReaL have the figures of AReaL's rules: its admission bounds the average age, and
no age is checked when a sample is trained. If 1 % of the answers are forty times longer, its oldest token is far older
than η. `gain_at_2` is the share of the gain from α = 0 to 8 that α = 2 already has; according to the paper it is nearly
all.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import capacity_s, change, ours, workload
from benchmarks.simulated.figure import lines
from benchmarks.simulated.peers.areal import Rules as Areal
from benchmarks.simulated.peers.areal import areal
from benchmarks.simulated.peers.roll_flash import Rules, roll_flash
from benchmarks.simulated.peers.world import PeerReport
from flash.simulate.report import SimReport

STRAGGLERS = [*[400] * 99, 16000]
"""Lengths of answers in tokens: 1 % are forty times longer."""


def measure(args: Args) -> list[Row]:
    """Return throughput by α, then ages under stragglers. `benchmarks.form.main` calls this."""
    batch, steps = (512, 5) if args.quick else (1024, 16)
    base = workload(
        "rlvr_long", run={"steps": steps}, train={"batch_size": batch}, simulate={"gpus": 40, "rollout_gpus": 28}
    )
    rows: list[Row] = []
    own: dict[int, float] = {}  # our samples per second, by α
    for ratio in (0, 2, 8) if args.quick else (0, 1, 2, 4, 8):
        config = change(base, train={"async_ratio": ratio})
        report = ours(config)
        peer = roll_flash(config, Rules(async_ratio=ratio))
        other = areal(config, Areal(eta=ratio))
        own[ratio] = report.samples_per_s
        bound = batch / capacity_s(config, report)
        streamed = ours(change(config, train={"stream": True})).samples_per_s
        rows += [
            Row(f"{ratio}", "samples_per_s", "samples/s", own[ratio], peer=peer.samples_per_s, bound=bound),
            Row(f"{ratio}, streamed", "streamed_samples_per_s", "samples/s", streamed, bound=bound),
            *areal_rows(f"{ratio}, AReaL", report, other),
        ]
    gain = (own[2] - own[0]) / (own[8] - own[0])
    rows.append(Row("2 of 8", "gain_at_2", "share", gain, at_least=0.9))
    return [*rows, *stragglers(args)]


def stragglers(args: Args) -> list[Row]:
    """Simulate a run at α = η = 2 in which 1 % of the answers are forty times longer, and return its rows.

    They show that AReaL trains tokens that are far older than η, because it checks no age at training.
    """
    config = workload(
        "rlvr_long",
        run={"steps": 30 if args.quick else 80},
        train={"batch_size": 256, "async_ratio": 2},
        simulate={"gpus": 16, "rollout_gpus": 8, "response_tokens": STRAGGLERS, "length_correlation": 0},
    )
    return areal_rows("stragglers, AReaL", ours(config), areal(config, Areal(eta=2)))


def areal_rows(case: str, report: SimReport, peer: PeerReport) -> list[Row]:
    """Return rows with the throughput and the oldest trained token of a run of ours and of a run by AReaL's rules."""
    return [
        # Not `samples_per_s`, because the plot has a point for each row of that name.
        Row(case, "areal_samples_per_s", "samples/s", report.samples_per_s, peer=peer.samples_per_s),
        Row(case, "age_versions", "versions", max(report.ages), peer=peer.oldest_age),
    ]


if __name__ == "__main__":
    main("async_ratio", __doc__ or "", measure, plot=lines("Async ratio", "α", "samples/s", "samples_per_s"))
