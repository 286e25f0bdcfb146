"""What was seen of the rhythm of attention, as a file keeps it and as a terminal shows it.

Texts of tokens come from models and files: what would command a terminal is shown escaped.
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
"""Mark tokens that plan, beside their change, and that anchor, beside their FAI."""
LONGEST_TEXT = 14
"""Columns of a token's text in the table."""
SPACE = "␣"
LABEL = 11
"""Columns before a row of the table."""
GAP = 2
"""Columns between two tokens."""
DECIMALS = 6
"""What is smaller is shown as 0: sums of numbers that are equal leave less."""


class HeadSeen(msgspec.Struct, frozen=True):
    """A head of the layers that were looked at."""

    layer: int
    head: int
    span: float
    """Tokens that it looks back, in the mean over all rows of the responses."""
    kind: str
    """`local`, `global`, or neither."""


class ResponseSeen(msgspec.Struct, frozen=True):
    """One response; [R] each, but for the tokens."""

    name: str
    tokens: list[str]
    """The text of each token of the whole sequence."""
    places: list[int]
    """Which of them the response is."""
    waad: list[float]
    change: list[float]
    """Δ."""
    fai: list[float]
    entropy: list[float]
    """Of the distribution that the token was drawn from, in nats."""
    multiplier: list[float]
    """γ, for an advantage of a sign that is multiplied."""
    plan: list[bool]
    """Whether Δ is among the top share."""
    anchor: list[bool]
    """Whether FAI is."""


class RhythmSeen(msgspec.Struct, frozen=True):
    """What `flash rhythm` has looked at, and found."""

    weights: str
    options: Rhythm
    temperatures: list[float]
    """At which the responses were sampled, and entropies are."""
    heads: list[HeadSeen]
    responses: list[ResponseSeen]
    couplings: list[Coupling]


def visible(token: str) -> str:
    """A token's text, escaped, with a mark for each space."""
    return one_line(token).replace(" ", SPACE)


def shortened(text: str, columns: int) -> str:
    """At most so many columns of a visible text, the last of them an ellipsis where it goes on."""
    if width(text) <= columns:
        return text
    ends = accumulate(width(one) for one in text)
    return "".join(one for one, end in zip(text, ends, strict=True) if end < columns) + "…"


def head_lines(heads: Sequence[HeadSeen], columns: int) -> Iterator[str]:
    """Which heads are of which kind, as layer.head with their spans, those of neither last."""
    for kind in ("local", "global", ""):
        cells = [f"{one.layer}.{one.head} ({one.span:.1f})" for one in heads if one.kind == kind]
        widths = [len(cell) + GAP for cell in cells]
        for block in _blocks(widths, columns - LABEL) if cells else ():
            yield _row((kind or "neither") if block.start == 0 else "", cells[block], widths[block])


def coupling_lines(couplings: Sequence[Coupling]) -> Iterator[str]:
    """A table: the means, their difference, and what chance gives."""
    names = max(len(one.name) for one in couplings)
    titles = f"{'tokens':>7} {'mean':>9} {'others':>9} {'more by':>9} {'by chance, 95 % of shifts':>32} {'p':>6}"
    yield f"{'':{names}} {titles}"
    for one in couplings:
        chance = f"{_signed(one.null_mean)} [{_signed(one.null_low)}, {_signed(one.null_high)}]"
        means = f"{_number(one.marked):>9} {_number(one.others):>9} {_signed(one.difference):>9}"
        p = "-" if math.isnan(one.p) else f"{one.p:.3f}"
        yield f"{one.name:{names}} {one.tokens:>7} {means} {'-' if math.isnan(one.p) else chance:>32} {p:>6}"


def response_lines(response: ResponseSeen, columns: int) -> Iterator[str]:
    """The tokens, and their signals beneath them, in as many blocks as the width asks for."""
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
    """Neighbours that fit into one line; one at least."""
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
    """Three digits, whatever its size: FAI shrinks as a response grows."""
    return "-" if math.isnan(value) else f"{round(value, DECIMALS):.3g}"


def _signed(value: float) -> str:
    return "-" if math.isnan(value) else f"{round(value, DECIMALS):+.3g}"
