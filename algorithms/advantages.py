"""How rewards become advantages. B = samples of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

EQUAL = 1e-9
"""Rewards of a group that differ by less than this share of their size are equal; what remains is rounding."""


def group_advantages(rewards: Sequence[float] | FloatArray, group_ids: Sequence[int]) -> FloatArray:
    """float64 [B]: (R − mean) / std within each group, std over the group's members (DeepSeekMath, arXiv 2402.03300).

    Groups are told apart by their id, so they may be ragged and in any order. A group of one, or of equal rewards, says
    nothing about the policy: its advantages are exactly 0.

    Raises:
        ValueError: a reward is not finite, or the two lengths differ.
    """
    reward_B = np.asarray(rewards, dtype=np.float64)
    if reward_B.ndim != 1 or len(reward_B) != len(group_ids):
        raise ValueError(f"{len(group_ids)} group ids for rewards of shape {reward_B.shape}; expected one each")
    if not np.isfinite(reward_B).all():
        bad = int(np.flatnonzero(~np.isfinite(reward_B))[0])
        raise ValueError(f"reward {bad} (group {group_ids[bad]}) is {reward_B[bad]}; expected a finite number")

    advantage_B = np.zeros_like(reward_B)
    group_B = np.asarray(group_ids, dtype=np.int64)
    for group in np.unique(group_B):
        members = group_B == group
        reward_G = reward_B[members]
        if np.ptp(reward_G) > EQUAL * np.abs(reward_G).max():
            advantage_B[members] = (reward_G - reward_G.mean()) / reward_G.std()
    return advantage_B
