"""The canary: its choice and its verdict."""

from __future__ import annotations

import math

import pytest

from flash.errors import WeightsError
from flash.types import Canary
from flash.weights.canary import canary_tokens, check_canary

CANARY = Canary(token_ids=[5, 6, 7], logprobs=[-1.0, -2.0])


def check(observed: list[float], tolerance: float = 1e-4) -> float:
    return check_canary(CANARY, observed, tolerance=tolerance, engine=3, version=8)


def test_the_same_arguments_give_the_same_prompt() -> None:
    assert canary_tokens(100, 32, 7) == canary_tokens(100, 32, 7)


def test_another_seed_gives_another_prompt() -> None:
    assert canary_tokens(100, 32, 7) != canary_tokens(100, 32, 8)


def test_a_prompt_may_be_longer_than_the_vocabulary() -> None:
    tokens = canary_tokens(4, 32, 0)
    assert len(tokens) == 32
    assert set(tokens) <= {0, 1, 2, 3}


def test_the_largest_difference_inside_the_tolerance_is_returned() -> None:
    assert check([-1.00001, -2.00005]) == pytest.approx(5e-5)


def test_the_worst_position_both_values_and_the_tolerance_are_named() -> None:
    with pytest.raises(WeightsError) as caught:
        check([-1.01, -2.5])
    message = str(caught.value)
    for part in ("engine 3", "version 8", "position 2", "token 7", "-2.500000", "-2.000000", "0.0001"):
        assert part in message


def test_nan_never_passes() -> None:
    with pytest.raises(WeightsError, match="position 1"):
        check([math.nan, -2.0], tolerance=1e9)


def test_a_missing_position_never_passes() -> None:
    with pytest.raises(WeightsError, match="2 positions"):
        check([-1.0])
