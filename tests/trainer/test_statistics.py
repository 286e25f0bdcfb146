from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash.trainer.mesh import trainer_mesh
from flash.trainer.statistics import LARGEST, OLDEST, RatioHistogram


def histogram(values: list[float], ages: list[int] | None = None, mask: list[bool] | None = None) -> dict[str, float]:
    counted = RatioHistogram(trainer_mesh("cpu"))
    counted.add(
        torch.tensor(values),
        torch.tensor(ages or [0] * len(values)),
        torch.tensor(mask or [True] * len(values)),
    )
    return counted.reduce()


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=300))
def test_a_quantile_is_that_of_the_tokens_to_one_per_cent_of_its_logarithm(values: list[float]) -> None:
    found = histogram(values)
    for percent in (1, 50, 99):
        exact = float(np.quantile(np.array(values, dtype=np.float32), percent / 100, method="inverted_cdf"))
        assert math.log(found[f"ratio_p{percent}_age_0"]) == pytest.approx(exact, rel=0.0101, abs=1.1e-5)


def test_a_ratio_of_one_is_exactly_one() -> None:
    assert set(histogram([0.0, 0.0]).values()) == {1.0}


def test_ages_are_apart_and_the_oldest_share_a_row() -> None:
    found = histogram([0.5, -0.5, 1.0, 1.0], [0, 2, OLDEST, OLDEST + 9])
    assert {key.rpartition("_")[2] for key in found} == {"0", "2", str(OLDEST)}
    assert found["ratio_p50_age_2"] == pytest.approx(math.exp(-0.5), rel=0.006)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e30])
def test_masked_tokens_are_not_counted_whatever_they_hold(garbage: float) -> None:
    clean = histogram([0.5, 0.25])
    assert histogram([0.5, garbage, 0.25], [0, -5, 0], [True, False, True]) == clean


def test_log_ratios_beyond_the_last_bin_count_there() -> None:
    found = histogram([math.inf, 1e30, 1e4])
    assert math.log(found["ratio_p50_age_0"]) == pytest.approx(LARGEST, rel=0.02)
