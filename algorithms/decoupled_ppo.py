"""Decoupled PPO: clip around a recent policy, weigh by how far that is from the one that sampled.

Hilton et al. 2021 (arXiv 2110.00641, section 3); AReaL (arXiv 2505.24298, eq. 5). The proximal policy is the one at the
start of the training step, so the clip bounds the step itself however old the data is.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens


class DecoupledPpo(Objective, frozen=True):
    """max E[w min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)], r = π_θ / π_proximal, w = π_proximal / π_behaviour."""

    clip_low: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """ε_low."""
    clip_high: Annotated[float, Meta(ge=0)] = 0.2
    """ε_high."""
    weight_cap: Annotated[float, Meta(gt=0)] = 5.0
    """Largest w that is used as it is."""
    cap: Literal["mask", "clamp"] = "mask"
    """What happens to a token with a larger w: no loss at all, or w = weight_cap."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio`, `clipped` (1 where the clip cut the gradient), `weight` (as used)."""
        ratio_T = (tokens.logp_T - tokens.proximal_T).exp()
        free_T = ratio_T * tokens.advantage_T
        bound_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high) * tokens.advantage_T

        weight_T = (tokens.proximal_T - tokens.behaviour_T).exp()
        if self.cap == "mask":
            weight_T = weight_T.masked_fill(weight_T > self.weight_cap, 0.0)
        else:
            weight_T = weight_T.clamp(max=self.weight_cap)

        stats = {
            "ratio": ratio_T.detach(),
            "clipped": (bound_T < free_T).to(ratio_T.dtype),
            "weight": weight_T,
        }
        return ObjectiveOutput(loss_T=-weight_T * free_T.minimum(bound_T), stats=stats)
