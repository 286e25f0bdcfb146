"""KL divergence from a reference policy, estimated at the sampled tokens (Schulman 2020, "Approximating KL
divergence").

With δ = log π − log π_ref at a token that π sampled:

| estimator | value | its mean under π | expected gradient as a loss |
|---|---|---|---|
| k1 | δ | KL(π ‖ π_ref) | **zero**: E[∇ log π] = 0, so it adds noise and no pull at all |
| k2 | δ² / 2 | about KL, second order in δ | ∇ KL(π ‖ π_ref), exactly |
| k3 | exp(−δ) − 1 + δ | KL(π ‖ π_ref) | ∇ KL(π_ref ‖ π), the same to first order in δ |

A value and its gradient are two matters: k1 is the estimator to subtract from the *reward*, where the policy gradient
supplies ∇ log π, and it is refused in the loss. On samples of an older policy all three are biased by its distance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


class Kl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pull towards a reference policy."""

    estimator: Estimator = "k3"
    """k1: log-ratio, refused in the loss; k2: half its square; k3: GRPO's, never negative."""
    coefficient: Annotated[float, Meta(gt=0)]
    """β, the factor."""
    place: Literal["loss", "reward"] = "loss"
    """Added to token losses, or taken from token rewards."""
    reference: str | None = None
    """Folder or hub id. None: the policy at the start."""
    refresh: Annotated[int, Meta(gt=0)] | None = None
    """Steps after which the policy of then is the reference (arXiv 2505.24864). None: never."""


def kl(estimator: Estimator, logp_T: Tensor, reference_T: Tensor) -> Tensor:
    """[T]: the estimate at each token; the gradient flows through `logp_T`."""
    delta_T = logp_T - reference_T
    if estimator == "k1":
        return delta_T
    if estimator == "k2":
        return delta_T.square() / 2
    return (-delta_T).expm1() + delta_T
