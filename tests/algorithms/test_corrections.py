from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from algorithms.corrections import Correction, Geometric, IcePop, SequenceMask, TokenTis
from tests.algorithms.cases import LENGTHS, filled, random_tokens, rows_of, take
from tests.algorithms.reference import Row, mates

CASES: list[Correction] = [
    TokenTis(),
    TokenTis(cap=1.1),
    IcePop(),
    IcePop(low=0.9, high=1.2),
    SequenceMask(),
    SequenceMask(low=0.8, high=1.5),
    Geometric(),
    Geometric(low=0.9, high=1.05),
]
ALL = pytest.mark.parametrize("correction", CASES, ids=repr)


def naive(correction: Any, rows: Sequence[Row], t: int) -> float:
    weight = math.exp(rows[t].proximal) / math.exp(rows[t].behaviour)
    if isinstance(correction, TokenTis):
        return min(weight, correction.cap)
    if isinstance(correction, IcePop):
        return weight if correction.low <= weight <= correction.high else 0.0
    product, group = 1.0, mates(rows, t)
    for u in group:
        product *= math.exp(rows[u].proximal) / math.exp(rows[u].behaviour)
    over = product ** (1 / len(group)) if isinstance(correction, Geometric) else product
    return float(correction.low <= over <= correction.high)


@ALL
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
def test_weights_equal_a_loop_over_tokens(correction: Correction, dtype: torch.dtype, tolerance: float) -> None:
    tokens = random_tokens(dtype)
    found_T = correction(tokens._replace(logp_T=tokens.logp_T.clone().requires_grad_()))
    assert found_T.dtype == dtype
    assert not found_T.requires_grad
    kept = torch.nonzero(tokens.mask_T).flatten().tolist()
    expected = torch.tensor([naive(correction, rows_of(tokens), t) for t in kept], dtype=torch.float64)
    torch.testing.assert_close(found_T[kept].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "correction", [IcePop(low=0.9, high=1.2), SequenceMask(low=0.8, high=1.5), Geometric(low=0.9, high=1.05)], ids=repr
)
def test_a_filter_takes_some_and_leaves_some(correction: Correction) -> None:
    tokens = random_tokens()
    kept_T = correction(tokens)[tokens.mask_T] > 0
    assert 0 < kept_T.sum() < len(kept_T)


@ALL
@pytest.mark.parametrize("garbage", [math.nan, 1e30, -1e30, math.inf])
def test_masked_slots_change_no_weight(correction: Correction, garbage: float) -> None:
    tokens = random_tokens()
    dirty = filled(tokens, garbage)
    assert torch.equal(correction(dirty)[tokens.mask_T], correction(tokens)[tokens.mask_T])


@ALL
def test_the_order_and_the_company_of_sequences_do_not_matter(correction: Correction) -> None:
    tokens = random_tokens()
    whole_T = correction(tokens)
    for chosen in ([8, 3, 0, 5], [1], list(reversed(range(len(LENGTHS))))):
        part, place_T = take(tokens, chosen)
        torch.testing.assert_close(correction(part), whole_T[place_T], rtol=1e-12, atol=0)


@ALL
def test_where_the_policies_agree_every_weight_is_one(correction: Correction) -> None:
    tokens = random_tokens()
    assert (correction(tokens._replace(behaviour_T=tokens.proximal_T)) == 1).all()


@ALL
def test_far_policies_give_finite_weights(correction: Correction) -> None:
    tokens = random_tokens(torch.float32)
    for gap in (-80.0, 80.0):
        assert correction(tokens._replace(behaviour_T=tokens.proximal_T + gap)).isfinite().all()


@pytest.mark.parametrize("kind", [IcePop, SequenceMask, Geometric])
def test_bounds_in_the_wrong_order_are_refused(kind: type) -> None:
    with pytest.raises(ValueError, match="expected low ≤ high, got 2 and 1"):
        kind(low=2.0, high=1.0)


@pytest.mark.parametrize(
    "plain",
    [
        {"kind": "token_tis", "cap": 0.0},
        {"kind": "token_tis", "low": 0.5},
        {"kind": "icepop", "low": -1.0},
        {"kind": "sequence_mask", "high": -1.0},
        {"kind": "geometric", "low": 1.1, "high": 1.0},
        {"kind": "unknown"},
        {"cap": 2.0},
    ],
)
def test_options_that_do_not_belong_to_the_kind_are_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plain, Correction)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("token_tis", TokenTis()), ("icepop", IcePop()), ("sequence_mask", SequenceMask()), ("geometric", Geometric())],
)
def test_the_kind_chooses_the_correction(kind: str, expected: Correction) -> None:
    assert msgspec.convert({"kind": kind}, Correction) == expected
