"""Advantages from rewards: estimators that compare the samples of a group or of a whole batch.

An *estimator* is one way to compute an *advantage*, the number that says how much better a sample is than expected.
`flash.trainer.plan` calls the estimator that is configured once per batch, with the rewards of all its samples. A
*group* is the samples of one prompt, its *members*. Each sample comes with the id of its group, so groups may have
different sizes, and their samples any order. The estimators raise ValueError if a reward is not finite or lengths
differ.

A group with one member, or with equal rewards, contains no comparison: `group_advantages`, `group_mean_advantages` and
`leave_one_out_advantages` give it advantages of exactly 0. `flash.samples` uses `are_equal` to find such groups.

A *turn* is one response of the policy with the environment's step after it.

Shape legend: B = samples of the whole batch, G = groups, K = turns of the longest sample, P = parts of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

EQUAL = 1e-9
"""Relative difference up to which rewards count as equal: smaller differences are rounding."""


class _CentredRewards(NamedTuple):
    """Rewards minus the mean of their group, scaled so that their squares stay finite."""

    group_B: IntArray
    """Index of each sample's group."""
    count_B: FloatArray
    """Number of members of each sample's group."""
    centred_B: FloatArray
    """(R − mean) / 2^exponent; exactly 0 in a group of equal rewards."""
    exponent_B: IntArray
    """Exponent of the power of two by which the rewards of the sample's group are divided, so that the largest is about
    1."""


def group_advantages(rewards: Sequence[float] | FloatArray, group_ids: Sequence[int] | IntArray) -> FloatArray:
    """Return float64 [B]: (R − mean) / std of the sample's group, std over its members (GRPO, arXiv 2402.03300).

    In a group with one member or with equal rewards, the advantages are 0.

    Raises:
        ValueError: a reward is not finite, or there are not as many rewards as group ids.
    """
    centred = _centred(rewards, group_ids)
    variance_G = np.bincount(centred.group_B, centred.centred_B**2) / np.bincount(centred.group_B)
    std_B = np.sqrt(variance_G)[centred.group_B]
    # Where std is 0, the centred rewards are exactly 0, too, and must not be divided by it.
    return centred.centred_B / np.where(std_B > 0, std_B, 1.0)


def group_mean_advantages(rewards: Sequence[float] | FloatArray, group_ids: Sequence[int] | IntArray) -> FloatArray:
    """Return float64 [B]: R − mean of the sample's group (Dr. GRPO, arXiv 2503.20783).

    A division by std would make very easy and very hard prompts count more than others.

    Raises:
        ValueError: a reward is not finite, or there are not as many rewards as group ids.
    """
    centred = _centred(rewards, group_ids)
    return _unscaled(centred.centred_B, centred.exponent_B)


def leave_one_out_advantages(rewards: Sequence[float] | FloatArray, group_ids: Sequence[int] | IntArray) -> FloatArray:
    """Return float64 [B]: the reward R of a sample, minus the mean reward of the other samples of its group.

    This is RLOO (arXiv 2402.14740). The subtracted mean is the baseline. It does not depend on the sample itself, so
    subtracting it does not bias the estimate of the policy's gradient. In a group with n ≥ 2 members the advantage
    equals n / (n − 1) · (R − mean of all members). In a group with one member it is 0.

    Raises:
        ValueError: a reward is not finite, or there are not as many rewards as group ids.
    """
    centred = _centred(rewards, group_ids)
    advantage_B = centred.centred_B * centred.count_B / np.maximum(centred.count_B - 1, 1)
    return _unscaled(advantage_B, centred.exponent_B)


def _unscaled(centred_B: FloatArray, exponent_B: IntArray) -> FloatArray:
    """Return centred rewards on their original scale, centred · 2^exponent."""
    # Rewards near both ends of the range of floats differ by more than the largest float. The result is then infinite,
    # which `flash.trainer.plan` refuses.
    with np.errstate(over="ignore"):
        return np.ldexp(centred_B, exponent_B)


