"""Plots for `flash simulate --plot`, as PNG bytes. `flash.cli.simulate` calls one of two functions.

`draw_run` shows the time and the ages of one run. `draw_sweep` shows the throughput over the values of a sweep, which
simulates one *cell* for each combination of values. The *age* of a token is the number of versions of the policy
between its sampling and its training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flash.observe.plots import BLUE, ORANGE, new_figure, png
from flash.simulate.report import SimReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flash.simulate.report import SweepCell

HEIGHT = 3.4
"""Height of a figure, in inches."""
IDLE_COLOURS = ("#d9d9d9", "#e69f00", "#cc79a7", "#56b4e9", "#f0e442")
"""Colours of the causes of idleness, in alphabetical order of the causes; they repeat if there are more causes."""


def draw_sweep(cells: Sequence[SweepCell]) -> bytes:
    """Plot throughput over the values of the last key, with one line for each combination of the other keys' values.

    `cells` are all cells of the sweep, at least one. Their `values` have the same keys in the same order, at least one.
    """
    figure, (axes,) = _figure(1)
    *others, last = cells[0].values
    # Cells of each line, by the values of the other keys.
    lines: dict[tuple[str, ...], list[SweepCell]] = {}
    for cell in cells:
        lines.setdefault(tuple(cell.values[key] for key in others), []).append(cell)
    positions = _positions([cell.values[last] for cell in cells])
    for values, line in lines.items():
        label = ", ".join(f"{_last_part(key)} {value}" for key, value in zip(others, values, strict=True))
        x = [positions[cell.values[last]] for cell in line]
        axes.plot(x, [cell.report.tokens_per_s for cell in line], marker="o", label=label or None)
    axes.set_xticks(list(positions.values()), list(positions))
    axes.set_xlabel(_last_part(last))
    axes.set_ylabel("trained tokens per second")
    axes.set_ylim(0, None)
    if others:
        axes.legend(frameon=False, fontsize=8)
    return png(figure)


def draw_run(report: SimReport) -> bytes:
    """Plot how engines and trainers spent their time, and the ages of the trained tokens.

    Each of the two has one horizontal bar, which consists of the busy share and the idle shares by cause.
    """
    figure, (time, ages) = _figure(2)
    names = ["trainers", "engines"]
    ends = [report.trainer_busy, report.engine_busy]  # where the next share of each bar begins
    time.barh(names, ends, color=BLUE, label="busy")
    for i, cause in enumerate(sorted({*report.engine_idle, *report.trainer_idle})):
        shares = [report.trainer_idle.get(cause, 0.0), report.engine_idle.get(cause, 0.0)]
        time.barh(names, shares, left=ends, color=IDLE_COLOURS[i % len(IDLE_COLOURS)], label=f"idle: {cause}")
        ends = [end + share for end, share in zip(ends, shares, strict=True)]
    time.set_xlabel("share of the time")
    time.set_xlim(0, 1)
    time.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=3)
    total = sum(report.ages.values()) or 1  # without trained tokens there are no bars, and nothing to divide
    ages.bar(
        [str(age) for age in sorted(report.ages)], [report.ages[a] / total for a in sorted(report.ages)], color=ORANGE
    )
    ages.set_xlabel("age of trained tokens, in versions")
    ages.set_ylabel("share")
    return png(figure)


def _positions(values: Sequence[str]) -> dict[str, float]:
    """Return the position of each value of the swept key on the horizontal axis.

    The positions are the values themselves, or 0, 1, 2, … in order of appearance if any value is not a number.
    """
    try:
        return {value: float(value) for value in values}
    except ValueError:
        return {value: float(position) for position, value in enumerate(dict.fromkeys(values))}


def _last_part(key: str) -> str:
    """Return the last part of a dotted key: `async_ratio` for `train.async_ratio`. Labels are short in this way."""
    return key.rpartition(".")[2]


def _figure(columns: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with `columns` plots side by side, and these plots from left to right."""
    figure = new_figure(HEIGHT)
    plots = list(figure.subplots(1, columns, squeeze=False).flat)
    for plot in plots:
        plot.spines[["top", "right"]].set_visible(False)
    return figure, plots
