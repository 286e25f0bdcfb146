"""Results of `flash rhythm`: their form in a file, their lines in the terminal, and their plot (`--plot`).

`flash rhythm` measures the attention of a model in given responses. For each token, *WAAD* is how far back the local
heads look; a large change of it marks a *plan token*. *FAI* is how much later tokens attend to a token; a large value
marks an *anchor token*. `algorithms/rhythm.py` defines both.

Texts of tokens come from models and files. Their control characters are escaped, so that they cannot control a
terminal.

Shape legend: B = tokens that are drawn, 2 = local and global heads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from algorithms.couplings import Coupling
from algorithms.rhythm import Rhythm
from flash.observe.plots import BLUE, FAINT, GRID, INK, ORANGE, new_figure, png, style_axes
from flash.text import one_line, width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PLAN, ANCHOR = "^", "*"
"""Marks of plan tokens, beside their change of WAAD, and of anchor tokens, beside their FAI."""
LONGEST_TEXT = 14
"""Largest number of columns of a token's text in the table."""
SPACE = "␣"
"""Character that shows a space."""
LABEL = 11
"""Columns of the terminal for the name of a row in the table."""
GAP = 2
"""Columns of the terminal between two tokens."""
DECIMALS = 6
"""Digits after the point that are shown. Rounding errors of sums are smaller, and so are shown as 0."""


HEIGHT = 7.6
"""Height of the plot in inches."""
MOST_NAMED = 48
"""Largest number of tokens that are written on the axes one by one. More would not fit."""
NAME = 8
"""Largest number of characters of a token on an axis."""
BRIGHTEST = 0.99
"""Quantile of the attention weights that gets the darkest colour. With the maximum, a few tokens with very large
weights would make all others invisible."""


class MeasuredHead(msgspec.Struct, frozen=True):
    """Attention head of a measured layer."""

    layer: int
    """Number of the layer, counted from 0."""
    head: int
    """Number of the head in its layer, counted from 0."""
    span: float
    """Mean number of tokens that the head looks back, over all queries in the responses."""
    kind: str
    """`local`, `global`, or neither."""


class MeasuredResponse(msgspec.Struct, frozen=True):
    """Signals of a response of R tokens. Each list but `tokens` has R entries."""

    name: str
    """Name of the response for people."""
    tokens: list[str]
    """The text of each token of the whole sequence."""
    places: list[int]
    """Places of the response's tokens in the sequence."""
    waad: list[float]
    """WAAD of each token, in tokens."""
    change: list[float]
    """Δ: change of WAAD at each token."""
    fai: list[float]
    """FAI of each token."""
    entropy: list[float]
    """Entropy of the distribution that the token was drawn from, in nats."""
    multiplier: list[float]
    """γ: factor of the token's advantage, if advantages of its sign are multiplied."""
    plan: list[bool]
    """True if Δ is among the top share: a plan token."""
    anchor: list[bool]
    """True if FAI is among the top share: an anchor token."""


class MeasuredRhythm(msgspec.Struct, frozen=True):
    """All inputs and results of `flash rhythm`."""

    weights: str
    """Name or path of the model's weights."""
    options: Rhythm
    """Options of the measurement."""
    temperatures: list[float]
    """Temperatures at which the responses were sampled. Entropies are for the same temperatures."""
    heads: list[MeasuredHead]
    responses: list[MeasuredResponse]
    couplings: list[Coupling]
    """Comparisons of marked tokens with the other ones, such as the entropy of plan tokens."""


def visible(token: str) -> str:
    """Return a token's text with control characters escaped and a mark for each space."""
    return one_line(token).replace(" ", SPACE)


def shortened(text: str, columns: int) -> str:
    """Cut a text to at most `columns` terminal columns. A cut text ends with an ellipsis."""
    if width(text) <= columns:
        return text
    ends = accumulate(width(one) for one in text)
    return "".join(one for one, end in zip(text, ends, strict=True) if end < columns) + "…"


def head_lines(heads: Sequence[MeasuredHead], columns: int) -> Iterator[str]:
    """Yield lines with the heads of each kind, as layer.head (span). Heads of neither kind come last."""
    for kind in ("local", "global", ""):
        cells = [f"{one.layer}.{one.head} ({one.span:.1f})" for one in heads if one.kind == kind]
        widths = [len(cell) + GAP for cell in cells]
        for block in _blocks(widths, columns - LABEL) if cells else ():
            yield _row((kind or "neither") if block.start == 0 else "", cells[block], widths[block])


