"""What the cells of the off-policy comparison say: seeds taken together, rows, tables, and the plot.

`python -m benchmarks.offpolicy.summary [FILE]` prints the tables of kept cells as markdown.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.form import RESULTS, Row
from benchmarks.offpolicy.cells import Method, Point, Result, read_lines

KEPT = RESULTS / "offpolicy_cells.jsonl"
TARGET = 0.6
"""The accuracy whose time is taken: from a start of about 0.4, well before the end of synchronous training."""
BASELINE = "grpo"
"""Synchronous training is this method at alpha = 0."""
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom."""
AREAL = {
    "ppo": {1: 41.8, 2: 40.0, 4: 23.3, 8: 35.7, 16: 35.8},
    "decoupled_ppo": {1: 42.1, 2: 41.8, 4: 42.2, 8: 41.0, 16: 38.7},
}
"""AIME24 accuracy in per cent by staleness (AReaL, arXiv 2505.24298): a clip around the behaviour policy, and
decoupled."""
AREAL_SYNCHRONOUS = 42.0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One method at one alpha, over its seeds."""

    method: Method
    alpha: int
    seeds: int
    mean: float
    """Final accuracy."""
    low: float
    """95 % confidence interval of the mean over seeds (Student's t), inside of 0 … 1; the mean, where there is one
    seed."""
    high: float
    reached: int
    """Seeds that ever reached `TARGET`."""
    steps: float
    """Median over seeds of the steps to `TARGET`; infinite for a seed that never does."""
    tokens: float
    """The same in trained action tokens."""
    collapses: int

    @property
    def case(self) -> str:
        """As rows name it."""
        return f"{self.method.title}, α = {self.alpha}"


def summarise(results: Sequence[Result]) -> list[Summary]:
    """One summary for each method and alpha, in the order of their first results."""
    together: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        together.setdefault((result.cell.method.key, result.cell.alpha), []).append(result)
    return [_summary(members) for members in together.values()]


def _summary(results: Sequence[Result]) -> Summary:
    finals = [result.final for result in results]
    mean, half = statistics.fmean(finals), half_width(finals)
    firsts = [result.reached(TARGET) for result in results]
    return Summary(
        method=results[0].cell.method,
        alpha=results[0].cell.alpha,
        seeds=len(results),
        mean=mean,
        low=max(mean - half, 0.0),
        high=min(mean + half, 1.0),
        reached=sum(first is not None for first in firsts),
        steps=_median(firsts, lambda point: point.step),
        tokens=_median(firsts, lambda point: point.tokens),
        collapses=sum(result.collapsed for result in results),
    )


def _median(points: Sequence[Point | None], field: Callable[[Point], float]) -> float:
    """The higher one of two in the middle, so that no infinity is averaged."""
    return statistics.median_high([math.inf if point is None else field(point) for point in points])


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % confidence interval of the mean; 0 for a single value, which says nothing of its spread."""
    if len(values) < 2:
        return 0.0
    quantile = STUDENT_95[min(len(values) - 1, len(STUDENT_95)) - 1]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def as_good(summary: Summary, synchronous: Summary) -> bool:
    """Whether the mean is inside of the synchronous interval, or above it."""
    return summary.mean >= synchronous.low


# -- rows ------------------------------------------------------------------------------------------------------------


def rows(summaries: Sequence[Summary]) -> list[Row]:
    """What was measured, then how it compares with synchronous training."""
    own = {summary.method.key: summary for summary in summaries if summary.alpha == 0}
    out: list[Row] = []
    for summary in summaries:
        out += _measured(summary)
        synchronous = own.get(summary.method.key)
        if synchronous is not None and summary.alpha > 0 and synchronous.mean > 0:
            published = AREAL.get(summary.method.key, {}).get(summary.alpha)
            share = None if published is None else published / AREAL_SYNCHRONOUS
            out.append(Row(summary.case, "share_of_synchronous", "share", summary.mean / synchronous.mean, share))
    baseline = own.get(BASELINE)
    if baseline is not None:
        out += _compared(summaries, baseline, own)
    return out


def _measured(summary: Summary) -> list[Row]:
    values: list[tuple[str, str, float]] = [
        ("final_accuracy", "share", summary.mean),
        ("final_accuracy_low", "share", summary.low),
        ("final_accuracy_high", "share", summary.high),
        ("seeds", "runs", summary.seeds),
        ("collapsed", "runs", summary.collapses),
        ("reached_target", "runs", summary.reached),
        ("steps_to_target", "steps", summary.steps),
        ("tokens_to_target", "tokens", summary.tokens),
    ]
    return [Row(summary.case, metric, unit, value) for metric, unit, value in values if math.isfinite(value)]


def _compared(summaries: Sequence[Summary], baseline: Summary, own: dict[str, Summary]) -> list[Row]:
    out: list[Row] = []
    for alpha, goal in ((2, 4), (8, 1)):
        here = [summary for summary in summaries if summary.alpha == alpha]
        if here:
            good = sum(as_good(summary, baseline) for summary in here)
            still = sum(as_good(summary, own[summary.method.key]) for summary in here if summary.method.key in own)
            out += [
                Row(f"as good as synchronous {BASELINE}, α = {alpha}", "methods", f"of {len(here)}", good, None, goal),
                Row(f"as good as the same method synchronous, α = {alpha}", "methods", f"of {len(here)}", still),
            ]
    return out


# -- tables ----------------------------------------------------------------------------------------------------------


def accuracy_table(summaries: Sequence[Summary]) -> str:
    """Markdown: final accuracy and its half interval by method and alpha, and how many runs collapsed."""

    def cell(summary: Summary) -> str:
        half = f" ± {(summary.high - summary.low) / 2:.3f}" if summary.seeds > 1 else ""
        collapsed = f", {summary.collapses} of {summary.seeds} collapsed" if summary.collapses else ""
        return f"{summary.mean:.3f}{half}{collapsed}"

    return _table(summaries, "final held-out accuracy", cell)


def steps_table(summaries: Sequence[Summary]) -> str:
    """Markdown: median steps to the target accuracy by method and alpha."""

    def cell(summary: Summary) -> str:
        return f"{summary.steps:.0f}" if math.isfinite(summary.steps) else "–"

    return _table(summaries, f"steps to {TARGET:g}", cell)


def _table(summaries: Sequence[Summary], corner: str, cell: Callable[[Summary], str]) -> str:
    titles = list(dict.fromkeys(summary.method.title for summary in summaries))
    alphas = sorted({summary.alpha for summary in summaries})
    at = {(summary.method.title, summary.alpha): cell(summary) for summary in summaries}
    lines = [f"| {corner} | {' | '.join(f'α = {alpha}' for alpha in alphas)} |", f"|---|{'--:|' * len(alphas)}"]
    lines += [f"| {title} | {' | '.join(at.get((title, alpha), '') for alpha in alphas)} |" for title in titles]
    return "\n".join(lines)


# -- plot ------------------------------------------------------------------------------------------------------------


def draw(results: Sequence[Result], file: Path, curve_alpha: int = 8) -> None:
    """Left: final accuracy over alpha, with intervals. Right: learning curves at one alpha, means over seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    summaries = summarise(results)
    titles = list(dict.fromkeys(summary.method.title for summary in summaries))
    palette = mpl.colormaps["tab10"]
    colors = {title: palette(number % palette.N) for number, title in enumerate(titles)}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), dpi=100)
    _draw_ages(left, summaries, colors)
    _draw_curves(right, results, colors, curve_alpha)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("held-out accuracy")
    left.legend(fontsize=7, frameon=False, loc="lower left")
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def _draw_ages(axes: Any, summaries: Sequence[Summary], colors: dict[str, Any]) -> None:
    alphas = sorted({summary.alpha for summary in summaries})
    for number, (title, color) in enumerate(colors.items()):
        mine = sorted((one for one in summaries if one.method.title == title), key=lambda one: one.alpha)
        # A little apart, so that the intervals of the methods do not cover each other.
        places = [alphas.index(one.alpha) + (number - len(colors) / 2) * 0.05 for one in mine]
        errors = [[one.mean - one.low for one in mine], [one.high - one.mean for one in mine]]
        axes.errorbar(
            places,
            [one.mean for one in mine],
            errors,
            marker="o",
            ms=4,
            lw=1.2,
            elinewidth=0.8,
            color=color,
            label=title,
        )
    baseline = next((one for one in summaries if one.method.key == BASELINE and one.alpha == 0), None)
    if baseline is not None:
        axes.axhspan(baseline.low, baseline.high, color="black", alpha=0.08, lw=0)
    axes.set_xticks(range(len(alphas)), [str(alpha) for alpha in alphas])
    axes.set_xlabel("age of the data α (versions)")
    axes.set_title(f"Final accuracy; the band is synchronous {BASELINE}", fontsize=10)


def _draw_curves(axes: Any, results: Sequence[Result], colors: dict[str, Any], alpha: int) -> None:
    for title, color in colors.items():
        _draw_curve(axes, [one for one in results if (one.cell.method.title, one.cell.alpha) == (title, alpha)], color)
    synchronous = [one for one in results if (one.cell.method.key, one.cell.alpha) == (BASELINE, 0)]
    _draw_curve(axes, synchronous, "black", ls="--", label=f"{BASELINE}, α = 0")
    axes.axhline(TARGET, color="black", lw=0.6, ls=":")
    axes.set_xlabel("step")
    axes.set_title(f"Learning at α = {alpha}", fontsize=10)
    axes.legend(fontsize=7, frameon=False, loc="lower right")


def _draw_curve(axes: Any, results: Sequence[Result], color: Any, **style: Any) -> None:
    """The mean over seeds, whose curves have the same steps."""
    if results:
        columns = list(zip(*(result.curve for result in results), strict=True))
        means = [statistics.fmean(point.accuracy for point in column) for column in columns]
        axes.plot([column[0].step for column in columns], means, lw=1.3, color=color, **style)


if __name__ == "__main__":
    kept = summarise(read_lines(Path(sys.argv[1]) if len(sys.argv) > 1 else KEPT))
    print(f"{accuracy_table(kept)}\n\n{steps_table(kept)}")
