"""Style of all plots: width, colours and axes.

matplotlib is imported on the first call, and its global state is not touched.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 8.0
"""Width of a plot in inches. A README shows 100 pixels per inch."""
DPI = 200
"""Pixels per inch of the file, twice those of a README, for sharp text on fine screens."""
INK = "#333333"
FAINT = "#8c8c8c"
GRID = "#e6e6e6"
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREEN = "#009e73"
PURPLE = "#cc79a7"


def new_figure(height: float) -> Figure:
    """Return an empty figure with a height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def plain_axes(figure: Figure, rows: int, columns: int, **options: Any) -> list[Axes]:
    """Return a grid of plain axes, row by row. `options` go to matplotlib's `subplots`."""
    grid = list(figure.subplots(rows, columns, **options).flat)
    for axes in grid:
        plain(axes)
    return grid


def plain(axes: Axes) -> None:
    """Give axes the plain style: two spines, and a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=10)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def outside_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Add a legend without a box, as one line above the axes."""
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=len(labels),
        frameon=False,
        labelcolor=INK,
        fontsize=10,
        handlelength=1.3,
        columnspacing=1.6,
    )


def png(figure: Figure) -> bytes:
    """Return the figure as the content of a PNG file."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DPI, facecolor="white")
    return image.getvalue()


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit for a duration that reads best: its length in seconds, and its name."""
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")
