"""The interface of all objectives: packed token tensors in, a per-token loss out.

Shape legend: T = packed tokens of one micro-batch that predict an action token (prompts are already gone); S =
sequences of that micro-batch; N = trained tokens of a whole minibatch, over all micro-batches and ranks. Every tensor
is float32 unless said otherwise.

An objective is a frozen struct whose fields are its options and whose `__call__` is its formula. It does no I/O,
reads no config and calls no collective: the trainer aggregates, masks and reduces. Files here use tensor methods
only, so that the options can be read and checked without importing torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

Advantage = Literal["group", "group_mean", "leave_one_out", "batch", "turn", "gae"]
"""Estimators: see `algorithms.advantages` and, for gae, `algorithms.gae`."""
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
"""See `algorithms.aggregation`."""
Proximal = Literal["recompute", "loglinear", "ewma"]
"""Where `proximal_T` comes from: the weights at the start of the step; a point between behaviour and now by age
(`algorithms.proximal`); an exponentially weighted average of the weights of all steps so far (Hilton et al. 2021)."""
CriticTarget = Literal["lambda", "monte_carlo"]
"""What critics learn: A + V, which leans on what they expect of later states; the rewards that came, discounted."""


class PackedTokens(NamedTuple):
    """What an objective sees. Slots where `mask_T` is False may hold anything, NaN included."""

    logp_T: Tensor
    """log π_θ now, with gradient."""
    behaviour_T: Tensor
    """Log-prob under the policy that sampled the token, from the engine."""
    proximal_T: Tensor
    """Log-prob under the proximal policy (see `Proximal`), no gradient."""
    advantage_T: Tensor
    """Advantage of the token's sequence (or of the token)."""
    reward_T: Tensor
    """Reward of the token's trajectory, as the environment gave it."""
    mask_T: Tensor
    """bool: the token takes part in the loss."""
    sequence_T: Tensor
    """int64: which of the S sequences the token belongs to; non-decreasing."""
    sequences: int
    """S."""
    deviation_T: Tensor
    """σ: standard deviation of what the critics expect before the token, no gradient; 0 with fewer than two of them."""
    limit: float = math.inf
    """What `Objective.limit` gave for the minibatch."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """What `Objective.bounds` gave for the batch."""


class ObjectiveOutput(NamedTuple):
    """Per-token loss, and per-token statistics that the trainer averages over unmasked tokens of the whole batch."""

    loss_T: Tensor
    """To be minimised. Values in masked slots are ignored, also when they are NaN."""
    stats: dict[str, Tensor]
    """Name → [T], detached. `ratio`: importance ratio, `clipped`: 1 where the gradient was taken away or cut, `weight`:
    a weight as used; these three have plots."""
    bonus_T: Tensor | None = None
    """Factor of each token's entropy bonus, detached. None: 1."""


class Objective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the objectives. Subclasses add options as fields and implement `__call__`."""

    corrects_staleness: ClassVar[bool] = True
    """Whether the objective uses behaviour log-probs; without them async_ratio > 0 is refused."""
    advantage: ClassVar[Advantage] = "group"
    """The estimator of the method, where `algorithm.advantage` names no other."""
    aggregation: ClassVar[Aggregation] = "token_mean"
    """The aggregation of the method, where `algorithm.aggregation` names no other."""
    limits: ClassVar[bool] = False
    """Whether `limit` is to be asked."""
    critics: ClassVar[int] = 1
    """How many critics the method has, where it has any and `critic.count` names no other number. Above 1 it compares
    them: it needs at least two, and `bounds` is to be asked."""
    critic_target: ClassVar[CriticTarget] = "lambda"
    """What the method's critics learn, where `critic.target` names nothing else."""

    @property
    def proximal_policy(self) -> Proximal:
        """Where `proximal_T` is to come from."""
        return "recompute"

    @property
    def proximal_decay(self) -> float:
        """Of `ewma`: what the average of the weights keeps of its past with each step."""
        raise TypeError(f"{type(self).__name__} does not define proximal_decay")

    def limit(self, log_ratio_N: Tensor, advantage_N: Tensor) -> float:
        """A number that follows from all trained tokens of a minibatch, before its update; no gradient.

        `log_ratio_N` is logp − behaviour. It reaches `__call__` as `PackedTokens.limit`, so that a rule over the whole
        minibatch does not depend on how the minibatch was cut.
        """
        raise TypeError(f"{type(self).__name__} does not define limit")

    def bounds(self, deviation_N: Tensor) -> tuple[float, float]:
        """Two numbers that follow from σ of all trained tokens of a batch (here N), before its first update.

        They reach `__call__` as `PackedTokens.bounds`, so that a rule over the whole batch does not depend on how the
        batch was cut.
        """
        raise TypeError(f"{type(self).__name__} does not define bounds")

    def without_effect(self) -> dict[str, str]:
        """Options that do nothing beside the others: name to what they would need."""
        return {}

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss of one micro-batch."""
        raise TypeError(f"{type(self).__name__} does not define __call__")
