from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.advantages import group_advantages

BATCH = st.lists(st.tuples(st.integers(0, 6), st.floats(-100, 100, width=32)), min_size=1, max_size=60)


def naive(rewards: list[float], groups: list[int]) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = math.fsum(members) / len(members)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in members) / len(members))
        result.append((reward - mean) / std if std > 0 else 0.0)
    return result


def test_ragged_groups_in_any_order_equal_a_loop_over_samples() -> None:
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat([5, -3, 11, 8], [4, 1, 7, 2])).tolist()
    rewards = rng.normal(size=len(groups)).tolist()
    np.testing.assert_allclose(group_advantages(rewards, groups), naive(rewards, groups), rtol=1e-12, atol=1e-12)


def test_float32_rewards_are_computed_in_float64() -> None:
    rng = np.random.default_rng(1)
    groups = rng.integers(0, 4, 40).tolist()
    rewards = rng.normal(size=40).astype(np.float32)
    np.testing.assert_allclose(group_advantages(rewards, groups), naive(rewards.tolist(), groups), atol=1e-12)


@given(BATCH)
def test_each_group_has_mean_zero_and_unit_or_zero_deviation(batch: list[tuple[int, float]]) -> None:
    groups, rewards = [group for group, _ in batch], [reward for _, reward in batch]
    advantages = group_advantages(rewards, groups)
    assert np.isfinite(advantages).all()
    for group in set(groups):
        members = advantages[np.array(groups) == group]
        assert abs(members.mean()) < 1e-6
        assert members.std() == pytest.approx(1.0, abs=1e-6) or (members == 0).all()


def test_a_missing_sample_does_not_shift_later_groups() -> None:
    whole = group_advantages([1.0, 0.0, 0.0, 5.0, 7.0, 9.0], [0, 0, 0, 1, 1, 1])
    ragged = group_advantages([1.0, 0.0, 5.0, 7.0, 9.0], [0, 0, 1, 1, 1])
    np.testing.assert_array_equal(ragged[2:], whole[3:])


@pytest.mark.parametrize("rewards", [[0.0] * 4, [0.1] * 3, [1e9] * 3, [0.1 + 0.2, 0.3, 0.3], [2.5]])
def test_equal_rewards_and_single_members_give_exactly_zero(rewards: list[float]) -> None:
    assert (group_advantages(rewards, [3] * len(rewards)) == 0.0).all()


def test_small_but_real_differences_are_kept() -> None:
    np.testing.assert_allclose(group_advantages([1e-6, 0.0], [0, 0]), [1.0, -1.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(bad: float) -> None:
    with pytest.raises(ValueError, match=r"reward 1 \(group 4\)"):
        group_advantages([1.0, bad], [4, 4])


def test_one_id_per_reward_is_required() -> None:
    with pytest.raises(ValueError, match="2 group ids"):
        group_advantages([1.0], [0, 0])
