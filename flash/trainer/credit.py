"""What the samples of a batch are worth: rewards shaped, compared, discounted, and weighted by age.

Samples are compared, whatever branches they have: each sequence of a sample gets the advantage of its sample.

Computed alike on every rank from what the hub says of the whole batch, so that it does not depend on how the batch was
dealt. What needs a forward pass is added later (`flash.trainer.firstpass`).

Shape legend: B = samples of the whole batch, S = sequences and T = action tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from algorithms.advantages import (
    FloatArray,
    group_advantages,
    group_mean_advantages,
    leave_one_out_advantages,
    turn_advantages,
)
from algorithms.base import Advantage
from algorithms.shaping import Shaping
from algorithms.staleness import Staleness
from flash.ages import age_of, recent
from flash.config.learning import AlgorithmConfig
from flash.errors import ContractError
from flash.trainer.packing import BoolArray, MicroBatch
from flash.types import BatchSample, Shard

BY_TURN: tuple[Advantage, ...] = ("turn", "gae")
"""Estimators that use the rewards of single turns."""


@dataclass(frozen=True)
class Credit:
    """Known before the first forward pass, the same on every rank."""

    reward_B: FloatArray
    """As the environments gave them."""
    advantage_B: FloatArray
    """Of whole samples: what the estimator makes of the shaped rewards. `batch`: the shaped rewards, to be whitened."""
    staleness_B: FloatArray
    """Weight by age; mean 1 over the samples that have a trained token."""
    counted_B: BoolArray
    """Whether the loss counts them: false of those that a limit has ended, where these are masked."""
    turns_B: list[FloatArray]
    """Rewards of each sample's turns; what shaping added stands in the last one."""
    turn_advantages_B: list[FloatArray]
    """Of each sample's turns, where the estimator is `turn`; else empty."""

    def advantages(self, micro: MicroBatch) -> FloatArray:
        """float64 [T]: each token's advantage, as far as it is known."""
        if not self.turn_advantages_B:
            return self.advantage_B[micro.index_T]
        offset_S = np.cumsum([0, *(len(self.turn_advantages_B[index]) for index in micro.index_S[:-1])])
        advantages = np.concatenate([self.turn_advantages_B[index] for index in micro.index_S])
        return advantages[offset_S[micro.sequence_T] + micro.turn_T]

    def weights(self, micro: MicroBatch) -> FloatArray:
        """float64 [T]: factor of the objective's loss of each token, by the age of its sample."""
        return self.staleness_B[micro.index_T]

    def earned(self, micro: MicroBatch) -> FloatArray:
        """float64 [T]: each turn's reward at its last trained token; that of a turn without one, at the one before.

        A branch earns what its sample does from its own first turn on: the reward of a later turn in another branch
        comes after its tokens so far. What was earned before it began, or before its first trained token, is none of
        its doing.
        """
        earned_T = np.zeros(len(micro.target_T))
        starts = np.searchsorted(micro.sequence_T, np.arange(micro.sequences + 1))
        for index, start, stop in zip(micro.index_S, starts, starts[1:], strict=False):
            rewards = self.turns_B[index]
            # Older tokens may come last, as after a move to an engine that is behind: what comes of them is not lost.
            kept = start + np.flatnonzero(micro.mask_T[start:stop])
            last = np.searchsorted(micro.turn_T[kept], np.arange(len(rewards)), side="right") - 1
            begun = last >= 0
            np.add.at(earned_T, kept[last[begun]], rewards[begun])
        return earned_T


def assign_credit(shard: Shard, algorithm: AlgorithmConfig, estimator: Advantage, async_ratio: float) -> Credit:
    """Rewards to advantages and weights.

    Members of a group that an earlier step has trained count for its statistics.

    Raises:
        ContractError: a reward or an advantage is not finite, or the turns of a sample are not known.
    """
    known = [*shard.batch, *shard.earlier]
    _check_rewards(shard, known)
    if estimator in BY_TURN:
        _check_turns(shard, known)
    raw_B = np.array([entry.reward for entry in known])
    group_ids = [entry.group_id for entry in known]
    try:
        shaped_B = shape(raw_B, known, algorithm.shaping)
        turns = _shaped_turns(known, shaped_B - raw_B)
        advantage_B, turn_advantages_B = _estimate(estimator, shaped_B, turns, group_ids, algorithm.gamma)
        staleness_B = age_weights(shard, algorithm.staleness, async_ratio)
    except ValueError as error:
        raise ContractError(f"step {shard.step}: {error}") from error
    count = len(shard.batch)
    masked_B = np.array([algorithm.mask_truncated and entry.truncated for entry in shard.batch], dtype=np.bool_)
    _check_advantages(shard, advantage_B, turn_advantages_B)
    return Credit(
        reward_B=raw_B[:count],
        advantage_B=advantage_B[:count],
        staleness_B=staleness_B,
        counted_B=~masked_B,
        turns_B=turns[:count],
        turn_advantages_B=turn_advantages_B[:count],
    )


