"""GRPO (Shao et al. 2024, arXiv 2402.03300, eq. 3); its KL term is `algorithms.kl`, to be set beside it.

The ratio is taken to the policy that sampled the token, so that data from an older version is corrected.
"""

from __future__ import annotations

from algorithms.base import Objective, ObjectiveOutput, PackedTokens
from algorithms.objectives.surrogate import ClipHigh, ClipLow, clipped_surrogate


class Grpo(Objective, frozen=True):
    """max E[min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)] with r = π_θ / π_behaviour, A = (R − mean) / std."""

    advantage = "group"
    aggregation = "seq_mean_token_mean"

    clip_low: ClipLow = 0.2
    """ε_low."""
    clip_high: ClipHigh = 0.2
    """ε_high."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio` and `clipped`."""
        ratio_T = (tokens.logp_T - tokens.behaviour_T).exp()
        surrogate_T, clipped_T = clipped_surrogate(ratio_T, tokens.advantage_T, self.clip_low, self.clip_high)
        return ObjectiveOutput(-surrogate_T, {"ratio": ratio_T.detach(), "clipped": clipped_T})
