"""Plots of rows: bars and lines, and the style of all pictures of benchmarks.

A row has up to four numbers: the published one or the one of another system, a peer's rules, Flash's own, and a bound.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.form import Row

NAMES = {"reference": "published", "peer": "ROLL Flash rules", "ours": "ours", "bound": "bound"}
"""Name in the legend of each field of a row."""
COLORS = {"reference": "#8c8c8c", "peer": "#d98032", "ours": "#2f6fb0", "bound": "#9ac29a"}
"""Colour of each field of a row."""
SIZE = (7.2, 3.4)
"""Width and height of a figure, in inches."""
MARKS = "os^D"
"""Shapes of the points of the lines of `lines`, in the notation of matplotlib."""


def new_picture(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """Return an empty matplotlib figure of this size in inches, and its `columns` plots, which stand side by side."""
    from matplotlib.figure import Figure

    # Without pyplot: the figure needs no window, and belongs to no list from which it must be removed.
    figure = Figure(figsize=(width, height), dpi=100)
    return figure, list(figure.subplots(1, columns, squeeze=False).flat)


def save_picture(figure: Any, file: Path) -> None:
    """Write a figure of `new_picture` to a file."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file)


def bars(
    title: str, unit: str, metric: str = "speedup", *, names: Mapping[str, str] = NAMES, log: bool = False
) -> Callable[[Sequence[Row], Path], None]:
    """Return a plot of the metrics whose names end in `metric`: a group of bars per case, one bar per number.

    `names` are the numbers that are drawn, and their names in the legend. `log` makes the axis logarithmic.
    """

    def plot(rows: Sequence[Row], file: Path) -> None:
        """Draw the rows to a file."""
        chosen = [row for row in rows if row.metric.endswith(metric)]
        figure, (axes,) = new_picture(*SIZE)
        columns = [name for name in names if any(getattr(row, name) is not None for row in chosen)]
        width = 0.8 / max(len(columns), 1)  # groups are 1 apart, and their bars fill 0.8 of that
        for i, name in enumerate(columns):
            places = [j + (i - (len(columns) - 1) / 2) * width for j in range(len(chosen))]
            heights = [getattr(row, name) or 0.0 for row in chosen]
            drawn = axes.bar(places, heights, width * 0.92, label=names[name], color=COLORS[name])
            axes.bar_label(drawn, [f"{height:.3g}" if height else "" for height in heights], fontsize=7, padding=1)
        axes.set_xticks(range(len(chosen)), [row.case.replace(", ", "\n") for row in chosen], fontsize=7)
        axes.set_ylabel(unit)
        if log:
            axes.set_yscale("log")
        _save(figure, axes, title, file)

    return plot


def lines(
    title: str, across: str, unit: str, metric: str, number: str = r".*?(\d+(?:\.\d+)?)[^,]*(?:, )?"
) -> Callable[[Sequence[Row], Path], None]:
    """Return a plot of one metric over a number that `row.case` has.

    `number` is a pattern whose group finds that number, by default the first one. The rest of `row.case` that the
    pattern does not match names the line to which the row belongs. Published numbers are points without a line. If the
    rows have nothing but numbers of ours, each line has a colour of its own.
    """

    def plot(rows: Sequence[Row], file: Path) -> None:
        """Draw the rows to a file."""
        figure, (axes,) = new_picture(*SIZE)
        # Points of each curve, by the field of the row and the name of the line.
        series: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for row in rows:
            found = re.search(number, row.case)
            if row.metric != metric or found is None:
                continue
            line = row.case[: found.start()] + row.case[found.end() :]
            for name in NAMES:
                value = getattr(row, name)
                if value is not None:
                    series.setdefault((name, line), []).append((float(found[1]), value))
        marks = dict(zip(dict.fromkeys(line for _, line in series), itertools.cycle(MARKS), strict=False))
        alone = len({name for name, _ in series}) == 1
        for (name, line), points in series.items():
            label = line if alone else f"{NAMES[name]}, {line}" if line else NAMES[name]
            style = {"reference": "none", "bound": "--"}.get(name, "-")
            color = None if alone and len(series) > 1 else COLORS[name]
            axes.plot(*zip(*points, strict=True), label=label, linestyle=style, marker=marks[line], ms=4, color=color)
        axes.set_xlabel(across)
        axes.set_ylabel(unit)
        _save(figure, axes, title, file)

    return plot


def _save(figure: Any, axes: Any, title: str, file: Path) -> None:
    """Give a figure its title and its style, and write it to a file."""
    axes.set_title(title, fontsize=10)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:  # matplotlib warns about a legend without entries
        axes.legend(fontsize=7, frameon=False)
    save_picture(figure, file)
