"""Turn the rewards of a batch into the advantages, returns and weights of its tokens.

First, `assign_credit` shapes and compares the rewards of whole samples, and weights samples by age (the trainer's
version minus the oldest version among the sample's tokens). Every rank computes the same numbers from the facts about
the whole batch, so they do not depend on how the batch was divided among the ranks. Samples are compared, not branches:
all sequences of a sample have the advantage of the sample.

Then, after the forward passes of `flash.trainer.references`, `token_advantages` computes the parts that need log-probs
or values: a KL in the reward, generalised advantage estimation, and whitening over the whole batch.

A *turn* is one response of the policy with the environment's step after it.

Shape legend: B = samples of the whole batch, S = sequences and T = action tokens of a micro-batch, M = critics, W =
data shards, N = trained tokens of this rank's part of the batch. Arrays are float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from algorithms.advantages import (
    FloatArray,
    group_advantages,
    group_mean_advantages,
    leave_one_out_advantages,
    moments,
    turn_advantages,
    whiten,
)
from algorithms.base import Advantage
from algorithms.critics import discounted_sums, gae, monte_carlo
from algorithms.references import kl
from flash.ages import age_of, recent
from flash.config.learning import AlgorithmConfig
from flash.config.tree import Config
from flash.errors import ContractError
from flash.trainer.mesh import TrainerMesh, raise_on_all_ranks
from flash.trainer.objective import Method
from flash.trainer.packing import BoolArray, MicroBatch
from flash.trainer.references import ModelOutputs
from flash.types import BatchSample, Shard

BY_TURN: tuple[Advantage, ...] = ("turn", "gae")
"""Estimators that use the rewards of single turns."""


@dataclass(frozen=True)
class Credit:
    """Rewards, advantages and weights of a batch that are known before a forward pass. They are equal on every rank."""

    reward_B: FloatArray
    """Rewards as the environments returned them."""
    advantage_B: FloatArray
    """Advantages of whole samples, from the shaped rewards. With the estimator `batch` these are the shaped rewards,
    which are whitened later; with `turn` and `gae` they are 0."""
    staleness_B: FloatArray
    """Weights by age, with mean 1 over the samples that have a trained token; 0 for the other samples."""
    in_loss_B: BoolArray
    """True for samples that the loss counts; False for truncated samples if `algorithm.mask_truncated` is set."""
    turns_B: list[FloatArray]
    """Rewards of each sample's turns. The amount that shaping adds to a sample is in the reward of its last turn."""
    turn_advantages_B: list[FloatArray]
    """Advantages of each sample's turns with the estimator `turn`; else empty."""

    def advantages(self, micro: MicroBatch) -> FloatArray:
        """Return [T]: each token's advantage, without the parts that need a forward pass."""
        if not self.turn_advantages_B:
            return self.advantage_B[micro.index_T]
        offset_S = np.cumsum([0, *(len(self.turn_advantages_B[index]) for index in micro.index_S[:-1])])
        advantages = np.concatenate([self.turn_advantages_B[index] for index in micro.index_S])
        return advantages[offset_S[micro.sequence_T] + micro.turn_T]

    def weights(self, micro: MicroBatch) -> FloatArray:
        """Return [T]: the factor of each token's loss, by the age of its sample."""
        return self.staleness_B[micro.index_T]

    def earned(self, micro: MicroBatch) -> FloatArray:
        """Return [T]: the reward that arrives at each token.

        In each sequence, the reward of a turn is at the last trained token of that turn or, if the turn has none there,
        at the last trained token before it. So a branch also gets the rewards of later turns that are in other
        branches. Rewards of turns before the first trained token are left out, since they are not an effect of the
        branch's tokens.
        """
        earned_T = np.zeros(len(micro.target_T))
        starts = np.searchsorted(micro.sequence_T, np.arange(micro.sequences + 1))
        for index, start, stop in zip(micro.index_S, starts, starts[1:], strict=False):
            rewards = self.turns_B[index]
            # A sequence can end with tokens that are too old to train, if its request moved to an engine with an older
            # version. Without this rule their reward would be lost.
            trained = start + np.flatnonzero(micro.mask_T[start:stop])
            last = np.searchsorted(micro.turn_T[trained], np.arange(len(rewards)), side="right") - 1
            begun = last >= 0
            np.add.at(earned_T, trained[last[begun]], rewards[begun])
        return earned_T


