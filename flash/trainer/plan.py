"""Plan a step: pack and check the batch, count it over all ranks, and turn its rewards into advantages.

`flash.trainer.step` calls `plan_step` before the first forward pass of a step, and `token_advantages` after the forward
passes of `flash.trainer.references`. Nothing here has a gradient.

The hub has *dealt* the batch: each *data shard* is a part of it, for one rank or for several ranks that compute the
same sequences together. `plan_step` makes the counts of all data shards known to every rank, in one collective. From
these counts each rank computes the denominators of the loss, and the number of micro-batches that every rank runs.

`assign_credit`, a part of `plan_step`, shapes and compares the rewards of whole samples and weights the samples by age.
It uses only facts about the whole batch, which every rank gets, so every rank computes the same numbers. All sequences
of a sample (its branches) have the advantage of the sample. `token_advantages` adds the parts that need log-probs or
values: a KL in the reward, generalised advantage estimation, and whitening over the batch.

The *age* of a token is the version that the step trains − the version that sampled the token. The age of a sample is
the age of its oldest trained token. A *turn* is one response of the policy with the environment's step after it.

Shape legend: B = samples of the whole batch, S = sequences and T = action tokens of a micro-batch, M = critics, W =
data shards, N = trained tokens of this rank's data shard. Arrays of credit are float64.
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
from algorithms.critics import assign_critics, discounted_sums, gae, monte_carlo
from algorithms.references import kl
from flash.ages import age_of, young_enough
from flash.config.learning import AlgorithmConfig
from flash.config.tree import Config
from flash.errors import ContractError
from flash.samples.batches import MinibatchPlace
from flash.trainer.mesh import TrainerMesh
from flash.trainer.objective import Method
from flash.trainer.packing import DUMMY, BoolArray, MicroBatch, pack, split_minibatches
from flash.trainer.references import ModelOutputs
from flash.types import BatchSample, Shard

BY_TURN: tuple[Advantage, ...] = ("turn", "gae")
"""Advantage estimators that use the rewards of single turns. All others use the reward of the whole sample."""


@dataclass(frozen=True)
class MinibatchPlan:
    """Input on this rank of one optimizer update, or of the part of it that is in one round. All ranks have equally
    many micro-batches."""

    place: MinibatchPlace
    """Number of the minibatch; `ends`: True if no later round has a part of it; `share`: the share of its groups that
    are in this round."""
    micro_batches: list[MicroBatch]
    shard_tokens: list[int]
    """[W]: trained tokens of each data shard."""
    total_sequences: int
    """Sequences with a trained token, over all ranks."""
    critic_tokens: list[int]
    """[M]: trained tokens that each critic learns from, over all ranks."""

    @property
    def total_tokens(self) -> int:
        """Trained tokens over all ranks."""
        return sum(self.shard_tokens)


@dataclass(frozen=True)
class Credit:
    """Rewards, advantages and weights of a batch that are known before a forward pass. They are equal on every rank.

    `assign_credit` makes this object. Its methods give each token of a micro-batch its number.
    """

    reward_B: FloatArray
    """Rewards as the environments returned them."""
    advantage_B: FloatArray
    """Advantages of whole samples, from the shaped rewards. With the estimator `batch` these are the shaped rewards,
    which are whitened later; with `turn` and `gae` they are 0."""
    staleness_B: FloatArray
    """Weights by age, with mean 1 over the samples that have a trained token; 0 for the other samples."""
    in_loss_B: BoolArray
    """True for samples that the loss includes; False for truncated samples if `algorithm.mask_truncated` is set."""
    turns_B: list[FloatArray]
    """Rewards of each sample's turns. The amount that shaping adds to a sample is in the reward of its last turn."""
    turn_advantages_B: list[FloatArray]
    """Advantages of each sample's turns with the estimator `turn`; else empty."""

    def advantages(self, micro: MicroBatch) -> FloatArray:
        """Return [T]: each token's advantage, without the parts that need a forward pass.

        This is the advantage of the token's turn with the estimator `turn`, and of its whole sample otherwise.
        """
        if not self.turn_advantages_B:
            return self.advantage_B[micro.index_T]
        # `advantages` has the turns of all sequences' samples one after another; `offset_S` is the place in it of each
        # sequence's first turn.
        offset_S = np.cumsum([0, *(len(self.turn_advantages_B[index]) for index in micro.index_S[:-1])])
        advantages = np.concatenate([self.turn_advantages_B[index] for index in micro.index_S])
        return advantages[offset_S[micro.sequence_T] + micro.turn_T]

    def weights(self, micro: MicroBatch) -> FloatArray:
        """Return [T]: the factor of each token's loss, by the age of its sample."""
        return self.staleness_B[micro.index_T]

    def earned(self, micro: MicroBatch) -> FloatArray:
        """Return [T]: the reward that arrives at each token, from which `gae` computes advantages.

        In each sequence, the reward of a turn is at the last trained token of that turn. If the sequence has no trained
        token of that turn, the reward is at the last trained token before the turn. So a branch also gets the rewards
        of later turns that are in other branches. Rewards of turns before the first trained token are left out, because
        the branch's tokens did not cause these rewards.
        """
        earned_T = np.zeros(len(micro.target_T))
        starts = np.searchsorted(micro.sequence_T, np.arange(micro.sequences + 1))
        for index, start, stop in zip(micro.index_S, starts, starts[1:], strict=False):
            rewards = self.turns_B[index]
            # A sequence can end with tokens that are too old to train, if its request moved to an engine with an older
            # version. The search for the last trained token keeps their reward, which would otherwise be lost.
            trained = start + np.flatnonzero(micro.mask_T[start:stop])
            last = np.searchsorted(micro.turn_T[trained], np.arange(len(rewards)), side="right") - 1
            begun = last >= 0
            np.add.at(earned_T, trained[last[begun]], rewards[begun])
        return earned_T


