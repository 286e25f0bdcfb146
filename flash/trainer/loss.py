"""The loss of a token: the objective's, corrected and weighed, with the pull to a reference and the entropy.

    loss = objective · Π corrections · weight + β · KL − bonus · entropy · the objective's factor of it

A teacher has its say in the advantage that the objective sees (`algorithms.references`).

The corrections multiply the policy's loss only; a token that one of them rejects has no loss of any kind and leaves the
mask. Shape legend: T = action tokens of a micro-batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from algorithms.base import Objective, PackedTokens, Proximal
from algorithms.corrections import correct
from algorithms.references import Teacher, distilled, kl, loglinear
from flash.ages import age_of
from flash.config.learning import AlgorithmConfig
from flash.trainer.firstpass import TokenFacts
from flash.trainer.mesh import to_device
from flash.trainer.model.logprobs import TokenLogprobs
from flash.trainer.objective import applied
from flash.trainer.packing import MicroBatch


class LossLimits(NamedTuple):
    """What the objective made of more than a micro-batch; without effect where it does not ask."""

    limit: float = math.inf
    """Of the minibatch."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Of the batch."""


class TokenLoss(NamedTuple):
    """[T] each."""

    loss_T: Tensor
    """With gradient; 0 where masked."""
    mask_T: Tensor
    """bool: trained and not rejected by a correction."""
    correction_T: Tensor
    """The product of the corrections."""
    divergence_T: Tensor | None
    """The KL estimate to the reference, where there is one."""
    beyond_T: Tensor | None
    """Log-prob less the teacher's, where there is one."""
    stats: dict[str, Tensor]
    """The objective's."""


def pack_tokens(
    micro: MicroBatch,
    now: TokenLogprobs,
    facts: TokenFacts,
    proximal: Proximal,
    *,
    step: int,
    limits: LossLimits,
    teacher: Teacher | None = None,
) -> PackedTokens:
    """What the objective and the corrections see.

    Masked slots are emptied before any arithmetic: 0 · NaN in a backward pass would still be NaN.
    """
    device = now.logp_T.device
    mask_T = to_device(micro.mask_T, device)
    behaviour_T = to_device(micro.behaviour_T, device).where(mask_T, 0.0)
    logp_T = now.logp_T.where(mask_T, 0.0)
    if proximal == "loglinear":
        age_T = to_device(age_of(micro.version_T, step), device).where(mask_T, 0)
        proximal_T = loglinear(logp_T, behaviour_T, age_T)
    elif proximal == "ewma":
        assert facts.average_T is not None, "the first pass ran for this"
        proximal_T = facts.average_T.where(mask_T, 0.0)
    else:
        proximal_T = first_logprobs(now, facts).where(mask_T, 0.0)
    advantage_T = facts.advantage_T.where(mask_T, 0.0)
    if teacher is not None:
        advantage_T = distilled(advantage_T, logp_T, _teacher(facts, mask_T), teacher.coefficient)
    return PackedTokens(
        logp_T=logp_T,
        behaviour_T=behaviour_T,
        proximal_T=proximal_T,
        advantage_T=advantage_T,
        reward_T=facts.reward_T.where(mask_T, 0.0),
        mask_T=mask_T,
        sequence_T=to_device(micro.sequence_T, device),
        sequences=micro.sequences,
        deviation_T=facts.deviation_T.where(mask_T, 0.0),
        limit=limits.limit,
        bounds=limits.bounds,
    )


def _teacher(facts: TokenFacts, mask_T: Tensor) -> Tensor:
    assert facts.teacher_T is not None, "the first pass ran for this"
    return facts.teacher_T.where(mask_T, 0.0)


def without_rejected(tokens: PackedTokens, keep_T: Tensor) -> PackedTokens:
    """The tokens as if the others had not been sampled: masked and emptied."""
    return tokens._replace(
        logp_T=tokens.logp_T.where(keep_T, 0.0),
        behaviour_T=tokens.behaviour_T.where(keep_T, 0.0),
        proximal_T=tokens.proximal_T.where(keep_T, 0.0),
        advantage_T=tokens.advantage_T.where(keep_T, 0.0),
        reward_T=tokens.reward_T.where(keep_T, 0.0),
        deviation_T=tokens.deviation_T.where(keep_T, 0.0),
        mask_T=tokens.mask_T & keep_T,
    )


def first_logprobs(now: TokenLogprobs, facts: TokenFacts) -> Tensor:
    """[T], no gradient: log-prob at the start of the step; where no pass was made for it, at the minibatch's start."""
    return now.logp_T.detach() if facts.first_T is None else facts.first_T


def corrected(algorithm: AlgorithmConfig, tokens: PackedTokens, facts: TokenFacts) -> tuple[Tensor, Tensor]:
    """[T] each: the product of the corrections, and whether the token is kept."""
    correction_T, keep_T = correct(algorithm.corrections, tokens)
    return correction_T.where(facts.counted_T, 0.0), keep_T & facts.counted_T


def token_loss(
    objective: Objective, algorithm: AlgorithmConfig, tokens: PackedTokens, facts: TokenFacts, entropy_T: Tensor
) -> TokenLoss:
    """The loss of each token before aggregation."""
    correction_T, keep_T = corrected(algorithm, tokens, facts)
    tokens = without_rejected(tokens, keep_T)
    mask_T = tokens.mask_T
    output = applied(objective, tokens)
    loss_T = output.loss_T.where(mask_T, 0.0) * correction_T * facts.weight_T.where(mask_T, 0.0)
    divergence_T = None
    if algorithm.kl is not None:
        assert facts.reference_T is not None, "a KL comes with a reference"
        divergence_T = kl(algorithm.kl.estimator, tokens.logp_T, facts.reference_T.where(mask_T, 0.0))
        if algorithm.kl.place == "loss":
            loss_T = loss_T + algorithm.kl.coefficient * divergence_T
    if algorithm.entropy_bonus:
        bonus_T = algorithm.entropy_bonus * entropy_T.where(mask_T, 0.0)
        loss_T = loss_T - (bonus_T if output.bonus_T is None else bonus_T * output.bonus_T.where(mask_T, 0.0))
    beyond_T = None if algorithm.teacher is None else tokens.logp_T.detach() - _teacher(facts, mask_T)
    return TokenLoss(loss_T.where(mask_T, 0.0), mask_T, correction_T, divergence_T, beyond_T, output.stats)
