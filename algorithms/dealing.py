"""Which of several critics learns from which response. B = samples of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def deal(group_ids_B: Sequence[int], critics: int, seed: int) -> IntArray:
    """int64 [B]: which critic learns from each of a batch's responses; every one exactly one.

    The responses of a group, in an order drawn from the seed and the group's id, go to the critics in turn, so that
    their counts differ by at most one. The first goes to critic (id mod critics): what a group has over, or all that a
    group with fewer responses than critics has, goes round the critics from group to group.
    """
    group_B = np.asarray(group_ids_B, dtype=np.int64)
    critic_B = np.zeros(len(group_B), dtype=np.int64)
    if critics > 1:
        for group in np.unique(group_B):
            members = np.flatnonzero(group_B == group)
            turns = np.random.default_rng([seed, int(group)]).permutation(len(members))
            critic_B[members] = (group + turns) % critics
    return critic_B
