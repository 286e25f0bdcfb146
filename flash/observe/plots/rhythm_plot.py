"""The picture of a response's rhythm: who looks at whom, nearby and far, and beneath it the two signals.

Shape legend: B = tokens that are drawn, 2 = local and global.
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
"""Inches."""
MOST_NAMED = 48
"""Tokens up to which each is written on the axes; more would not fit."""
NAME = 8
"""Characters of a token on an axis."""
BRIGHTEST = 0.99
"""Quantile of the weights that gets the darkest colour: a few tokens take so much that the rest would not show."""


class DrawnRhythm(NamedTuple):
    """What is drawn."""

    response: ResponseSeen
    start: int
    """The first of the B tokens, in the sequence."""
    map_2BB: npt.NDArray[np.float32]
    """Rows are those who look."""


def rhythm_png(drawn: DrawnRhythm) -> bytes:
    """The picture as a file; texts that no font here has are drawn as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        return png(draw_rhythm(drawn))


def draw_rhythm(drawn: DrawnRhythm) -> Figure:
    """The local map, where phrases are a sawtooth at the diagonal, the global one, where those that many look at are
    columns, and beneath them WAAD with its plans and FAI with its anchors."""
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
    """A value for each token of the response; where it has a gap, the environment spoke."""
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
    """Write the tokens on the axis of columns, or on both."""
    places = list(range(drawn.start, drawn.start + drawn.map_2BB.shape[1]))
    names = [shortened(visible(drawn.response.tokens[place]), NAME) for place in places]
    upright = max(map(len, names)) > 1
    axes.set_xticks(places, names, rotation=90 if upright else 0, fontsize=8)
    if both:
        axes.set_yticks(places, names, fontsize=8)
    # A dollar sign in a token would begin a formula.
    for label in (*axes.get_xticklabels(), *(axes.get_yticklabels() if both else ())):
        label.set_parse_math(False)
