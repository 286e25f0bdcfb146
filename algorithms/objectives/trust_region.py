"""Trust regions other than a clip around the policy that sampled: limits on how far an update moves the policy.

`flash.trainer.objective.apply_objective` calls the objective for each micro-batch, the part of a minibatch that a rank
computes at a time. A minibatch is the part of a batch that is trained in one update.

`decoupled_ppo` and `tis` clip around the proximal policy, for example the policy at the start of the step, and weigh
the token by w = π_proximal / π_behaviour. π_behaviour is the policy that sampled the token. `asyppo` leaves tokens out
of the loss by the disagreement of several critics. `m2po` bounds the second moment of the log-ratio over a minibatch
instead of the ratio of each token. In the formulas, A is the advantage.

Shape legend: T = action tokens of a micro-batch; N = trained tokens over all ranks, of the batch in `AsyPpo.bounds` and
of a minibatch in `M2po.limit`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens, Proximal
from algorithms.objectives.clipped import ClipHigh, ClipLow, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

Share = Annotated[float, Meta(ge=0, lt=1)]
"""Share of the trained tokens of a batch."""

EQUAL_DEVIATION = 1e-3
"""Relative difference up to which two σ count as equal. Values of one state that are computed in two micro-batches
differ by rounding, and the tokens with this state must be on the same side of a bound."""

SHARE_SLACK = 1e-9
"""Added to share · count before it is rounded down: 0.29 · 100 is 28.999… in floats and must give 29 tokens."""


class DecoupledPpo(Objective, frozen=True):
    """max E[w min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)], r = π_θ / π_proximal, w = π_proximal / π_behaviour.

    Decoupled PPO (Hilton et al. 2021, arXiv 2110.00641, section 3; AReaL, arXiv 2505.24298, eq. 5). The clip around the
    proximal policy bounds the size of an update however old the data is. w, which has no gradient, corrects for the age
    of the data.
    """

    advantage = "group"
    aggregation = "token_mean"

    clip_low: ClipLow = 0.2
    """ε_low."""
    clip_high: ClipHigh = 0.2
    """ε_high."""
    weight_cap: Annotated[float, Meta(gt=0)] = 5.0
    """Bound on w. A token with a w above this number is treated as `cap` says."""
    cap: Literal["mask", "clamp"] = "mask"
    """Treatment of a token with w above `weight_cap`. mask: its loss is 0. clamp: w = weight_cap. In both cases the
    token stays in the denominator of the batch, so that the weight of the other tokens does not change (AReaL)."""
    proximal: Proximal = "recompute"
    """The proximal policy. recompute: the weights at the start of the step; it costs one more forward pass if a step
    makes several updates. loglinear: a point between the behaviour policy and the current one, by the token's age; it
    costs no pass. ewma: an exponentially weighted average of the weights of all steps; it costs one more pass, and a
    copy of the weights."""
    ewma_decay: Annotated[float, Meta(ge=0, lt=1)] = 0.889
    """Share that the average of `ewma` keeps of its past at each step."""

    @property
    def proximal_policy(self) -> Proximal:
        """Return the option `proximal`, so that the trainer computes the log-probs of this policy."""
        return self.proximal

    @property
    def proximal_decay(self) -> float:
        """Return the option `ewma_decay`. The trainer reads it only if `proximal` is ewma."""
        return self.ewma_decay

    def without_effect(self) -> dict[str, str]:
        """Return the option `ewma_decay` with a reason, unless `proximal` is ewma: no other proximal policy uses it."""
        if self.proximal == "ewma":
            return {}
        return {"ewma_decay": f"proximal is {self.proximal!r}; expected 'ewma' beside it"}

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `ratio` (r), `clipped`, and `weight` (w) as used."""
        ratio_T = (tokens.logp_T - tokens.proximal_T).exp()
        surrogate_T, clipped_T = clipped_surrogate(ratio_T, tokens.advantage_T, self.clip_low, self.clip_high)
        weight_T = (tokens.proximal_T - tokens.behaviour_T).exp()
        if self.cap == "mask":
            weight_T = weight_T.masked_fill(weight_T > self.weight_cap, 0.0)
        else:
            weight_T = weight_T.clamp(max=self.weight_cap)
        stats = {"ratio": ratio_T.detach(), "clipped": clipped_T, "weight": weight_T}
        return ObjectiveOutput(-weight_T * surrogate_T, stats)


