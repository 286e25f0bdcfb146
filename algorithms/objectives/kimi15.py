"""Kimi k1.5's mirror descent (arXiv 2501.12599, eq. 3): a squared log-ratio holds the policy near the one that sampled.

The optimum of the regularised problem satisfies log π − log π_behaviour = (R − const) / τ for every response, whoever
sampled it; this is the gradient of the squared gap, so it is right for off-policy data without a ratio.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens
from algorithms.sequences import sequence_lengths, sequence_sum


class Kimi15(Objective, frozen=True):
    """max E[A log π_θ(response) − τ/2 (log π_θ(response) − log π_behaviour(response))²], A = R − mean of the group."""

    advantage = "group_mean"
    aggregation = "seq_mean_token_sum"

    tau: Annotated[float, Meta(gt=0)] = 0.1
    """τ."""
    penalty: Literal["sequence", "token"] = "sequence"
    """Square the response's log-ratio, as in the paper, or each token's by itself: weaker on long responses."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss; a response's square is shared out evenly over its tokens. Statistics: `ratio`, per token."""
        log_ratio_T = tokens.logp_T - tokens.behaviour_T
        square_T = log_ratio_T.square()
        if self.penalty == "sequence":
            square_S = sequence_sum(tokens, log_ratio_T).square() / sequence_lengths(tokens)
            square_T = square_S.to(log_ratio_T.dtype)[tokens.sequence_T]
        loss_T = self.tau / 2 * square_T - tokens.advantage_T * tokens.logp_T
        return ObjectiveOutput(loss_T, {"ratio": log_ratio_T.detach().exp()})
