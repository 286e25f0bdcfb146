"""Curves of accuracy over seconds, one for each run of the comparison, and the figures that follow from them.

`benchmarks.versus_trl.run` makes the curves, and computes rows and plot with this module. Curves of earlier runs are
kept in a file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.form import Row
from benchmarks.plots import new_picture, save_picture
from flash.errors import ConfigError
from flash.observe.stats import Interval, mean_interval

COLORS = ("tab:blue", "tab:orange", "tab:brown", "tab:green", "tab:gray")
"""Colors of the systems in the plot, Flash first."""


class Point(msgspec.Struct, frozen=True):
    """An evaluated version of the policy."""

    step: int
    """Number of optimizer steps."""
    seconds: float
    """Seconds from the first rollout to the end of that step."""
    accuracy: float
    """Mean reward over the held-out problems."""
    low: float
    high: float
    """Upper end of the 95 % confidence interval of `accuracy`; `low` is its lower end."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Curve of one run of a system."""

    case: str
    """Name of the workload, a key of `benchmarks.versus_trl.run.CASES`."""
    system: str
    """Name of the system, such as `Flash` or `TRL`, with its settings."""
    seed: int
    software: dict[str, str]
    """Versions of the packages, by name."""
    points: list[Point]
    """Evaluations in the order of steps, the untrained policy first."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.points[-1].step

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.points[-1].seconds / self.steps


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A workload of the comparison."""

    title: str
    """Name of the workload in the plot."""
    accuracy: float
    """Both systems are timed to this held-out accuracy."""
    goal: float
    """Goal of the speed-up over TRL with its default, which generates with the newest weights."""


def seconds_to(points: Sequence[Point], accuracy: float) -> float:
    """Return the seconds until the accuracy is first reached; NaN if it never is.

    `points` are the evaluations in the order of steps. Between two evaluations the accuracy is assumed to grow evenly.
    Otherwise the result would be a whole number of intervals between evaluations, whose length differs between the
    systems.
    """
    if points[0].accuracy >= accuracy:
        return points[0].seconds
    for before, after in itertools.pairwise(points):
        if after.accuracy >= accuracy:
            share = (accuracy - before.accuracy) / (after.accuracy - before.accuracy)
            return before.seconds + share * (after.seconds - before.seconds)
    return math.nan


def rows(case: Case, name: str, ours: Curve, others: Sequence[Curve]) -> list[Row]:
    """Compare a run of Flash with runs of other systems on the same seed, and return the rows.

    The goal is for the first of `others`. If Flash's run does not reach the accuracy, its speed-up is 0. If another
    system's run does not reach it, the whole run counts, so the speed-up is a lower bound. `name` is the name of the
    workload.

    Raises:
        ConfigError: an untrained policy already has the accuracy, so there is no time to compare.
    """
    label = name + (f", seed {ours.seed}" if ours.seed else "")
    for curve in (ours, *others):
        if (first := curve.points[0].accuracy) >= case.accuracy:
            raise ConfigError(
                f"{label}: the untrained policy of {curve.system} already has the accuracy {first:g}; expected less "
                f"than the {case.accuracy:g} to which the systems are timed: raise `accuracy` of this case in "
                "benchmarks/versus_trl/run.py"
            )
    ours_s, out = seconds_to(ours.points, case.accuracy), list[Row]()
    for number, theirs in enumerate(others):
        pair, last, their_last = f"{label}, over {theirs.system}", ours.points[-1], theirs.points[-1]
        theirs_s = seconds_to(theirs.points, case.accuracy)
        if math.isnan(theirs_s):
            theirs_s = their_last.seconds
        goal = case.goal if number == 0 else None
        # False if the accuracy after our last step is significantly below theirs after as many steps.
        same = last.high >= their_last.low
        out += [
            Row(pair, "speedup", "x", 0.0 if math.isnan(ours_s) else theirs_s / ours_s, at_least=goal),
            Row(pair, "same_quality", "0 or 1", float(same), at_least=None if goal is None else 1),
            Row(pair, "step_speedup", "x", theirs.step_s / ours.step_s),
        ]
    for curve in (ours, *others):
        end = curve.points[-1]
        figures = (
            (f"to_{case.accuracy:.0%}_s", "s", seconds_to(curve.points, case.accuracy)),
            ("run_s", "s", end.seconds),
            ("step_s", "s", curve.step_s),
            ("first_accuracy", "share", curve.points[0].accuracy),
            ("final_accuracy", "share", end.accuracy),
            ("final_accuracy_low", "share", end.low),
            ("final_accuracy_high", "share", end.high),
        )
        facts = f"{label}, {curve.system}"
        out += [Row(facts, metric, unit, value) for metric, unit, value in figures if not math.isnan(value)]
    return out


