"""Reward shapings: changes of rewards that depend on the length of responses, made before advantages are computed.

`flash.trainer.plan` calls the configured shapings once per batch, in the order in which they are listed. Each shaping
gets the rewards that the shaping before it returned.

Shape legend: B = samples of the whole batch, G = groups (the samples of one prompt). A length is the number of action
tokens of a sample, the tokens that the policy sampled.
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
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13).

    The punishment of a response of up to limit − buffer tokens is 0. It then grows linearly with the length, up to
    `penalty` at `limit` tokens. Longer responses have the punishment `penalty`.
    """

    limit: Annotated[int, Meta(gt=0)]
    """L_max: length in tokens from which the full penalty is subtracted."""
    buffer: Annotated[int, Meta(gt=0)]
    """L_cache: number of tokens before `limit` over which the penalty grows."""
    penalty: Annotated[float, Meta(gt=0)] = 1.0
    """Full penalty: the number that is subtracted from the reward of a response of `limit` tokens or more."""

    def __post_init__(self) -> None:
        # msgspec reports the ValueError to the user, with the key of the configuration.
        if self.buffer > self.limit:
            raise ValueError(f"expected buffer ≤ limit = {self.limit}, got {self.buffer}")

    def shaped(
        self, rewards_B: FloatArray, tokens_B: IntArray, truncated_B: BoolArray, group_ids_B: Sequence[int]
    ) -> FloatArray:
        """Return float64 [B]: the rewards minus the penalty, which depends on the length alone."""
        excess_B = (np.asarray(tokens_B) - (self.limit - self.buffer)) / self.buffer
        return np.asarray(rewards_B, dtype=np.float64) - self.penalty * excess_B.clip(0, 1)


class LengthPenalty(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="length"
):
    """Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3), within each group.

    λ = 1/2 − (length − shortest) / (longest − shortest), where shortest and longest are lengths of the group. A correct
    response gets λ. A wrong response gets min(0, λ), so that a long wrong response loses reward and a short wrong
    response gains none. Responses of a group with equal lengths get 0.
    """

    coefficient: Annotated[float, Meta(gt=0)] = 1.0
    """Factor of λ; the paper gives no value."""
    correct_above: float = 0.0
    """A response counts as correct if its reward, as earlier shapings left it, is above this number."""

    def shaped(
        self, rewards_B: FloatArray, tokens_B: IntArray, truncated_B: BoolArray, group_ids_B: Sequence[int]
    ) -> FloatArray:
        """Return float64 [B]: the rewards plus `coefficient` · λ for correct responses, or · min(0, λ) for wrong ones.

        A truncated response never counts as correct.
        """
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
