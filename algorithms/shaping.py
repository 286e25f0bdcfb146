"""Reward shaping by the length of responses, applied before rewards become advantages.

Shapings apply one after another, in the order in which they are listed; each gets the rewards that the one before it
returned. `flash.trainer.credit` calls them once per batch.

Shape legend: B = samples of the whole batch. Lengths are action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Overlong(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="overlong"):
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): 0 up to limit − buffer, then linearly to −penalty."""

    limit: Annotated[int, Meta(gt=0)]
    """L_max: length in tokens from which the full penalty is subtracted."""
    buffer: Annotated[int, Meta(gt=0)]
    """L_cache: tokens before `limit` over which the penalty grows."""
    penalty: Annotated[float, Meta(gt=0)] = 1.0
    """Full penalty."""

    def __post_init__(self) -> None:
        if self.buffer > self.limit:
            raise ValueError(f"expected buffer ≤ limit = {self.limit}, got {self.buffer}")

    def shaped(
        self, rewards_B: FloatArray, tokens_B: IntArray, truncated_B: BoolArray, group_ids_B: Sequence[int]
    ) -> FloatArray:
        """Return float64 [B]: the rewards minus the penalty."""
        excess_B = (np.asarray(tokens_B) - (self.limit - self.buffer)) / self.buffer
        return np.asarray(rewards_B, dtype=np.float64) - self.penalty * excess_B.clip(0, 1)


class LengthPenalty(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="length"
):
    """Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3), within each group.

    λ = 1/2 − (length − shortest) / (longest − shortest). A correct response gets λ, a wrong one min(0, λ): a long wrong
    response loses, a short wrong one gains nothing. A group of equal lengths gets 0.
    """

    coefficient: Annotated[float, Meta(gt=0)] = 1.0
    """Factor of λ; the paper gives no value."""
    correct_above: float = 0.0
    """Reward above which a response counts as correct."""

    def shaped(
        self, rewards_B: FloatArray, tokens_B: IntArray, truncated_B: BoolArray, group_ids_B: Sequence[int]
    ) -> FloatArray:
        """Return float64 [B]: the rewards plus the length reward. A truncated response never counts as correct."""
        reward_B, length_B = np.asarray(rewards_B, dtype=np.float64), np.asarray(tokens_B, dtype=np.float64)
        group_B = np.unique(np.asarray(group_ids_B, dtype=np.int64), return_inverse=True)[1]
        shortest_G = np.full(group_B.max(initial=-1) + 1, np.inf)
        longest_G = -shortest_G
        np.minimum.at(shortest_G, group_B, length_B)
        np.maximum.at(longest_G, group_B, length_B)
        spread_B = (longest_G - shortest_G)[group_B]
        share_B = (length_B - shortest_G[group_B]) / np.where(spread_B > 0, spread_B, 1.0)
        bonus_B = np.where(spread_B > 0, 0.5 - share_B, 0.0)
        correct_B = (reward_B > self.correct_above) & ~np.asarray(truncated_B, dtype=np.bool_)
        return reward_B + self.coefficient * np.where(correct_B, bonus_B, np.minimum(bonus_B, 0.0))


Shaping = Overlong | LengthPenalty
"""A reward shaping; the field `kind` selects the class."""
