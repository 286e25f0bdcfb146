"""GSPO (Zheng et al. 2025, arXiv 2507.18071): the ratio and its clip belong to the sequence, as the reward does.

Written as the paper's GSPO-token (eq. 13 and 14): s takes its value from the sequence and its gradient from the token.
Where A is constant over a sequence, value and gradient are those of GSPO (eq. 5); where it is not, it still holds.
"""

from __future__ import annotations

from algorithms.base import Objective, ObjectiveOutput, PackedTokens
from algorithms.objectives.surrogate import ClipHigh, ClipLow, clipped_surrogate
from algorithms.sequences import sequence_mean


class Gspo(Objective, frozen=True):
    """max E[min(s A, clip(s, 1 − ε_low, 1 + ε_high) A)], s = (π_θ(sequence) / π_behaviour(sequence))^(1 / length)."""

    advantage = "group"
    aggregation = "seq_mean_token_mean"

    clip_low: ClipLow = 3e-4
    """ε_low; small, since s is a geometric mean."""
    clip_high: ClipHigh = 4e-4
    """ε_high."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio` (s) and `clipped`."""
        fixed_T = tokens.logp_T.detach()
        mean_T = sequence_mean(tokens, fixed_T - tokens.behaviour_T).to(fixed_T.dtype)[tokens.sequence_T]
        ratio_T = (mean_T + tokens.logp_T - fixed_T).exp()
        surrogate_T, clipped_T = clipped_surrogate(ratio_T, tokens.advantage_T, self.clip_low, self.clip_high)
        return ObjectiveOutput(-surrogate_T, {"ratio": ratio_T.detach(), "clipped": clipped_T})
