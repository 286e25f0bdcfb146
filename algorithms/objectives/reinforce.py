"""REINFORCE and its off-policy forms: A · log π_θ, with a bounded importance weight per token that has no gradient.

`flash.trainer.objective.apply_objective` calls the objective for each micro-batch. In the formulas, A is the advantage,
R the reward of a sample, r = π_θ / π_behaviour the ratio of one token to the policy that sampled it, and sg(x) is x
without gradient.

No token loses its gradient to a clip: if its ratio is extreme, only its weight is cut. `TisReinforce`, `Cispo` and
`Aipo` differ only in the bounds of the weight; `Rloo` has the weight 1. `Supervised` is the loss with A = 1 and the
weight 1, for answers that are given.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens
from algorithms.objectives.clipped import ClipHigh, ClipLow


class Rloo(Objective, frozen=True):
    """max E[A log π_θ(response)] with A = R − mean of the group's other samples.

    RLOO (Ahmadian et al. 2024, arXiv 2402.14740). log π_θ(response) is the sum of log π_θ over the tokens of a
    response, which the aggregation computes. RLOO is an on-policy method without a ratio, so it does not correct data
    of an older version, and an asynchronous run is refused. Off policy, use `tis_reinforce` or `aipo` with advantage =
    "leave_one_out".
    """

    corrects_staleness = False
    advantage = "leave_one_out"
    aggregation = "seq_mean_token_sum"

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. No statistics."""
        return ObjectiveOutput(-tokens.advantage_T * tokens.logp_T, {})


class TisReinforce(Objective, frozen=True):
    """max E[sg(clip(r, low, high)) A log π_θ] with r = π_θ / π_behaviour.

    REINFORCE with a truncated importance weight per token, which ROLL Flash (arXiv 2510.11345) calls TIS.
    """

    advantage = "group"
    aggregation = "token_mean"

    low: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Smallest weight."""
    high: Annotated[float, Meta(ge=1)] = 1.0
    """Largest weight."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `ratio`, `clipped` (weight cut), and `weight` as used."""
        ratio_T = (tokens.logp_T.detach() - tokens.behaviour_T).exp()
        weight_T = ratio_T.clamp(self.low, self.high)
        stats = {"ratio": ratio_T, "clipped": (weight_T != ratio_T).to(ratio_T.dtype), "weight": weight_T}
        return ObjectiveOutput(-weight_T * tokens.advantage_T * tokens.logp_T, stats)


class Cispo(Objective, frozen=True):
    """max E[sg(clip(r, 1 − ε_low, 1 + ε_high)) A log π_θ] with r = π_θ / π_behaviour.

    CISPO (MiniMax-M1, arXiv 2506.13585), eq. 4 and 5: clip the importance weight, not the gradient. Every token keeps a
    gradient. A clipped surrogate would first drop rare tokens, and among these are the tokens at which the reasoning
    changes its course.
    """

    advantage = "group"
    aggregation = "token_mean"

    clip_low: ClipLow = 1.0
    """ε_low. With 1, as in the paper, there is no lower bound."""
    clip_high: ClipHigh = 5.0
    """ε_high."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `ratio`, `clipped` (weight cut), and `weight` as used."""
        ratio_T = (tokens.logp_T.detach() - tokens.behaviour_T).exp()
        weight_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high)
        stats = {"ratio": ratio_T, "clipped": (weight_T != ratio_T).to(ratio_T.dtype), "weight": weight_T}
        return ObjectiveOutput(-weight_T * tokens.advantage_T * tokens.logp_T, stats)


class Aipo(Objective, frozen=True):
    """max E[sg(min(r, ρ)) A log π_θ] with r = π_θ / π_behaviour.

    AIPO (LlamaRL, arXiv 2505.24034): the weight is bounded from above only. A ratio below 1 is used as it is, so a
    token that has become less likely since it was sampled counts less. Only large ratios, which cause most of the
    variance, are cut.
    """

    advantage = "group"
    aggregation = "token_mean"

    cap: Annotated[float, Meta(ge=1)] = 4.0
    """ρ: largest weight; 2 to 10 work in the paper."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `ratio`, `clipped` (weight cut), and `weight` as used."""
        ratio_T = (tokens.logp_T.detach() - tokens.behaviour_T).exp()
        weight_T = ratio_T.clamp(max=self.cap)
        stats = {"ratio": ratio_T, "clipped": (ratio_T > self.cap).to(ratio_T.dtype), "weight": weight_T}
        return ObjectiveOutput(-weight_T * tokens.advantage_T * tokens.logp_T, stats)


class Supervised(Objective, frozen=True):
    """min E[− log π_θ], the mean over all tokens of given answers: supervised fine-tuning.

    `flash sft` uses this objective. It has no name in `algorithms.OBJECTIVES`, because it uses neither advantages nor
    ratios, and so makes no sense for samples.
    """

    corrects_staleness = False
    aggregation = "token_mean"

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `nll`, the negative log-likelihood, equal to the loss."""
        return ObjectiveOutput(-tokens.logp_T, {"nll": -tokens.logp_T.detach()})