def assign_credit(shard: Shard, algorithm: AlgorithmConfig, estimator: Advantage, async_ratio: float) -> Credit:
    """Return the credit of all samples of a batch.

    Members of a group that an earlier step has trained count in the comparison with their group.

    Args:
        shard: this rank's shard, which also has the facts about the whole batch.
        algorithm: the configuration of the method.
        estimator: the advantage estimator.
        async_ratio: α, or the larger bound on the age of tokens, for the weights by age.

    Raises:
        ContractError: a reward or an advantage is not finite, or a sample has another number of rewards than turns.
    """
    known = [*shard.batch, *shard.earlier]
    _check_rewards(shard, known, turns=estimator in BY_TURN)
    count, gamma = len(shard.batch), algorithm.gamma
    raw_B = np.array([entry.reward for entry in known])
    tokens_B = np.array([entry.tokens for entry in known], dtype=np.int64)
    truncated_B = np.array([entry.truncated for entry in known], dtype=np.bool_)
    group_ids_B = [entry.group_id for entry in known]
    turns_B = [np.array(entry.turns, dtype=np.float64) for entry in known]
    oldest_B = np.array([entry.oldest_version for entry in shard.batch], dtype=np.float64)
    trained_B = recent(oldest_B, shard.min_version)
    staleness_B = np.zeros_like(oldest_B)
    turn_advantages_B: list[FloatArray] = []
    try:
        shaped_B = raw_B
        for shaping in algorithm.shaping:
            shaped_B = shaping.shaped(shaped_B, tokens_B, truncated_B, group_ids_B)
        for rewards, added in zip(turns_B, shaped_B - raw_B, strict=True):
            if len(rewards):
                rewards[-1] += added
        match estimator:
            case "group":
                advantage_B = group_advantages(shaped_B, group_ids_B)
            case "group_mean":
                advantage_B = group_mean_advantages(shaped_B, group_ids_B)
            case "leave_one_out":
                advantage_B = leave_one_out_advantages(shaped_B, group_ids_B)
            case "batch":
                advantage_B = shaped_B
            case "turn":
                advantage_B = np.zeros_like(shaped_B)
                turn_advantages_B = turn_advantages([rewards.tolist() for rewards in turns_B], group_ids_B, gamma)
            case "gae":
                advantage_B = np.zeros_like(shaped_B)
        # Samples without a trained token keep the weight 0.
        ages = age_of(oldest_B[trained_B], shard.step)
        staleness_B[trained_B] = algorithm.staleness.weights(ages, async_ratio)
    except ValueError as error:
        raise ContractError(f"step {shard.step}: {error}") from error
    for index, entry in enumerate(shard.batch):
        values = [advantage_B[index], *(turn_advantages_B[index] if turn_advantages_B else [])]
        if not np.isfinite(values).all():
            raise ContractError(
                f"step {shard.step}: {_name(shard, index, entry)} has an advantage that is not finite: {values}"
            )
    return Credit(
        reward_B=raw_B[:count],
        advantage_B=advantage_B[:count],
        staleness_B=staleness_B,
        in_loss_B=~truncated_B[:count] if algorithm.mask_truncated else np.ones(count, dtype=np.bool_),
        turns_B=turns_B[:count],
        turn_advantages_B=turn_advantages_B[:count],
    )


def _check_rewards(shard: Shard, known: Sequence[BatchSample], *, turns: bool) -> None:
    """Check the rewards of all samples. `turns` is True if the estimator uses the rewards of single turns.

    Raises:
        ContractError: a reward is not finite or, with `turns`, a sample has another number of rewards than turns.
    """
    for index, entry in enumerate(known):
        if not all(map(math.isfinite, (entry.reward, *entry.turns))):
            raise ContractError(
                f"step {shard.step}: {_name(shard, index, entry)} has the reward {entry.reward} "
                f"(turns: {entry.turns}); expected finite numbers"
            )
    if not turns:
        return
    spans = {sample.index: len(sample.trajectory.action_spans) for sample in shard.samples}
    for index, entry in enumerate(known):
        # Only the samples of this rank have their trajectories here. Any other sample must have at least one reward.
        expected = spans.get(index, max(len(entry.turns), 1))
        if len(entry.turns) != expected:
            raise ContractError(
                f"step {shard.step}: {_name(shard, index, entry)} has {len(entry.turns)} rewards for {expected} turns"
            )


def _name(shard: Shard, index: int, entry: BatchSample) -> str:
    """Return a phrase that names a sample in an error message. `index` is its place in the batch and `earlier`."""
    which = f"sample {index}" if index < len(shard.batch) else "a sample trained earlier"
    return f"{which} (group {entry.group_id})"


class TokenAdvantages(NamedTuple):
    """Advantages of a micro-batch's tokens, and the regression targets of the critics; [T] each."""

    advantage_T: FloatArray
    return_T: FloatArray
    """Target of the critics; 0 without critics."""