@dataclass(frozen=True)
class StepPlan:
    """Input of one round of a step, on which all ranks agree before they start."""

    minibatches: list[MinibatchPlan]
    credit: Credit
    tokens: int
    """Tokens of prompts and responses, over all ranks."""
    packed_tokens: int
    """Tokens of all packed sequences, over all ranks."""
    computed_tokens: int
    """Number of `packed_tokens` that are computed. The others are not computed again, because several sequences of one
    micro-batch begin with them."""
    age_histogram: list[int]
    """Number of trained tokens of age 0, 1, … (in versions), over all ranks."""
    critic_B: np.ndarray
    """int64: number of the critic that learns from each sample; 0 without critics."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """This rank's micro-batches of all minibatches, in order."""
        return [micro for minibatch in self.minibatches for micro in minibatch.micro_batches]

    @property
    def shard_tokens(self) -> list[int]:
        """[W]: trained tokens of each data shard over all minibatches."""
        return [sum(counts) for counts in zip(*(one.shard_tokens for one in self.minibatches), strict=True)]


def plan_step(
    shard: Shard, config: Config, method: Method, version: int, mesh: TrainerMesh, *, share_rows: bool
) -> StepPlan:
    """Pack this rank's shard of a round, check its tokens, and exchange counts with the other ranks, in one collective.

    Args:
        shard: the samples of this rank, and facts about the whole round.
        config: the run's configuration.
        method: the estimator, the critics and the other parts of the method.
        version: the version that the trainer holds.
        mesh: the trainer ranks.
        share_rows: True packs several sequences into a micro-batch. False gives each sequence one of its own, for
            models that cannot keep packed sequences apart.

    Raises:
        ContractError: on every rank, if the shard of any rank has tokens that are too old, is damaged or lacks the
            teacher's log-probs, if a reward or an advantage is not finite, or if all shards together have other totals
            than the hub dealt.
    """
    # First do what this rank can do alone: pack its samples, check them, and compare the rewards.
    train, fault = config.train, ""
    # Number of possible ages, from 0 to the age of the oldest trained version. It is equal on all ranks. `min_version`
    # is negative in the first steps of a run, which have fewer versions before them than `train.max_age`.
    ages = max(age_of(max(shard.min_version, 0), shard.step) + 1, 1)
    parts = split_minibatches(shard, train.minibatches)
    packed: list[list[MicroBatch]] = [[] for _ in parts]
    histogram = np.zeros(ages, dtype=np.int64)
    credit: Credit | None = None
    critic_B = assign_critics([entry.group_id for entry in shard.batch], method.critics, config.run.seed)
    try:
        packed = [
            pack(part, min_version=shard.min_version, max_tokens=train.max_tokens_per_microbatch, share_rows=share_rows)
            for _, part in parts
        ]
        age_T = _checked_ages(shard, version, [micro for micros in packed for micro in micros], config)
        histogram = np.bincount(age_T, minlength=ages)
        credit = assign_credit(shard, config.algorithm, method.estimator)
    except ContractError as error:
        # The error is raised later, on all ranks: this rank must still take part in the next collective, for which the
        # others wait.
        fault = str(error)

    # The row of a data shard has: fault, tokens, packed tokens, computed tokens, tokens by age, and for each minibatch
    # the `_minibatch_counts`.
    tokens = sum(sample.trajectory.length for sample in shard.samples)
    all_micros = [micro for micros in packed for micro in micros]
    packed_tokens = sum(len(micro.input_P) for micro in all_micros)
    computed_tokens = sum(len(micro.computed.place_U) for micro in all_micros)
    counts = [count for micros in packed for count in _minibatch_counts(micros, critic_B, method.critics)]
    row = torch.tensor([bool(fault), tokens, packed_tokens, computed_tokens, *histogram.tolist(), *counts])
    rows = mesh.gather_rows(row).cpu()
    mesh.raise_on_all_ranks(fault, rows[:, 0], f"their part of the batch of step {shard.step}")
    assert credit is not None, "without a fault there is credit"

    # Make the plan of each minibatch from the rows of all data shards, and check the totals against the hub's.
    grid = rows[:, 4 + ages :].reshape(len(rows), len(parts), 3 + method.critics).numpy()
    minibatches = [
        MinibatchPlan(
            place=place,
            # Micro-batches of one masked token (`DUMMY`) are added until every rank has equally many, because each pass
            # is a collective. Each minibatch gets at least one, so that every rank has the same names of statistics.
            micro_batches=micros + [DUMMY] * (max(int(grid[:, index, 0].max()), 1) - len(micros)),
            shard_tokens=grid[:, index, 1].tolist(),
            total_sequences=int(grid[:, index, 2].sum()),
            critic_tokens=grid[:, index, 3:].sum(0).tolist(),
        )
        for index, ((place, _), micros) in enumerate(zip(parts, packed, strict=True))
    ]
    total_tokens = sum(minibatch.total_tokens for minibatch in minibatches)
    total_sequences = sum(minibatch.total_sequences for minibatch in minibatches)
    if (total_tokens, total_sequences) != (shard.total_tokens, shard.total_sequences):
        raise ContractError(
            f"step {shard.step}: the ranks hold {total_tokens} trained tokens in {total_sequences} sequences, the hub "
            f"dealt {shard.total_tokens} in {shard.total_sequences}"
        )
    _, tokens, packed_tokens, computed_tokens, *age_counts = rows[:, : 4 + ages].sum(0).tolist()
    return StepPlan(minibatches, credit, tokens, packed_tokens, computed_tokens, age_counts, critic_B)