class Tis(Objective, frozen=True):
    """max E[min(w, C) min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)], r = π_θ / π_proximal, w = π_proximal / π_behaviour.

    Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL"),
    equal to `decoupled_ppo` with `cap = "clamp"` and `weight_cap` = C. The clip stays around the policy at the start of
    the step. The truncated weight corrects that the engine sampled from another policy: it computes with other kernels
    and, in an asynchronous run, with older weights.
    """

    advantage = "group"
    aggregation = "token_mean"

    clip_low: ClipLow = 0.2
    """ε_low."""
    clip_high: ClipHigh = 0.2
    """ε_high."""
    cap: Annotated[float, Meta(gt=0)] = 2.0
    """C: largest weight."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `ratio` (r), `clipped`, and `weight` (min(w, C)) as used."""
        ratio_T = (tokens.logp_T - tokens.proximal_T).exp()
        surrogate_T, clipped_T = clipped_surrogate(ratio_T, tokens.advantage_T, self.clip_low, self.clip_high)
        weight_T = (tokens.proximal_T - tokens.behaviour_T).exp().clamp(max=self.cap)
        stats = {"ratio": ratio_T.detach(), "clipped": clipped_T, "weight": weight_T}
        return ObjectiveOutput(-weight_T * surrogate_T, stats)


