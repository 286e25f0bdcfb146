"""Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL").

The clip stays around the policy at the start of the step; the truncated weight corrects that the engine sampled from
another one: other kernels, and, in an asynchronous run, older weights.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens
from algorithms.objectives.surrogate import ClipHigh, ClipLow, clipped_surrogate


class Tis(Objective, frozen=True):
    """max E[min(w, C) min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)], r = π_θ / π_proximal, w = π_proximal / π_behaviour.

    The special case of `decoupled_ppo` with cap = "clamp".
    """

    advantage = "group"
    aggregation = "token_mean"

    clip_low: ClipLow = 0.2
    """ε_low."""
    clip_high: ClipHigh = 0.2
    """ε_high."""
    cap: Annotated[float, Meta(gt=0)] = 2.0
    """C."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio`, `clipped`, and `weight` as used."""
        ratio_T = (tokens.logp_T - tokens.proximal_T).exp()
        surrogate_T, clipped_T = clipped_surrogate(ratio_T, tokens.advantage_T, self.clip_low, self.clip_high)
        weight_T = (tokens.proximal_T - tokens.behaviour_T).exp().clamp(max=self.cap)
        stats = {"ratio": ratio_T.detach(), "clipped": clipped_T, "weight": weight_T}
        return ObjectiveOutput(-weight_T * surrogate_T, stats)