def _checked_ages(shard: Shard, version: int, micro_batches: Sequence[MicroBatch], config: Config) -> np.ndarray:
    """Check the age of each trained token, and return the ages as int64, in the order of the micro-batches.

    The age contract: the step that trains version n may train tokens of the versions n − `train.max_age` … n only. If
    `algorithm.teacher.url` is set, each trained token must also have the log-prob that the server of the teacher gave.

    Raises:
        ContractError: the batch is for another version, a token is too old or newer than the trained version, or a
            trained token comes without the log-prob of the teacher behind `algorithm.teacher.url`.
    """
    train, teacher = config.train, config.algorithm.teacher
    if shard.step != version:
        raise ContractError(f"a batch for version {shard.step} reached a trainer that holds version {version}")
    ages = [age_of(micro.version_T[micro.mask_T], shard.step) for micro in micro_batches]
    age_T = np.concatenate(ages) if ages else np.zeros(0, dtype=np.int64)
    if age_T.size and (age_T.max() > train.max_age or age_T.min() < 0):
        raise ContractError(
            f"step {shard.step}: token ages run from {age_T.min()} to {age_T.max()}, train.async_ratio and "
            f"max_token_age allow 0 to {train.max_age}; the hub's min_version was {shard.min_version}"
        )
    served = teacher is not None and teacher.url is not None
    if served and not all(np.isfinite(micro.teacher_T[micro.mask_T]).all() for micro in micro_batches):
        raise ContractError(
            "a sample comes without its teacher's log-probs: it was made before algorithm.teacher.url was set; go on "
            "with algorithm.teacher.path, or start a new run"
        )
    return age_T


