"""PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7), with advantages of a critic (GAE).

The dual clip (Ye et al. 2020, arXiv 1912.09729) bounds what a bad token can weigh: without it the loss of a
token with A < 0 grows with its ratio without end, which is where stale data does its harm.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens
from algorithms.objectives.surrogate import ClipHigh, ClipLow, clipped_surrogate


class Ppo(Objective, frozen=True):
    """max E[min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)] with r = π_θ / π_behaviour; where A < 0, at least c A."""

    advantage = "gae"
    aggregation = "token_mean"

    clip_low: ClipLow = 0.2
    """ε_low."""
    clip_high: ClipHigh = 0.2
    """ε_high."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """c: a ratio above it has no gradient where A < 0 (3 is usual). None: no such bound."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio` and `clipped` (by either clip)."""
        ratio_T = (tokens.logp_T - tokens.behaviour_T).exp()
        surrogate_T, clipped_T = clipped_surrogate(ratio_T, tokens.advantage_T, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            beyond_T = (ratio_T > self.dual_clip) & (tokens.advantage_T < 0)
            surrogate_T = (self.dual_clip * tokens.advantage_T).where(beyond_T, surrogate_T)
            clipped_T = clipped_T.masked_fill(beyond_T, 1.0)
        return ObjectiveOutput(-surrogate_T, {"ratio": ratio_T.detach(), "clipped": clipped_T})
