"""What is learned of a batch before the policy changes: log-probs of other policies, values, and token advantages.

No gradient. Only what the configuration asks for is computed. All ranks make the same passes in the same order.
Shape legend: T = action tokens of a micro-batch, M = critics, W = data shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from algorithms.advantages import FloatArray, moments, whiten
from algorithms.critics import discounted_sums, gae, monte_carlo
from algorithms.references import kl
from flash.config.tree import Config
from flash.errors import ContractError
from flash.foreign.peft import without_adapters
from flash.trainer.credit import Credit
from flash.trainer.critic import Critic
from flash.trainer.ewma import swapped_in
from flash.trainer.mesh import TrainerMesh, raise_on_all_ranks, to_device
from flash.trainer.model.logprobs import policy_logprobs, watch_attention
from flash.trainer.model.model import reshard
from flash.trainer.objective import Method
from flash.trainer.packing import MicroBatch
from flash.trainer.plan import MinibatchPlan, StepPlan
from flash.trainer.rhythm import MicroSignals, RhythmPass, RhythmWatch

T = TypeVar("T")


@dataclass(frozen=True)
class TokenFacts:
    """What is known of a micro-batch's tokens: [T], float32, on the policy's device; masked slots hold anything."""

    advantage_T: Tensor
    reward_T: Tensor
    """Of the whole trajectory, as the environment gave it."""
    weight_T: Tensor
    """Of the objective's loss: by the sample's age, and by its branches where they divide its weight."""
    counted_T: Tensor
    """bool: the loss counts it; else it is as if it were rejected by a correction."""
    first_T: Tensor | None
    """Log-prob under the weights at the start of the step; None where the first pass in training gives it."""
    average_T: Tensor | None
    """Log-prob under the average of the weights."""
    reference_T: Tensor | None
    """Log-prob under the reference policy."""
    teacher_T: Tensor | None
    """Log-prob under the teacher."""
    value_MT: Tensor | None
    """Each critic's V before each token."""
    return_T: Tensor | None
    """What the critics are to learn."""
    deviation_T: Tensor
    """Standard deviation of the critics' values; 0 with fewer than two."""


class Worth(NamedTuple):
    """What tokens earned, float64 [T]."""

    advantage_T: FloatArray
    return_T: FloatArray
    """What critics are to learn; 0 without one."""


@dataclass(frozen=True)
class Passes:
    """What the forward passes over one micro-batch gave."""

    first_T: Tensor | None
    average_T: Tensor | None
    reference_T: Tensor | None
    teacher_T: Tensor | None
    value_MT: Tensor | None
    signals: MicroSignals | None
    """Of the policy's attention at the start of the step."""


@dataclass(frozen=True)
class Models:
    """Everything that says something of a token."""

    mesh: TrainerMesh
    policy: PreTrainedModel
    reference: PreTrainedModel | None
    """The policy itself, where its base is meant."""
    teacher: PreTrainedModel | None
    """None also where a server holds it, whose word came with the samples."""
    critics: Sequence[Critic]
    ewma: Mapping[str, Tensor] | None
    rhythm: RhythmPass | None
    """Where it takes part in the first pass."""


def first_pass(plan: StepPlan, config: Config, method: Method, models: Models) -> list[list[TokenFacts]]:
    """Facts per minibatch and micro-batch.

    Raises:
        ContractError: on every rank, when a trained token of any has an advantage that is not a finite number.
    """
    passes = _run(plan, config, method, models)
    device = models.mesh.device
    worth = _token_advantages(plan, config, method, passes, models.mesh)
    if models.rhythm is not None:
        worth = _in_rhythm(plan, passes, worth, models.rhythm, models.mesh)

    def tensor(values_T: FloatArray) -> Tensor:
        return to_device(values_T.astype(np.float32), device)

    return [
        [
            TokenFacts(
                advantage_T=tensor(worth[index][place].advantage_T),
                reward_T=tensor(plan.credit.reward_B[micro.index_T]),
                weight_T=tensor(plan.credit.weights(micro)),
                counted_T=to_device(plan.credit.counted_B[micro.index_T], device),
                first_T=passes[index][place].first_T,
                average_T=passes[index][place].average_T,
                reference_T=passes[index][place].reference_T,
                teacher_T=passes[index][place].teacher_T,
                value_MT=passes[index][place].value_MT,
                return_T=tensor(worth[index][place].return_T) if models.critics else None,
                deviation_T=_deviation(micro, passes[index][place].value_MT, device),
            )
            for place, micro in enumerate(minibatch.micro_batches)
        ]
        for index, minibatch in enumerate(plan.minibatches)
    ]


