"""Results of the calls from Python: a run with its curve, and an evaluation with its episodes.

`flash.train` and `flash.sft` return a `RunResult`, and `flash.evaluate` returns an `EvaluationResult`. Both are read
from files that the command has written, so they need no torch. A notebook shows a run as a drawing in SVG.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from flash.errors import RunDirectoryError
from flash.observe.console import best_of_lines, environment_lines, evaluation_line
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.samples import Sample
from flash.observe.rundir.summary import Row, Summary, by_step, number
from flash.observe.stats import BestOf, Interval

WIDTH, HEIGHT = 640, 260
"""Size of the drawing of a run, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 14, 34
"""Margins of the drawing, in pixels, which hold the numbers of the axes."""
LINE, DOT = "#4c72b0", "#dd8452"
"""Colours of the trained samples and of the evaluations. Both are visible on a light and on a dark background."""
BLOCKS = "▁▂▃▄▅▆▇█"
"""Characters for the curve in a terminal, from the lowest value to the highest."""
LONGEST_BAR = 40
"""Largest number of such characters. Each then stands for the mean of several steps."""


class EvaluationPoint(msgspec.Struct, frozen=True):
    """An evaluation of a run on held-out problems, which are never trained."""

    step: int
    """Step before which it was made."""
    mean: float
    """Mean reward; in `flash.sft` the mean loss of a token."""
    low: float | None
    """Lower end of the 95 % interval of the mean reward; None if it was not measured, as in `flash.sft`."""
    high: float | None
    """Upper end of this interval."""

    def __str__(self) -> str:
        """Return the evaluation as text, such as `0.744 (0.693 to 0.788) at step 30`."""
        interval = "" if self.low is None or self.high is None else f" ({self.low:.3f} to {self.high:.3f})"
        return f"{self.mean:.3f}{interval} at step {self.step}"


