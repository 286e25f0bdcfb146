"""Weights of samples by age, and the learning rate by lag."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.staleness import ExponentialStaleness, Lag, LinearStaleness, NoStaleness, Staleness

CASES: list[Staleness] = [NoStaleness(), ExponentialStaleness(decay=0.8), LinearStaleness()]
ALL = pytest.mark.parametrize("staleness", CASES, ids=repr)
# Ages of the samples of a batch, in versions.
AGES = [0.0, 3.0, 1.0, 1.0, 4.0]


def weights(staleness: Staleness, ages: list[float], max_age: float) -> list[float]:
    """Return the weights of samples with these ages. `max_age` is the largest allowed age."""
    return staleness.weights(np.array(ages), max_age).tolist()


def naive(staleness: Staleness, ages: list[float], max_age: float) -> list[float]:
    """Return the weights of samples, computed from the definitions."""
    match staleness:
        case NoStaleness():
            raw = [1.0 for _ in ages]
        case ExponentialStaleness(decay=decay):
            raw = [decay**age for age in ages]
        case LinearStaleness():
            raw = [max(0.0, 1 - age / (max_age + 1)) for age in ages]
    return [one / (sum(raw) / len(raw)) for one in raw]


@ALL
@pytest.mark.parametrize("max_age", [4.0, 4.5, 16.0, 2.0])
def test_weights_are_the_formula_divided_by_its_mean(staleness: Staleness, max_age: float) -> None:
    np.testing.assert_allclose(weights(staleness, AGES, max_age), naive(staleness, AGES, max_age), rtol=1e-12)


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
def test_a_negative_or_infinite_age_is_refused(staleness: Staleness, age: float) -> None:
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


RATE = 1e-3
"""The scheduled learning rate of an update."""


def naive_scale(budget: float, rate: float, tokens: list[tuple[float, float, float]]) -> float:
    """Return `Lag.scale` by its rule, from the tokens of an update.

    A token is its log-ratio, its lag in versions, and the sum of the rates applied since it was sampled.
    """
    count = len(tokens)
    distance = math.sqrt(sum(log_ratio**2 for log_ratio, _, _ in tokens) / count)
    lag = math.sqrt(sum(one**2 for _, one, _ in tokens) / count)
    moved = math.sqrt(sum(one**2 for _, _, one in tokens) / count)
    allowed = math.sqrt(budget) / distance * moved / lag
    return min(1.0, max(allowed / rate, 1 / (1 + lag)))


@pytest.mark.parametrize("budget", [1e-4, 0.01, 0.04, 1.0])
def test_the_scale_equals_the_rule_token_by_token(budget: float) -> None:
    lags, moved, counts = [0.5, 1.5, 2.5], [0.2e-3, 0.9e-3, 1.4e-3], [3, 0, 2]
    log_ratios = [0.1, -0.3, 0.05, 0.4, -0.2]
    tokens = [(log_ratio, lags[age], moved[age]) for log_ratio, age in zip(log_ratios, [0, 0, 0, 2, 2], strict=True)]
    square = sum(one**2 for one in log_ratios)
    found = Lag(budget=budget).scale(RATE, square, counts, lags, moved)
    assert found == pytest.approx(naive_scale(budget, RATE, tokens), rel=1e-12)


def test_at_constant_rates_the_rate_goes_down_with_the_distance_beyond_the_budget() -> None:
    lag, counts, lags, moved = Lag(budget=0.04), [0.0, 10.0], [0.0, 1.0], [0.0, RATE]
    assert lag.scale(RATE, 10 * 0.04, counts, lags, moved) == pytest.approx(1.0)
    assert lag.scale(RATE, 10 * 0.01, counts, lags, moved) == 1.0
    assert lag.scale(RATE, 10 * 0.09, counts, lags, moved) == pytest.approx(2 / 3)


@pytest.mark.parametrize("age", [1, 2, 8, 16])
def test_the_distance_settles_at_the_budget_where_updates_agree_in_their_direction(age: int) -> None:
    """Simulate steps on tokens of one age. In each step, a rate of 1 moves each log-prob by g.

    The distance must settle at the budget, or at the lower bound of the rate if that moves the policy further.
    """
    # With rates of 1, the distance would be (g · age)² = 0.36.
    lag, g = Lag(budget=0.04), 0.6 / age
    rates = list[float]()
    for step in range(40 * age):
        old = min(step, age)
        moved = sum(rates[step - old :])
        counts = [0.0] * age + [1.0]
        way = [0.0] * age + [moved]
        lags = [0.0] * age + [float(old)]
        rates.append(lag.scale(1.0, (g * moved) ** 2, counts, lags, way))
    held = (g * sum(rates[-age:])) ** 2
    # The lower bound of the rate is 1 / (1 + age).
    floor = (g * age / (1 + age)) ** 2
    assert held == pytest.approx(max(0.04, floor), rel=1e-6)
    assert rates[-1] < 1


def test_the_scale_has_a_lower_bound_that_depends_on_the_lag() -> None:
    for age in (1.0, 4.0, 16.0):
        assert Lag(budget=1e-6).scale(RATE, 100.0, [1.0], [age], [age * RATE]) == pytest.approx(1 / (1 + age))


def test_without_lag_distance_or_movement_the_rate_stays_whole() -> None:
    lag = Lag(budget=1e-6)
    assert lag.scale(RATE, 9.0, [5.0], [0.0], [0.0]) == 1.0, "all tokens are of the current version"
    assert lag.scale(RATE, 9.0, [0.0, 5.0], [0.0, 1.0], [0.0, 0.0]) == 1.0, "no update has moved the policy"
    assert lag.scale(RATE, 0.0, [0.0, 5.0], [0.0, 1.0], [0.0, RATE]) == 1.0, "the distance is 0"
    assert lag.scale(RATE, 0.0, [0.0, 0.0], [0.0, 1.0], [0.0, RATE]) == 1.0, "no trained token"
    assert lag.scale(0.0, 9.0, [0.0, 5.0], [0.0, 1.0], [0.0, RATE]) == 1.0, "the scheduled rate is 0"
    assert lag.scale(RATE, math.nan, [0.0, 5.0], [0.0, 1.0], [0.0, RATE]) == 1.0, "NaN: the gradient's check reports it"


def test_the_scale_takes_earlier_reductions_of_the_rate_into_account() -> None:
    """Check a policy that moved at half the rate: at the whole rate, its distance would be twice as large."""
    lag = Lag(budget=0.04)
    assert lag.scale(RATE, 0.04, [1.0], [1.0], [RATE / 2]) == pytest.approx(0.5)
    assert lag.scale(RATE, 0.01, [1.0], [1.0], [RATE / 2]) == pytest.approx(1.0)


@pytest.mark.parametrize("budget", [0, -0.1, 101])
def test_a_budget_out_of_range_is_refused(budget: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"budget": budget}, Lag)
