"""Plot of a response's rhythm: the attention maps of local and global heads, and beneath them the two signals.

`flash rhythm --plot` draws it.

Shape legend: B = tokens that are drawn, 2 = local and global heads.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from flash.observe.plots.style import BLUE, FAINT, GRID, INK, ORANGE, new_figure, plain, png
from flash.observe.rhythm import ResponseSeen, shortened, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT = 7.6
"""Height of the plot in inches."""
MOST_NAMED = 48
"""Largest number of tokens that are written on the axes one by one. More would not fit."""
NAME = 8
"""Largest number of characters of a token on an axis."""
BRIGHTEST = 0.99
"""Quantile of the attention weights that gets the darkest colour. With the maximum, a few tokens with very large
weights would make all others invisible."""


class DrawnRhythm(NamedTuple):
    """Part of a response with its attention maps."""

    response: ResponseSeen
    start: int
    """Place in the sequence of the first of the B tokens."""
    map_2BB: npt.NDArray[np.float32]
    """Mean attention weights of the local and global heads. Rows are queries, columns are keys."""


def rhythm_png(drawn: DrawnRhythm) -> bytes:
    """Return the plot as the content of a PNG file. Characters that no installed font has are drawn as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        return png(draw_rhythm(drawn))


def draw_rhythm(drawn: DrawnRhythm) -> Figure:
    """Draw the two attention maps, and beneath them WAAD with its plan tokens and FAI with its anchor tokens.

    In the local map, phrases form a sawtooth at the diagonal. In the global map, a token that many later tokens attend
    to is a column.
    """
    figure = new_figure(HEIGHT)
    axes = figure.subplot_mosaic([["local", "global"], ["waad", "waad"], ["fai", "fai"]], height_ratios=[3.6, 1.3, 1.3])
    for one in axes.values():
        plain(one)
    for place, kind in enumerate(("local", "global")):
        _draw_map(axes[kind], drawn, drawn.map_2BB[place], f"{kind} heads")
    response = drawn.response
    _draw_signal(axes["waad"], drawn, response.waad, response.plan, "WAAD", "plan")
    _draw_signal(axes["fai"], drawn, response.fai, response.anchor, "FAI", "anchor")
    axes["waad"].sharex(axes["fai"])
    axes["waad"].tick_params(labelbottom=False)
    return figure


def _draw_map(axes: Axes, drawn: DrawnRhythm, map_BB: npt.NDArray[np.float32], title: str) -> None:
    from matplotlib.colors import PowerNorm

    size = len(map_BB)
    seen_BB = np.where(np.tri(size, dtype=bool), map_BB, np.nan)
    top = float(np.nanquantile(seen_BB, BRIGHTEST))
    places = np.arange(size + 1) + drawn.start - 0.5
    axes.pcolormesh(places, places, seen_BB, cmap="Blues", norm=PowerNorm(0.5, 0, max(top, 1e-6)), rasterized=True)
    begin = drawn.response.places[0] - 0.5
    if drawn.start < begin < drawn.start + size:
        axes.axhline(begin, color=FAINT, linewidth=0.8, linestyle="--")
        axes.axvline(begin, color=FAINT, linewidth=0.8, linestyle="--")
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_title(title, color=INK, fontsize=11, loc="left")
    axes.set_xlabel("looked at")
    axes.set_ylabel("looking")
    axes.locator_params(integer=True)
    if size <= MOST_NAMED // 2:
        _name_tokens(axes, drawn, both=True)


def _draw_signal(
    axes: Axes, drawn: DrawnRhythm, values: list[float], marks: list[bool], name: str, marked: str
) -> None:
    """Draw a value for each token of the response. Tokens of the environment are gaps."""
    stop = drawn.start + drawn.map_2BB.shape[1]
    line = np.full(stop - drawn.start, np.nan)
    peaks = np.full(stop - drawn.start, np.nan)
    for place, value, mark in zip(drawn.response.places, values, marks, strict=True):
        if drawn.start <= place < stop:
            line[place - drawn.start] = value
            peaks[place - drawn.start] = value if mark else np.nan
    places = np.arange(drawn.start, stop)
    axes.plot(places, line, color=BLUE, linewidth=1.6, marker=".", markersize=4)
    axes.plot(places, peaks, color=ORANGE, marker="o", markersize=5, linewidth=0, label=marked)
    axes.set_xlim(drawn.start - 0.5, stop - 0.5)
    axes.set_ylim(0, 1.12 * float(np.nanmax(line, initial=0.0)) or 1.0)
    axes.set_ylabel(name)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 0.97), frameon=False, labelcolor=INK, fontsize=9, handlelength=1.0
    )
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    axes.locator_params(axis="x", integer=True)
    if stop - drawn.start <= MOST_NAMED:
        _name_tokens(axes, drawn, both=False)
    else:
        axes.set_xlabel("place in the sequence")


def _name_tokens(axes: Axes, drawn: DrawnRhythm, *, both: bool) -> None:
    """Write the tokens on the x axis; with `both`, also on the y axis."""
    places = list(range(drawn.start, drawn.start + drawn.map_2BB.shape[1]))
    names = [shortened(visible(drawn.response.tokens[place]), NAME) for place in places]
    upright = max(map(len, names)) > 1
    axes.set_xticks(places, names, rotation=90 if upright else 0, fontsize=8)
    if both:
        axes.set_yticks(places, names, fontsize=8)
    # Without this, matplotlib takes a dollar sign in a token as the start of a formula.
    for label in (*axes.get_xticklabels(), *(axes.get_yticklabels() if both else ())):
        label.set_parse_math(False)