class RunResult(Summary, frozen=True, kw_only=True):
    """A run that has ended: its summary, its folder and its curve."""

    run_dir: Path
    """Folder of the run. Its folder `model` has the trained model if all steps were trained."""
    evaluations: list[EvaluationPoint]
    """Evaluations on held-out problems in the order of their steps; empty if there was none."""
    curve_steps: list[int]
    """Steps of `curve`, from 0."""
    curve: list[float]
    """Mean reward of the samples that each step has trained; in `flash.sft` the mean loss of a token."""
    measure: Literal["reward", "loss"]
    """Name of the numbers in `curve`."""

    def __repr__(self) -> str:
        """Return the main results as a table of few lines. Mean rewards are called accuracy if all are 0 or 1."""
        name = self.measure
        rows = [("run", str(self.run_dir)), ("steps", str(self.steps))]
        if self.evaluations:
            first, last = self.evaluations[0], self.evaluations[-1]
            held_out = "accuracy" if self.binary else f"held-out {name}"
            rows.append((held_out, str(last) if first is last else f"{first} → {last}"))
        if self.curve:
            rows.append((name, f"{self.curve[0]:.3f} → {self.curve[-1]:.3f}  {_bar(self.curve)}"))
        rows.append(("time", f"{self.wall_seconds:.0f} s, {self.trained_tokens} tokens trained"))
        width = max(len(title) for title, _ in rows)
        return "\n".join(f"{title.ljust(width)}  {text}" for title, text in rows)

    def _repr_html_(self) -> str:
        """Return the curve as a drawing, and below it the table. IPython calls this to show a result in a notebook."""
        return f"<div>{_drawing(self)}<pre>{html.escape(repr(self))}</pre></div>"


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of a model on held-out problems."""

    mean: float | None
    """Mean reward of all answers; None if all episodes have failed."""
    low: float | None
    """Lower end of the 95 % interval of the mean reward over problems; None if there is only one problem."""
    high: float | None
    """Upper end of this interval."""
    problems: int
    """Number of problems."""
    failed: int
    """Number of answers that are in no figure, because their episodes have failed in all attempts."""
    best_of: dict[int, Interval]
    """Mean reward of the best of k answers with its interval, by k. It is pass@k if every reward is 0 or 1."""
    row: dict[str, Any]
    """All numbers of the evaluation, under the names of `evals.jsonl`. `env/NAME` is a metric of the environment."""
    episodes: list[Sample]
    """Episodes with their texts and rewards, in the order of the problems."""

    def __repr__(self) -> str:
        """Return the result as the lines that `flash eval` prints."""
        found = [BestOf(k, interval) for k, interval in self.best_of.items()]
        best = best_of_lines(found, binary=self.row.get("binary") == 1) if len(found) > 1 else []
        return "\n".join([evaluation_line(self.row), *best, *environment_lines(self.row)])


def read_run(run_dir: Path) -> RunResult:
    """Return the result of a run from its folder.

    Raises:
        RunDirectoryError: a file cannot be read, for example because the run has no summary.
    """
    directory = RunDirectory(run_dir)
    try:
        summary = msgspec.json.decode(directory.summary.read_bytes(), type=Summary)
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirectoryError(f"cannot read {directory.summary}, the result of the run: {error}") from error
    evaluations = [point for row in by_step(directory.read_evaluations()) if (point := _point(row)) is not None]
    rows = by_step(directory.read_metrics())
    # A row of `flash.sft` has no reward, but `nll`, the mean negative log-likelihood of a token.
    supervised = any("nll" in row for row in rows) and not any("reward_mean" in row for row in rows)
    column = "nll" if supervised else "reward_mean"
    curve = [(int(row["step"]), value) for row in rows if (value := number(row, column)) is not None]
    return RunResult(
        **{field: getattr(summary, field) for field in Summary.__struct_fields__},
        run_dir=run_dir,
        evaluations=evaluations,
        curve_steps=[step for step, _ in curve],
        curve=[value for _, value in curve],
        measure="loss" if supervised else "reward",
    )


def read_evaluation(result: Path, transcripts: Path) -> EvaluationResult:
    """Return an evaluation from the files of `flash eval`: `--json` (`result`) and `--transcripts`.

    The command has written both files completely, so damaged ones are no case here.
    """
    row: dict[str, Any] = msgspec.json.decode(result.read_bytes())
    best_of = {int(one["k"]): Interval(one["mean"], one["low"], one["high"]) for one in row.pop("best_of")}
    return EvaluationResult(
        mean=number(row, "mean_reward"),
        low=number(row, "low"),
        high=number(row, "high"),
        problems=int(row["problems"]),
        failed=int(number(row, "missing") or 0),
        best_of=best_of,
        row=row,
        episodes=[msgspec.json.decode(line, type=Sample) for line in transcripts.read_bytes().splitlines()],
    )


def _point(row: Row) -> EvaluationPoint | None:
    """Return a row of evals.jsonl as a point of the curve; None if it has no result, as if all episodes have failed."""
    mean = number(row, "mean_reward")
    mean = number(row, "held_out_nll") if mean is None else mean
    return None if mean is None else EvaluationPoint(int(row["step"]), mean, number(row, "low"), number(row, "high"))


def _bar(values: Sequence[float]) -> str:
    """Return a curve as a line of at most `LONGEST_BAR` block characters. `values` is not empty."""
    size = -(-len(values) // LONGEST_BAR)  # number of values for each character, rounded up
    means = [sum(part) / len(part) for at in range(0, len(values), size) if (part := values[at : at + size])]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in means)


def _drawing(run: RunResult) -> str:
    """Return the curve of a run in SVG: a line of the trained samples, and a dot with its interval per evaluation.

    Empty if the run has neither a trained step nor an evaluation.
    """
    points = run.evaluations
    ends = [end for point in points for end in (point.low, point.high) if end is not None]
    values = [*run.curve, *(point.mean for point in points), *ends]
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:  # `y` divides by the difference
        low, high = low - 0.5, high + 0.5
    last = max((*run.curve_steps, *(point.step for point in points), 1))

    def x(step: float) -> float:
        """Return the position of a step from the left, in pixels."""
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(value: float) -> float:
        """Return the position of a value from the top, in pixels."""
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts: list[str] = []
    for value in (low, (low + high) / 2, high):
        at = y(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    under = f'y="{HEIGHT - BOTTOM + 16}" text-anchor="middle"'
    parts += [f'<text x="{x(step):.1f}" {under}>{step}</text>' for step in dict.fromkeys((0, last // 2, last))]
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(run.curve_steps, run.curve, strict=True))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    for point in points:
        if point.low is not None and point.high is not None:
            ends_y = f'y1="{y(point.low):.1f}" y2="{y(point.high):.1f}"'
            parts.append(f'<line x1="{x(point.step):.1f}" x2="{x(point.step):.1f}" {ends_y} stroke="{DOT}"/>')
        title = f"<title>{html.escape(str(point))}</title>"
        parts.append(f'<circle cx="{x(point.step):.1f}" cy="{y(point.mean):.1f}" r="4" fill="{DOT}">{title}</circle>')
    legend = f'<tspan fill="{LINE}">{run.measure} of trained samples</tspan>  <tspan fill="{DOT}">held out</tspan>'
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 4}" xml:space="preserve">{legend}</text>')
    style = 'font-family="sans-serif" font-size="12" fill="currentColor"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {style}>{"".join(parts)}</svg>'
