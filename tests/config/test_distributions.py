"""Distributions of `[simulate]`: numbers, lists and tables."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.config.decode import examine
from flash.config.load import load
from flash.config.simulate import Distribution, Lognormal, Normal, Sampler, SimulateConfig, sampler, uniform
from flash.errors import ConfigError

FORMS: list[Any] = [
    300,
    {"kind": "normal", "mean": 10, "deviation": 3},
    {"kind": "normal", "mean": 10, "deviation": 10},
    {"kind": "normal", "mean": 5, "deviation": 3, "low": 2, "high": 6},
    {"kind": "lognormal", "mean": 1000, "deviation": 1500, "high": 8192},
    {"kind": "lognormal", "mean": 20, "deviation": 40},
    {"kind": "uniform", "low": 5, "high": 15},
    [1, 2, 40],
    [40, 2, 1],
    [3],
]


def made(form: Any) -> Sampler:
    """Return the object that draws from a distribution of the configuration."""
    return sampler(msgspec.convert(form, Distribution))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_mean_is_that_of_many_draws(form: Any) -> None:
    values, count = made(form), 20_000
    mean = sum(values.draw((i + 0.5) / count) for i in range(count)) / count
    assert values.expected() == pytest.approx(mean, rel=2e-3)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_draws_grow_with_u_and_stay_below_the_upper_end(form: Any) -> None:
    values = made(form)
    draws = [values.draw(i / 1000) for i in range(1, 1000)]
    assert draws == sorted(draws)
    assert max(draws) <= values.upper() < math.inf


def test_the_stated_mean_and_deviation_are_those_before_the_limits() -> None:
    for values in (Normal(mean=100, deviation=7), Lognormal(mean=100, deviation=7)):
        draws = [values.draw((i + 0.5) / 100_000) for i in range(100_000)]
        mean = sum(draws) / len(draws)
        assert mean == pytest.approx(100, rel=1e-3)
        assert math.sqrt(sum((d - mean) ** 2 for d in draws) / len(draws)) == pytest.approx(7, rel=1e-2)


def test_draws_beyond_a_limit_are_set_to_the_limit() -> None:
    values = Normal(mean=10, deviation=10, high=12)
    draws = [values.draw((i + 0.5) / 1000) for i in range(1000)]
    assert (min(draws), max(draws)) == (0, 12)
    assert draws.count(0) == pytest.approx(159, abs=1)
    assert values.upper() == 12


def test_listed_values_are_equally_likely() -> None:
    draws = [made([1, 2, 2, 40]).draw((i + 0.5) / 400) for i in range(400)]
    assert [draws.count(value) for value in (1, 2, 40)] == [100, 200, 100]


KINDS = '"lognormal", "normal" or "uniform"'


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ([], "expected "),
        (True, "expected "),
        ([1, "x"], "expected "),
        ({"kind": "gauss", "mean": 1}, f'expected {KINDS}, got "gauss"'),
        ({"kind": "normal", "mean": 10}, "is missing; expected a number above 0"),
        ({"kind": "normal", "mean": 10, "deviation": -1}, "expected a number above 0, got -1"),
        ({"kind": "normal", "mean": 10, "deviation": 3, "top": 4}, '"normal" has no such option'),
        ({"kind": "normal", "mean": 10, "deviation": 3, "low": 4, "high": 2}, "expected low ≤ high, got 4 and 2"),
        ({"kind": "lognormal", "mean": 0, "deviation": 1}, "expected a number above 0, got 0"),
        ({"kind": "lognormal", "mean": 1, "deviation": 1e200}, "expected a deviation from 1e-06 to 1e+06 times"),
        ({"kind": "uniform", "low": 5, "high": 5}, "expected low < high, got 5 and 5"),
    ],
)
def test_a_value_that_is_no_distribution_is_refused_with_the_reason(form: Any, message: str) -> None:
    _, (problem,) = examine(form, Distribution, "simulate.turns")
    assert problem.message.startswith(message)


def test_a_text_of_earlier_versions_is_refused_with_the_new_form(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(
        "run = {name = 'x'}\nmodel = {path = 'm'}\nenv = {path = 'a:B'}\nsimulate = {turns = 'uniform(1, 4)'}"
    )
    with pytest.raises(ConfigError) as caught:
        load("run.toml", simulated=True)
    assert "`simulate.turns` (run.toml): expected a number, " in str(caught.value)
    assert 'such as { kind = "lognormal", mean = 1000, deviation = 1500, low = 1, high = 8192 }' in str(caught.value)


def test_the_settings_of_a_workload_may_have_any_form() -> None:
    lengths = {"kind": "lognormal", "mean": 10, "deviation": 3}
    table = msgspec.convert({"turns": 3, "env_s": [1, 2], "response_tokens": lengths}, SimulateConfig)
    assert (table.turns, table.env_s, table.response_tokens) == (3, [1, 2], Lognormal(mean=10, deviation=3))


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
