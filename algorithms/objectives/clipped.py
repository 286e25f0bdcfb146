"""The clipped surrogate of PPO with one ratio per token, r = π_θ / π_behaviour, and the methods that use it.

`flash.trainer.objective.apply_objective` calls the objective for each micro-batch. In the formulas, E is the mean over
tokens that the objective's `aggregation` names, A is the advantage that its `advantage` estimator gives, and R is the
reward of a sample. A *group* is the samples of one prompt.

The denominator of r is the behaviour policy, which sampled the token, and not the policy at the start of the step. So
data of an older version is corrected from the first update on. In this update, the ratio to the policy at the start of
the step is 1 and would correct nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from algorithms.base import Objective, ObjectiveOutput, PackedTokens

if TYPE_CHECKING:
    from torch import Tensor

ClipLow = Annotated[float, Meta(ge=0, le=1)]
"""ε_low: a ratio below 1 − ε_low is clipped."""
ClipHigh = Annotated[float, Meta(ge=0)]
"""ε_high: a ratio above 1 + ε_high is clipped."""


def clipped_surrogate(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return [T] min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), and [T] 1 where the clip removed the gradient, else 0.

    PPO (Schulman et al. 2017, arXiv 1707.06347), eq. 7. All objectives with a clip use it, each with the ratio of its
    own formula.
    """
    free_T = ratio_T * advantage_T
    bound_T = ratio_T.clamp(1 - low, 1 + high) * advantage_T
    # Where the bound is smaller than r A, the bound is the minimum. Its ratio is clamped and has no gradient.
    return free_T.minimum(bound_T), (bound_T < free_T).to(ratio_T.dtype)


class Grpo(Objective, frozen=True):
    """max E[min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)] with r = π_θ / π_behaviour, A = (R − mean) / std of the group.

    GRPO (Shao et al. 2024, arXiv 2402.03300), eq. 3. The KL term of the paper is a separate setting, `algorithm.kl`.
    """

    advantage = "group"
    aggregation = "seq_mean_token_mean"

    clip_low: ClipLow = 0.2
    """ε_low."""
    clip_high: ClipHigh = 0.2
    """ε_high."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `ratio` and `clipped`."""
        ratio_T = (tokens.logp_T - tokens.behaviour_T).exp()
        surrogate_T, clipped_T = clipped_surrogate(ratio_T, tokens.advantage_T, self.clip_low, self.clip_high)
        return ObjectiveOutput(-surrogate_T, {"ratio": ratio_T.detach(), "clipped": clipped_T})


class Dapo(Grpo, frozen=True):
    """GRPO with a higher upper clip and the mean over all tokens: max E[min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)].

    DAPO (Yu et al. 2025, arXiv 2503.14476), eq. 8. The other two parts of the method are separate settings. Dynamic
    sampling, which leaves out groups of equal rewards, is `rollout.drop_equal_rewards`. The penalty of long responses
    is `algorithms.shaping.Overlong`.
    """

    advantage = "group"
    aggregation = "token_mean"

    clip_high: ClipHigh = 0.28
    """ε_high. It is larger than `clip_low`, so that the probability of an unlikely token can rise further than it can
    fall, which keeps the entropy of the policy up."""


class DrGrpo(Grpo, frozen=True):
    """GRPO without its two biases: max E[min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)] with A = R − mean of the group.

    Dr. GRPO (Liu et al. 2025, arXiv 2503.20783). The advantage is not divided by the group's standard deviation,
    because this would favour very easy and very hard prompts. Token losses are divided by a constant and not by the
    length of the response, because this would favour long wrong answers.
    """

    advantage = "group_mean"
    aggregation = "constant"


class ReinforcePp(Grpo, frozen=True):
    """max E[min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)], A = (R − mean) / std over all trained tokens of the batch.

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): the clipped surrogate without groups and without a critic. On
    policy, r is 1 and the gradient equals REINFORCE's. The token-level KL of the paper is a separate setting:
    `algorithm.kl` with `estimator = "k1"` and `place = "reward"`.
    """

    advantage = "batch"
    aggregation = "token_mean"


class Ppo(Objective, frozen=True):
    """max E[min(r A, clip(r, 1 − ε_low, 1 + ε_high) A)], where A < 0 E[max(min(r A, clip(r, …) A), c A)]; A by GAE.

    PPO (Schulman et al. 2017, arXiv 1707.06347), eq. 7, with the dual clip (Ye et al. 2020, arXiv 1912.09729), eq. 5. A
    critic gives the values for A, the generalised advantage estimate (`algorithms.critics.gae`).
    """

    advantage = "gae"
    aggregation = "token_mean"

    clip_low: ClipLow = 0.2
    """ε_low."""
    clip_high: ClipHigh = 0.2
    """ε_high."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """c: where A < 0, a ratio above c has no gradient (3 is usual). None: no such bound."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss per token. Statistics: `ratio` and `clipped` (by either clip)."""
        ratio_T = (tokens.logp_T - tokens.behaviour_T).exp()
        surrogate_T, clipped_T = clipped_surrogate(ratio_T, tokens.advantage_T, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            # Where A < 0, min(r A, clip(r) A) is below c A exactly if r > c, because c > 1. Without this bound the loss
            # of such a token would have no limit, and data of older versions has large ratios.
            beyond_T = (ratio_T > self.dual_clip) & (tokens.advantage_T < 0)
            surrogate_T = (self.dual_clip * tokens.advantage_T).where(beyond_T, surrogate_T)
            clipped_T = clipped_T.masked_fill(beyond_T, 1.0)
        return ObjectiveOutput(-surrogate_T, {"ratio": ratio_T.detach(), "clipped": clipped_T})