def shape(reward_B: FloatArray, samples: Sequence[BatchSample], shapings: Sequence[Shaping]) -> FloatArray:
    """float64 [B]: the rewards after every shaping, in their order."""
    tokens_B = np.array([entry.tokens for entry in samples], dtype=np.int64)
    truncated_B = np.array([entry.truncated for entry in samples], dtype=np.bool_)
    group_ids_B = [entry.group_id for entry in samples]
    for shaping in shapings:
        reward_B = shaping.shaped(reward_B, tokens_B, truncated_B, group_ids_B)
    return reward_B


def age_weights(shard: Shard, staleness: Staleness, async_ratio: float) -> FloatArray:
    """float64 [B]: weight of each sample by the age of its oldest trained token; 0 where it has none.

    Raises:
        ValueError: a sample is from the future.
    """
    oldest_B = np.array([entry.oldest_version for entry in shard.batch], dtype=np.float64)
    trained_B = recent(oldest_B, shard.min_version)
    weight_B = np.zeros_like(oldest_B)
    weight_B[trained_B] = staleness.weights(age_of(oldest_B[trained_B], shard.step), async_ratio)
    return weight_B


def _estimate(
    estimator: Advantage, shaped_B: FloatArray, turns: list[FloatArray], group_ids: list[int], gamma: float
) -> tuple[FloatArray, list[FloatArray]]:
    """Advantages of whole samples, and, where the estimator tells turns apart, of each sample's turns."""
    match estimator:
        case "group":
            return group_advantages(shaped_B, group_ids), []
        case "group_mean":
            return group_mean_advantages(shaped_B, group_ids), []
        case "leave_one_out":
            return leave_one_out_advantages(shaped_B, group_ids), []
        case "batch":
            return shaped_B, []
        case "turn":
            return np.zeros_like(shaped_B), turn_advantages([rewards.tolist() for rewards in turns], group_ids, gamma)
        case "gae":
            return np.zeros_like(shaped_B), []


def _shaped_turns(samples: Sequence[BatchSample], added_B: FloatArray) -> list[FloatArray]:
    turns = [np.array(entry.turns, dtype=np.float64) for entry in samples]
    for rewards, added in zip(turns, added_B, strict=True):
        if len(rewards):
            rewards[-1] += added
    return turns


def _check_rewards(shard: Shard, known: Sequence[BatchSample]) -> None:
    for index, entry in enumerate(known):
        if not all(map(math.isfinite, (entry.reward, *entry.turns))):
            raise ContractError(
                f"step {shard.step}: {_named(shard, index, entry)} has the reward {entry.reward} "
                f"(turns: {entry.turns}); expected finite numbers"
            )


def _check_turns(shard: Shard, known: Sequence[BatchSample]) -> None:
    spans = {sample.index: len(sample.trajectory.action_spans) for sample in shard.samples}
    for index, entry in enumerate(known):
        expected = spans.get(index, max(len(entry.turns), 1))
        if len(entry.turns) != expected:
            raise ContractError(
                f"step {shard.step}: {_named(shard, index, entry)} has {len(entry.turns)} rewards for {expected} turns"
            )


def _check_advantages(shard: Shard, advantage_B: FloatArray, turn_advantages_B: Sequence[FloatArray]) -> None:
    for index, entry in enumerate(shard.batch):
        values = [advantage_B[index], *(turn_advantages_B[index] if turn_advantages_B else [])]
        if not np.isfinite(values).all():
            raise ContractError(
                f"step {shard.step}: {_named(shard, index, entry)} has an advantage that is not finite: {values}"
            )


def _named(shard: Shard, index: int, entry: BatchSample) -> str:
    which = f"sample {index}" if index < len(shard.batch) else "a sample trained earlier"
    return f"{which} (group {entry.group_id})"
