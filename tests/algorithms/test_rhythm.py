"""Multipliers of advantages by the rhythm of attention, compared with a reference that computes token by token.

`algorithms.rhythm` explains WAAD, FAI, plans, anchors, and local and global heads.

Shape legend: H = heads, L = tokens of the sequence, R = tokens of the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from algorithms.rhythm import (
    SHIFT,
    WINDOW,
    Rhythm,
    changes,
    chosen_layers,
    followers,
    future_influence,
    head_kinds,
    multiplier,
    spans,
    top_share,
    windowed_distance,
)
from tests.algorithms import rhythm_reference as reference

# Places of the tokens of a response within a sequence of `LENGTH` tokens; a gap ends a turn.
RESPONSES = {
    "one turn": list(range(5, 60)),
    "three turns": [*range(4, 20), *range(22, 23), *range(30, 57)],
    "one token": [7],
    "shorter than the horizon": list(range(3, 9)),
}
LENGTH = 60
"""Number of tokens of the sequence."""


def random_maps(heads: int, seed: int = 0) -> torch.Tensor:
    """Return causal attention maps, float64 [H, L, L], whose rows add up to 1. The first heads look back least far."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(LENGTH, dtype=torch.float64)
    distance = place[:, None] - place[None, :]
    slope = torch.linspace(-0.5, 0.1, heads, dtype=torch.float64)[:, None, None]
    score = slope * distance + 2 * torch.randn(heads, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    return score.masked_fill(distance < 0, -torch.inf).softmax(-1)


def signals(maps: torch.Tensor, response: list[int], options: Rhythm) -> tuple[Any, Any]:
    """Return WAAD and FAI of each head and token of the response, [H, R] each."""
    row = torch.tensor(response)
    weights, column = maps[:, row], torch.arange(LENGTH)
    given = future_influence(weights, row, column, options.nearest, options.farthest)[:, row].numpy()
    count = followers(np.array(response), options.nearest, options.farthest)
    return windowed_distance(weights, row, column, WINDOW).numpy(), given / np.maximum(count, 1)


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
def test_the_signals_equal_the_definitions_of_the_paper(response: list[int]) -> None:
    options = Rhythm(nearest=3, farthest=20)
    maps = random_maps(3)
    waad, influence = signals(maps, response, options)
    row = torch.tensor(response)
    span = spans(maps[:, row], row, torch.arange(LENGTH)).mean(-1)
    for head, one in enumerate(maps.tolist()):
        assert span[head].item() == pytest.approx(reference.head_span(one, response), rel=1e-12)
        assert waad[head].tolist() == pytest.approx(reference.waad(one, response, WINDOW), rel=1e-9)
        assert influence[head].tolist() == pytest.approx(reference.fai(one, response, 3, 20), rel=1e-12)


def test_fai_of_blocks_of_rows_adds_up_to_fai_of_all_rows() -> None:
    maps, options = random_maps(2), Rhythm(nearest=3, farthest=20)
    place = torch.arange(LENGTH)
    whole = future_influence(maps, place, place, options.nearest, options.farthest)
    parts = [
        future_influence(maps[:, rows], place[rows], place, options.nearest, options.farthest)
        for rows in (slice(0, 17), slice(17, 18), slice(18, LENGTH))
    ]
    assert torch.allclose(torch.stack(parts).sum(0), whole, rtol=1e-12)


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
@pytest.mark.parametrize(
    "options",
    [
        {"credit": "local"},
        {"credit": "local", "top": 1.0, "gain": 3.0},
        {"credit": "global"},
        {"credit": "global", "nearest": 1, "farthest": 5, "top": 0.1},
        {"credit": "coupled"},
        {"credit": "coupled", "nearest": 2, "farthest": 30},
        {"credit": "coupled", "nearest": 1, "top": 1.0},
    ],
    ids=str,
)
def test_the_multiplier_equals_the_definition_of_the_paper(options: dict[str, Any], response: list[int]) -> None:
    rhythm = Rhythm(**options)
    for seed in range(2):
        maps = random_maps(4, seed)
        waad, influence = signals(maps, response, rhythm)
        found = multiplier(rhythm, waad[:2].mean(0), influence[2:].mean(0), np.array(response))
        local, far = (reference.mean_map(part.tolist()) for part in (maps[:2], maps[2:]))
        assert found.tolist() == pytest.approx(reference.gamma(rhythm, local, far, response), rel=1e-9)


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=40),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["local", "global", "coupled"]),
)
def test_coupled_credit_moves_from_anchors_to_plans_and_never_grows(waad: list[float], seed: int, credit: Any) -> None:
    rng = np.random.default_rng(seed)
    influence, position = rng.random(len(waad)), np.arange(len(waad)) + 3
    rhythm = Rhythm(credit=credit)
    gamma = multiplier(rhythm, np.array(waad), influence, position)
    assert ((gamma >= 1) & (gamma <= 1 + (rhythm.gain - 1) * (1 + SHIFT) + 1e-12)).all()
    if credit != "coupled":
        assert set(gamma.tolist()) <= {1.0, rhythm.gain}
        return
    uncoupled = multiplier(Rhythm(credit="global"), np.array(waad), influence, position)
    assert gamma.sum() <= uncoupled.sum() + 1e-9


