"""Wall-clock speed of asynchronous over synchronous training, on two cores that stand for two devices.

All runs go through `flash train` with the same seed, environment, batch and number of samples. The node loop with its
engine is pinned to core 0 and the trainer to core 1. First the script lengthens the prompts until a synchronous step
trains about as long as it generates. Time runs from the end of the first evaluation, when rollouts begin, to the last
committed step. The tiny model has learned little more than the form of an answer, since only speed is compared.

The bound of a speed-up is (generation + training) / max(generation, training), from the synchronous run: no schedule of
the same work on these two cores is faster.
"""

from __future__ import annotations

from benchmarks.form import WORKLOADS, Args, Row, main
from benchmarks.real.compare import ALPHA_0
from benchmarks.training import PINNED, Measured, speed_rows, train

WORKLOAD = WORKLOADS / "async_vs_sync.toml"
"""Configuration of all runs."""
GOALS = {"α = 0, streamed": 1.5, "α = 1": 1.6}
"""Goals of the speed-ups over the synchronous run, by the case. The limit at equal halves is 2."""
MODES = {
    "α = 0": ALPHA_0,
    "α = 0, streamed": [*ALPHA_0, "train.stream=true"],
    "α = 1": ["train.async_ratio=1"],
    "α = 1, streamed": ["train.async_ratio=1", "train.stream=true"],
}
"""Overrides of each run. The first one is the baseline."""

FIRST_PADDING, MOST_PADDING, MOST_TRIES = 64, 200, 4
"""Padding of the prompts that is tried first, and the largest one that fits, in tokens; largest number of tries."""
BALANCE = 0.1
"""Largest relative difference of generation and training that counts as balanced."""
PROBE_STEPS = 8
"""Number of steps of a run that only measures the two halves; the first ones are slower, and do not count."""


def compare(args: Args) -> list[Row]:
    """Find the length of prompts, make all runs, and return their rows."""
    prompts, tried = balanced(args)
    size = [*prompts, f"run.steps={8 if args.quick else 30}"]
    runs = {
        case: train(WORKLOAD, f"bench-async-{number}", [*PINNED, *size, *overrides])
        for number, (case, overrides) in enumerate(MODES.items())
    }
    baseline = runs["α = 0"]
    generation, training = halves(baseline)
    bound = (generation + training) / max(generation, training)
    rows = [
        Row(f"{case} over α = 0", "speedup", "x", baseline.seconds / run.seconds, at_least=GOALS.get(case), bound=bound)
        for case, run in runs.items()
        if run is not baseline
    ]
    rows += [
        Row(f"{padding} tokens of padding", "training_over_generation", "ratio", ratio)
        for padding, ratio in tried.items()
    ]
    for case, run in runs.items():
        rows += [
            *speed_rows(case, [run]),
            Row(case, "mean_age", "versions", run.mean("age_mean")),
            Row(case, "trainer_wait_s_per_step", "s", run.mean("trainer_wait_s")),
        ]
    return rows


def balanced(args: Args) -> tuple[list[str], dict[int, float]]:
    """Return the overrides of the prompts with which the two halves of a synchronous step are most equal.

    Also returns training ÷ generation by the numbers of tokens that were tried. `PaddedArithmetic` says why longer
    prompts make training heavier. A short form of the benchmark tries one number.
    """
    tried: dict[int, float] = {}
    padding = FIRST_PADDING
    while padding not in tried and len(tried) < (1 if args.quick else MOST_TRIES):
        probe = [*PINNED, *ALPHA_0, *_padding(padding), f"run.steps={PROBE_STEPS}"]
        generation, training = halves(train(WORKLOAD, "bench-async-probe", probe))
        tried[padding] = training / generation
        if abs(tried[padding] - 1) <= BALANCE:
            break
        # Both halves grow with the prompts, so the ratio grows less than the tokens of a sample do.
        padding = min(MOST_PADDING, max(0, round((padding + 10) / tried[padding] ** 2) - 10))
    best = min(tried, key=lambda padding: abs(tried[padding] - 1))
    return _padding(best), tried


def halves(run: Measured) -> tuple[float, float]:
    """Return the seconds that a synchronous step waits for samples and that it trains; the first steps do not count."""
    settled = slice(2, None)
    return run.mean("trainer_wait_s", settled), run.mean("trainer_step_s", settled)


def _padding(padding: int) -> list[str]:
    """Return the overrides of prompts with so much padding. Each number has a model of its own, which is made once."""
    return [f"env.options.padding={padding}", f"model.path=outputs/models/bench-padded-{padding}"]


if __name__ == "__main__":
    main("async_vs_sync", __doc__ or "", compare)
