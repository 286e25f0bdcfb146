from __future__ import annotations

import itertools
import math
import random

import pytest

from flash.observe.stats import best_of, best_of_each, difference, mean_interval


def test_interval_of_binary_rewards_solves_the_score_equation() -> None:
    """Wilson's bounds are the rates for which the observed mean is exactly 1.96 standard errors away."""
    interval = mean_interval([1] * 37 + [0] * 91, binary=True)
    assert interval.mean == pytest.approx(37 / 128)
    for bound in (interval.low, interval.high):
        assert abs(interval.mean - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / 128), rel=1e-6)
    assert interval.low < interval.mean < interval.high


def test_interval_of_a_perfect_score_stays_below_certainty() -> None:
    interval = mean_interval([1] * 20, binary=True)
    assert interval.high == pytest.approx(1.0)
    assert 0.8 < interval.low < 0.9


def test_repeating_an_answer_of_the_same_problem_adds_no_confidence() -> None:
    once = mean_interval([1, 0, 1, 1, 0, 0, 1, 1], binary=True)
    thrice = mean_interval(
        [v for v in [1, 0, 1, 1, 0, 0, 1, 1] for _ in range(3)], [p for p in range(8) for _ in "abc"], binary=True
    )
    assert thrice.mean == once.mean
    assert thrice.high - thrice.low == pytest.approx(once.high - once.low, rel=0.1)


def test_perfect_scores_count_each_problem_once() -> None:
    perfect = mean_interval([1] * 40, [sample % 10 for sample in range(40)], binary=True)
    assert perfect == mean_interval([1] * 10, binary=True)


@pytest.mark.parametrize("degrees", [1, 2, 5, 9, 10, 15, 40, 200])
def test_interval_of_other_rewards_holds_95_percent_of_students_t(degrees: int) -> None:
    values = [0.5, 2.5] + [1.5 + 0.25 * (-1) ** i for i in range(degrees - 1)]
    interval = mean_interval(values)
    n = len(values)
    deviation = math.sqrt(sum((value - interval.mean) ** 2 for value in values) / (n - 1) / n)
    quantile = (interval.high - interval.mean) / deviation
    assert _t_mass(quantile, degrees) == pytest.approx(0.95, abs=5e-5)


def test_clustered_interval_covers_the_true_mean_at_its_rate() -> None:
    """In simulated evaluations with correlated answers, about 95 % of the intervals contain the true mean."""
    generator = random.Random(0)
    problems = [problem for problem in range(60) for _ in range(4)]
    covered = 0
    for _ in range(400):
        rates = [generator.choice((0.05, 0.9)) for _ in range(60)]
        values = [int(generator.random() < rates[problem]) for problem in problems]
        interval = mean_interval(values, problems, binary=True)
        covered += interval.low <= 0.475 <= interval.high
    assert 0.92 <= covered / 400 <= 0.98


def test_no_value_gives_no_number_and_one_value_no_bound() -> None:
    assert all(math.isnan(number) for number in mean_interval([]))
    assert mean_interval([0.3]) == (0.3, -math.inf, math.inf)


def _t_mass(quantile: float, degrees: int) -> float:
    """Return P(|t| <= quantile), by Simpson's rule on the density."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    pieces = 4000
    width = 2 * quantile / pieces
    total = 0.0
    for piece in range(pieces + 1):
        at = -quantile + piece * width
        weight = 1 if piece in (0, pieces) else 4 if piece % 2 else 2
        total += weight * scale * (1 + at * at / degrees) ** (-(degrees + 1) / 2)
    return total * width / 3


@pytest.mark.parametrize(("n", "right", "k"), [(8, 3, 1), (8, 3, 4), (8, 6, 4), (10, 0, 5), (5, 5, 2), (200, 17, 100)])
def test_best_of_k_of_binary_rewards_is_the_unbiased_pass_at_k(n: int, right: int, k: int) -> None:
    expected = 1 - math.comb(n - right, k) / math.comb(n, k)
    assert best_of([1.0] * right + [0.0] * (n - right), k) == pytest.approx(expected, abs=1e-12)


def test_best_of_k_is_the_mean_of_the_best_over_all_choices() -> None:
    values = [0.2, -1.0, 0.7, 0.7, 0.1]
    for k in range(1, 6):
        choices = [max(choice) for choice in itertools.combinations(values, k)]
        assert best_of(values, k) == pytest.approx(sum(choices) / len(choices))


def test_best_of_each_counts_problems_with_enough_answers() -> None:
    found = best_of_each([[1, 0, 0], [1, 1, 1], [0]])
    assert [one.k for one in found] == [1, 2, 3]
    assert [one.interval.mean for one in found] == pytest.approx([4 / 9, (2 / 3 + 1) / 2, 1.0])
    assert all(0 <= one.interval.low <= one.interval.mean <= one.interval.high <= 1 for one in found)
    assert best_of_each([]) == []


def test_perfect_answers_have_one_interval_for_each_k() -> None:
    found = best_of_each([[1.0] * 10 for _ in range(20)])
    assert [one.k for one in found] == [1, 2, 4, 8, 10]
    assert {one.interval for one in found} == {mean_interval([1] * 20, binary=True)}


def test_the_best_of_one_answer_has_the_interval_of_the_evaluation() -> None:
    answers = [[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 0, 1]]
    problems = [problem for problem in range(4) for _ in range(4)]
    flat = mean_interval([value for values in answers for value in values], problems, binary=True)
    assert best_of_each(answers)[0].interval == pytest.approx(flat)


def test_means_of_runs_have_students_interval_also_if_they_are_0_or_1() -> None:
    assert mean_interval([1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)


def test_the_interval_of_a_difference_adds_the_limits_in_squares() -> None:
    """Newcombe 1998, table II, example a: 56/70 − 48/80 = 0.2000 (0.0524 to 0.3339)."""
    found = difference(mean_interval([1] * 48 + [0] * 32, binary=True), mean_interval([1] * 56 + [0] * 14, binary=True))
    assert found == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_the_difference_to_oneself_holds_zero() -> None:
    interval = mean_interval([1] * 48 + [0] * 32, binary=True)
    found = difference(interval, interval)
    assert found.mean == 0
    assert found.low < 0 < found.high
