"""Results of the off-policy comparison over all seeds: rows, the table of docs/figures.md, and the plot.

`python -m benchmarks.offpolicy.summary [FILE]` prints the table of recorded cells as markdown.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.form import RESULTS, Row, new_picture, save_picture
from benchmarks.offpolicy.cells import Method, Result, read_lines
from flash.observe.stats import Interval, mean_interval

KEPT = RESULTS / "offpolicy_cells.jsonl"
"""File with the recorded cells."""
BASELINE = "grpo"
"""Synchronous training is this method at alpha = 0."""
CURVE_ALPHA = 8
"""The alpha whose learning curves are drawn."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Final accuracy of a method at one alpha, over its seeds."""

    method: Method
    alpha: int
    """Age of the data, in versions."""
    seeds: int
    """Number of seeds."""
    mean: float
    """Final accuracy."""
    low: float
    """95 % confidence interval of the mean over seeds (Student's t), within 0 … 1; the mean if there is one seed."""
    high: float
    """Upper end of the interval."""
    collapses: int
    """Number of seeds whose run has collapsed (`cells.COLLAPSED`)."""

    @property
    def case(self) -> str:
        """Name of the rows."""
        return f"{self.method.title}, α = {self.alpha}"


def summarise(results: Sequence[Result]) -> list[Summary]:
    """Make one summary for each method and alpha, in the order of their first results."""
    together: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        together.setdefault((result.cell.method.key, result.cell.alpha), []).append(result)
    found: list[Summary] = []
    for members in together.values():
        finals = [result.final for result in members]
        # One value says nothing about the spread.
        interval = mean_interval(finals) if len(finals) > 1 else Interval(finals[0], finals[0], finals[0])
        found.append(
            Summary(
                method=members[0].cell.method,
                alpha=members[0].cell.alpha,
                seeds=len(members),
                mean=interval.mean,
                low=max(interval.low, 0.0),
                high=min(interval.high, 1.0),
                collapses=sum(result.collapsed for result in members),
            )
        )
    return found


def rows(summaries: Sequence[Summary]) -> list[Row]:
    """Return the rows: each final accuracy, and how it compares with synchronous training.

    A method is as good as synchronous training if its mean is not below the lower end of the latter's interval. The
    goals are 4 such methods at α = 2, and 1 at α = 8.
    """
    own = {summary.method.key: summary for summary in summaries if summary.alpha == 0}  # synchronous, by method
    out: list[Row] = []
    for summary in summaries:
        out += [
            Row(summary.case, "final_accuracy", "share", summary.mean),
            Row(summary.case, "final_accuracy_low", "share", summary.low),
            Row(summary.case, "final_accuracy_high", "share", summary.high),
            Row(summary.case, "seeds", "runs", summary.seeds),
            Row(summary.case, "collapsed", "runs", summary.collapses),
        ]
        synchronous = own.get(summary.method.key)
        if synchronous is not None and summary.alpha > 0 and synchronous.mean > 0:
            out.append(Row(summary.case, "share_of_synchronous", "share", summary.mean / synchronous.mean))
    baseline = own.get(BASELINE)
    for alpha, goal in ((2, 4), (8, 1)):
        here = [summary for summary in summaries if summary.alpha == alpha]
        if baseline is None or not here:
            continue
        good = sum(summary.mean >= baseline.low for summary in here)
        still = sum(summary.mean >= own[summary.method.key].low for summary in here if summary.method.key in own)
        out += [
            Row(f"as good as synchronous {BASELINE}, α = {alpha}", "methods", f"of {len(here)}", good, at_least=goal),
            Row(f"as good as the same method synchronous, α = {alpha}", "methods", f"of {len(here)}", still),
        ]
    return out


def accuracy_table(summaries: Sequence[Summary]) -> str:
    """Return a Markdown table of final accuracies by method and α, with half intervals and collapsed runs.

    docs/figures.md has this table, and a test compares them.
    """

    def cell(summary: Summary) -> str:
        """Return the text of a cell of the table."""
        half = f" ± {(summary.high - summary.low) / 2:.3f}" if summary.seeds > 1 else ""
        collapsed = f", {summary.collapses} of {summary.seeds} collapsed" if summary.collapses else ""
        return f"{summary.mean:.3f}{half}{collapsed}"

    titles = list(dict.fromkeys(summary.method.title for summary in summaries))
    alphas = sorted({summary.alpha for summary in summaries})
    at = {(summary.method.title, summary.alpha): cell(summary) for summary in summaries}
    lines = [f"| final held-out accuracy | {' | '.join(f'α = {alpha}' for alpha in alphas)} |"]
    lines.append(f"|---|{'--:|' * len(alphas)}")
    lines += [f"| {title} | {' | '.join(at.get((title, alpha), '') for alpha in alphas)} |" for title in titles]
    return "\n".join(lines)


def draw(results: Sequence[Result], file: Path) -> None:
    """Draw final accuracy over alpha with intervals (left), and mean learning curves at one alpha (right)."""
    from matplotlib import colormaps

    summaries = summarise(results)
    titles = list(dict.fromkeys(summary.method.title for summary in summaries))
    alphas = sorted({one.alpha for one in summaries})
    palette = colormaps["tab10"]
    figure, (left, right) = new_picture(11, 4.2, 2)

    def curve(members: Sequence[Result], color: Any, **style: Any) -> None:
        """Draw the mean learning curve of the results `members`."""
        if members:
            columns = list(zip(*(result.curve for result in members), strict=True))
            means = [statistics.fmean(point.accuracy for point in column) for column in columns]
            right.plot([column[0].step for column in columns], means, lw=1.3, color=color, **style)

    for number, title in enumerate(titles):
        color = palette(number % palette.N)
        mine = sorted((one for one in summaries if one.method.title == title), key=lambda one: one.alpha)
        # A little apart, so that the intervals of the methods do not cover each other.
        places = [alphas.index(one.alpha) + (number - len(titles) / 2) * 0.05 for one in mine]
        errors = [[one.mean - one.low for one in mine], [one.high - one.mean for one in mine]]
        style = {"marker": "o", "ms": 4, "lw": 1.2, "elinewidth": 0.8}
        left.errorbar(places, [one.mean for one in mine], errors, color=color, label=title, **style)
        wanted = (title, CURVE_ALPHA)
        curve([one for one in results if (one.cell.method.title, one.cell.alpha) == wanted], color)
    synchronous = [one for one in results if (one.cell.method.key, one.cell.alpha) == (BASELINE, 0)]
    curve(synchronous, "black", ls="--", label=f"{BASELINE}, α = 0")
    baseline = next((one for one in summaries if one.method.key == BASELINE and one.alpha == 0), None)
    if baseline is not None:
        left.axhspan(baseline.low, baseline.high, color="black", alpha=0.08, lw=0)
    left.set_xticks(range(len(alphas)), [str(alpha) for alpha in alphas])
    left.set_xlabel("age of the data α (versions)")
    left.set_title(f"Final accuracy; the band is synchronous {BASELINE}", fontsize=10)
    right.set_xlabel("step")
    right.set_title(f"Learning at α = {CURVE_ALPHA}", fontsize=10)
    for axes in (left, right):
        axes.set_ylabel("held-out accuracy")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False, loc="lower left" if axes is left else "lower right")
    save_picture(figure, file)


if __name__ == "__main__":
    print(accuracy_table(summarise(read_lines(Path(sys.argv[1]) if len(sys.argv) > 1 else KEPT))))
