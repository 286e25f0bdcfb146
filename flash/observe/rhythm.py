"""Results of `flash rhythm`: their form in a file (`--json`), their lines in the terminal, and their plot (`--plot`).

`flash rhythm` measures the attention of a model in given responses. An attention head is *local* if it looks back few
tokens, and *global* if it looks back many; other heads are neither. For each token, *WAAD* is how far back the local
heads look; a large change of it marks a *plan token*. *FAI* is how much the global heads of later tokens look at the
token; a large value marks an *anchor token*. `algorithms/rhythm.py` defines both.

`flash.run.rhythm` measures and makes the structs. `flash.cli.runs` then calls `head_lines`, `coupling_lines` and
`response_lines` for the terminal, and `rhythm_png` for the plot.

A *place* is the index of a token in its sequence, the prompt and the response. Texts of tokens come from models and
files. Their control characters are escaped, so that they cannot control a terminal.

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
"""Digits after the point to which means and differences are rounded. Rounding errors of sums are smaller, so that they
are shown as 0."""
HEIGHT = 7.6
"""Height of the plot in inches."""
MOST_NAMED = 48
"""Largest number of tokens that are written on the axes one by one. More would not fit."""
NAME = 8
"""Largest number of characters of a token on an axis."""
BRIGHTEST = 0.99
"""Quantile of the attention weights in a map. Weights above it get the darkest colour. With the maximum instead, a few
very large weights would make all others invisible."""


class MeasuredHead(msgspec.Struct, frozen=True):
    """Attention head of a measured layer."""

    layer: int
    """Number of the layer, counted from 0."""
    head: int
    """Number of the head in its layer, counted from 0."""
    span: float
    """Mean number of tokens that the head looks back, over all queries in the responses."""
    kind: str
    """`local` or `global`; empty if the head is neither."""


class MeasuredResponse(msgspec.Struct, frozen=True):
    """Signals of a response of R tokens. Each list but `tokens` has R entries.

    The R tokens need not be neighbours: between two turns of a recorded sample stand tokens of the environment.
    """

    name: str
    """Name of the response for people."""
    tokens: list[str]
    """The text of each token of the whole sequence, the prompt and the environment's tokens included."""
    places: list[int]
    """Indices of the response's tokens in `tokens`, ascending."""
    waad: list[float]
    """WAAD of each token, in tokens."""
    change: list[float]
    """Δ: absolute change of WAAD from each token to the next one; 0 at the last token of a turn."""
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
    """Return a text cut to at most `columns` terminal columns. A cut text ends with an ellipsis."""
    if width(text) <= columns:
        return text
    # A character may take two columns or none. A character that ends before the last column leaves it to the ellipsis.
    ends = accumulate(width(character) for character in text)
    return "".join(character for character, end in zip(text, ends, strict=True) if end < columns) + "…"


def head_lines(heads: Sequence[MeasuredHead], columns: int) -> Iterator[str]:
    """Yield lines with the heads of each kind, as layer.head (span). Heads of neither kind come last.

    `columns` is the width of the terminal. A kind without heads has no line.
    """
    for kind in ("local", "global", ""):
        cells = [f"{one.layer}.{one.head} ({one.span:.1f})" for one in heads if one.kind == kind]
        widths = [len(cell) + GAP for cell in cells]
        # Only the first line of a kind begins with its name.
        for block in _blocks(widths, columns - LABEL) if cells else ():
            yield _row((kind or "neither") if block.start == 0 else "", cells[block], widths[block])


def coupling_lines(couplings: Sequence[Coupling]) -> Iterator[str]:
    """Yield a table with a line for each comparison of marked tokens with other ones.

    The columns are: number of marked tokens, mean over the marked tokens, mean over the others, difference of the
    means, mean difference by chance with its 95 % interval, and p-value. By chance means that the plan tokens are moved
    by a random number of tokens (`algorithms.couplings`). A number that is NaN is shown as `-`. `couplings` has at
    least one entry.
    """
    names = max(len(one.name) for one in couplings)
    titles = f"{'tokens':>7} {'mean':>9} {'others':>9} {'more by':>9} {'by chance [95 % interval]':>32} {'p':>6}"
    yield f"{'':{names}} {titles}"
    for one in couplings:
        chance = f"{_signed(one.null_mean)} [{_signed(one.null_low)}, {_signed(one.null_high)}]"
        means = f"{_number(one.marked):>9} {_number(one.others):>9} {_signed(one.difference):>9}"
        p = "-" if math.isnan(one.p) else f"{one.p:.3f}"
        yield f"{one.name:{names}} {one.tokens:>7} {means} {'-' if math.isnan(one.p) else chance:>32} {p:>6}"


def response_lines(response: MeasuredResponse, columns: int) -> Iterator[str]:
    """Yield a table of a response: a column for each token, with a row for each signal below the text.

    `columns` is the width of the terminal. A long response has several blocks of rows, with an empty line after each.
    """
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
    # A token's column is as wide as its widest cell, which is its text or one of its signals.
    token_columns = zip(texts, *rows.values(), strict=True)
    widths = [max(map(width, cells)) + GAP for cells in token_columns]
    for block in _blocks(widths, columns - LABEL):
        yield _row("token", texts[block], widths[block])
        for name, values in rows.items():
            yield _row(name, values[block], widths[block])
        yield ""


