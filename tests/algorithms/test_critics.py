"""Advantages and targets from critics, and the assignment of responses to critics."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.critics import BoolArray, FloatArray, IntArray, assign_critics, discounted_sums, gae, monte_carlo


def naive(
    reward: FloatArray,
    value: FloatArray,
    mask: BoolArray,
    sequence: IntArray,
    gamma: float,
    lam: float,
    bootstrap: FloatArray | None = None,
) -> tuple[list[float], list[float]]:
    """Return advantages and returns of `gae` by its recursion, from the last token of each sequence to the first."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for one in sorted(set(sequence.tolist())):
        after = 0.0 if bootstrap is None else float(bootstrap[one])
        running = 0.0
        for t in reversed([t for t in range(len(mask)) if mask[t] and sequence[t] == one]):
            running = float(reward[t]) + gamma * after - float(value[t]) + gamma * lam * running
            after = float(value[t])
            advantages[t], returns[t] = running, running + after
    return advantages, returns


def batch(lengths: list[int], seed: int = 0) -> tuple[FloatArray, FloatArray, BoolArray, IntArray]:
    """Return rewards, values, mask and sequence of the tokens of random sequences with these lengths.

    About a fifth of the tokens have a reward, and four fifths are unmasked.
    """
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    return (
        rng.normal(size=count) * (rng.random(count) < 0.2),
        rng.normal(size=count),
        rng.random(count) < 0.8,
        np.repeat(np.arange(len(lengths)), lengths),
    )


@pytest.mark.parametrize("gamma", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_length_equals_the_recursion(gamma: float, lam: float, seed: int) -> None:
    reward, value, mask, sequence = batch([1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 1, 100], seed)
    mask[sequence == 4] = False
    found = gae(reward, value, mask, sequence, gamma=gamma, lam=lam)
    for one, expected in zip(found, naive(reward, value, mask, sequence, gamma, lam), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (1.0, 1.0), (0.999, 0.9999), (0.5, 0.1), (1.0, 1e-300)])
def test_ten_thousand_tokens_neither_overflow_nor_vanish(gamma: float, lam: float) -> None:
    reward, value, mask, sequence = batch([10_000, 3, 7_777])
    advantage, returns = gae(reward, value, mask, sequence, gamma=gamma, lam=lam)
    expected = naive(reward, value, mask, sequence, gamma, lam)
    np.testing.assert_allclose(advantage, expected[0], rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(returns, expected[1], rtol=1e-12, atol=1e-10)


def test_a_reward_at_the_end_of_a_long_sequence_reaches_its_first_token() -> None:
    reward, value = np.zeros(4096), np.zeros(4096)
    reward[-1] = 1.0
    advantage, _ = gae(reward, value, np.ones(4096, dtype=bool), np.zeros(4096, dtype=np.int64), gamma=1.0, lam=0.95)
    np.testing.assert_allclose(advantage, 0.95 ** np.arange(4095, -1, -1), rtol=1e-12)
    assert advantage[0] > 0


def test_masked_positions_never_enter() -> None:
    reward, value, mask, sequence = batch([20, 11, 30])
    found = gae(reward, value, mask, sequence, gamma=0.9, lam=0.8)
    for garbage in (math.nan, 1e30, -math.inf):
        dirty = gae(np.where(mask, reward, garbage), np.where(mask, value, garbage), mask, sequence, gamma=0.9, lam=0.8)
        np.testing.assert_array_equal(dirty, found)
    bare = gae(reward[mask], value[mask], mask[mask], sequence[mask], gamma=0.9, lam=0.8)
    for one, packed in zip(bare, found, strict=True):
        np.testing.assert_array_equal(one, packed[mask])
        assert (packed[~mask] == 0).all()


def test_sequences_do_not_see_each_other() -> None:
    reward, value, mask, sequence = batch([13, 8, 21])
    found, _ = gae(reward, value, mask, sequence, gamma=1.0, lam=0.95)
    for one in range(3):
        own = sequence == one
        alone, _ = gae(reward[own], value[own], mask[own], np.zeros(own.sum(), dtype=np.int64), gamma=1.0, lam=0.95)
        np.testing.assert_array_equal(alone, found[own])


def test_an_episode_that_goes_on_is_bootstrapped_and_one_that_ended_is_not() -> None:
    reward, value, mask, sequence = batch([6, 9])
    bootstrap = np.array([0.0, 2.5])
    found = gae(reward, value, mask, sequence, gamma=0.9, lam=0.7, bootstrap_S=bootstrap)
    for one, expected in zip(found, naive(reward, value, mask, sequence, 0.9, 0.7, bootstrap), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-12, atol=1e-12)
    ended, _ = gae(reward, value, mask, sequence, gamma=0.9, lam=0.7)
    assert (found[0][sequence == 0] == ended[sequence == 0]).all()
    assert (found[0][(sequence == 1) & mask] != ended[(sequence == 1) & mask]).any()


def test_without_a_critic_and_with_lambda_one_the_advantage_is_the_return() -> None:
    reward, _, mask, sequence = batch([15, 4])
    advantage, returns = gae(reward, np.zeros(19), mask, sequence, gamma=0.5, lam=1.0)
    np.testing.assert_array_equal(advantage, returns)
    np.testing.assert_array_equal(advantage[mask], discounted_sums(reward[mask], sequence[mask], 0.5))


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_monte_carlo_returns_are_the_discounted_rewards_whatever_a_critic_says(gamma: float) -> None:
    reward, value, mask, sequence = batch([15, 4, 1])
    expected = np.zeros(len(mask))
    for t in np.flatnonzero(mask):
        later = [u for u in np.flatnonzero(mask) if u >= t and sequence[u] == sequence[t]]
        expected[t] = sum(gamma**k * reward[u] for k, u in enumerate(later))
    found = monte_carlo(np.where(mask, reward, math.nan), mask, sequence, gamma=gamma)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    _, returns = gae(reward, value, mask, sequence, gamma=gamma, lam=1.0)
    np.testing.assert_allclose(found, returns, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="reward of unmasked token"):
        monte_carlo(np.where(mask, math.inf, reward), mask, sequence, gamma=gamma)


def test_a_perfect_critic_gives_advantages_of_zero() -> None:
    reward, value = np.array([0.0, 0.0, 3.0]), np.array([3.0, 3.0, 3.0])
    ones, zeros = np.ones(3, dtype=bool), np.zeros(3, dtype=np.int64)
    advantage, returns = gae(reward, value, ones, zeros, gamma=1.0, lam=0.95)
    assert (advantage == 0).all()
    assert (returns == 3).all()


@pytest.mark.parametrize("count", [0, 4])
def test_nothing_unmasked_gives_zeros(count: int) -> None:
    nothing = np.full(count, math.nan)
    found = gae(nothing, nothing, np.zeros(count, dtype=bool), np.zeros(count, dtype=np.int64), gamma=1.0, lam=1.0)
    assert all(one.shape == (count,) and (one == 0).all() for one in found)


@pytest.mark.parametrize(("gamma", "lam"), [(1.1, 0.9), (-0.1, 0.9), (1.0, 1.5), (math.nan, 1.0)])
def test_factors_out_of_range_are_refused(gamma: float, lam: float) -> None:
    with pytest.raises(ValueError, match="expected numbers from 0 to 1"):
        gae(*batch([3]), gamma=gamma, lam=lam)


@pytest.mark.parametrize("which", ["reward", "value"])
def test_a_number_that_is_not_finite_is_refused_with_its_place(which: str) -> None:
    reward, value, mask, sequence = batch([5])
    mask[:] = True
    (reward if which == "reward" else value)[3] = math.nan
    with pytest.raises(ValueError, match=f"{which} of unmasked token 3"):
        gae(reward, value, mask, sequence, gamma=1.0, lam=1.0)


GROUPS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=8, unique_by=lambda one: one[0]
)
"""Groups of a batch: pairs of the group's id and its number of responses."""


