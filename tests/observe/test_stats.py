from __future__ import annotations

import math
import random

import pytest

from flash.observe.stats import mean_interval


def test_interval_of_binary_rewards_solves_the_score_equation() -> None:
    """Wilson's bounds are the rates at which the observed mean lies exactly 1.96 standard errors away."""
    interval = mean_interval([1] * 37 + [0] * 91)
    assert interval.mean == pytest.approx(37 / 128)
    for bound in (interval.low, interval.high):
        assert abs(interval.mean - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / 128), rel=1e-6)
    assert interval.low < interval.mean < interval.high


def test_interval_of_a_perfect_score_stays_below_certainty() -> None:
    interval = mean_interval([1] * 20)
    assert interval.high == pytest.approx(1.0)
    assert 0.8 < interval.low < 0.9


def test_repeating_an_answer_of_the_same_problem_adds_no_confidence() -> None:
    once = mean_interval([1, 0, 1, 1, 0, 0, 1, 1])
    thrice = mean_interval(
        [v for v in [1, 0, 1, 1, 0, 0, 1, 1] for _ in range(3)], [p for p in range(8) for _ in "abc"]
    )
    assert thrice.mean == once.mean
    assert thrice.high - thrice.low == pytest.approx(once.high - once.low, rel=0.1)


def test_perfect_scores_count_each_problem_once() -> None:
    assert mean_interval([1] * 40, [sample % 10 for sample in range(40)]) == mean_interval([1] * 10)


@pytest.mark.parametrize("degrees", [1, 2, 5, 9, 10, 15, 40, 200])
def test_interval_of_other_rewards_holds_95_percent_of_students_t(degrees: int) -> None:
    values = [0.5, 2.5] + [1.5 + 0.25 * (-1) ** i for i in range(degrees - 1)]
    interval = mean_interval(values)
    n = len(values)
    deviation = math.sqrt(sum((value - interval.mean) ** 2 for value in values) / (n - 1) / n)
    quantile = (interval.high - interval.mean) / deviation
    assert _t_mass(quantile, degrees) == pytest.approx(0.95, abs=5e-5)


def test_clustered_interval_covers_the_true_mean_at_its_rate() -> None:
    """Of simulated evaluations with correlated answers, about 95 % of the intervals contain the truth."""
    generator = random.Random(0)
    problems = [problem for problem in range(60) for _ in range(4)]
    covered = 0
    for _ in range(400):
        rates = [generator.choice((0.05, 0.9)) for _ in range(60)]
        values = [int(generator.random() < rates[problem]) for problem in problems]
        interval = mean_interval(values, problems)
        covered += interval.low <= 0.475 <= interval.high
    assert 0.92 <= covered / 400 <= 0.98


def test_no_value_gives_no_number_and_one_value_no_bound() -> None:
    assert all(math.isnan(number) for number in mean_interval([]))
    assert mean_interval([0.3]) == (0.3, -math.inf, math.inf)


def _t_mass(quantile: float, degrees: int) -> float:
    """P(|t| <= quantile), by Simpson's rule on the density."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    pieces = 4000
    width = 2 * quantile / pieces
    total = 0.0
    for piece in range(pieces + 1):
        at = -quantile + piece * width
        weight = 1 if piece in (0, pieces) else 4 if piece % 2 else 2
        total += weight * scale * (1 + at * at / degrees) ** (-(degrees + 1) / 2)
    return total * width / 3
