"""CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): clip the importance weight, not the gradient.

Every token keeps a gradient, also the rare ones at forks of the reasoning, which a clipped surrogate drops first.
"""

from __future__ import annotations

from algorithms.base import Objective, ObjectiveOutput, PackedTokens
from algorithms.objectives.surrogate import ClipHigh, ClipLow


class Cispo(Objective, frozen=True):
    """max E[sg(clip(r, 1 − ε_low, 1 + ε_high)) A log π_θ] with r = π_θ / π_behaviour."""

    advantage = "group"
    aggregation = "token_mean"

    clip_low: ClipLow = 1.0
    """ε_low; 1, as in the paper, bounds nothing from below."""
    clip_high: ClipHigh = 5.0
    """ε_high."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio`, `clipped` (weight cut), and `weight` as used."""
        ratio_T = (tokens.logp_T.detach() - tokens.behaviour_T).exp()
        weight_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high)
        stats = {"ratio": ratio_T, "clipped": (weight_T != ratio_T).to(ratio_T.dtype), "weight": weight_T}
        return ObjectiveOutput(-weight_T * tokens.advantage_T * tokens.logp_T, stats)
