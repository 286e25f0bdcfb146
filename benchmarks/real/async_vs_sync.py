"""Wall-clock speed of asynchronous over synchronous training, on two cores that stand for two devices.

All runs go through `flash train` with the same seed, environment, batch and number of samples. The node loop with its
engine is pinned to core 0 and the trainer to core 1. First the script widens the model until a synchronous step trains
about as long as it generates. Time runs from the end of the first evaluation, when rollouts begin, to the last
committed step.

The bound of a speed-up is (generation + training) / max(generation, training), from the synchronous run: no schedule of
the same work on these two cores is faster.
"""

from __future__ import annotations

from benchmarks.form import WORKLOADS, Args, Row, main
from benchmarks.training import PINNED, Measured, train

WORKLOAD = WORKLOADS / "async_vs_sync.toml"
"""Configuration of all runs."""
GOALS = {"α = 0, streamed": 1.5, "α = 1": 1.6}
"""Goals of the speed-ups over the synchronous run, by the case. The limit at equal halves is 2."""
SYNCHRONOUS = ["train.async_ratio=0", "rollout.seeded=false"]
"""Overrides. Seeds are off as in the asynchronous runs, because they would slow this one down."""
MODES = {
    "α = 0": SYNCHRONOUS,
    "α = 0, streamed": [*SYNCHRONOUS, "train.stream=true"],
    "α = 1": ["train.async_ratio=1"],
    "α = 1, streamed": ["train.async_ratio=1", "train.stream=true"],
}
"""Overrides of each run. The first one is the baseline."""

FIRST_WIDTH, WIDTH_STEP, MOST_WIDTHS = 128, 32, 5
"""Hidden size of the first model that is tried, the multiple that all widths are, and the largest number of tries."""
BALANCE = 0.1
"""Largest relative difference of generation and training that counts as balanced."""
PROBE_STEPS = 8
"""Number of steps of a run that only measures the two halves; the first ones are slower, and do not count."""


def compare(args: Args) -> list[Row]:
    """Find the width, make all runs, and return their rows."""
    model, tried = balanced(args)
    size = [*model, f"run.steps={8 if args.quick else 30}"]
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
    rows += [Row(f"width {width}", "training_over_generation", "ratio", ratio) for width, ratio in tried.items()]
    for case, run in runs.items():
        rows += [
            Row(case, "seconds", "s", run.seconds),
            Row(case, "final_accuracy", "share", run.summary["final_reward"]),
            Row(case, "mean_age", "versions", run.mean("age_mean")),
            Row(case, "trainer_busy_share", "share", 1 - run.summary["trainer_wait_share"]),
            Row(case, "engine_busy_share", "share", 1 - run.summary["engine_idle_share"]),
            Row(case, "trainer_wait_s_per_step", "s", run.mean("trainer_wait_s")),
            Row(case, "trainer_step_s_per_step", "s", run.mean("trainer_step_s")),
        ]
    return rows


def balanced(args: Args) -> tuple[list[str], dict[int, float]]:
    """Return the overrides of the model with which the two halves of a synchronous step are most equal.

    Also returns training ÷ generation by the widths that were tried. A wider model makes training heavier faster than
    generation, because a decoding step has few tokens and its time is mostly that of starting its operations. A short
    form of the benchmark tries one width.
    """
    tried: dict[int, float] = {}
    width = FIRST_WIDTH
    while width not in tried and len(tried) < (1 if args.quick else MOST_WIDTHS):
        run = train(WORKLOAD, "bench-async-probe", [*PINNED, *SYNCHRONOUS, *_model(width), f"run.steps={PROBE_STEPS}"])
        generation, training = halves(run)
        tried[width] = training / generation
        if abs(tried[width] - 1) <= BALANCE:
            break
        # The ratio grows about like the width.
        scaled = width * min(2.0, max(0.5, 1 / tried[width]))
        width = max(WIDTH_STEP, round(scaled / WIDTH_STEP) * WIDTH_STEP)
    best = min(tried, key=lambda width: abs(tried[width] - 1))
    return _model(best), tried


def halves(run: Measured) -> tuple[float, float]:
    """Return the seconds that a synchronous step waits for samples and that it trains; the first steps do not count."""
    settled = slice(2, None)
    return run.mean("trainer_wait_s", settled), run.mean("trainer_step_s", settled)


def _model(width: int) -> list[str]:
    """Return the overrides of a model of this width. Each width has a folder, since its weights are made once."""
    return [f"tiny_model.width={width}", f"model.path=outputs/models/bench-arithmetic-{width}"]


if __name__ == "__main__":
    main("async_vs_sync", __doc__ or "", compare)
