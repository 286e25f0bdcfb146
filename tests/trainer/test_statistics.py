"""Statistics of a step: quantiles of ratios, the mismatch of engine and trainer, and faults of other ranks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.base import PackedTokens
from flash.config.tree import ParallelConfig
from flash.errors import ContractError
from flash.trainer.mesh import trainer_mesh
from flash.trainer.objective import TokenLoss
from flash.trainer.statistics import LARGEST, OLDEST, RatioHistogram, StepStatistics


def histogram(values: list[float], ages: list[int] | None = None, mask: list[bool] | None = None) -> dict[str, float]:
    """Return the quantiles of log-ratios with these ages (by default 0) and mask (by default True), as metrics."""
    counted = RatioHistogram(trainer_mesh("cpu"))
    counted.add(
        torch.tensor(values),
        torch.tensor(ages or [0] * len(values)),
        torch.tensor(mask or [True] * len(values)),
    )
    return counted.reduce()


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=300))
def test_the_logarithm_of_a_quantile_is_exact_to_one_per_cent(values: list[float]) -> None:
    found = histogram(values)
    for percent in (1, 50, 99):
        exact = float(np.quantile(np.array(values, dtype=np.float32), percent / 100, method="inverted_cdf"))
        assert math.log(found[f"ratio_p{percent}_age_0"]) == pytest.approx(exact, rel=0.0101, abs=1.1e-5)


def test_a_ratio_of_one_is_exactly_one() -> None:
    assert set(histogram([0.0, 0.0]).values()) == {1.0}


def test_each_age_has_its_quantiles_and_the_oldest_share_a_row() -> None:
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


@pytest.mark.parametrize("log_ratio", [1e-5, -1e-3, 100.0])
def test_the_mismatch_of_engine_and_trainer_is_exact_for_small_and_large_differences(log_ratio: float) -> None:
    zeros_T, ones_T, mask_T = torch.zeros(2), torch.ones(2), torch.ones(2, dtype=torch.bool)
    sequence_T = torch.zeros(2, dtype=torch.int64)
    start_T = torch.full((2,), log_ratio)
    tokens = PackedTokens(start_T, zeros_T, start_T, ones_T, ones_T, mask_T, sequence_T, 1, zeros_T)
    statistics = StepStatistics(trainer_mesh("cpu"))
    loss = TokenLoss(zeros_T, mask_T, ones_T, None, None, {})
    statistics.add(tokens, start_T, zeros_T, torch.zeros(2, dtype=torch.int64), ("",), loss, zeros_T)
    statistics.end_minibatch(1.0)
    exact = math.expm1(float(start_T[0])) - float(start_T[0])
    assert statistics.metrics(1, 1)["mismatch_k3"] == pytest.approx(exact, rel=1e-6)


def test_a_refused_batch_names_all_ranks_that_hold_the_faulty_part() -> None:
    mesh = dataclasses.replace(trainer_mesh("cpu"), parallel=ParallelConfig(context=2))
    mesh.raise_on_all_ranks("", torch.tensor([0, 0]), "their part")
    with pytest.raises(ContractError, match=r"trainer ranks \[2, 3\] refused their part"):
        mesh.raise_on_all_ranks("", torch.tensor([0, 1]), "their part")
