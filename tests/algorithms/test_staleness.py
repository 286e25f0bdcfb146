from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.staleness import ExponentialStaleness, LinearStaleness, NoStaleness, Staleness

CASES: list[Staleness] = [NoStaleness(), ExponentialStaleness(decay=0.8), LinearStaleness()]
ALL = pytest.mark.parametrize("staleness", CASES, ids=repr)
AGES = [0.0, 3.0, 1.0, 1.0, 4.0]


def weights(staleness: Staleness, ages: list[float], alpha: float) -> list[float]:
    return staleness.weights(np.array(ages), alpha).tolist()


def naive(staleness: Staleness, ages: list[float], alpha: float) -> list[float]:
    match staleness:
        case NoStaleness():
            raw = [1.0 for _ in ages]
        case ExponentialStaleness(decay=decay):
            raw = [decay**age for age in ages]
        case LinearStaleness():
            raw = [max(0.0, 1 - age / (alpha + 1)) for age in ages]
    return [one / (sum(raw) / len(raw)) for one in raw]


@ALL
@pytest.mark.parametrize("alpha", [4.0, 4.5, 16.0, 2.0])
def test_weights_are_the_formula_over_its_mean(staleness: Staleness, alpha: float) -> None:
    np.testing.assert_allclose(weights(staleness, AGES, alpha), naive(staleness, AGES, alpha), rtol=1e-12)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.sampled_from(CASES))
def test_the_mean_weight_is_one_and_older_never_weighs_more(ages: list[int], staleness: Staleness) -> None:
    found = weights(staleness, [float(age) for age in ages], 20.0)
    assert sum(found) / len(found) == pytest.approx(1.0)
    by_age = [weight for _, weight in sorted(zip(ages, found, strict=True))]
    assert all(one >= other * (1 - 1e-12) for one, other in pairwise(by_age))


@ALL
@pytest.mark.parametrize("age", [0.0, 2.0, 100.0, 1e6])
def test_a_batch_of_equal_ages_is_unchanged(staleness: Staleness, age: float) -> None:
    assert weights(staleness, [age] * 3, 2.0) == [1.0] * 3


def test_very_old_batches_keep_their_ratios() -> None:
    young = weights(ExponentialStaleness(decay=0.5), [0.0, 1.0], 1e4)
    assert weights(ExponentialStaleness(decay=0.5), [5000.0, 5001.0], 1e4) == pytest.approx(young)


@ALL
def test_no_samples_have_no_weights(staleness: Staleness) -> None:
    assert weights(staleness, [], 1.0) == []


@ALL
@pytest.mark.parametrize("age", [-1.0, math.nan, math.inf])
def test_an_age_that_cannot_be_is_refused(staleness: Staleness, age: float) -> None:
    with pytest.raises(ValueError, match="expected finite numbers of at least 0"):
        weights(staleness, [0.0, age], 1.0)


@pytest.mark.parametrize(
    "plain",
    [
        {"kind": "exponential"},
        {"kind": "exponential", "decay": 0.0},
        {"kind": "exponential", "decay": 1.1},
        {"kind": "linear", "decay": 0.5},
        {"kind": "none", "decay": 0.5},
        {"kind": "quadratic"},
    ],
)
def test_options_that_do_not_belong_to_the_kind_are_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plain, Staleness)


def test_the_kind_chooses_the_weights() -> None:
    assert msgspec.convert({"kind": "exponential", "decay": 0.8}, Staleness) == CASES[1]
    assert msgspec.convert({"kind": "linear"}, Staleness) == CASES[2]
    assert msgspec.convert({"kind": "none"}, Staleness) == CASES[0]