def _minibatch_counts(micro_batches: Sequence[MicroBatch], critic_B: np.ndarray, critics: int) -> list[int]:
    """Return [3 + M] counts of this rank's micro-batches of one minibatch.

    The numbers are, in this order: micro-batches; trained tokens; sequences with a trained token; and for each of the
    M = `critics` critics, the trained tokens that it learns from. `plan_step` sends these numbers to all ranks and
    reads them by their place, so a change of the order must be made there, too.
    """
    tokens = sum(int(micro.mask_T.sum()) for micro in micro_batches)
    sequences = sum(len(np.unique(micro.sequence_T[micro.mask_T])) for micro in micro_batches)
    of_critic_M = np.zeros(critics, dtype=np.int64)
    for micro in micro_batches:
        # Without critics every sample has the critic number 0, but no count of a critic is returned. The slice removes
        # the count of this number.
        of_critic_M += np.bincount(critic_B[micro.index_T[micro.mask_T]], minlength=critics)[:critics]
    return [len(micro_batches), tokens, sequences, *of_critic_M.tolist()]


# -- credit ----------------------------------------------------------------------------------------------------------


def assign_credit(shard: Shard, algorithm: AlgorithmConfig, estimator: Advantage) -> Credit:
    """Return the credit of all samples of a batch: shape the rewards, compare them, and weight the samples by age.

    A group may be trained in several steps. Members that an earlier step has trained (`Shard.earlier`) are compared
    with the rest of their group, but get no credit here.

    Args:
        shard: this rank's shard, which also has the facts about the whole batch.
        algorithm: the configuration of the method.
        estimator: the advantage estimator.

    Raises:
        ContractError: a reward or an advantage is not finite, or a sample has another number of rewards than turns.
    """
    # The samples of the batch come first, so that the first `count` numbers are theirs.
    known = [*shard.batch, *shard.earlier]
    _check_rewards(shard, known, turns=estimator in BY_TURN)
    count, gamma = len(shard.batch), algorithm.gamma
    raw_B = np.array([entry.reward for entry in known])
    tokens_B = np.array([entry.tokens for entry in known], dtype=np.int64)
    truncated_B = np.array([entry.truncated for entry in known], dtype=np.bool_)
    group_ids_B = [entry.group_id for entry in known]
    turns_B = [np.array(entry.turns, dtype=np.float64) for entry in known]
    oldest_B = np.array([entry.oldest_version for entry in shard.batch], dtype=np.float64)
    trained_B = young_enough(oldest_B, shard.min_version)
    staleness_B = np.zeros_like(oldest_B)
    turn_advantages_B: list[FloatArray] = []
    try:
        # Shape the rewards, for example by length. The last turn gets what shaping adds to a sample.
        shaped_B = raw_B
        for shaping in algorithm.shaping:
            shaped_B = shaping.shaped(shaped_B, tokens_B, truncated_B, group_ids_B)
        for rewards, added in zip(turns_B, shaped_B - raw_B, strict=True):
            if len(rewards):
                rewards[-1] += added
        # Compare the shaped rewards.
        match estimator:
            case "group":
                advantage_B = group_advantages(shaped_B, group_ids_B)
            case "group_mean":
                advantage_B = group_mean_advantages(shaped_B, group_ids_B)
            case "leave_one_out":
                advantage_B = leave_one_out_advantages(shaped_B, group_ids_B)
            case "batch":  # `token_advantages` compares all tokens of the batch
                advantage_B = shaped_B
            case "turn":
                advantage_B = np.zeros_like(shaped_B)
                turn_advantages_B = turn_advantages([rewards.tolist() for rewards in turns_B], group_ids_B, gamma)
            case "gae":  # `token_advantages` computes it from the critics' values
                advantage_B = np.zeros_like(shaped_B)
        # Weight the samples by age. Samples without a trained token keep the weight 0.
        ages = age_of(oldest_B[trained_B], shard.step)
        # The limit is the one by which the hub made the batch, so that a replay of the batch has the same weights.
        max_age = age_of(shard.min_version, shard.step)
        staleness_B[trained_B] = algorithm.staleness.weights(ages, max_age)
    except ValueError as error:  # the functions of `algorithms` refuse numbers that are not finite
        raise ContractError(f"step {shard.step}: {error}") from error
    for index, entry in enumerate(shard.batch):
        values = [advantage_B[index], *(turn_advantages_B[index] if turn_advantages_B else [])]
        if not np.isfinite(values).all():
            raise ContractError(
                f"step {shard.step}: {_sample_name(shard, index, entry)} has an advantage that is not finite: {values}"
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
    """Check the rewards of all samples, before any arithmetic with them.

    Args:
        shard: this rank's shard.
        known: the samples of the batch, then the samples of `shard.earlier`.
        turns: True if the estimator uses the rewards of single turns, so that each turn must have one.

    Raises:
        ContractError: a reward is not finite or, with `turns`, a sample has another number of rewards than turns.
    """
    for index, entry in enumerate(known):
        if not all(map(math.isfinite, (entry.reward, *entry.turns))):
            raise ContractError(
                f"step {shard.step}: {_sample_name(shard, index, entry)} has the reward {entry.reward} "
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
                f"step {shard.step}: {_sample_name(shard, index, entry)} has {len(entry.turns)} rewards for {expected} "
                "turns"
            )


def _sample_name(shard: Shard, index: int, entry: BatchSample) -> str:
    """Return a phrase that names a sample in an error message.

    `index` is the place of the sample among the samples of the batch, followed by the samples of `Shard.earlier`.
    """
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

    Args:
        micro_batches: this rank's micro-batches of the step.
        outputs: results of the forward passes before the update, for each micro-batch.
        credit: the credit of the batch.
        config: the run's configuration.
        method: the estimator, the critics and the other parts of the method.
        mesh: the trainer ranks.

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

    # Exchange faults and, for whitening, the moments of the advantages of each data shard.
    row = torch.tensor([float(bool(fault)), *moments(trained_N)], dtype=torch.float64)
    rows = mesh.gather_rows(row).cpu()
    mesh.raise_on_all_ranks(fault, rows[:, 0], "their part of the batch")
    if method.estimator != "batch":
        return found
    mean, scale = whiten(rows[:, 1:].numpy())
    return [TokenAdvantages((one.advantage_T - mean) * scale, one.return_T) for one in found]


def _micro_advantages(
    micro: MicroBatch, outputs: ModelOutputs, credit: Credit, config: Config, method: Method
) -> TokenAdvantages:
    """Return the advantages of one micro-batch before whitening, and the targets of the critics.

    With a KL in the reward, `kl.coefficient` times the estimated KL of a token is subtracted from the reward of that
    token. This lowers the advantages of this token and of all tokens before it.

    Args:
        micro: the micro-batch.
        outputs: results of the forward passes before the update for this micro-batch.
        credit: the credit of the batch.
        config: the run's configuration.
        method: the estimator and the target of the critics.

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
        # The value before a token is the mean over the critics.
        value_T = outputs.value_MT.double().mean(dim=0).cpu().numpy()
        _check_finite(micro, value_T, "the critic's value")
        reward_T = credit.earned(micro) - penalty_T
        _check_finite(micro, reward_T, "the reward")
        gamma, lam = config.algorithm.gamma, config.critic.lam
        found = TokenAdvantages(*gae(reward_T, value_T, micro.mask_T, micro.sequence_T, gamma=gamma, lam=lam))
        # Critics learn the λ-return of `gae`, or else the discounted sum of the rewards (`monte_carlo`).
        if method.critic_target == "lambda":
            return found
        return found._replace(return_T=monte_carlo(reward_T, micro.mask_T, micro.sequence_T, gamma=gamma))
    teacher = config.algorithm.teacher
    # A teacher that replaces the rewards gives advantages by its log-probs alone, which `objective_input` of
    # `flash.trainer.objective` adds. The configuration refuses a critic together with such a teacher, so a run with
    # `gae` (the branch above) never has one.
    rewarded = teacher is None or teacher.reward
    advantage_T = credit.advantages(micro).copy() if rewarded else np.zeros(len(micro.target_T))
    trained = micro.mask_T
    # The discount is 1, because only `gae` discounts per token; in the other estimators γ is per turn or not used.
    advantage_T[trained] -= discounted_sums(penalty_T[trained], micro.sequence_T[trained], 1.0)
    _check_finite(micro, advantage_T, "the advantage")
    return TokenAdvantages(advantage_T, np.zeros_like(advantage_T))


def _check_finite(micro: MicroBatch, values_T: FloatArray, what: str) -> None:
    """Check that each trained token has a finite number. `what` names the numbers in the error message.

    Raises:
        ContractError: the number of a trained token is not finite. The message names the first such token.
    """
    wrong_T = micro.mask_T & ~np.isfinite(values_T)
    if wrong_T.any():
        first = int(np.flatnonzero(wrong_T)[0])
        token = first - int(np.searchsorted(micro.sequence_T, micro.sequence_T[first]))
        raise ContractError(
            f"sample {micro.index_T[first]}: {what} of its action token {token} is {values_T[first]}; expected a "
            "finite number: look at the last metrics for one that diverges"
        )
