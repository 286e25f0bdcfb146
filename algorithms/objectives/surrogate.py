"""The clipped surrogate, which several objectives share, and the types of its two options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

if TYPE_CHECKING:
    from torch import Tensor

ClipLow = Annotated[float, Meta(ge=0, le=1)]
"""ε_low: how far below 1 a ratio may fall."""
ClipHigh = Annotated[float, Meta(ge=0)]
"""ε_high: how far above 1 a ratio may rise."""


def clipped_surrogate(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), and 1 where the clip took the gradient away (arXiv 1707.06347)."""
    free_T = ratio_T * advantage_T
    bound_T = ratio_T.clamp(1 - low, 1 + high) * advantage_T
    return free_T.minimum(bound_T), (bound_T < free_T).to(ratio_T.dtype)
