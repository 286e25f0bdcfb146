"""REINFORCE with a truncated importance weight per token: what ROLL Flash (arXiv 2510.11345) calls TIS.

The gradient is w A ∇ log π_θ, so no token loses its gradient to a clip; at most its weight is cut.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens


class TisReinforce(Objective, frozen=True):
    """max E[sg(clip(r, low, high)) A log π_θ] with r = π_θ / π_behaviour."""

    advantage = "group"
    aggregation = "token_mean"

    low: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Smallest weight."""
    high: Annotated[float, Meta(ge=1)] = 1.0
    """Largest weight."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio`, `clipped` (weight cut), and `weight` as used."""
        ratio_T = (tokens.logp_T.detach() - tokens.behaviour_T).exp()
        weight_T = ratio_T.clamp(self.low, self.high)
        stats = {"ratio": ratio_T, "clipped": (weight_T != ratio_T).to(ratio_T.dtype), "weight": weight_T}
        return ObjectiveOutput(-weight_T * tokens.advantage_T * tokens.logp_T, stats)
