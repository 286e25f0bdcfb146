"""Corrections for the mismatch of policies: factors, rejected sequences, denominators, and options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from algorithms.base import Aggregation, Objective, PackedTokens
from algorithms.corrections import Correction, Geometric, IcePop, SequenceMask, TokenTis, correct
from algorithms.objectives.clipped import Grpo
from algorithms.objectives.trust_region import DecoupledPpo, M2po, Tis
from tests.algorithms.cases import DEFAULTS, LENGTHS, filled, random_tokens, rows_of, step, take, with_limit
from tests.algorithms.reference import Reference, Row, decoupled_ppo, m2po, mates, tis
from tests.algorithms.test_invariance import AGGREGATIONS

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
    """Return the factor that a correction gives token `t`, from its definition with w = π_proximal / π_behaviour."""
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
def test_masked_slots_change_no_weight(correction: Correction) -> None:
    tokens = random_tokens()
    for garbage in (math.nan, 1e30, -1e30, math.inf):
        dirty = filled(tokens, garbage)
        assert torch.equal(correction(dirty)[tokens.mask_T], correction(tokens)[tokens.mask_T])


@ALL
def test_order_and_choice_of_the_other_sequences_do_not_matter(correction: Correction) -> None:
    tokens = random_tokens()
    whole_T = correction(tokens)
    for chosen in ([8, 3, 0, 5], [1], list(reversed(range(len(LENGTHS))))):
        part, place_T = take(tokens, chosen)
        torch.testing.assert_close(correction(part), whole_T[place_T], rtol=1e-12, atol=0)


@ALL
def test_if_the_policies_are_equal_every_weight_is_one(correction: Correction) -> None:
    tokens = random_tokens()
    assert (correction(tokens._replace(behaviour_T=tokens.proximal_T)) == 1).all()


@ALL
def test_far_policies_give_finite_weights(correction: Correction) -> None:
    tokens = random_tokens(torch.float32)
    for gap in (-80.0, 80.0):
        assert correction(tokens._replace(behaviour_T=tokens.proximal_T + gap)).isfinite().all()


REJECTING = pytest.mark.parametrize(
    "correction", [SequenceMask(low=0.8, high=1.5), Geometric(low=0.9, high=1.05)], ids=repr
)
AGGREGATED = pytest.mark.parametrize("aggregation", AGGREGATIONS)


def accepted(correction: Correction, tokens: PackedTokens) -> list[int]:
    """Return the indices of the sequences that the correction accepts and that have an unmasked token."""
    accepted_T = correct([correction], tokens).accepted_T & tokens.mask_T
    return sorted(set(tokens.sequence_T[accepted_T].tolist()))


@REJECTING
@pytest.mark.parametrize(
    ("objective", "aggregation"),
    # Each pair of a correction and an aggregation meets several objectives.
    [(one, AGGREGATIONS[at % 4]) for at, one in enumerate(DEFAULTS)],
    ids=repr,
)
def test_a_rejected_sequence_is_as_if_it_had_not_been_sampled(
    correction: Correction, objective: Objective, aggregation: Aggregation
) -> None:
    tokens = random_tokens()
    chosen = accepted(correction, tokens)
    assert 0 < len(chosen) < len(LENGTHS) - 1
    part, place_T = take(tokens, chosen)
    expected, (expected_T,) = step(objective, [part], aggregation)
    loss, (gradient_T,) = step(objective, [tokens], aggregation, [correction])
    assert loss == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient_T[place_T], expected_T, rtol=1e-12, atol=1e-15)
    assert gradient_T.count_nonzero() == expected_T.count_nonzero()


@REJECTING
@AGGREGATED
def test_a_filter_commutes_with_every_cut_and_with_garbage_in_masked_slots(
    correction: Correction, aggregation: Aggregation
) -> None:
    tokens, objective = random_tokens(), Grpo()
    loss, (gradient_T,) = step(objective, [tokens], aggregation, [correction])
    parts, places = zip(*(take(tokens, part) for part in ([8, 3, 1], [0, 7, 6, 5], [4, 2])), strict=True)
    dirty = [filled(part, math.nan) for part in parts]
    shared, gradients = step(objective, dirty, aggregation, [correction])
    assert shared == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(torch.cat(gradients), gradient_T[torch.cat(places)], rtol=1e-12, atol=1e-15)


@REJECTING
@AGGREGATED
def test_the_gradient_of_a_filtered_step_is_its_finite_difference(
    correction: Correction, aggregation: Aggregation
) -> None:
    tokens, objective, width = random_tokens(), Tis(), 1e-6
    _, (gradient_T,) = step(objective, [tokens], aggregation, [correction])
    for t in range(0, len(tokens.logp_T), 7):
        ends: list[float] = []
        for sign in (-1, 1):
            moved_T = tokens.logp_T.clone()
            moved_T[t] += sign * width
            ends.append(step(objective, [tokens._replace(logp_T=moved_T)], aggregation, [correction])[0])
        assert float(gradient_T[t]) == pytest.approx((ends[1] - ends[0]) / 2 / width, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("objective", "reference", "corrections"),
    [
        (Tis(cap=1e9), tis, [IcePop(low=0.9, high=1.2)]),
        (DecoupledPpo(weight_cap=1.2), decoupled_ppo, []),
        (M2po(), m2po, []),
    ],
    ids=["icepop", "cap = mask", "m2po"],
)
def test_tokens_with_weight_zero_stay_in_the_denominator(
    objective: Objective, reference: Reference, corrections: list[Correction]
) -> None:
    """Check J = 1 / Σ |y| · Σ …, in which |y| counts all tokens of a response, as in the paper of each method."""
    tokens = random_tokens()
    (whole,) = with_limit(objective, [tokens])
    _, (gradient_T,) = step(objective, [tokens], "token_mean", corrections)
    rows = rows_of(whole)
    expected, dropped = torch.zeros(len(rows), dtype=torch.float64), 0
    kept = [t for t, row in enumerate(rows) if row.mask]
    for t in kept:
        weight = math.prod(naive(one, rows, t) for one in corrections)
        found = reference(objective, rows, t)
        dropped += weight * found.loss == 0
        for u, slope in found.gradient.items():
            expected[u] += weight * slope / len(kept)
    assert 0 < dropped < len(kept)
    torch.testing.assert_close(gradient_T, expected, rtol=1e-10, atol=1e-14)


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
