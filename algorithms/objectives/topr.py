"""TOPR, tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286).

Good trajectories are learned from as they are, like in supervised learning; bad ones are pushed down with a truncated
sequence ratio, so that one which the policy has already left no longer pushes. Neither grows without bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens
from algorithms.sequences import sequence_sum

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 20.0
"""A |log ρ| beyond it counts as it: weights are cut long before, and statistics stay finite."""


class Topr(Objective, frozen=True):
    """max E[A log π_θ] over T⁺, E[sg(clip(ρ, low, high)) A log π_θ] over T⁻, ρ = Π_t π_θ / π_behaviour."""

    advantage = "group"
    aggregation = "seq_mean_token_mean"

    low: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """a⁻: smallest weight in T⁻."""
    high: Annotated[float, Meta(ge=1, le=1e6)] = 1.0
    """b⁻: largest weight in T⁻."""
    split: Literal["reward", "advantage"] = "reward"
    """What is above 0 in T⁺: the trajectory's reward, as in the paper, or the advantage."""

    def taper(self, tokens: PackedTokens) -> tuple[Tensor, Tensor, Tensor]:
        """[T], detached: whether the token is in T⁺, its sequence's ρ, and its weight."""
        log_ratio_T = (tokens.logp_T - tokens.behaviour_T).detach()
        ratio_S = sequence_sum(tokens, log_ratio_T).clamp(-LARGEST, LARGEST).exp()
        ratio_T = ratio_S.to(log_ratio_T.dtype)[tokens.sequence_T]
        positive_T = (tokens.reward_T if self.split == "reward" else tokens.advantage_T) > 0
        return positive_T, ratio_T, ratio_T.clamp(self.low, self.high).masked_fill(positive_T, 1.0)

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio` (ρ), `clipped` (weight cut, in T⁻), and `weight` as used."""
        positive_T, ratio_T, weight_T = self.taper(tokens)
        cut_T = (weight_T != ratio_T) & ~positive_T
        stats = {"ratio": ratio_T, "clipped": cut_T.to(ratio_T.dtype), "weight": weight_T}
        return ObjectiveOutput(-weight_T * tokens.advantage_T * tokens.logp_T, stats)
