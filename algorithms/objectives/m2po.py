"""M2PO (Zheng et al. 2025, arXiv 2510.01161): bound the second moment of the log-ratio, not each ratio.

A token is in the trust region's charge where the objective would push its ratio further from 1: A > 0 and r > 1, or
A < 0 and r < 1. Of these tokens of a minibatch, those with the largest (log r)² are dropped, as few as will bring the
mean (log r)² of the rest to τ or below. The others keep their gradient however large their ratio is. The mean is taken
over the tokens in charge, as in the authors' code, which also caps log-ratios and clips with a range of a least width.
The dropped ones stay in the objective's denominator: J = 1 / Σ |o| · Σ M r A.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens

if TYPE_CHECKING:
    from torch import Tensor


class M2po(Objective, frozen=True):
    """max E[M r A] with r = π_θ / π_behaviour, M = 0 for tokens in the trust region's charge with (log r)² ≥ limit."""

    advantage = "group"
    aggregation = "token_mean"
    limits = True

    tau: Annotated[float, Meta(gt=0)] = 0.04
    """τ: largest mean (log r)² of the tokens in charge."""

    def limit(self, log_ratio_N: Tensor, advantage_N: Tensor) -> float:
        """The smallest (log r)² that is dropped; inf where none is. Equal ones are dropped together."""
        square_K = log_ratio_N.double().square()[in_charge(log_ratio_N, advantage_N)].sort().values
        # Mean over the k + 1 smallest: it rises with k, so what fits under τ is a prefix.
        mean_K = square_K.cumsum(0) / square_K.new_ones(len(square_K)).cumsum(0)
        kept = int((mean_K <= self.tau).sum())
        return float(square_K[kept]) if kept < len(square_K) else math.inf

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `ratio` and `clipped` (dropped)."""
        log_ratio_T = tokens.logp_T - tokens.behaviour_T
        fixed_T = log_ratio_T.detach()
        dropped_T = in_charge(fixed_T, tokens.advantage_T) & (fixed_T.double().square() >= tokens.limit)
        ratio_T = log_ratio_T.exp()
        loss_T = (-ratio_T * tokens.advantage_T).masked_fill(dropped_T, 0.0)
        return ObjectiveOutput(loss_T, {"ratio": ratio_T.detach(), "clipped": dropped_T.to(ratio_T.dtype)})


def in_charge(log_ratio_T: Tensor, advantage_T: Tensor) -> Tensor:
    """bool [T]: the objective pushes the ratio away from 1."""
    return log_ratio_T.sign() * advantage_T.sign() > 0
