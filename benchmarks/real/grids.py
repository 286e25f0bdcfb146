"""A tiny model learns a grid game on two cores: directly, and through an agent of the official `openai` client.

The runs are those of examples/frozen_lake.toml and examples/agent_frozen_lake.toml, one after the other, with the same
lakes, model and settings. Accuracy is on held-out lakes, none of whose positions is met in training, with its 95 %
interval. `clear_gain` is how far the interval of the last evaluation lies above the first one, and `gain_in_time` the
same of the last one that ended within 15 minutes; `same_accuracy` is 1 where the last intervals of both runs overlap.
Time runs from the end of the first evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.form import ROOT, Args, Row, main
from benchmarks.training import Measured, train
from flash.observe.plots import BLUE, INK, ORANGE, new_figure, outside_legend, plain_axes, png, run_times

EXAMPLES = {"directly": "frozen_lake", "through an agent": "agent_frozen_lake"}
"""The example of each case."""
COLOURS = dict(zip(EXAMPLES, (BLUE, ORANGE), strict=True))
LIMIT_S = 900.0
"""Goal: the time until a run has clearly learned."""
QUICK = ["run.steps=4", "eval.problems=64", "tiny_model.warm_start_steps=20", "model.path=outputs/models/quick-lake"]
POINT = re.compile(r"(.*), step (\d+)")
"""The case of a row that belongs to one evaluation."""


def run(args: Args) -> list[Row]:
    """Both runs, one after the other."""
    runs = {
        case: train(ROOT / "examples" / f"{name}.toml", f"bench-{name}", QUICK if args.quick else [])
        for case, name in EXAMPLES.items()
    }
    return [*(row for case, measured in runs.items() for row in curve(case, measured)), *verdict(runs)]


def curve(case: str, run: Measured) -> list[Row]:
    """Every evaluation of a run."""
    rows: list[Row] = []
    for one, seconds in zip(run.evals, run_times(run.metrics, run.evals)[1], strict=True):
        name = f"{case}, step {one['step']:.0f}"
        told = {"accuracy": one["mean_reward"], "accuracy_low": one["low"], "accuracy_high": one["high"]}
        rows += [Row(name, metric, "share", float(value)) for metric, value in told.items()]
        rows.append(Row(name, "after_s", "s", float(seconds)))
    return rows


def verdict(runs: dict[str, Measured]) -> list[Row]:
    """Whether each run has learned, in time, and whether they agree."""
    rows: list[Row] = []
    for case, measured in runs.items():
        first, last = measured.evals[0], measured.evals[-1]
        times = run_times(measured.metrics, measured.evals)[1]
        *_, in_time = (one for one, seconds in zip(measured.evals, times, strict=True) if seconds <= LIMIT_S)
        rows += [
            Row(case, "gain_in_time", "share", in_time["low"] - first["high"], goal=0.0),
            Row(case, "clear_gain", "share", last["low"] - first["high"], goal=0.0),
            Row(case, "run_s", "s", float(times[-1])),
        ]
    low, high = max(run.evals[-1]["low"] for run in runs.values()), min(run.evals[-1]["high"] for run in runs.values())
    return [*rows, Row("both", "same_accuracy", "0 or 1", float(low <= high), goal=1.0)]


def draw(rows: Sequence[Row], file: Path) -> None:
    """Accuracy over steps on the left and over time on the right, a line for each run in the band of its intervals."""
    points: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        if found := POINT.fullmatch(row.case):
            points.setdefault(found[1], {}).setdefault(int(found[2]), {})[row.metric] = row.ours
    figure = new_figure(3.4)
    left, right = plain_axes(figure, 1, 2, sharey=True)
    for case, evals in points.items():
        steps, colour = sorted(evals), COLOURS[case]
        accuracy, low, high, after_s = (
            np.array([evals[step][metric] for step in steps])
            for metric in ("accuracy", "accuracy_low", "accuracy_high", "after_s")
        )
        for axes, across in ((left, np.array(steps)), (right, after_s / 60)):
            axes.fill_between(across, low, high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(across, accuracy, color=colour, linewidth=2, marker="o", markersize=4.5, label=case)
    left.set_xlabel("step")
    left.set_ylabel("held-out lakes crossed", color=INK)
    left.set_ylim(0, 1)
    right.set_xlabel("minutes")
    outside_legend(figure, *left.get_legend_handles_labels())
    file.write_bytes(png(figure))


if __name__ == "__main__":
    main("grids", __doc__ or "", run, plot=draw)