def asks_policy(plan: StepPlan, config: Config, method: Method) -> bool:
    """Whether the policy's log-probs are needed before it is trained."""
    divergence = config.algorithm.kl
    # A single update's own forward pass sees the weights of the start.
    later = method.proximal == "recompute" and len(plan.minibatches) * config.train.updates_per_batch > 1
    return later or (divergence is not None and divergence.place == "reward")


@torch.no_grad()
def _run(plan: StepPlan, config: Config, method: Method, models: Models) -> list[list[Passes]]:
    """The forward passes, model by model."""
    first = asks_policy(plan, config, method)

    def over(model: PreTrainedModel | None, *, routed: bool = True) -> list[list[Tensor | None]]:
        if model is None:
            return _each(plan.minibatches, lambda _: None)

        def says(micro: MicroBatch) -> Tensor | None:
            return policy_logprobs(model, micro if routed else replace(micro, routes=None)).logp_T

        found = _each(plan.minibatches, says)
        reshard(model)
        return found

    def start(micro: MicroBatch) -> tuple[Tensor | None, MicroSignals | None]:
        rhythm, logp_T = models.rhythm, None
        watch = None if rhythm is None else rhythm.watch(micro)
        if first:
            logp_T = policy_logprobs(models.policy, micro, watch=watch).logp_T
        elif watch is not None:
            watch_attention(models.policy, micro, watch)
        return logp_T, None if rhythm is None or watch is None else rhythm.collect(watch)

    starts = _each(plan.minibatches, start)
    if first or models.rhythm is not None:
        reshard(models.policy)
    with without_adapters(models.policy) if models.reference is models.policy else nullcontext():
        # Also where it is the policy itself, it chooses its own experts.
        references = over(models.reference, routed=False)
    if config.algorithm.teacher is not None and models.teacher is None:
        device = models.mesh.device
        teachers = _each(plan.minibatches, lambda micro: to_device(micro.teacher_T, device))
    else:
        teachers = over(models.teacher)
    if models.ewma is None:
        averages = over(None)
    else:
        with swapped_in(models.ewma, models.policy):
            averages = over(models.policy)
    critics = models.critics
    values = _each(
        plan.minibatches, lambda micro: torch.stack([one.values(micro) for one in critics]) if critics else None
    )
    return [
        [
            Passes(first_T, average_T, reference_T, teacher_T, value_MT, signals)
            for (first_T, signals), average_T, reference_T, teacher_T, value_MT in zip(*columns, strict=True)
        ]
        for columns in zip(starts, averages, references, teachers, values, strict=True)
    ]


def _each(minibatches: list[MinibatchPlan], work: Callable[[MicroBatch], T]) -> list[list[T]]:
    return [[work(micro) for micro in minibatch.micro_batches] for minibatch in minibatches]


def _deviation(micro: MicroBatch, value_MT: Tensor | None, device: torch.device) -> Tensor:
    """float32 [T]: the population's standard deviation over the critics."""
    if value_MT is None:
        return torch.zeros(len(micro.target_T), device=device)
    return value_MT.double().std(dim=0, correction=0).float()


def _token_advantages(
    plan: StepPlan, config: Config, method: Method, passes: list[list[Passes]], mesh: TrainerMesh
) -> list[list[Worth]]:
    """Per minibatch and micro-batch, with one collective where a pass or the whole batch has a say in it."""
    fault = ""
    worth: list[list[Worth]] = []
    known_N = np.zeros(0)
    try:
        worth = [
            [
                token_worth(micro, known, config, method, plan.credit)
                for micro, known in zip(minibatch.micro_batches, row, strict=True)
            ]
            for minibatch, row in zip(plan.minibatches, passes, strict=True)
        ]
        kept = [
            found.advantage_T[micro.mask_T]
            for minibatch, row in zip(plan.minibatches, worth, strict=True)
            for micro, found in zip(minibatch.micro_batches, row, strict=True)
        ]
        known_N = np.concatenate([known_N, *kept])
    except ContractError as error:
        fault = str(error)
    penalised = config.algorithm.kl is not None and config.algorithm.kl.place == "reward"
    if not (penalised or method.estimator in ("batch", "gae")):
        return worth

    row = torch.tensor([float(bool(fault)), *moments(known_N)], dtype=torch.float64)
    rows = mesh.gather_rows(row).cpu()
    raise_on_all_ranks(fault, rows[:, 0], "their part of the batch")
    if method.estimator != "batch":
        return worth
    mean, scale = whiten(rows[:, 1:].numpy())
    return [[Worth((one.advantage_T - mean) * scale, one.return_T) for one in row] for row in worth]


