"""The interface of all objectives, which compute the loss of each token from packed tensors of tokens.

An objective is a frozen struct. Its fields are its options, its `__call__` is its formula. It does no I/O, reads no
configuration and calls no collective. `flash.trainer.objective` builds the `PackedTokens` of one micro-batch and calls
the objective. The trainer then masks, weighs and sums the losses over all micro-batches and ranks. Each hook of
`Objective` says when it is called. Before a run starts, `flash.trainer.objective.try_objective` also calls the formula,
`limit` and `bounds` on a few invented tokens.

A *minibatch* is the part of a batch that is trained in one update. Each rank computes its part of a minibatch in
*micro-batches*, as many tokens at a time as its memory allows. π_θ is the policy in training, and the *behaviour
policy* is the policy that sampled a token: an older version, or the same weights computed by other kernels.

The files of this package use tensor methods only and import torch for type checking alone, so that options can be read
and checked without torch.

Shape legend: T = action tokens (tokens that the policy sampled) of one micro-batch, without the tokens of prompts; S =
sequences of that micro-batch; N = trained tokens of a whole minibatch (in `limit`) or batch (in `bounds`), over all
micro-batches and ranks. Every tensor is float32 unless its docstring names another type.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

Advantage = Literal["group", "group_mean", "leave_one_out", "batch", "turn", "gae"]
"""Advantage estimators. `algorithms.advantages` has all except gae, which is in `algorithms.critics`."""
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
"""Ways to sum token losses into one number. `algorithms.sequences.token_weights` has their formulas."""
Proximal = Literal["recompute", "loglinear", "ewma"]
"""Source of the proximal policy, a recent policy near which an objective keeps the trained policy. recompute: the
weights at the start of the step. loglinear: interpolated between the behaviour policy, which sampled the token, and the
current policy, by the token's age in versions (`algorithms.references.loglinear`). ewma: an exponentially weighted
moving average of the weights of all steps so far (Hilton et al. 2021, arXiv 2110.00641)."""
CriticTarget = Literal["lambda", "monte_carlo"]
"""Regression target of the critics. lambda: A + V, which depends on the critics' own values of later states.
monte_carlo: the discounted sum of the rewards that followed."""


class PackedTokens(NamedTuple):
    """Input of an objective and of the corrections.

    A token is *masked* if `mask_T` is False. The values of a masked token may be anything, even NaN.
    """

    logp_T: Tensor
    """log π_θ under the current weights, with gradient."""
    behaviour_T: Tensor
    """Log-prob under the behaviour policy, as the engine reported it, no gradient."""
    proximal_T: Tensor
    """Log-prob under the proximal policy (see `Proximal`), no gradient."""
    advantage_T: Tensor
    """Advantage of the token, which most estimators set to the advantage of its sequence."""
    reward_T: Tensor
    """Reward of the token's trajectory, as the environment returned it."""
    mask_T: Tensor
    """bool: True if the token takes part in the loss. False if the token is too old to be trained, if a correction has
    rejected it, or if its sample is truncated and `algorithm.mask_truncated` is set."""
    sequence_T: Tensor
    """int64: index of the token's sequence, from 0 to S − 1; non-decreasing."""
    sequences: int
    """S."""
    deviation_T: Tensor
    """σ: standard deviation of the values that the critics give to the state before the token, no gradient; 0 with
    fewer than two critics."""
    limit: float = math.inf
    """Result of `Objective.limit` for the minibatch; infinite if the trainer has not called it."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Result of `Objective.bounds` for the batch; infinite on both sides if the trainer has not called it."""


class ObjectiveOutput(NamedTuple):
    """Result of an objective: a loss and statistics for each token.

    The trainer averages the statistics over the unmasked tokens of the batch and reports them as metrics.
    """

    loss_T: Tensor
    """Loss of each token, to be minimised. Values of masked tokens are ignored, even if they are NaN."""
    stats: dict[str, Tensor]
    """Name → [T], detached. `ratio`: importance ratio. `clipped`: 1 where a clip removed the gradient or cut the
    weight. `weight`: the weight as used in the loss. The run's pages plot these three."""
    bonus_T: Tensor | None = None
    """[T]: factor of each token's entropy bonus, detached. None: the factor is 1."""


