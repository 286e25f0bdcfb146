"""Turn rewards into advantages. B = samples of the whole batch, G = groups.

Groups are told apart by their id, so they may be ragged and in any order. A group of one, or of equal rewards, says
nothing about the policy: its advantages are exactly 0. All functions raise ValueError where a reward is not finite or
lengths differ.
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
"""Share of their size by which equal rewards may differ: smaller differences are rounding."""


class _Groups(NamedTuple):
    """Rewards, centred within their groups."""

    group_B: IntArray
    """Index of each sample's group."""
    count_B: FloatArray
    """Members of each sample's group."""
    centred_B: FloatArray
    """(R − mean) / 2^exponent; exactly 0 in a group of equal rewards."""
    exponent_B: IntArray
    """Power of two that brings the largest reward of the sample's group to about 1, so that squares stay finite."""


def group_advantages(rewards: Sequence[float] | FloatArray, group_ids: Sequence[int] | IntArray) -> FloatArray:
    """Return float64 [B]: (R − mean) / std of each group, std over its members (DeepSeekMath, arXiv 2402.03300)."""
    groups = _grouped(rewards, group_ids)
    variance_G = np.bincount(groups.group_B, groups.centred_B**2) / np.bincount(groups.group_B)
    std_B = np.sqrt(variance_G)[groups.group_B]
    return groups.centred_B / np.where(std_B > 0, std_B, 1.0)


def group_mean_advantages(rewards: Sequence[float] | FloatArray, group_ids: Sequence[int] | IntArray) -> FloatArray:
    """Return float64 [B]: R − mean of each group (Dr. GRPO, arXiv 2503.20783): no prompt counts more for being easy."""
    groups = _grouped(rewards, group_ids)
    return _scaled_back(groups.centred_B, groups.exponent_B)


def leave_one_out_advantages(rewards: Sequence[float] | FloatArray, group_ids: Sequence[int] | IntArray) -> FloatArray:
    """Return float64 [B]: R − mean of the group's other samples (RLOO, arXiv 2402.14740): an unbiased baseline.

    With n members it is n / (n − 1) · (R − mean of all).
    """
    groups = _grouped(rewards, group_ids)
    advantage_B = groups.centred_B * groups.count_B / np.maximum(groups.count_B - 1, 1)
    return _scaled_back(advantage_B, groups.exponent_B)


def _scaled_back(centred_B: FloatArray, exponent_B: IntArray) -> FloatArray:
    # Rewards at both ends of the range of floats lie further apart than any float: the caller refuses the infinity.
    with np.errstate(over="ignore"):
        return np.ldexp(centred_B, exponent_B)


def turn_advantages(
    turns: Sequence[Sequence[float]], group_ids: Sequence[int] | IntArray, gamma: float
) -> list[FloatArray]:
    """Return per sample float64 [its turns]: each turn's return, normalised over the group's samples at the same turn.

    `turns` are the rewards per turn; the return of a turn is Σ γ^j · reward j turns later, itself included. Samples of
    a group may have different numbers of turns: each turn is compared with the samples that came that far.
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
    return_BK = np.zeros_like(reward_BK)
    following_B = np.zeros(len(turns))
    for turn in reversed(range(deepest)):
        following_B = reward_BK[:, turn] + gamma * following_B
        return_BK[:, turn] = following_B
    there_BK = np.arange(deepest) < np.array(counts, dtype=np.int64)[:, None]
    group_B = np.unique(np.asarray(group_ids, dtype=np.int64), return_inverse=True)[1]
    cell_BK = group_B[:, None] * deepest + np.arange(deepest)
    advantages = group_advantages(return_BK[there_BK], cell_BK[there_BK])
    return np.split(advantages, np.cumsum(counts)[:-1]) if counts else []


def moments(values: FloatArray) -> tuple[float, float, float]:
    """Return the count, the mean and the sum of squared differences from the mean; zeros of no values."""
    mean = float(values.mean()) if len(values) else 0.0
    return float(len(values)), mean, float(np.square(values - mean).sum())


def whiten(parts: Sequence[Sequence[float]] | FloatArray) -> tuple[float, float]:
    """Return the mean and 1 / std of the numbers of a batch, from the `moments` of its parts.

    REINFORCE++ (arXiv 2501.03262): advantage = (raw − mean) · (1 / std), over all trained tokens. Where the numbers are
    equal, or there are none, 1 / std is given as 0, so that the advantages are 0.

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
    # Squares are of centred numbers (Chan et al., 1979): the difference of two sums loses small differences of large
    # numbers.
    std = math.sqrt((squares_P.sum() + count_P @ np.square(mean_P - mean)) / count)
    return mean, 1 / std if std > EQUAL * abs(mean) else 0.0


def are_equal(rewards: Collection[float]) -> bool:
    """True if the rewards of a group are equal but for rounding, so that its advantages are 0."""
    least, most = min(rewards), max(rewards)
    return most - least <= EQUAL * max(abs(least), abs(most))


def _grouped(rewards: Sequence[float] | FloatArray, group_ids: Sequence[int] | IntArray) -> _Groups:
    reward_B = np.asarray(rewards, dtype=np.float64)
    if reward_B.ndim != 1 or len(reward_B) != len(group_ids):
        raise ValueError(f"{len(group_ids)} group ids for rewards of shape {reward_B.shape}; expected one each")
    if not np.isfinite(reward_B).all():
        bad = int(np.flatnonzero(~np.isfinite(reward_B))[0])
        raise ValueError(f"reward {bad} (group {group_ids[bad]}) is {reward_B[bad]}; expected a finite number")

    group_B = np.unique(np.asarray(group_ids, dtype=np.int64), return_inverse=True)[1]
    count_G = np.bincount(group_B).astype(np.float64)
    least_G, most_G = np.full(len(count_G), math.inf), np.full(len(count_G), -math.inf)
    np.minimum.at(least_G, group_B, reward_B)
    np.maximum.at(most_G, group_B, reward_B)
    size_G = np.maximum(np.abs(least_G), np.abs(most_G))
    exponent_G = np.frexp(size_G)[1].astype(np.int64)
    scaled_B = np.ldexp(reward_B, -exponent_G[group_B])
    differ_G = np.ldexp(most_G, -exponent_G) - np.ldexp(least_G, -exponent_G) > EQUAL * np.ldexp(size_G, -exponent_G)
    centred_B = scaled_B - (np.bincount(group_B, scaled_B) / count_G)[group_B]
    centred_B = np.where(differ_G[group_B], centred_B, 0.0)
    return _Groups(group_B, count_G[group_B], centred_B, exponent_G[group_B])