def _in_rhythm(
    plan: StepPlan, passes: list[list[Passes]], worth: list[list[Worth]], rhythm: RhythmPass, mesh: TrainerMesh
) -> list[list[Worth]]:
    """The advantages in rhythm; what a critic learns stays as it is."""
    rhythm.choose_heads(mesh)

    def multiplied(one: Worth, known: Passes, micro: MicroBatch) -> Worth:
        assert known.signals is not None, "the first pass ran for this"
        return one._replace(advantage_T=rhythm.multiply(one.advantage_T, known.signals, micro))

    return [
        list(map(multiplied, of_tokens, known, minibatch.micro_batches))
        for of_tokens, known, minibatch in zip(worth, passes, plan.minibatches, strict=True)
    ]


def facts_in_rhythm(facts: TokenFacts, rhythm: RhythmPass, watch: RhythmWatch) -> TokenFacts:
    """What is known of the tokens of a micro-batch once a pass over it was watched; its heads are settled."""
    advantage_T = facts.advantage_T.double().cpu().numpy()
    found_T = rhythm.multiply(advantage_T, rhythm.collect(watch), watch.micro).astype(np.float32)
    return replace(facts, advantage_T=torch.from_numpy(found_T).to(facts.advantage_T.device))


def token_worth(micro: MicroBatch, known: Passes, config: Config, method: Method, credit: Credit) -> Worth:
    """Advantages of a micro-batch's tokens, before whitening, and the returns that critics learn.

    Several critics are believed on average. A KL in the reward takes β · estimate from the reward of each token, so
    from the advantages of the tokens up to it.

    Raises:
        ContractError: an advantage is not a finite number.
    """
    penalty_T = _penalty(micro, known, config)
    if method.estimator == "gae":
        assert config.critic is not None, "refused by the configuration's check"
        assert known.value_MT is not None, "gae comes with a critic"
        value_T = known.value_MT.double().mean(dim=0).cpu().numpy()
        _check_finite(micro, value_T, "the critic's value")
        reward_T = credit.earned(micro) - penalty_T
        _check_finite(micro, reward_T, "the reward")
        gamma, lam = config.algorithm.gamma, config.critic.lam
        worth = Worth(*gae(reward_T, value_T, micro.mask_T, micro.sequence_T, gamma=gamma, lam=lam))
        if method.target == "lambda":
            return worth
        return worth._replace(return_T=monte_carlo(reward_T, micro.mask_T, micro.sequence_T, gamma=gamma))
    teacher = config.algorithm.teacher
    counts = teacher is None or teacher.reward
    advantage_T = credit.advantages(micro).copy() if counts else np.zeros(len(micro.target_T))
    kept = micro.mask_T
    advantage_T[kept] -= discounted_sums(penalty_T[kept], micro.sequence_T[kept], 1.0)
    _check_finite(micro, advantage_T, "the advantage")
    return Worth(advantage_T, np.zeros_like(advantage_T))


def _penalty(micro: MicroBatch, known: Passes, config: Config) -> FloatArray:
    """float64 [T]: what a KL in the reward takes from each token's; 0 where masked."""
    divergence = config.algorithm.kl
    if divergence is None or divergence.place == "loss":
        return np.zeros(len(micro.target_T))
    assert known.first_T is not None, "the first pass ran for this"
    assert known.reference_T is not None, "a KL comes with a reference"
    estimate_T = kl(divergence.estimator, known.first_T.double(), known.reference_T.double())
    return np.where(micro.mask_T, divergence.coefficient * estimate_T.cpu().numpy(), 0.0)


def _check_finite(micro: MicroBatch, values_T: FloatArray, what: str) -> None:
    wrong_T = micro.mask_T & ~np.isfinite(values_T)
    if wrong_T.any():
        first = int(np.flatnonzero(wrong_T)[0])
        token = first - int(np.searchsorted(micro.sequence_T, micro.sequence_T[first]))
        raise ContractError(
            f"sample {micro.index_T[first]}: {what} of its action token {token} is {values_T[first]}; expected a "
            "finite number: look at the last metrics for what ran away"
        )