def token_advantages(
    micro_batches: Sequence[MicroBatch],
    outputs: Sequence[ModelOutputs],
    credit: Credit,
    config: Config,
    method: Method,
    mesh: TrainerMesh,
) -> list[TokenAdvantages]:
    """Return the advantages of the tokens of each micro-batch, and the targets of the critics.

    A collective if the advantages depend on a forward pass or on the whole batch: with a KL in the reward, and with the
    estimators `batch` and `gae`. This depends on the configuration alone, so all ranks take the same path.

    Raises:
        ContractError: on every rank, if any rank has a trained token whose advantage is not finite.
    """
    fault = ""
    found: list[TokenAdvantages] = []
    trained_N = np.zeros(0)
    try:
        found = [
            _micro_advantages(micro, output, credit, config, method)
            for micro, output in zip(micro_batches, outputs, strict=True)
        ]
        trained = [one.advantage_T[micro.mask_T] for micro, one in zip(micro_batches, found, strict=True)]
        trained_N = np.concatenate([trained_N, *trained])
    except ContractError as error:
        # The error is raised later, on all ranks: this rank must still take part in the next collective.
        fault = str(error)
    penalised = config.algorithm.kl is not None and config.algorithm.kl.place == "reward"
    if not (penalised or method.estimator in ("batch", "gae")):
        # There is no fault: `assign_credit` has checked these advantages, and it computes the same on every rank.
        return found

    row = torch.tensor([float(bool(fault)), *moments(trained_N)], dtype=torch.float64)
    rows = mesh.gather_rows(row).cpu()
    raise_on_all_ranks(fault, rows[:, 0], "their part of the batch")
    if method.estimator != "batch":
        return found
    mean, scale = whiten(rows[:, 1:].numpy())
    return [TokenAdvantages((one.advantage_T - mean) * scale, one.return_T) for one in found]


def _micro_advantages(
    micro: MicroBatch, outputs: ModelOutputs, credit: Credit, config: Config, method: Method
) -> TokenAdvantages:
    """Return the advantages of one micro-batch before whitening, and the targets of the critics.

    The value before a token is the mean over the critics. A KL in the reward subtracts β times its estimate from the
    reward of each token, and so from the advantages of all tokens up to that one.

    Raises:
        ContractError: the value, the reward or the advantage of a trained token is not finite.
    """
    penalty_T = np.zeros(len(micro.target_T))
    divergence = config.algorithm.kl
    if divergence is not None and divergence.place == "reward":
        assert outputs.start_T is not None, "the passes before the update computed it"
        assert outputs.reference_T is not None, "a KL comes with a reference"
        estimate_T = kl(divergence.estimator, outputs.start_T.double(), outputs.reference_T.double())
        penalty_T = np.where(micro.mask_T, divergence.coefficient * estimate_T.cpu().numpy(), 0.0)
    if method.estimator == "gae":
        assert config.critic is not None, "refused by the configuration's check"
        assert outputs.value_MT is not None, "gae comes with a critic"
        value_T = outputs.value_MT.double().mean(dim=0).cpu().numpy()
        _check_finite(micro, value_T, "the critic's value")
        reward_T = credit.earned(micro) - penalty_T
        _check_finite(micro, reward_T, "the reward")
        gamma, lam = config.algorithm.gamma, config.critic.lam
        found = TokenAdvantages(*gae(reward_T, value_T, micro.mask_T, micro.sequence_T, gamma=gamma, lam=lam))
        if method.critic_target == "lambda":
            return found
        return found._replace(return_T=monte_carlo(reward_T, micro.mask_T, micro.sequence_T, gamma=gamma))
    teacher = config.algorithm.teacher
    # A teacher that replaces the rewards gives advantages by its log-probs alone, which `objective_input` of
    # `flash.trainer.objective` adds.
    rewarded = teacher is None or teacher.reward
    advantage_T = credit.advantages(micro).copy() if rewarded else np.zeros(len(micro.target_T))
    trained = micro.mask_T
    advantage_T[trained] -= discounted_sums(penalty_T[trained], micro.sequence_T[trained], 1.0)
    _check_finite(micro, advantage_T, "the advantage")
    return TokenAdvantages(advantage_T, np.zeros_like(advantage_T))


def _check_finite(micro: MicroBatch, values_T: FloatArray, what: str) -> None:
    """Check numbers of which each token has one. `what` names them in the error message.

    Raises:
        ContractError: the number of a trained token is not finite.
    """
    wrong_T = micro.mask_T & ~np.isfinite(values_T)
    if wrong_T.any():
        first = int(np.flatnonzero(wrong_T)[0])
        token = first - int(np.searchsorted(micro.sequence_T, micro.sequence_T[first]))
        raise ContractError(
            f"sample {micro.index_T[first]}: {what} of its action token {token} is {values_T[first]}; expected a "
            "finite number: look at the last metrics for one that diverges"
        )