def coupling_lines(couplings: Sequence[Coupling]) -> Iterator[str]:
    """Yield a table of the means at marked and other tokens, their difference, and the difference by chance."""
    names = max(len(one.name) for one in couplings)
    titles = f"{'tokens':>7} {'mean':>9} {'others':>9} {'more by':>9} {'by chance, 95 % of shifts':>32} {'p':>6}"
    yield f"{'':{names}} {titles}"
    for one in couplings:
        chance = f"{_signed(one.null_mean)} [{_signed(one.null_low)}, {_signed(one.null_high)}]"
        means = f"{_number(one.marked):>9} {_number(one.others):>9} {_signed(one.difference):>9}"
        p = "-" if math.isnan(one.p) else f"{one.p:.3f}"
        yield f"{one.name:{names}} {one.tokens:>7} {means} {'-' if math.isnan(one.p) else chance:>32} {p:>6}"


def response_lines(response: MeasuredResponse, columns: int) -> Iterator[str]:
    """Yield the tokens with their signals beneath them, in blocks that fit into `columns`."""
    changes = zip(response.change, response.plan, strict=True)
    influences = zip(response.fai, response.anchor, strict=True)
    rows = {
        "WAAD": [f"{value:.2f}" for value in response.waad],
        "change": [f"{value:.2f}{PLAN if peak else ' '}" for value, peak in changes],
        "FAI": [f"{value:.2g}{ANCHOR if peak else ' '}" for value, peak in influences],
        "entropy": [f"{value:.2f}" for value in response.entropy],
        "multiplier": ["" if value == 1 else f"{value:.2f}" for value in response.multiplier],
    }
    texts = [shortened(visible(response.tokens[place]), LONGEST_TEXT) for place in response.places]
    cells = list(zip(texts, *rows.values(), strict=True))
    widths = [max(map(width, cell)) + GAP for cell in cells]
    for block in _blocks(widths, columns - LABEL):
        yield _row("token", texts[block], widths[block])
        for name, values in rows.items():
            yield _row(name, values[block], widths[block])
        yield ""


def _blocks(widths: Sequence[int], columns: int) -> Iterator[slice]:
    """Yield ranges of neighbouring cells that fit into one line, at least one cell each."""
    begin, used = 0, 0
    for place, one in enumerate(widths):
        if used + one > columns and place > begin:
            yield slice(begin, place)
            begin, used = place, 0
        used += one
    yield slice(begin, len(widths))


def _row(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of the table: the name of the row, and its cells aligned to the right."""
    padded = (" " * (room - width(cell)) + cell for cell, room in zip(cells, widths, strict=True))
    return f"{name:{LABEL}}{''.join(padded)}".rstrip()


def _number(value: float) -> str:
    """Return a number with three significant digits, since FAI gets smaller in a longer response."""
    return "-" if math.isnan(value) else f"{round(value, DECIMALS):.3g}"


def _signed(value: float) -> str:
    """Return a number with its sign and three significant digits; `-` for NaN."""
    return "-" if math.isnan(value) else f"{round(value, DECIMALS):+.3g}"


class DrawnRhythm(NamedTuple):
    """Part of a response with its attention maps."""

    response: MeasuredResponse
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
        style_axes(one)
    for place, kind in enumerate(("local", "global")):
        _draw_map(axes[kind], drawn, drawn.map_2BB[place], f"{kind} heads")
    response = drawn.response
    _draw_signal(axes["waad"], drawn, response.waad, response.plan, "WAAD", "plan")
    _draw_signal(axes["fai"], drawn, response.fai, response.anchor, "FAI", "anchor")
    axes["waad"].sharex(axes["fai"])
    axes["waad"].tick_params(labelbottom=False)
    return figure


def _draw_map(axes: Axes, drawn: DrawnRhythm, map_BB: npt.NDArray[np.float32], title: str) -> None:
    """Draw an attention map below its diagonal. A dashed line separates the prompt from the response."""
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
    """Draw a value for each token of the response. Tokens of the environment are gaps.

    Args:
        axes: axes to draw on.
        drawn: the part of the response that is drawn.
        values: value of each token of the whole response.
        marks: True for each token that gets a mark.
        name: label of the y axis.
        marked: label of the marks in the legend.
    """
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
