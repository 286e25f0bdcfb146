"""Errors of `flash simulate` on real runs on two cores, with constants fitted by `flash calibrate`.

An asynchronous run of RL on two-digit sums is measured, with the engine on core 0 and the trainer on core 1. The
constants fitted to it predict that run itself, and two that the fit has not seen: synchronous training, and
asynchronous training with batches of half the size. Errors are of the step time, without the first step.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.real.async_vs_sync import WORKLOAD
from benchmarks.training import PINNED, run
from flash.cli.simulate import predicted_step_s
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.summary import by_step
from flash.simulate.calibrate import calibrate, measured_step_s

RUNS = {
    "async, the run fitted to": ["train.async_ratio=1"],
    "sync": ["train.async_ratio=0", "rollout.seeded=false"],
    "async, half the batch": ["train.async_ratio=1", "train.batch_size=128"],
}
"""Overrides of each run. The constants are fitted to the first one."""
GOAL = 0.1
"""Largest error of a prediction."""


def predict(args: Args) -> list[Row]:
    """Measure the runs, fit constants to the first, and predict all of them."""
    steps = f"run.steps={10 if args.quick else 30}"
    folders = {
        case: run(WORKLOAD, f"bench-calibration-{number}", [*PINNED, steps, *overrides])
        for number, (case, overrides) in enumerate(RUNS.items())
    }
    first = next(iter(folders.values()))
    fitted = calibrate(first)
    table = first / "fitted.toml"
    table.write_text(fitted.toml())
    rows: list[Row] = []
    for case, folder in folders.items():
        measured = measured_step_s(by_step(RunDirectory(folder).read_metrics()))
        simulated = float(predicted_step_s(folder / "config.toml", table).mean())
        rows += [
            Row(case, "step_s", "s", simulated, measured),
            Row(case, "relative_error", "share", abs(simulated / measured - 1), at_most=GOAL),
        ]
    for part in fitted.parts:
        rows.append(Row(f"fit: {part.name}", "residual_error", "share", part.residual, None))
        rows += [Row(f"fit: {part.name}", name, "s", value, None) for name, value in part.constants.items()]
    return rows


if __name__ == "__main__":
    main("calibration", __doc__ or "", predict)
