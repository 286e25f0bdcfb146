"""Estimators of advantages: group, leave-one-out and turn estimators, and the whitening over a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.advantages import (
    FloatArray,
    are_equal,
    group_advantages,
    group_mean_advantages,
    leave_one_out_advantages,
    moments,
    turn_advantages,
    whiten,
)

Estimator = Callable[[list[float], list[int]], FloatArray]
"""Function from the rewards of samples and the groups of the same samples to their advantages."""

BATCH = st.lists(st.tuples(st.integers(0, 6), st.floats(-100, 100, width=32)), min_size=1, max_size=60)
"""Batches of (group, reward) pairs."""
ESTIMATORS: list[Estimator] = [group_advantages, group_mean_advantages, leave_one_out_advantages]
ALL = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda one: one.__name__)


def naive(estimator: Estimator, rewards: list[float], groups: list[int]) -> list[float]:
    """Return the advantages that `estimator` should give, computed sample by sample from the definitions."""
    result = []
    for place, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for i, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and i != place]
        mean = math.fsum(members) / len(members)
        if estimator is leave_one_out_advantages:
            result.append(reward - math.fsum(others) / len(others) if others else 0.0)
            continue
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in members) / len(members))
        scale = std if estimator is group_advantages else 1.0
        result.append((reward - mean) / scale if std > 0 else 0.0)
    return result


@ALL
def test_ragged_groups_in_any_order_equal_a_loop_over_samples(estimator: Estimator) -> None:
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat([5, -3, 11, 8], [4, 1, 7, 2])).tolist()
    rewards = rng.normal(size=len(groups)).tolist()
    expected = naive(estimator, rewards, groups)
    np.testing.assert_allclose(estimator(rewards, groups), expected, rtol=1e-12, atol=1e-12)


def test_float32_rewards_are_computed_in_float64() -> None:
    rng = np.random.default_rng(1)
    groups = rng.integers(0, 4, 40).tolist()
    rewards: Any = rng.normal(size=40).astype(np.float32)
    expected = naive(group_advantages, rewards.tolist(), groups)
    np.testing.assert_allclose(group_advantages(rewards, groups), expected, atol=1e-12)


@given(BATCH)
def test_each_group_has_mean_zero_and_unit_or_zero_deviation(batch: list[tuple[int, float]]) -> None:
    groups, rewards = [group for group, _ in batch], [reward for _, reward in batch]
    advantages = group_advantages(rewards, groups)
    assert np.isfinite(advantages).all()
    for group in set(groups):
        members = advantages[np.array(groups) == group]
        assert abs(members.mean()) < 1e-6
        assert members.std() == pytest.approx(1.0, abs=1e-6) or (members == 0).all()


@ALL
def test_a_missing_sample_does_not_shift_later_groups(estimator: Estimator) -> None:
    whole = estimator([1.0, 0.0, 0.0, 5.0, 7.0, 9.0], [0, 0, 0, 1, 1, 1])
    ragged = estimator([1.0, 0.0, 5.0, 7.0, 9.0], [0, 0, 1, 1, 1])
    np.testing.assert_array_equal(ragged[2:], whole[3:])


@ALL
@pytest.mark.parametrize("rewards", [[0.0] * 4, [0.1] * 3, [1e9] * 3, [0.1 + 0.2, 0.3, 0.3], [2.5]])
def test_equal_rewards_and_single_members_give_exactly_zero(estimator: Estimator, rewards: list[float]) -> None:
    assert (estimator(rewards, [3] * len(rewards)) == 0.0).all()


def test_small_but_real_differences_are_kept() -> None:
    np.testing.assert_allclose(group_advantages([1e-6, 0.0], [0, 0]), [1.0, -1.0])


@ALL
def test_no_samples_have_no_advantages(estimator: Estimator) -> None:
    assert estimator([], []).shape == (0,)


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(estimator: Estimator, bad: float) -> None:
    with pytest.raises(ValueError, match=r"reward 1 \(group 4\)"):
        estimator([1.0, bad], [4, 4])


@ALL
def test_one_id_per_reward_is_required(estimator: Estimator) -> None:
    with pytest.raises(ValueError, match="2 group ids"):
        estimator([1.0], [0, 0])


def naive_turns(turns: list[list[float]], groups: list[int], gamma: float) -> list[list[float]]:
    """Return the advantages of the turns of each sample, computed turn by turn from the definition."""
    returns = [
        [sum(gamma**later * one for later, one in enumerate(rewards[turn:])) for turn in range(len(rewards))]
        for rewards in turns
    ]
    result: list[list[float]] = [[] for _ in turns]
    for place, mine in enumerate(returns):
        for turn, value in enumerate(mine):
            peers = [r[turn] for r, g in zip(returns, groups, strict=True) if g == groups[place] and len(r) > turn]
            mean = sum(peers) / len(peers)
            std = math.sqrt(sum((peer - mean) ** 2 for peer in peers) / len(peers))
            result[place].append((value - mean) / std if std > 1e-9 else 0.0)
    return result


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_turns_are_compared_within_their_group_and_depth(gamma: float) -> None:
    rng = np.random.default_rng(2)
    groups = [4, 9, 4, 4, 9, 2, 4]
    turns = [rng.normal(size=count).tolist() for count in (3, 1, 2, 5, 4, 2, 3)]
    found = turn_advantages(turns, groups, gamma)
    for one, expected in zip(found, naive_turns(turns, groups, gamma), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-12, atol=1e-12)


def test_a_turn_that_one_sample_alone_reached_says_nothing() -> None:
    found = turn_advantages([[0.0, 1.0, 5.0], [0.0, 0.0]], [0, 0], 1.0)
    assert [one.tolist() for one in found] == [[1.0, 1.0, 0.0], [-1.0, -1.0]]


def test_samples_of_one_turn_have_the_advantages_of_a_group() -> None:
    rewards, groups = [1.0, 3.0, 2.0, 7.0], [0, 0, 0, 1]
    found = turn_advantages([[one] for one in rewards], groups, 0.5)
    np.testing.assert_array_equal(np.concatenate(found), group_advantages(rewards, groups))


def test_samples_without_turns_have_no_turn_advantages() -> None:
    assert [len(one) for one in turn_advantages([[], [1.0]], [0, 0], 1.0)] == [0, 1]
    assert turn_advantages([], [], 1.0) == []


@pytest.mark.parametrize("gamma", [-0.1, 1.1, math.nan])
def test_a_discount_out_of_range_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        turn_advantages([[1.0]], [0], gamma)


def test_one_id_per_list_of_turns_is_required() -> None:
    with pytest.raises(ValueError, match="2 group ids for 1 samples"):
        turn_advantages([[1.0]], [0, 0], 1.0)


def test_whitened_numbers_have_mean_zero_and_deviation_one() -> None:
    values: FloatArray = np.random.default_rng(3).normal(5.0, 3.0, 1000)
    mean, scale = whiten([moments(part) for part in np.split(values, [0, 10, 700])])
    assert mean == pytest.approx(values.mean(), rel=1e-12)
    assert 1 / scale == pytest.approx(values.std(), rel=1e-9)


@pytest.mark.parametrize("offset", [0.0, 1e5, -1e6, 1e7])
def test_rewards_with_an_offset_whiten_as_without_it(offset: float) -> None:
    lengths = np.random.default_rng(4).integers(0, 50, 200)
    values: FloatArray = np.float64(offset) + 0.1 * lengths.astype(np.float64)
    mean, scale = whiten([moments(values[:60]), moments(values[60:])])
    expected = (lengths - lengths.mean()) / lengths.std()
    np.testing.assert_allclose((values - mean) * scale, expected, atol=1e-6)


@ALL
@pytest.mark.parametrize("size", [1e-200, 1e200, 1e306])
def test_tiny_and_huge_rewards_have_the_advantages_of_usual_ones(estimator: Estimator, size: float) -> None:
    rewards, groups = [1.0, 2.0, 4.0, -50.0, 3.0], [0, 0, 0, 1, 1]
    expected = estimator(rewards, groups)
    scaled = estimator([reward * size for reward in rewards], groups)
    np.testing.assert_allclose(scaled, expected if estimator is group_advantages else expected * size, rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e6])
@pytest.mark.parametrize("count", [1, 3, 1000])
def test_equal_numbers_whiten_to_zero(value: float, count: int) -> None:
    values = np.full(count, value)
    assert whiten([moments(values), moments(values[1:])])[1] == 0


def test_no_numbers_whiten_to_zero() -> None:
    assert whiten([moments(np.zeros(0))] * 2) == (0.0, 0.0)


@pytest.mark.parametrize("part", [(3.0, math.nan, 1.0), (3.0, 1.0, math.inf)])
def test_moments_that_are_not_finite_are_refused(part: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="expected finite numbers"):
        whiten([part])


@given(st.lists(st.sampled_from([0.3, 0.1 + 0.2, 0.30001, 1.0, 1e9, 1e9 + 0.1]), min_size=1, max_size=4))
def test_rewards_are_equal_where_their_advantages_are_zero(rewards: list[float]) -> None:
    assert are_equal(rewards) == (group_advantages(rewards, [0] * len(rewards)) == 0).all()
