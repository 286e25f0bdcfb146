"""Decoupled PPO: clip around a recent policy, weigh by how far that is from the one that sampled.

Hilton et al. 2021 (arXiv 2110.00641, section 3); AReaL (arXiv 2505.24298, eq. 5). The clip bounds the step itself
however old the data is, and w, which has no gradient, corrects for the age.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens, Proximal
from algorithms.objectives.surrogate import ClipHigh, ClipLow, clipped_surrogate


class DecoupledPpo(Objective, frozen=True):
    """max E[w min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)], r = π_θ / π_proximal, w = π_proximal / π_behaviour."""

    advantage = "group"
    aggregation = "token_mean"

    clip_low: ClipLow = 0.2
    """ε_low."""
    clip_high: ClipHigh = 0.2
    """ε_high."""
    weight_cap: Annotated[float, Meta(gt=0)] = 5.0
    """Largest w that is used as it is."""
    cap: Literal["mask", "clamp"] = "mask"
    """What happens to a token with a larger w: no loss at all, or w = weight_cap. In both it counts as a token of the
    batch, so that the others weigh what they would have weighed (AReaL)."""
    proximal: Proximal = "recompute"
    """The proximal policy: the weights at the start of the step (one more forward pass), a point between behaviour and
    now by age (none), or an exponentially weighted average of the weights of all steps (one, and a copy of them)."""
    ewma_decay: Annotated[float, Meta(ge=0, lt=1)] = 0.889
    """What the average of `ewma` keeps of its past with each step."""

    @property
    def proximal_policy(self) -> Proximal:
        """`proximal`."""
        return self.proximal

    @property
    def proximal_decay(self) -> float:
        """`ewma_decay`."""
        return self.ewma_decay

    def without_effect(self) -> dict[str, str]:
        """`ewma_decay`, where there is no such average."""
        if self.proximal == "ewma":
            return {}
        return {"ewma_decay": f"proximal is {self.proximal!r}; expected 'ewma' beside it"}

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio`, `clipped`, and `weight` as used."""
        ratio_T = (tokens.logp_T - tokens.proximal_T).exp()
        surrogate_T, clipped_T = clipped_surrogate(ratio_T, tokens.advantage_T, self.clip_low, self.clip_high)
        weight_T = (tokens.proximal_T - tokens.behaviour_T).exp()
        if self.cap == "mask":
            weight_T = weight_T.masked_fill(weight_T > self.weight_cap, 0.0)
        else:
            weight_T = weight_T.clamp(max=self.weight_cap)
        stats = {"ratio": ratio_T.detach(), "clipped": clipped_T, "weight": weight_T}
        return ObjectiveOutput(-weight_T * surrogate_T, stats)
