"""Stragglers: 1 % of the samples are 40 times longer than the others, async ratio 2, in the three `on_expire` modes.

Simulated: two engines of 64 places, batches of 256 samples in groups of 8, a trainer as fast as the engines. A long
sample takes as long as 14 steps would without them. For each mode: the age of the oldest trained token, the share of
the long samples that were trained (a masked one counts where at least one of its tokens was), the share of the
generated tokens that were trained, and the throughput as a share of the same run without stragglers and of one in
which every sample has the mean length, which is the same work spread evenly.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import TWO_ENGINES, configure, decode_s, run_world
from flash.simulate.report import SimReport

SHORT, LONG = 200, 8000
"""Tokens."""
MEAN = (99 * SHORT + LONG) / 100
BATCH, PLACES = 256, 64
ALPHA = 2


def run(tokens: str, on_expire: str, steps: int) -> tuple[SimReport, float]:
    """One simulated run, and the share of its long samples that were trained."""
    config = configure(
        run={"name": "stragglers", "steps": steps},
        rollout={"group_size": 8, "on_expire": on_expire},
        train={"batch_size": BATCH, "async_ratio": ALPHA},
        engine={"max_sequences": PLACES},
        simulate=TWO_ENGINES | {"train_step_s": decode_s(BATCH, MEAN, PLACES), "response_tokens": tokens},
    )
    world, report = run_world(config)
    issued = world.issued_lengths()[LONG]
    return report, world.trainer.lengths[LONG] / issued if issued else 0.0


def measure(args: Args) -> list[Row]:
    """For each mode of `on_expire` ages, shares and throughputs."""
    steps = 20 if args.quick else 100
    mixed = f"values({', '.join([str(SHORT)] * 99)}, {LONG})"
    rows: list[Row] = []
    for mode in ("mask", "requeue", "wait"):
        without, _ = run(f"constant({SHORT})", mode, steps)
        spread_out, _ = run(f"constant({MEAN:.0f})", mode, steps)
        report, long_trained = run(mixed, mode, steps)
        ledger = report.ledger
        kept = report.samples_per_s / without.samples_per_s
        even = report.samples_per_s / spread_out.samples_per_s
        young = sum(tokens for age, tokens in report.ages.items() if age <= ALPHA) / report.trained_tokens
        used = 1 - ledger["discarded_tokens"] / ledger["generated_tokens"]
        rows += [
            Row(mode, "oldest_trained_token", "versions", max(report.ages)),
            Row(mode, "trained_tokens_within_ratio", "share", young, goal=1.0),
            Row(mode, "long_samples_trained", "share", long_trained, goal=0.9 if mode == "mask" else None),
            Row(mode, "tokens_used", "share", used),
            Row(mode, "throughput_of_no_stragglers", "share", kept),
            Row(mode, "throughput_of_even_work", "share", even),
        ]
    return rows


if __name__ == "__main__":
    main("stragglers", __doc__ or "", measure)