class Objective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the objectives. Subclasses add options as fields and implement `__call__`."""

    corrects_staleness: ClassVar[bool] = True
    """True if the objective uses behaviour log-probs, and so corrects for the age of samples. If it is False, the check
    of the configuration refuses `train.async_ratio` > 0, unless a correction by weight is configured or
    `train.allow_uncorrected` is set."""
    advantage: ClassVar[Advantage] = "group"
    """Estimator that the method uses unless `algorithm.advantage` names another estimator."""
    aggregation: ClassVar[Aggregation] = "token_mean"
    """Aggregation that the method uses unless `algorithm.aggregation` names another aggregation."""
    limits: ClassVar[bool] = False
    """True if the trainer must call `limit` before each update."""
    critics: ClassVar[int] = 1
    """Number of critics of a run with advantage `gae`. If this is more than 1, the objective compares critics, and the
    trainer calls `bounds` for each batch."""
    critic_target: ClassVar[CriticTarget] = "lambda"
    """Target that the method's critics learn unless `critic.target` names another target."""

    @property
    def proximal_policy(self) -> Proximal:
        """Source of `PackedTokens.proximal_T`.

        The check of the configuration reads this, and the trainer reads it when it starts.
        """
        return "recompute"

    @property
    def proximal_decay(self) -> float:
        """Share of the moving average of the weights that is kept at each step.

        The trainer reads this at the end of each step if `proximal_policy` is `ewma`, and never otherwise. A class that
        does not define it raises TypeError.
        """
        raise TypeError(f"{type(self).__name__} does not define proximal_decay")

    def limit(self, log_ratio_N: Tensor, advantage_N: Tensor) -> float:
        """Return a number computed from all trained tokens of a minibatch; no gradient. Classes with `limits` override
        this.

        If `limits` is True, the trainer calls this on every rank before each update of a minibatch, and before the
        backward passes of that update. It is not called for a minibatch without a trained token. The trainer passes the
        result to `__call__` as `PackedTokens.limit`. So a rule over the whole minibatch does not depend on how the
        minibatch is cut into micro-batches.

        Args:
            log_ratio_N: logp − behaviour of each trained token under the weights just before the update.
            advantage_N: advantage of each of these tokens; 0 for a token that a correction rejects.

        Raises:
            TypeError: the class does not define this method.
        """
        raise TypeError(f"{type(self).__name__} does not define limit")

    def bounds(self, deviation_N: Tensor) -> tuple[float, float]:
        """Return the lower and the upper bound of a range of σ. A token outside it may lose a part of its loss. Classes
        that compare critics override this.

        If the run has several critics, the trainer calls this on every rank once per step: after the critics have
        valued the tokens, and before the first update. It is not called for a batch without a trained token. The
        trainer passes the result to `__call__` as `PackedTokens.bounds`. So a rule over the whole batch does not depend
        on how the batch is cut into minibatches and micro-batches.

        `deviation_N`: σ of each trained token of the batch (`PackedTokens.deviation_T`).

        Raises:
            TypeError: the class does not define this method.
        """
        raise TypeError(f"{type(self).__name__} does not define bounds")

    def without_effect(self) -> dict[str, str]:
        """Return the options that have no effect next to the other options: name → the reason.

        The check of the configuration calls this. If a user has set one of these options, the configuration is refused
        with the reason.
        """
        return {}

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Return the loss and the statistics of each token of one micro-batch.

        The trainer calls this in every training pass, once for each micro-batch, after its forward pass and before its
        backward pass.
        """
        raise TypeError(f"{type(self).__name__} does not define __call__")
