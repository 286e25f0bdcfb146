"""Mean lengths of trained samples: batches of the first complete groups favour short answers, `rollout.fifo_window`
does not.

In the simulation, answers are lognormal with a deviation above their mean. Batches have 128 samples in groups of 8. Two
engines run four batches at once, so samples end in an order that is far from the order of issue. The trainer is as fast
as the engines. For each async ratio and window there are these rows: the mean length of a trained sample over that of
an issued one, in the first steps of a run and over a long run; the throughput as a share of the throughput without a
window; and the share of generated tokens that were trained. A window of 1 batch is strict order of issue.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import TWO_ENGINES, configure, decode_s
from flash.config.tree import Config
from flash.simulate.world import simulate

MEAN, DEVIATION = 400, 500
"""Tokens."""
BATCH, PLACES = 128, 256
"""Samples of a batch, and places of an engine."""
FIRST = 4
"""Number of steps that count as a run's first."""
CASES = ((2, (None, 2.0, 1.0)), (8, (None, 4.0, 2.0, 1.0)))
"""Async ratio, and windows in batches."""


def configured(async_ratio: float, window: float | None, steps: int) -> Config:
    """Configure a run with a window in batches, None for any order."""
    return configure(
        run={"name": "length_bias", "steps": steps},
        rollout={"group_size": 8, "fifo_window": window},
        train={"batch_size": BATCH, "async_ratio": async_ratio},
        engine={"max_sequences": PLACES},
        simulate=TWO_ENGINES
        | {
            "train_step_s": decode_s(BATCH, MEAN, PLACES),
            "response_tokens": {"kind": "lognormal", "mean": MEAN, "deviation": DEVIATION, "low": 1},
        },
    )


def measure(args: Args) -> list[Row]:
    """Simulate each async ratio and window."""
    steps = 20 if args.quick else 60
    rows: list[Row] = []
    for ratio, windows in CASES:
        free = simulate(configured(ratio, None, steps))
        for window in windows:
            case = f"α = {ratio}, " + ("any order" if window is None else f"window {window:g}")
            first, whole = (simulate(configured(ratio, window, count)) for count in (FIRST, steps))
            used = 1 - whole.ledger["discarded_tokens"] / whole.ledger["generated_tokens"]
            rows += [
                Row(case, f"length_in_{FIRST}_steps", "share", first.mean_trained_length / free.mean_issued_length),
                Row(case, f"length_in_{steps}_steps", "share", whole.mean_trained_length / free.mean_issued_length),
                Row(case, "throughput_of_any_order", "share", whole.samples_per_s / free.samples_per_s),
                Row(case, "tokens_used", "share", used),
            ]
    return rows


if __name__ == "__main__":
    main("length_bias", __doc__ or "", measure)
