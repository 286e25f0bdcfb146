"""GRPO's clipped surrogate (Shao et al. 2024, arXiv 2402.03300, eq. 3), without its KL term.

The ratio is taken to the policy that sampled the token, so that data from an older version is corrected.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens


class Grpo(Objective, frozen=True):
    """max E[min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)] with r = π_θ / π_behaviour."""

    clip_low: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """ε_low."""
    clip_high: Annotated[float, Meta(ge=0)] = 0.2
    """ε_high."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio`, and `clipped` (1 where the clip took the gradient away)."""
        ratio_T = (tokens.logp_T - tokens.behaviour_T).exp()
        free_T = ratio_T * tokens.advantage_T
        bound_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high) * tokens.advantage_T
        stats = {"ratio": ratio_T.detach(), "clipped": (bound_T < free_T).to(ratio_T.dtype)}
        return ObjectiveOutput(loss_T=-free_T.minimum(bound_T), stats=stats)
