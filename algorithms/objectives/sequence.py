"""Objectives with one ratio for a whole response, because the reward belongs to the whole response.

`flash.trainer.objective.apply_objective` calls the objective for each micro-batch. A micro-batch holds whole sequences,
so the ratio of each sequence can be computed from the micro-batch alone. Sums over a response are taken over unmasked
tokens, in float64 (`algorithms.sequences`). A token is masked if the loss leaves it out, for example because it is too
old.

In the formulas, A is the advantage, R the reward of a sample, and sg(x) is x without gradient. T⁺ and T⁻ are the good
and the bad trajectories.

Shape legend: T = action tokens of a micro-batch, S = its sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens
from algorithms.objectives.clipped import ClipHigh, ClipLow, clipped_surrogate
from algorithms.sequences import sequence_lengths, sequence_mean, sequence_sum

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound to which |log ρ| of a sequence is clamped, in nats. Weights are cut at much smaller ratios, so the clamp only
keeps the statistics finite."""


class Gspo(Objective, frozen=True):
    """max E[min(s A, clip(s, 1 − ε_low, 1 + ε_high) A)], s = (π_θ(sequence) / π_behaviour(sequence))^(1 / length).

    GSPO (Zheng et al. 2025, arXiv 2507.18071), in the form of the paper's GSPO-token (eq. 13 and 14): s has the value
    of the sequence's ratio and the gradient of the token's log-prob. If A is constant over a sequence, value and
    gradient of the objective are those of GSPO (eq. 5). The formula can also be used if A differs between tokens, as
    with the estimators `turn` and `gae`.
    """

    advantage = "group"
    aggregation = "seq_mean_token_mean"

    clip_low: ClipLow = 3e-4
    """ε_low. It is small, because s is a geometric mean over the tokens of a sequence and stays close to 1."""
    clip_high: ClipHigh = 4e-4
    """ε_high."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `ratio` (s) and `clipped`."""
        fixed_T = tokens.logp_T.detach()
        mean_T = sequence_mean(tokens, fixed_T - tokens.behaviour_T).to(fixed_T.dtype)[tokens.sequence_T]
        # logp − fixed is 0 and has the gradient of the token's log-prob; mean_T has no gradient (eq. 14).
        ratio_T = (mean_T + tokens.logp_T - fixed_T).exp()
        surrogate_T, clipped_T = clipped_surrogate(ratio_T, tokens.advantage_T, self.clip_low, self.clip_high)
        return ObjectiveOutput(-surrogate_T, {"ratio": ratio_T.detach(), "clipped": clipped_T})


class Topr(Objective, frozen=True):
    """max E[A log π_θ] over T⁺, E[sg(clip(ρ, low, high)) A log π_θ] over T⁻, ρ = Π_t π_θ / π_behaviour.

    TOPR, tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286). ρ is the ratio of a whole sequence. The
    weight in T⁺ is 1, as in supervised learning. The weight in T⁻ is the truncated ρ, so that a trajectory which the
    policy no longer produces is not pushed down further. Neither weight grows without bound.
    """

    advantage = "group"
    aggregation = "seq_mean_token_mean"

    low: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """a⁻: smallest weight in T⁻."""
    high: Annotated[float, Meta(ge=1, le=1e6)] = 1.0
    """b⁻: largest weight in T⁻."""
    split: Literal["reward", "advantage"] = "reward"
    """Number that decides about T⁺: a trajectory is in T⁺ if its reward, as in the paper, or its advantage is above
    0."""

    def taper(self, tokens: PackedTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors [T], detached: True (bool) if the token is in T⁺; ρ of its sequence; its weight.

        `ToprWeighted` multiplies the weights by w⁺ or w⁻.
        """
        log_ratio_T = (tokens.logp_T - tokens.behaviour_T).detach()
        ratio_S = sequence_sum(tokens, log_ratio_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        ratio_T = ratio_S.to(log_ratio_T.dtype)[tokens.sequence_T]
        positive_T = (tokens.reward_T if self.split == "reward" else tokens.advantage_T) > 0
        return positive_T, ratio_T, ratio_T.clamp(self.low, self.high).masked_fill(positive_T, 1.0)

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `ratio` (ρ), `clipped` (weight cut, in T⁻), and `weight` as used."""
        positive_T, ratio_T, weight_T = self.taper(tokens)
        cut_T = (weight_T != ratio_T) & ~positive_T
        stats = {"ratio": ratio_T, "clipped": cut_T.to(ratio_T.dtype), "weight": weight_T}
        return ObjectiveOutput(-weight_T * tokens.advantage_T * tokens.logp_T, stats)


class ToprWeighted(Topr, frozen=True):
    """max w⁺ E[A log π_θ] over T⁺, w⁻ E[sg(clip(ρ, low, high)) A log π_θ] over T⁻, ρ = Π_t π_θ / π_behaviour.

    TOPR with a weight on each of its two sets, as in ROLL Flash (arXiv 2510.11345). With w⁺ = w⁻ = 1 this is `topr`.
    """

    positive: Annotated[float, Meta(ge=0)] = 1.0
    """w⁺, the weight of good trajectories. 0 learns from bad trajectories alone."""
    negative: Annotated[float, Meta(ge=0)] = 1.0
    """w⁻, the weight of bad trajectories. 0 learns from good trajectories alone, like rejection sampling."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `ratio` (ρ), `clipped` (weight cut, in T⁻), and `weight` as used."""
        positive_T, ratio_T, taper_T = self.taper(tokens)
        weight_T = (self.positive * taper_T).where(positive_T, self.negative * taper_T)
        cut_T = (taper_T != ratio_T) & ~positive_T
        stats = {"ratio": ratio_T, "clipped": cut_T.to(ratio_T.dtype), "weight": weight_T}
        return ObjectiveOutput(-weight_T * tokens.advantage_T * tokens.logp_T, stats)


class Kimi15(Objective, frozen=True):
    """max E[A log π_θ(response) − τ/2 (log π_θ(response) − log π_behaviour(response))²], A = R − mean of the group.

    Kimi k1.5's mirror descent (arXiv 2501.12599), eq. 3: a squared log-ratio keeps the policy near the policy that
    sampled. The optimum of the regularised problem satisfies log π − log π_behaviour = (R − const) / τ for every
    response, whichever policy sampled the response. The gradient of this objective is, up to a factor, the gradient of
    the squared difference between the two sides. So it is right for off-policy data without an importance ratio.
    """

    advantage = "group_mean"
    aggregation = "seq_mean_token_sum"

    tau: Annotated[float, Meta(gt=0)] = 0.1
    """τ, the strength of the penalty: the larger it is, the nearer the policy stays to the policy that sampled."""
    penalty: Literal["sequence", "token"] = "sequence"
    """Log-ratio that is squared. sequence: the log-ratio of the response, as in the paper. token: the log-ratio of each
    token alone, which is weaker on long responses."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `ratio` of each token."""
        log_ratio_T = tokens.logp_T - tokens.behaviour_T
        square_T = log_ratio_T.square()
        if self.penalty == "sequence":
            # Each token gets an equal part of the square of its response, so that the sum over the tokens, which the
            # aggregation takes, is the whole square.
            square_S = sequence_sum(tokens, log_ratio_T).square() / sequence_lengths(tokens)
            square_T = square_S.to(log_ratio_T.dtype)[tokens.sequence_T]
        loss_T = self.tau / 2 * square_T - tokens.advantage_T * tokens.logp_T
        return ObjectiveOutput(loss_T, {"ratio": log_ratio_T.detach().exp()})
