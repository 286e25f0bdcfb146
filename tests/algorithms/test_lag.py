from __future__ import annotations

import math

import msgspec
import pytest

from algorithms.staleness import Lag

RATE = 1e-3


def naive_scale(budget: float, rate: float, tokens: list[tuple[float, float, float]]) -> float:
    """The rule token by token: (log-ratio, lag, rates applied since)."""
    count = len(tokens)
    distance = math.sqrt(sum(log_ratio**2 for log_ratio, _, _ in tokens) / count)
    lag = math.sqrt(sum(one**2 for _, one, _ in tokens) / count)
    moved = math.sqrt(sum(one**2 for _, _, one in tokens) / count)
    allowed = math.sqrt(budget) / distance * moved / lag
    return min(1.0, max(allowed / rate, 1 / (1 + lag)))


@pytest.mark.parametrize("budget", [1e-4, 0.01, 0.04, 1.0])
def test_the_scale_is_that_of_the_rule_token_by_token(budget: float) -> None:
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
    """Each rate of 1 moves a log-prob by g a version: the loop of measuring and holding, on data of one age."""
    lag, g = Lag(budget=0.04), 0.2 * 3 / age
    rates = list[float]()
    for step in range(40 * age):
        old = min(step, age)
        moved = sum(rates[step - old :])
        counts = [0.0] * age + [1.0]
        way = [0.0] * age + [moved]
        lags = [0.0] * age + [float(old)]
        rates.append(lag.scale(1.0, (g * moved) ** 2, counts, lags, way))
    held = (g * sum(rates[-age:])) ** 2
    floor = (g * age / (1 + age)) ** 2
    assert held == pytest.approx(max(0.04, floor), rel=1e-6)
    assert rates[-1] < 1


def test_the_rate_is_never_below_that_of_a_whole_update_over_the_lag() -> None:
    for age in (1.0, 4.0, 16.0):
        assert Lag(budget=1e-6).scale(RATE, 100.0, [1.0], [age], [age * RATE]) == pytest.approx(1 / (1 + age))


def test_without_lag_distance_or_movement_the_rate_stays_whole() -> None:
    lag = Lag(budget=1e-6)
    assert lag.scale(RATE, 9.0, [5.0], [0.0], [0.0]) == 1.0, "tokens of the current version"
    assert lag.scale(RATE, 9.0, [0.0, 5.0], [0.0, 1.0], [0.0, 0.0]) == 1.0, "nothing has moved the policy"
    assert lag.scale(RATE, 0.0, [0.0, 5.0], [0.0, 1.0], [0.0, RATE]) == 1.0, "it is where it was"
    assert lag.scale(RATE, 0.0, [0.0, 0.0], [0.0, 1.0], [0.0, RATE]) == 1.0, "no token"
    assert lag.scale(0.0, 9.0, [0.0, 5.0], [0.0, 1.0], [0.0, RATE]) == 1.0, "no rate to hold down"
    assert lag.scale(RATE, math.nan, [0.0, 5.0], [0.0, 1.0], [0.0, RATE]) == 1.0, "the gradient says what is wrong"


def test_what_was_held_down_before_is_not_held_against_the_rate_again() -> None:
    """The policy moved at half the rate: at the whole one it would be twice as far."""
    lag = Lag(budget=0.04)
    assert lag.scale(RATE, 0.04, [1.0], [1.0], [RATE / 2]) == pytest.approx(0.5)
    assert lag.scale(RATE, 0.01, [1.0], [1.0], [RATE / 2]) == pytest.approx(1.0)


@pytest.mark.parametrize("budget", [0, -0.1, 101])
def test_a_budget_that_makes_no_sense_is_refused(budget: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"budget": budget}, Lag)
