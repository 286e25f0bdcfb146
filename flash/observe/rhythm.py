"""Results of `flash rhythm`: their form in a file, and their lines in the terminal.

Texts of tokens come from models and files. Their control characters are escaped, so that they cannot control a
terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from algorithms.couplings import Coupling
from algorithms.rhythm import Rhythm
from flash.observe.text import width
from flash.text import one_line

PLAN, ANCHOR = "^", "*"
"""Marks of plan tokens, beside their change of WAAD, and of anchor tokens, beside their FAI."""
LONGEST_TEXT = 14
"""Largest number of columns of a token's text in the table."""
SPACE = "␣"
LABEL = 11
"""Columns for the name of a row in the table."""
GAP = 2
"""Columns between two tokens."""
DECIMALS = 6
"""Digits after the point that are shown. Rounding errors of sums are smaller, and so are shown as 0."""


class HeadSeen(msgspec.Struct, frozen=True):
    """Attention head of a measured layer."""

    layer: int
    head: int
    span: float
    """Mean number of tokens that the head looks back, over all queries in the responses."""
    kind: str
    """`local`, `global`, or neither."""


class ResponseSeen(msgspec.Struct, frozen=True):
    """Signals of a response of R tokens. Each list but `tokens` has R entries."""

    name: str
    tokens: list[str]
    """The text of each token of the whole sequence."""
    places: list[int]
    """Places of the response's tokens in the sequence."""
    waad: list[float]
    change: list[float]
    """Δ: change of WAAD at each token."""
    fai: list[float]
    entropy: list[float]
    """Entropy of the distribution that the token was drawn from, in nats."""
    multiplier: list[float]
    """γ: factor of the token's advantage, if advantages of its sign are multiplied."""
    plan: list[bool]
    """True if Δ is among the top share: a plan token."""
    anchor: list[bool]
    """True if FAI is among the top share: an anchor token."""


class RhythmSeen(msgspec.Struct, frozen=True):
    """All inputs and results of `flash rhythm`."""

    weights: str
    options: Rhythm
    temperatures: list[float]
    """Temperatures at which the responses were sampled. Entropies are for the same temperatures."""
    heads: list[HeadSeen]
    responses: list[ResponseSeen]
    couplings: list[Coupling]


def visible(token: str) -> str:
    """Return a token's text with control characters escaped and a mark for each space."""
    return one_line(token).replace(" ", SPACE)


def shortened(text: str, columns: int) -> str:
    """Cut a text to at most `columns` terminal columns. A cut text ends with an ellipsis."""
    if width(text) <= columns:
        return text
    ends = accumulate(width(one) for one in text)
    return "".join(one for one, end in zip(text, ends, strict=True) if end < columns) + "…"


def head_lines(heads: Sequence[HeadSeen], columns: int) -> Iterator[str]:
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


def response_lines(response: ResponseSeen, columns: int) -> Iterator[str]:
    """Yield the tokens with their signals beneath them, in blocks that fit into `columns`."""
    rows = {
        "WAAD": [f"{value:.2f}" for value in response.waad],
        "change": [f"{value:.2f}{PLAN if peak else ' '}" for value, peak in _marked(response.change, response.plan)],
        "FAI": [f"{value:.2g}{ANCHOR if peak else ' '}" for value, peak in _marked(response.fai, response.anchor)],
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


def _marked(values: Sequence[float], marks: Sequence[bool]) -> Iterator[tuple[float, bool]]:
    return zip(values, marks, strict=True)


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
    padded = (" " * (room - width(cell)) + cell for cell, room in zip(cells, widths, strict=True))
    return f"{name:{LABEL}}{''.join(padded)}".rstrip()


def _number(value: float) -> str:
    """Return a number with three significant digits, since FAI gets smaller in a longer response."""
    return "-" if math.isnan(value) else f"{round(value, DECIMALS):.3g}"


def _signed(value: float) -> str:
    return "-" if math.isnan(value) else f"{round(value, DECIMALS):+.3g}"