def _blocks(widths: Sequence[int], columns: int) -> Iterator[slice]:
    """Divide the cells of a table into lines: yield the range of cells of each line.

    `widths` has the width of each cell. A line has at most `columns` columns, but at least one cell, even if this cell
    is wider.
    """
    begin, used = 0, 0
    for number, cell in enumerate(widths):
        if used + cell > columns and number > begin:
            yield slice(begin, number)
            begin, used = number, 0
        used += cell
    yield slice(begin, len(widths))


def _row(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of the table: the name of the row, and its cells aligned to the right in their `widths`."""
    # Python's own alignment counts characters, but some characters take two columns of a terminal.
    padded = (" " * (room - width(cell)) + cell for cell, room in zip(cells, widths, strict=True))
    return f"{name:{LABEL}}{''.join(padded)}".rstrip()


def _number(value: float) -> str:
    """Return a number with three significant digits; `-` for NaN.

    A fixed number of decimals would not do, since FAI gets smaller in a longer response.
    """
    return "-" if math.isnan(value) else f"{round(value, DECIMALS):.3g}"


def _signed(value: float) -> str:
    """Return a number with its sign and three significant digits; `-` for NaN."""
    return "-" if math.isnan(value) else f"{round(value, DECIMALS):+.3g}"


class DrawnRhythm(NamedTuple):
    """Range of B neighbouring tokens that the plot shows, with their attention maps."""

    response: MeasuredResponse
    """The whole response. The plot shows only those of its tokens that are in the range."""
    start: int
    """Index in `response.tokens` of the first of the B tokens."""
    map_2BB: npt.NDArray[np.float32]
    """Mean attention weights of the local and global heads. Rows are queries, columns are keys."""


def rhythm_png(drawn: DrawnRhythm) -> bytes:
    """Return the plot as the content of a PNG file, for `flash rhythm --plot`.

    Characters that no installed font has are drawn as boxes. The warning about them is hidden: the user cannot mend it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        return png(draw_rhythm(drawn))


def draw_rhythm(drawn: DrawnRhythm) -> Figure:
    """Return the figure: two attention maps, and below them WAAD with its plan tokens and FAI with its anchor tokens.

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
    """Draw one attention map, `map_BB`, of `drawn`: rows are the tokens that look, columns the tokens looked at.

    Dashed lines separate the prompt from the response.
    """
    from matplotlib.colors import PowerNorm

    size = len(map_BB)
    # A token cannot look at a later one. NaN leaves the part above the diagonal white.
    seen_BB = np.where(np.tri(size, dtype=bool), map_BB, np.nan)
    top = float(np.nanquantile(seen_BB, BRIGHTEST))
    edges = np.arange(size + 1) + drawn.start - 0.5  # the cell of a token has the token's place in its middle
    axes.pcolormesh(edges, edges, seen_BB, cmap="Blues", norm=PowerNorm(0.5, 0, max(top, 1e-6)), rasterized=True)
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
    # A map is half as wide as the plot, so that half as many names fit on its axes.
    if size <= MOST_NAMED // 2:
        _name_tokens(axes, drawn, both=True)


def _draw_signal(
    axes: Axes, drawn: DrawnRhythm, values: list[float], marks: list[bool], name: str, marked: str
) -> None:
    """Draw a signal over the tokens in the range of `drawn`. Tokens that are not of the response are gaps.

    Args:
        axes: axes to draw on.
        drawn: the part of the response that is drawn.
        values: value of each of the R tokens of the whole response.
        marks: True for each of the R tokens that gets a mark, a plan token or an anchor token.
        name: name of the signal, the label of the y axis.
        marked: label of the marks in the legend.
    """
    stop = drawn.start + drawn.map_2BB.shape[1]
    line = np.full(stop - drawn.start, np.nan)
    marked_values = np.full(stop - drawn.start, np.nan)
    for place, value, mark in zip(drawn.response.places, values, marks, strict=True):
        if drawn.start <= place < stop:
            line[place - drawn.start] = value
            marked_values[place - drawn.start] = value if mark else np.nan
    places = np.arange(drawn.start, stop)
    axes.plot(places, line, color=BLUE, linewidth=1.6, marker=".", markersize=4)
    axes.plot(places, marked_values, color=ORANGE, marker="o", markersize=5, linewidth=0, label=marked)
    axes.set_xlim(drawn.start - 0.5, stop - 0.5)
    # If all values are 0, the axis ends at 1: matplotlib warns of an axis without length.
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
    """Write the texts of the drawn tokens on the x axis; with `both`, also on the y axis."""
    places = list(range(drawn.start, drawn.start + drawn.map_2BB.shape[1]))
    names = [shortened(visible(drawn.response.tokens[place]), NAME) for place in places]
    turned = max(map(len, names)) > 1
    axes.set_xticks(places, names, rotation=90 if turned else 0, fontsize=8)
    if both:
        axes.set_yticks(places, names, fontsize=8)
    # Without this, matplotlib takes a dollar sign in a token as the start of a formula.
    for label in (*axes.get_xticklabels(), *(axes.get_yticklabels() if both else ())):
        label.set_parse_math(False)
