"""Plan a step before its first forward pass: pack the batch, check its tokens, and count them over all ranks.

`flash.trainer.step` calls `plan_step`. One collective makes the counts of all ranks known to every rank. The
denominators of the loss and the number of micro-batches are computed from these counts, so all ranks run equally many
passes. The *age* of a token is the version that the trainer holds, less the version that sampled the token.

Shape legend: B = samples of the whole batch, T = action tokens of a micro-batch, M = critics, W = data shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from algorithms.critics import assign_critics
from flash.ages import age_of
from flash.config.tree import Config
from flash.errors import ContractError
from flash.trainer.credit import Credit, assign_credit
from flash.trainer.mesh import TrainerMesh, raise_on_all_ranks
from flash.trainer.objective import Method
from flash.trainer.packing import DUMMY, MicroBatch, pack, split_minibatches
from flash.types import Shard


@dataclass(frozen=True)
class MinibatchPlan:
    """Input of one optimizer update on this rank. All ranks have equally many micro-batches."""

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
class StepPlan:
    """Input of one step, on which all ranks agree before they start."""

    minibatches: list[MinibatchPlan]
    credit: Credit
    tokens: int
    """Tokens of prompts and responses, over all ranks."""
    shared_token_share: float
    """Share of the tokens that are not computed again, because several sequences of one micro-batch begin with them."""
    age_histogram: list[int]
    """Number of trained tokens of age 0, 1, … (in versions), over all ranks."""
    critic_B: np.ndarray
    """int64: number of the critic that learns from each sample."""

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
    """Pack this rank's shard, check its tokens, and exchange counts with the other ranks, in one collective.

    Args:
        shard: the samples of this rank, and a description of the whole batch.
        config: the run's configuration.
        method: the estimator, the critics and the other parts of the method.
        version: the version that the trainer holds.
        mesh: the trainer ranks.
        share_rows: True packs several sequences into a micro-batch. False gives each sequence one of its own.

    Raises:
        ContractError: on every rank, if the shard of any rank has tokens that are too old, is damaged or lacks the
            teacher's log-probs, or if all shards together have other totals than the hub dealt.
    """
    train, fault = config.train, ""
    ages = max(age_of(max(shard.min_version, 0), shard.step) + 1, 1)
    parts: list[list[MicroBatch]] = [[] for _ in range(train.minibatches)]
    histogram = np.zeros(ages, dtype=np.int64)
    credit: Credit | None = None
    critic_B = assign_critics([entry.group_id for entry in shard.batch], method.critics, config.run.seed)
    try:
        parts = [
            pack(part, min_version=shard.min_version, max_tokens=train.max_tokens_per_microbatch, share_rows=share_rows)
            for part in split_minibatches(shard, train.minibatches)
        ]
        age_T = _checked_ages(shard, version, [micro for part in parts for micro in part], config)
        histogram = np.bincount(age_T, minlength=ages)
        ratio = max(train.async_ratio, train.max_token_age or 0)
        credit = assign_credit(shard, config.algorithm, method.estimator, ratio)
    except ContractError as error:
        # The error is raised later, on all ranks: this rank must still take part in the next collective, for which the
        # others wait.
        fault = str(error)

    tokens = sum(sample.trajectory.length for sample in shard.samples)
    counts = [count for part in parts for count in _count(part, critic_B, method.critics)]
    micros = [micro for part in parts for micro in part]
    sizes = [sum(len(one.input_P) for one in micros), sum(len(one.computed.place_U) for one in micros)]
    # One row per data shard: fault, tokens, packed tokens, computed tokens, tokens by age, and `_count` by minibatch.
    row = torch.tensor([bool(fault), tokens, *sizes, *histogram.tolist(), *counts])
    rows = mesh.gather_rows(row).cpu()
    raise_on_all_ranks(fault, rows[:, 0], f"their part of the batch of step {shard.step}")
    assert credit is not None, "without a fault there is credit"

    grid = rows[:, 4 + ages :].reshape(len(rows), train.minibatches, 3 + method.critics).numpy()
    minibatches = [
        MinibatchPlan(
            # Padded to the rank with the most micro-batches, so that all ranks make equally many passes, which are
            # collectives; and to at least one, so that every rank has the same names of statistics.
            micro_batches=part + [DUMMY] * (max(int(grid[:, index, 0].max()), 1) - len(part)),
            shard_tokens=grid[:, index, 1].tolist(),
            total_sequences=int(grid[:, index, 2].sum()),
            critic_tokens=grid[:, index, 3:].sum(0).tolist(),
        )
        for index, part in enumerate(parts)
    ]
    total_tokens = sum(part.total_tokens for part in minibatches)
    total_sequences = sum(part.total_sequences for part in minibatches)
    if (total_tokens, total_sequences) != (shard.total_tokens, shard.total_sequences):
        raise ContractError(
            f"step {shard.step}: the ranks hold {total_tokens} trained tokens in {total_sequences} sequences, the hub "
            f"dealt {shard.total_tokens} in {shard.total_sequences}"
        )
    _, tokens, packed, computed, *aged = rows[:, : 4 + ages].sum(0).tolist()
    return StepPlan(minibatches, credit, tokens, 1 - computed / max(packed, 1), aged, critic_B)


def _checked_ages(shard: Shard, version: int, micro_batches: Sequence[MicroBatch], config: Config) -> np.ndarray:
    """Return the age of each trained token, in the order of the micro-batches, int64, once all tokens are checked.

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


def _count(part: Sequence[MicroBatch], critic_B: np.ndarray, critics: int) -> list[int]:
    """Count a part of the shard: [3 + M] numbers.

    They are the numbers of micro-batches, of trained tokens, of sequences with a trained token, and of the trained
    tokens that each of the M critics learns from.
    """
    tokens = sum(int(micro.mask_T.sum()) for micro in part)
    sequences = sum(len(np.unique(micro.sequence_T[micro.mask_T])) for micro in part)
    of_critic_M = np.zeros(critics, dtype=np.int64)
    for micro in part:
        of_critic_M += np.bincount(critic_B[micro.index_T[micro.mask_T]], minlength=critics)[:critics]
    return [len(part), tokens, sequences, *of_critic_M.tolist()]
