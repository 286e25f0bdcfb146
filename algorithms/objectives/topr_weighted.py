"""TOPR with a weight on each of its two sets, as in ROLL Flash (arXiv 2510.11345)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from algorithms.base import ObjectiveOutput, PackedTokens
from algorithms.objectives.topr import Topr


class ToprWeighted(Topr, frozen=True):
    """max w⁺ E[A log π_θ] over T⁺, w⁻ E[sg(clip(ρ, low, high)) A log π_θ] over T⁻, ρ = Π_t π_θ / π_behaviour."""

    positive: Annotated[float, Meta(ge=0)] = 1.0
    """w⁺: 0 learns from bad trajectories alone."""
    negative: Annotated[float, Meta(ge=0)] = 1.0
    """w⁻: 0 learns from good trajectories alone, like rejection sampling."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio` (ρ), `clipped` (weight cut, in T⁻), and `weight` as used."""
        positive_T, ratio_T, taper_T = self.taper(tokens)
        weight_T = (self.positive * taper_T).where(positive_T, self.negative * taper_T)
        cut_T = (taper_T != ratio_T) & ~positive_T
        stats = {"ratio": ratio_T, "clipped": cut_T.to(ratio_T.dtype), "weight": weight_T}
        return ObjectiveOutput(-weight_T * tokens.advantage_T * tokens.logp_T, stats)
