"""AIPO (LlamaRL, arXiv 2505.24034): REINFORCE with an importance weight that is bounded on one side only.

A ratio below 1 is used as it is: a token which the policy has left counts less. Only large ratios, which carry the
variance, are cut.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens


class Aipo(Objective, frozen=True):
    """max E[sg(min(r, ρ)) A log π_θ] with r = π_θ / π_behaviour."""

    advantage = "group"
    aggregation = "token_mean"

    cap: Annotated[float, Meta(ge=1)] = 4.0
    """ρ: largest weight; the paper finds 2 to 10 to work."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio`, `clipped` (weight cut), and `weight` as used."""
        ratio_T = (tokens.logp_T.detach() - tokens.behaviour_T).exp()
        weight_T = ratio_T.clamp(max=self.cap)
        stats = {"ratio": ratio_T, "clipped": (ratio_T > self.cap).to(ratio_T.dtype), "weight": weight_T}
        return ObjectiveOutput(-weight_T * tokens.advantage_T * tokens.logp_T, stats)