@given(GROUPS, st.integers(1, 4), st.integers(0, 3))
def test_every_response_has_one_critic_and_each_group_is_split_evenly(
    groups: list[tuple[int, int]], critics: int, seed: int
) -> None:
    ids = [group for group, size in groups for _ in range(size)]
    critic_B = assign_critics(ids, critics, seed).tolist()
    assert len(critic_B) == len(ids)
    for group, _ in groups:
        counts = Counter(critic for critic, mine in zip(critic_B, ids, strict=True) if mine == group)
        each = [counts[critic] for critic in range(critics)]
        assert sum(counts.values()) == sum(each)
        assert max(each) - min(each) <= 1


@given(GROUPS, st.randoms(use_true_random=False))
def test_the_assignment_of_a_group_does_not_depend_on_the_rest_of_the_batch(
    groups: list[tuple[int, int]], shuffled: object
) -> None:
    ids = [group for group, size in groups for _ in range(size)]
    mixed = list(ids)
    shuffled.shuffle(mixed)  # pyright: ignore[reportAttributeAccessIssue]
    whole, other = assign_critics(ids, 2, 7), assign_critics(mixed, 2, 7)
    for group, size in groups:
        alone = assign_critics([group] * size, 2, 7).tolist()
        assert whole[np.array(ids) == group].tolist() == other[np.array(mixed) == group].tolist() == alone


def test_left_over_responses_of_groups_go_to_the_critics_in_turn() -> None:
    assert assign_critics(list(range(6)), 3, 0).tolist() == [0, 1, 2, 0, 1, 2]
    triples = [group for group in range(4) for _ in range(3)]
    assert Counter(assign_critics(triples, 2, 0).tolist()) == {0: 6, 1: 6}


def test_the_assignment_depends_on_seed_and_group_alone() -> None:
    eight = [3] * 8
    dealt = {tuple(assign_critics(eight, 2, seed).tolist()) for seed in range(20)}
    assert len(dealt) > 10
    assert len({tuple(assign_critics([group] * 8, 2, 0).tolist()) for group in range(0, 40, 2)}) > 10
    assert assign_critics(eight, 2, 5).tolist() == assign_critics(eight, 2, 5).tolist()
    assert not assign_critics(eight, 1, 5).any()
    assert not assign_critics(eight, 0, 5).any()
