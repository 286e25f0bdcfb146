"""The rhythm of attention on a terminal and in a picture."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from algorithms.couplings import Coupling
from flash.observe.rhythm import (
    GAP,
    LABEL,
    DrawnRhythm,
    MeasuredHead,
    MeasuredResponse,
    coupling_lines,
    draw_rhythm,
    head_lines,
    response_lines,
    rhythm_png,
    shortened,
    visible,
    width,
)

TOKENS = ["ask", "=", " so", "12", "\n", "\x1b[2J", "\u202e", "好的", "a-very-long-token-indeed", "$\\x"]


def response(count: int = 8, **changes: Any) -> MeasuredResponse:
    """Return a response of `count` tokens whose signals all grow; the second token is a plan token."""
    values = [0.25 * place for place in range(count)]
    plan = [place == 1 for place in range(count)]
    seen = MeasuredResponse(
        name="a",
        tokens=(TOKENS * (count // len(TOKENS) + 1))[: count + 2],
        places=list(range(2, count + 2)),
        waad=values,
        change=values,
        fai=values,
        entropy=values,
        multiplier=[1.5 if peak else 1.0 for peak in plan],
        plan=plan,
        anchor=plan[::-1],
    )
    return replace(seen, **changes)


def test_a_text_that_is_too_long_is_cut_by_what_it_takes_of_a_line() -> None:
    assert width("好的") == 4
    assert width("e\u0301") == 1
    assert shortened("好的好的", 8) == "好的好的"
    assert shortened("好的好的", 7) == "好的好…"
    assert shortened("abcdef", 4) == "abc…"


def test_signals_stand_beneath_their_tokens_and_peaks_are_marked() -> None:
    (token, waad, change, fai, entropy, multiplier, _) = response_lines(response(), 200)
    assert token.split()[1:] == ["␣so", "12", "\\n", "\\x1b[2J", "\\u202e", "好的", "a-very-long-t…", "$\\x"]
    assert [line.split()[0] for line in (waad, change, fai, entropy)] == ["WAAD", "change", "FAI", "entropy"]
    assert [cell for cell in change.split() if cell.endswith("^")] == ["0.25^"]
    assert [cell for cell in fai.split() if cell.endswith("*")] == ["1.5*"]
    assert multiplier.split() == ["multiplier", "1.50"]
    ends = token.index("12") + 2
    assert waad[:ends].endswith(" 0.25")
    assert multiplier[:ends].endswith(" 1.50")


@pytest.mark.parametrize("columns", [1, 40, 80])
def test_a_long_response_goes_on_in_blocks_that_fit(columns: int) -> None:
    lines = list(response_lines(response(200), columns))
    blocks = [lines[start : start + 7] for start in range(0, len(lines), 7)]
    assert sum(len(block[1].split()) - 1 for block in blocks) == 200
    assert all(block[6] == "" for block in blocks)
    if columns > LABEL + GAP + 20:
        assert max(map(width, lines)) <= columns


def test_heads_stand_by_their_kind() -> None:
    heads = [MeasuredHead(1, 0, 2.5, "local"), MeasuredHead(1, 1, 9.0, "global"), MeasuredHead(2, 0, 5.0, "")]
    assert [line.split() for line in head_lines(heads, 80)] == [
        ["local", "1.0", "(2.5)"],
        ["global", "1.1", "(9.0)"],
        ["neither", "2.0", "(5.0)"],
    ]
    many = list(head_lines([MeasuredHead(1, head, 2.5, "local") for head in range(30)], 60))
    assert len(many) > 1
    assert [line.split()[0] == "local" for line in many] == [True] + [False] * (len(many) - 1)


def test_couplings_are_a_table_and_what_is_no_number_a_dash() -> None:
    known = Coupling("entropy at plans", 1.5, 0.000512, 12, 1e-18, -0.2, 0.25, 0.002)
    unknown = Coupling("FAI at plans", math.nan, 0.5, 0, math.nan, math.nan, math.nan, math.nan)
    title, first, second = coupling_lines([known, unknown])
    assert title.split()[:3] == ["tokens", "mean", "others"]
    assert " ".join(first.split()) == "entropy at plans 12 1.5 0.000512 +1.5 +0 [-0.2, +0.25] 0.002"
    assert " ".join(second.split()) == "FAI at plans 0 - 0.5 - - -"


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "size"), [(8, 10), (200, 96)])
def test_a_picture_has_both_maps_and_both_signals(tokens: int, size: int) -> None:
    seen = response(tokens)
    map_2BB = np.random.default_rng(0).random((2, size, size), dtype=np.float32)
    drawn = DrawnRhythm(seen, seen.places[0] - 2, map_2BB)
    local, far, waad, fai = draw_rhythm(drawn).axes
    assert [axes.get_title(loc="left") for axes in (local, far)] == ["local heads", "global heads"]
    for axes, values in ((waad, seen.waad), (fai, seen.fai)):
        line = np.asarray(axes.lines[0].get_ydata())
        inside = min(size - 2, tokens)
        assert np.isnan(line[:2]).all()
        assert line[2 : 2 + inside].tolist() == values[:inside]
    peaks = np.asarray(waad.lines[1].get_ydata())
    assert np.flatnonzero(np.isfinite(peaks)).tolist() == [3]
    named = [label.get_text() for label in fai.get_xticklabels()]
    assert ("␣so" in named) == (size <= 48)
    data = rhythm_png(drawn)
    assert struct.unpack(">II", data[16:24])[0] == 1600


def test_what_would_command_a_terminal_is_shown_escaped() -> None:
    assert [visible(token) for token in TOKENS[2:7]] == ["␣so", "12", "\\n", "\\x1b[2J", "\\u202e"]
    text = "\n".join([*response_lines(response(), 200), *head_lines([MeasuredHead(1, 0, 2.5, "local")], 80)])
    assert all(one.isprintable() for one in text.replace("\n", ""))
