"""The comparison of an engine's log-probs of the canary, a short text, with the trainer's."""

from __future__ import annotations

import math

import pytest

from flash.errors import WeightsError
from flash.types import Canary
from flash.weights.versions import check_canary


def check(observed: list[float], tolerance: float = 1e-4) -> float:
    """Compare an engine's log-probs with −1 and −2, the trainer's, and return the mean difference."""
    canary = Canary(token_ids=[5, 6, 7], logprobs=[-1.0, -2.0], tolerance=tolerance)
    return check_canary(canary, observed, engine=3, version=8)


def test_the_mean_difference_inside_the_tolerance_is_returned() -> None:
    assert check([-1.00001, -2.00005]) == pytest.approx(3e-5)


def test_one_token_that_rounding_hits_harder_than_the_others_passes() -> None:
    assert check([-1.0, -2.00019]) == pytest.approx(9.5e-5)


def test_the_mean_the_worst_position_both_values_and_the_tolerance_are_named() -> None:
    with pytest.raises(WeightsError) as caught:
        check([-1.01, -2.5])
    message = str(caught.value)
    for part in ("engine 3", "version 8", "0.255 nats", "position 2", "token 7", "-2.500000", "-2.000000", "0.0001"):
        assert part in message


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_never_passes(wrong: float) -> None:
    with pytest.raises(WeightsError, match="position 1"):
        check([wrong, -2.0], tolerance=1e9)


def test_a_missing_position_never_passes() -> None:
    with pytest.raises(WeightsError, match="2 positions"):
        check([-1.0])