def test_a_plan_gets_its_share_once_however_many_anchors_follow_it() -> None:
    waad = np.array([9.0, 1.0, 1.0, 1.0, 5.0, 5.0])
    influence = np.array([0.0, 0.0, 3.0, 2.0, 0.0, 0.0])
    rhythm = Rhythm(top=0.33)
    # Δ = 8, 0, 0, 4, 0, 0: the first token is the plan of the third and of the fourth, three tokens on.
    found = multiplier(rhythm, waad, influence, np.arange(6))
    assert found.tolist() == pytest.approx([1.2, 1.0, 1.3, 1.3, 1.0, 1.0])


def test_tokens_with_signal_zero_are_not_chosen_and_ties_go_to_earlier_tokens() -> None:
    assert top_share(np.zeros(5), 1.0).tolist() == [False] * 5
    assert top_share(np.array([1.0, 2.0, 2.0, 1.0, 2.0]), 0.4).tolist() == [False, True, True, False, False]
    assert changes(np.array([1.0, 4.0, 2.0]), np.array([5, 6, 9])).tolist() == [3.0, 0.0, 0.0]


def test_heads_with_short_spans_are_local_and_with_long_spans_global() -> None:
    span = np.array([5.0, 1.0, 9.0, 2.0, 7.0, 3.0, 8.0, 4.0, 6.0, 0.0])
    near, far = head_kinds(span)
    assert (near.tolist(), far.tolist()) == ([1, 3, 9], [2, 4, 6])
    near, far = head_kinds(span[:2], 0.1, 0.1)
    assert (near.tolist(), far.tolist()) == ([1], [0])


@given(st.integers(2, 40), st.floats(0.01, 0.99), st.floats(0.01, 1.0))
@example(15, 0.5, 1.0)
def test_no_head_is_both_local_and_global(count: int, local: float, part: float) -> None:
    near, far = head_kinds(np.arange(count, dtype=np.float64), local, part * (1 - local))
    assert len(near) > 0
    assert len(far) > 0
    assert near.max() < far.min()


@pytest.mark.parametrize(
    ("attention", "count", "expected"),
    [
        (range(36), 36, [12, 15, 18, 21, 24]),
        (range(28), 28, [9, 11, 14, 16, 18]),
        (range(3), 3, [1, 2]),
        (range(1), 1, [0]),
        (range(3, 36, 4), 36, [11, 15, 19, 23]),
        ([0, 35], 36, [0, 35]),
    ],
)
def test_layers_of_attention_are_spaced_over_the_middle_third(
    attention: Sequence[int], count: int, expected: list[int]
) -> None:
    assert chosen_layers(attention, count) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nearest": 11, "farthest": 10}, "nearest"),
        ({"gain": 1.0}, "gain"),
        ({"top": 0.0}, "top"),
        ({"top": 1.1}, "top"),
        ({"credit": "both"}, "credit"),
        ({"nearest": 0}, "nearest"),
        ({"farthest": 0}, "farthest"),
        ({"depth": 3}, "depth"),
    ],
)
def test_an_invalid_option_is_refused_and_named_in_the_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(options, Rhythm)
