"""Rows and plots that the benchmarks of simulated runs have in common.

A figure compares four numbers for each case: the published one, a peer's rules, Flash's own code, and the speed
that no schedule can exceed. The last three come from the same simulation of the same workload. Speed-ups are over the
same simulated baseline.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.form import Row, new_picture, save_picture

LARGEST_ERROR = 0.15
"""Goal: largest difference of a simulated peer from the published figure, as a share of it."""
LEAST_SHARE_OF_PEER = 0.99
"""Goal of our speed as a share of the peer's: below 1, because the order of events differs where both do the same."""
NAMES = {"reference": "published", "peer": "ROLL Flash rules", "ours": "ours", "bound": "bound"}
"""Name in the legend of each field of a row."""
COLORS = {"reference": "#8c8c8c", "peer": "#d98032", "ours": "#2f6fb0", "bound": "#9ac29a"}
"""Colour of each field of a row."""
SIZE = (7.2, 3.4)
"""Width and height of a figure, in inches."""
MARKS = "os^D"
"""Shapes of the points of the lines of `lines`, in the notation of matplotlib."""


# -- rows ------------------------------------------------------------------------------------------------------------


def speedup(
    case: str, baseline_s: float, ours_s: float, peer_s: float, bound_s: float | None, published: float | None
) -> list[Row]:
    """Return the speed-up over a baseline, and the error of the peer's rules against the published speed-up.

    Args:
        case: name of the rows.
        baseline_s: seconds of a step of the simulated baseline.
        ours_s: seconds of a step of Flash.
        peer_s: seconds of a step by the peer's rules.
        bound_s: least seconds of a step under any schedule; None if it is not computed.
        published: speed-up that the peer's paper states; None if it states none.
    """
    peer, bound = baseline_s / peer_s, None if bound_s is None else baseline_s / bound_s
    goal = LEAST_SHARE_OF_PEER * peer
    rows = [Row(case, "speedup", "x", baseline_s / ours_s, published, at_least=goal, peer=peer, bound=bound)]
    if published is not None:
        rows.append(Row(case, "reproduction_error", "share", abs(peer / published - 1), at_most=LARGEST_ERROR))
    return rows


# -- plots -----------------------------------------------------------------------------------------------------------


def bars(title: str, unit: str, metric: str = "speedup") -> Callable[[Sequence[Row], Path], None]:
    """Return a plot of one metric: a group of bars per case, one bar per number that it has."""

    def plot(rows: Sequence[Row], file: Path) -> None:
        """Draw the rows to a file."""
        chosen = [row for row in rows if row.metric == metric]
        figure, (axes,) = new_picture(*SIZE)
        columns = [name for name in NAMES if any(getattr(row, name) is not None for row in chosen)]
        width = 0.8 / max(len(columns), 1)  # groups are 1 apart, and their bars fill 0.8 of that
        for i, name in enumerate(columns):
            places = [j + (i - (len(columns) - 1) / 2) * width for j in range(len(chosen))]
            heights = [getattr(row, name) or 0.0 for row in chosen]
            drawn = axes.bar(places, heights, width * 0.92, label=NAMES[name], color=COLORS[name])
            axes.bar_label(drawn, [f"{height:.2f}" if height else "" for height in heights], fontsize=7, padding=1)
        axes.set_xticks(range(len(chosen)), [row.case.replace(", ", "\n") for row in chosen], fontsize=8)
        axes.set_ylabel(unit)
        _save(figure, axes, title, file)

    return plot


def lines(title: str, across: str, unit: str, metric: str) -> Callable[[Sequence[Row], Path], None]:
    """Return a plot of one metric over a number: the first number in `row.case`.

    The text after the first comma of `row.case` names the line to which the row belongs. Published numbers are points
    without a line.
    """

    def plot(rows: Sequence[Row], file: Path) -> None:
        """Draw the rows to a file."""
        figure, (axes,) = new_picture(*SIZE)
        # Points of each curve, by the field of the row and the text after the comma.
        series: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for row in rows:
            number = re.search(r"\d+(\.\d+)?", row.case)
            if row.metric != metric or number is None:
                continue
            line = row.case.partition(", ")[2]
            for name in NAMES:
                value = getattr(row, name)
                if value is not None:
                    series.setdefault((name, line), []).append((float(number[0]), value))
        marks = dict(zip(dict.fromkeys(line for _, line in series), itertools.cycle(MARKS), strict=False))
        for (name, line), points in series.items():
            label = f"{NAMES[name]}, {line}" if line else NAMES[name]
            style = {"reference": "none", "bound": "--"}.get(name, "-")
            look = {"linestyle": style, "marker": marks[line], "ms": 4, "color": COLORS[name]}
            axes.plot(*zip(*points, strict=True), label=label, **look)
        axes.set_xlabel(across)
        axes.set_ylabel(unit)
        _save(figure, axes, title, file)

    return plot


def _save(figure: Any, axes: Any, title: str, file: Path) -> None:
    """Give a figure its title, with the note that it is simulated, and its style, and write it to a file."""
    axes.set_title(f"{title} (simulated)", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:  # matplotlib warns about a legend without entries
        axes.legend(fontsize=7, frameon=False)
    save_picture(figure, file)