class AsyPpo(DecoupledPpo, frozen=True):
    """max E[I^A min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)] with r = π_θ / π_behaviour, or in its decoupled form.

    AsyPPO (Liu et al. 2025, arXiv 2510.01656): PPO with several small critics. Critic m learns from D_m, its own part
    of the responses to every prompt. The mean of the critics' values, V̄, gives the advantages Ā. The standard deviation
    σ of the critics' values says how informative a token is:

        L(V_m) = mean over D_m of (V_m(s_t) − R_t)²,   R_t the discounted rewards that followed
        J = E[1/|o| Σ_t I^A_t min(r_t Ā_t, clip(r_t) Ā_t) + β I^H_t H_t]

    I^A = 0 for the share of a batch's tokens with the lowest σ: the critics agree on such a state because it is well
    known, and its advantage is mostly noise. I^H = 0 for the share with the highest σ: the critics disagree on such a
    state because it is unusual, and it must not be explored. The trainer trains the critics, and multiplies the entropy
    H by β (`algorithm.entropy_bonus`). This class returns I^H as `bonus_T`.
    """

    advantage = "gae"
    aggregation = "seq_mean_token_mean"
    critics = 2
    critic_target = "monte_carlo"

    mask_lowest: Share = 0.2
    """Share of the batch's trained tokens whose policy loss is left out: the tokens with the lowest σ."""
    filter_highest: Share = 0.2
    """Share of the batch's trained tokens that have no entropy bonus: the tokens with the highest σ."""
    decoupled: bool = False
    """True: the clip is around the proximal policy, and the token is weighed by π_proximal / π_behaviour, for data
    several versions old. Only then do the options `weight_cap`, `cap`, `proximal` and `ewma_decay` have an effect."""

    def without_effect(self) -> dict[str, str]:
        """Return the options that only the decoupled form uses, with a reason, unless `decoupled` is set.

        With `decoupled`, the rule of `DecoupledPpo` decides about `ewma_decay`.
        """
        if self.decoupled:
            return super().without_effect()
        needed = "decoupled is false; expected true beside it"
        return dict.fromkeys(("weight_cap", "cap", "proximal", "ewma_decay"), needed)

    def bounds(self, deviation_N: Tensor) -> tuple[float, float]:
        """Return the σ below which I^A = 0, and the σ above which I^H = 0; here N = trained tokens of the batch.

        Each bound leaves out at most its share of the tokens, because all tokens whose σ equals the bound stay in.
        Without tokens both bounds are infinite.
        """
        count = len(deviation_N)
        if count == 0:
            return -math.inf, math.inf
        ordered_N = deviation_N.double().sort().values
        shares = (self.mask_lowest, self.filter_highest)
        lowest, highest = (min(int(share * count + SHARE_SLACK), count - 1) for share in shares)
        low, high = float(ordered_N[lowest]), float(ordered_N[count - 1 - highest])
        # The bounds are widened, so that rounding does not separate tokens with the same σ.
        return low * (1 - EQUAL_DEVIATION), high * (1 + EQUAL_DEVIATION)

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token, and I^H as the factor of each token's entropy bonus.

        Statistics: `ratio`, `clipped`, `weight`, `deviation` (σ), `learned` (I^A) and `bonus` (I^H).
        """
        if not self.decoupled:
            # With π_proximal = π_behaviour, w is 1 and r is π_θ / π_behaviour.
            tokens = tokens._replace(proximal_T=tokens.behaviour_T)
        output = super().__call__(tokens)
        low, high = tokens.bounds
        deviation_T = tokens.deviation_T
        learned_T = deviation_T >= low
        bonus_T = (deviation_T <= high).to(deviation_T.dtype)
        stats = output.stats | {
            "deviation": deviation_T,
            "learned": learned_T.to(deviation_T.dtype),
            "bonus": bonus_T,
        }
        return ObjectiveOutput(output.loss_T.where(learned_T, 0.0), stats, bonus_T)


class M2po(Objective, frozen=True):
    """max E[M r A] with r = π_θ / π_behaviour, M = 0 for outward tokens with (log r)² ≥ limit, else 1.

    M2PO (Zheng et al. 2025, arXiv 2510.01161). A token is *outward* if the objective would push its ratio further from
    1: A > 0 and r > 1, or A < 0 and r < 1. Outward tokens are dropped (M = 0), the token with the largest (log r)²
    first, until the mean (log r)² of the remaining outward tokens of the minibatch is at most τ. All other tokens keep
    their gradient, however large their ratio is.

    The mean is over outward tokens, as in the authors' code and not as in the paper's formula. The authors' code also
    caps log-ratios and clips with a minimal range; this class does neither. Dropped tokens stay in the denominator:
    J = 1 / Σ |o| · Σ M r A, where |o| is the number of tokens of a response.
    """

    advantage = "group"
    aggregation = "token_mean"
    limits = True
    """The trainer calls `limit`."""

    tau: Annotated[float, Meta(gt=0)] = 0.04
    """τ: largest mean (log r)² of the outward tokens."""

    def limit(self, log_ratio_N: Tensor, advantage_N: Tensor) -> float:
        """Return the smallest (log r)² of the tokens to drop; inf if no token is dropped.

        The trainer calls this on every rank before each update of a minibatch, with the log-ratios under the weights
        just before the update. It gives the result to `__call__` as `tokens.limit`. `__call__` drops each outward token
        whose (log r)² is at least this number, so tokens with equal (log r)² are dropped together.

        The trainer sets the advantage of tokens that a correction (`algorithm.corrections`) rejects to 0. Tokens with
        advantage 0 are not outward.
        """
        # K = outward tokens, by rising (log r)².
        square_K = log_ratio_N.double().square()[is_outward(log_ratio_N, advantage_N)].sort().values
        # Entry k is the mean over the k + 1 smallest numbers. These means never fall, so the first `kept` tokens are
        # exactly the tokens to keep.
        mean_K = square_K.cumsum(0) / square_K.new_ones(len(square_K)).cumsum(0)
        kept = int((mean_K <= self.tau).sum())
        return float(square_K[kept]) if kept < len(square_K) else math.inf

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `ratio`, and `clipped`, which is 1 for dropped tokens."""
        log_ratio_T = tokens.logp_T - tokens.behaviour_T
        fixed_T = log_ratio_T.detach()
        dropped_T = is_outward(fixed_T, tokens.advantage_T) & (fixed_T.double().square() >= tokens.limit)
        ratio_T = log_ratio_T.exp()
        loss_T = (-ratio_T * tokens.advantage_T).masked_fill(dropped_T, 0.0)
        return ObjectiveOutput(loss_T, {"ratio": ratio_T.detach(), "clipped": dropped_T.to(ratio_T.dtype)})


def is_outward(log_ratio_T: Tensor, advantage_T: Tensor) -> Tensor:
    """Return bool [T]: True if the objective pushes the ratio of the token further away from 1.

    False if the advantage or the log-ratio is 0.
    """
    return log_ratio_T.sign() * advantage_T.sign() > 0
