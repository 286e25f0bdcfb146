"""Distributions as text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.config.spread import parse_spread, uniform
from flash.errors import ConfigError

FORMS = [
    "constant(300)",
    "normal(10, 3)",
    "normal(10, 10)",
    "normal(5, 3, low=2, high=6)",
    "lognormal(1000, 1500, high=8192)",
    "lognormal(20, 40)",
    "exponential(5)",
    "exponential(5, low=1, high=9)",
    "uniform(5, 15)",
    "uniform(5, 15, high=8)",
    "values(1, 2, 40)",
    "values(3)",
]


@pytest.mark.parametrize("text", FORMS)
def test_the_mean_is_that_of_many_draws(text: str) -> None:
    spread, count = parse_spread(text), 200_000
    mean = sum(spread.draw((i + 0.5) / count) for i in range(count)) / count
    assert spread.mean() == pytest.approx(mean, rel=2e-3)


@pytest.mark.parametrize("text", FORMS)
def test_draws_grow_with_u_and_stay_below_the_upper_end(text: str) -> None:
    spread = parse_spread(text)
    draws = [spread.draw(i / 1000) for i in range(1, 1000)]
    assert draws == sorted(draws)
    assert max(draws) <= spread.upper() < math.inf


def test_the_named_numbers_are_mean_and_standard_deviation_before_the_cut() -> None:
    for text in ("normal(100, 7)", "lognormal(100, 7)"):
        draws = [parse_spread(text).draw((i + 0.5) / 100_000) for i in range(100_000)]
        mean = sum(draws) / len(draws)
        assert mean == pytest.approx(100, rel=1e-3)
        assert math.sqrt(sum((d - mean) ** 2 for d in draws) / len(draws)) == pytest.approx(7, rel=1e-2)


def test_a_cut_puts_what_lies_beyond_on_the_end() -> None:
    spread = parse_spread("normal(10, 10, high=12)")
    draws = [spread.draw((i + 0.5) / 1000) for i in range(1000)]
    assert (min(draws), max(draws)) == (0, 12)
    assert draws.count(0) == pytest.approx(159, abs=1)
    assert spread.upper() == 12


def test_listed_values_are_equally_likely() -> None:
    draws = [parse_spread("values(1, 2, 2, 40)").draw((i + 0.5) / 400) for i in range(400)]
    assert [draws.count(value) for value in (1, 2, 40)] == [100, 200, 100]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read"),
        ("300", "not of the form"),
        ("gauss(1, 2)", "no distribution"),
        ("constant()", "no distribution"),
        ("normal(10)", "no distribution"),
        ("normal(10, -1)", "no distribution"),
        ("uniform(5, 5)", "no distribution"),
        ("lognormal(0, 1)", "no distribution"),
        ("normal(10, 3, top=4)", "'top' is neither low nor high"),
        ("normal(10, 3, low=4, high=2)", "low = 4 is above high = 2"),
        ("normal(10, x)", "x is not a number"),
        ("constant(1e999)", "is not a number"),
        ("constant(True)", "is not a number"),
        ("values(1, 2, high=1)", "cut"),
        ("__import__('os').system('true')", "not of the form"),
    ],
)
def test_another_text_is_refused_with_its_reason_and_the_right_forms(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spread(text)
    assert why in str(caught.value)
    assert "lognormal(1000, 1500, high=8192)" in str(caught.value)


@given(st.lists(st.integers(-(1 << 70), 1 << 70), max_size=4))
def test_a_hashed_number_lies_between_0_and_1_and_depends_only_on_its_key(key: list[int]) -> None:
    assert 0 < uniform(*key) < 1
    assert uniform(*key) == uniform(*key)


def test_hashed_numbers_are_even_and_the_same_on_every_machine() -> None:
    draws = [uniform(7, i) for i in range(20_000)]
    for i in range(10):
        share = sum(i / 10 <= draw < (i + 1) / 10 for draw in draws) / len(draws)
        assert share == pytest.approx(0.1, abs=0.01)
    assert uniform(1, 2, 3) == uniform(1, 2, 3) != uniform(1, 23)
    assert uniform(0) == pytest.approx(ANCHOR, abs=1e-15)


ANCHOR = 0.28531186808645315
"""`uniform(0)`."""
