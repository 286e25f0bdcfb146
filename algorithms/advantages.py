"""How rewards become advantages. B = samples of the whole batch, G = groups.

Groups are told apart by their id, so they may be ragged and in any order. A group of one, or of equal rewards, says
nothing about the policy: its advantages are exactly 0. All raise ValueError where a reward is not finite or lengths
differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

EQUAL = 1e-9
"""Rewards of a group that differ by less than this share of their size are equal; what remains is rounding."""

SUMS_EQUAL = 1e-12
"""A variance below this share of the mean square is rounding, where both come from sums in float64."""


class _Groups(NamedTuple):
    """Rewards, centred within their groups."""

    group_B: IntArray
    """Index of each sample's group."""
    count_B: FloatArray
    """Members of each sample's group."""
    centred_B: FloatArray
    """R − mean; exactly 0 in a group of equal rewards."""


def group_advantages(rewards: Sequence[float] | FloatArray, group_ids: Sequence[int] | IntArray) -> FloatArray:
    """float64 [B]: (R − mean) / std within each group, std over its members (DeepSeekMath, arXiv 2402.03300)."""
    groups = _grouped(rewards, group_ids)
    variance_G = np.bincount(groups.group_B, groups.centred_B**2) / np.bincount(groups.group_B)
    std_B = np.sqrt(variance_G)[groups.group_B]
    return groups.centred_B / np.where(std_B > 0, std_B, 1.0)


def group_mean_advantages(rewards: Sequence[float] | FloatArray, group_ids: Sequence[int] | IntArray) -> FloatArray:
    """float64 [B]: R − mean within each group (Dr. GRPO, arXiv 2503.20783): no prompt counts more for being easy."""
    return _grouped(rewards, group_ids).centred_B


def leave_one_out_advantages(rewards: Sequence[float] | FloatArray, group_ids: Sequence[int] | IntArray) -> FloatArray:
    """float64 [B]: R − mean of the group's other samples (RLOO, arXiv 2402.14740): an unbiased baseline.

    With n members it is n / (n − 1) · (R − mean of all).
    """
    groups = _grouped(rewards, group_ids)
    return groups.centred_B * groups.count_B / np.maximum(groups.count_B - 1, 1)


def turn_advantages(
    turns: Sequence[Sequence[float]], group_ids: Sequence[int] | IntArray, gamma: float
) -> list[FloatArray]:
    """Per sample, float64 [its turns]: each turn's return, normalised over the group's samples at the same turn.

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


def whiten(total: float, total_square: float, count: float) -> tuple[float, float]:
    """Mean and 1 / std of `count` numbers, from their sum and their sum of squares over the whole batch.

    REINFORCE++ (arXiv 2501.03262): advantage = (raw − mean) · (1 / std), over all trained tokens. Where the numbers are
    equal, or there are none, 1 / std is given as 0, so that the advantages are 0.

    Raises:
        ValueError: a sum is not finite.
    """
    if not (math.isfinite(total) and math.isfinite(total_square)):
        raise ValueError(f"the batch's sum is {total} and its sum of squares {total_square}; expected finite numbers")
    if count <= 0:
        return 0.0, 0.0
    mean, mean_square = total / count, total_square / count
    variance = mean_square - mean * mean
    return mean, 1 / math.sqrt(variance) if variance > SUMS_EQUAL * mean_square else 0.0


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
    differ_G = most_G - least_G > EQUAL * np.maximum(np.abs(least_G), np.abs(most_G))
    centred_B = reward_B - (np.bincount(group_B, reward_B) / count_G)[group_B]
    return _Groups(group_B, count_G[group_B], np.where(differ_G[group_B], centred_B, 0.0))