def over_seeds(name: str, rows: Sequence[Row]) -> list[Row]:
    """Return the mean speed-up of several seeds over each system, with its 95 % interval (Student's t on logarithms).

    If a run of Flash does not reach the accuracy, the mean is 0. `name` is the name of the workload, and `rows` are its
    rows from `rows`, for all seeds.
    """
    found: dict[str, list[Row]] = {}  # rows with the speed-up of each seed, by the system that it is over
    for row in rows:
        if row.metric == "speedup":
            found.setdefault(row.case.rpartition(", over ")[2], []).append(row)
    out: list[Row] = []
    for system, speedups in found.items():
        if len(speedups) < 2:
            continue
        label = f"{name}, {len(speedups)} seeds, over {system}"
        interval = Interval(-math.inf, -math.inf, -math.inf)  # logarithms of speed-ups that are 0
        if all(row.ours for row in speedups):
            interval = mean_interval([math.log(row.ours) for row in speedups])
        out += [
            Row(label, "speedup", "x", math.exp(interval.mean), at_least=speedups[0].at_least),
            Row(label, "speedup_low", "x", math.exp(interval.low)),
            Row(label, "speedup_high", "x", math.exp(interval.high)),
        ]
    return out


def read(file: Path) -> list[Curve]:
    """Return the curves of a file; none if there is no file."""
    return msgspec.json.decode(file.read_bytes(), type=list[Curve]) if file.exists() else []


def keep(file: Path, new: Sequence[Curve]) -> list[Curve]:
    """Write curves into a file, where they replace earlier ones of the same runs. Returns all curves of the file.

    A run is known by its workload, seed and system.
    """
    known = {(curve.case, curve.seed, curve.system): curve for curve in [*read(file), *new]}
    curves = [known[key] for key in sorted(known)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(curves), indent=2) + b"\n")
    return curves


def draw(curves: Sequence[Curve], cases: dict[str, Case], file: Path) -> None:
    """Draw one panel per case, and one line per run, into `file`. Cases without a curve have no panel."""
    shown = [name for name in cases if any(curve.case == name for curve in curves)]
    figure, panels = new_picture(4.2 * len(shown), 3.4, len(shown))
    colors = dict(zip(dict.fromkeys(["Flash", "TRL", *(curve.system for curve in curves)]), COLORS, strict=False))
    for axes, name in zip(panels, shown, strict=True):
        for curve in (curve for curve in curves if curve.case == name):
            seconds = [point.seconds for point in curve.points]
            color = colors[curve.system]
            label = curve.system if curve.seed == 0 else None
            axes.plot(seconds, [point.accuracy for point in curve.points], "o-", ms=3, color=color, label=label)
            low, high = [point.low for point in curve.points], [point.high for point in curve.points]
            axes.fill_between(seconds, low, high, color=color, alpha=0.15, linewidth=0)
        axes.axhline(cases[name].accuracy, color="black", lw=0.8, ls="--")
        axes.set_title(cases[name].title, fontsize=9)
        axes.set_xlabel("seconds since the first rollout", fontsize=8)
        axes.set_ylabel("held-out accuracy", fontsize=8)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False, loc="lower right")
    save_picture(figure, file)