def turn_advantages(
    turns: Sequence[Sequence[float]], group_ids: Sequence[int] | IntArray, gamma: float
) -> list[FloatArray]:
    """Return the advantages of the turns of each sample, one float64 array for each sample.

    The return of a turn is Σ_{j ≥ 0} γ^j · (reward of the turn j turns later). The turn's advantage is
    (return − mean) / std, with the mean and std of the returns of all samples of the group that have a turn of the same
    number. If these returns are equal, the advantage is 0. Samples of a group may have different numbers of turns; a
    sample without turns gets an empty array.

    Args:
        turns: rewards of the turns of each sample, in order.
        group_ids: group of each sample.
        gamma: γ, the discount of a turn.

    Raises:
        ValueError: γ lies outside of [0, 1], a return is not finite, or the lengths differ.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; expected a number from 0 to 1")
    if len(turns) != len(group_ids):
        raise ValueError(f"{len(group_ids)} group ids for {len(turns)} samples; expected one each")
    counts = [len(rewards) for rewards in turns]
    deepest = max(counts, default=0)
    reward_BK = np.zeros((len(turns), deepest))
    for row_K, rewards in zip(reward_BK, turns, strict=True):
        row_K[: len(rewards)] = rewards
    # The discounted returns, from the last turn to the first.
    return_BK = np.zeros_like(reward_BK)
    following_B = np.zeros(len(turns))
    for turn in reversed(range(deepest)):
        following_B = reward_BK[:, turn] + gamma * following_B
        return_BK[:, turn] = following_B
    exists_BK = np.arange(deepest) < np.array(counts, dtype=np.int64)[:, None]
    group_B = np.unique(np.asarray(group_ids, dtype=np.int64), return_inverse=True)[1]
    # Each pair of a group and the number of a turn is compared like a group.
    cell_BK = group_B[:, None] * deepest + np.arange(deepest)
    advantages = group_advantages(return_BK[exists_BK], cell_BK[exists_BK])
    # Without samples, `np.split` would return one array, of no sample.
    return np.split(advantages, np.cumsum(counts)[:-1]) if counts else []


def moments(values: FloatArray) -> tuple[float, float, float]:
    """Return the count, the mean, and the sum of squared differences from the mean; zeros if there are no values.

    Each rank calls this for its part of a batch. The ranks exchange the results for `whiten`.
    """
    mean = float(values.mean()) if len(values) else 0.0
    return float(len(values)), mean, float(np.square(values - mean).sum())


def whiten(parts: Sequence[Sequence[float]] | FloatArray) -> tuple[float, float]:
    """Return the mean and 1 / std of the numbers of a batch, from the `moments` of its parts, [P, 3].

    A part is the numbers of one data shard, the samples that one rank trains. The estimator `batch` needs this
    (REINFORCE++, arXiv 2501.03262): advantage = (raw − mean) · (1 / std), over all trained tokens. If the numbers are
    equal up to rounding (`EQUAL`), or if there are none, 0 is returned for 1 / std, so that the advantages are 0.

    Raises:
        ValueError: a moment is not finite.
    """
    count_P, mean_P, squares_P = np.asarray(parts, dtype=np.float64).reshape(-1, 3).T
    if not (np.isfinite(mean_P).all() and np.isfinite(squares_P).all()):
        raise ValueError(f"the batch's means are {mean_P} and its squares {squares_P}; expected finite numbers")
    count = count_P.sum()
    if count <= 0:
        return 0.0, 0.0
    mean = float(count_P @ mean_P / count)
    # The squares of centred numbers are summed (Chan et al., 1979), because E[x²] − E[x]² would lose small differences
    # of large numbers.
    std = math.sqrt((squares_P.sum() + count_P @ np.square(mean_P - mean)) / count)
    return mean, 1 / std if std > EQUAL * abs(mean) else 0.0


def are_equal(rewards: Collection[float]) -> bool:
    """Return True if the rewards of a group are equal up to rounding. `rewards` must not be empty.

    The estimators `group`, `group_mean` and `leave_one_out` then give the group advantages of 0. `flash.samples` counts
    such groups, and leaves them out of training if `rollout.drop_equal_rewards` is set, whatever the estimator. As in
    DAPO (arXiv 2503.14476), the raw rewards decide: with `algorithm.shaping`, which changes rewards by length before
    they are compared, advantages of such a group may differ from 0.
    """
    least, most = min(rewards), max(rewards)
    return most - least <= EQUAL * max(abs(least), abs(most))


def _centred(rewards: Sequence[float] | FloatArray, group_ids: Sequence[int] | IntArray) -> _CentredRewards:
    """Subtract the mean of its group from each reward, and scale the results.

    The results are scaled by a power of two, which is exact, so that estimators can square them without overflow.

    Raises:
        ValueError: a reward is not finite, or the number of ids differs from the number of rewards.
    """
    reward_B = np.asarray(rewards, dtype=np.float64)
    if reward_B.ndim != 1 or len(reward_B) != len(group_ids):
        raise ValueError(f"{len(group_ids)} group ids for rewards of shape {reward_B.shape}; expected one each")
    if not np.isfinite(reward_B).all():
        bad = int(np.flatnonzero(~np.isfinite(reward_B))[0])
        raise ValueError(f"reward {bad} (group {group_ids[bad]}) is {reward_B[bad]}; expected a finite number")

    group_B = np.unique(np.asarray(group_ids, dtype=np.int64), return_inverse=True)[1]
    # Smallest and largest reward of each group, and the exponent that scales the larger size of both to about 1.
    count_G = np.bincount(group_B).astype(np.float64)
    least_G, most_G = np.full(len(count_G), math.inf), np.full(len(count_G), -math.inf)
    np.minimum.at(least_G, group_B, reward_B)
    np.maximum.at(most_G, group_B, reward_B)
    size_G = np.maximum(np.abs(least_G), np.abs(most_G))
    exponent_G = np.frexp(size_G)[1].astype(np.int64)
    scaled_B = np.ldexp(reward_B, -exponent_G[group_B])
    differ_G = np.ldexp(most_G, -exponent_G) - np.ldexp(least_G, -exponent_G) > EQUAL * np.ldexp(size_G, -exponent_G)
    centred_B = scaled_B - (np.bincount(group_B, scaled_B) / count_G)[group_B]
    # Rounding would leave differences in a group of equal rewards, which a division by std would make large.
    centred_B = np.where(differ_G[group_B], centred_B, 0.0)
    return _CentredRewards(group_B, count_G[group_B], centred_B, exponent_G[group_B])
