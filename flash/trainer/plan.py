"""A step before its first forward pass: the batch packed, checked against the laws, and counted over all ranks.

Shape legend: B = samples of the whole batch, T = action tokens of a micro-batch, M = critics, W = data shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from algorithms.critics import deal
from flash.ages import age_of
from flash.config.learning import TrainConfig
from flash.config.tree import Config
from flash.errors import ContractError
from flash.trainer.credit import Credit, assign_credit
from flash.trainer.mesh import TrainerMesh, raise_on_all_ranks
from flash.trainer.objective import Method
from flash.trainer.packing import DUMMY, MicroBatch, pack, split_minibatches
from flash.types import Shard


@dataclass(frozen=True)
class MinibatchPlan:
    """One optimizer update: this rank's micro-batches, as many as on any other rank, and counts over all ranks."""

    micro_batches: list[MicroBatch]
    shard_tokens: list[int]
    """[W]: trained tokens of each data shard."""
    total_sequences: int
    critic_tokens: list[int]
    """[M]: of the trained tokens over all ranks, those that each critic learns from."""

    @property
    def total_tokens(self) -> int:
        """Trained tokens over all ranks."""
        return sum(self.shard_tokens)


@dataclass(frozen=True)
class StepPlan:
    """What all ranks agree on before they start."""

    minibatches: list[MinibatchPlan]
    credit: Credit
    tokens: int
    """Prompts and responses over all ranks."""
    shared: float
    """Share of the tokens of all sequences that are not computed, as another one of their micro-batch has them."""
    age_histogram: list[int]
    """Trained tokens of age 0, 1, … over all ranks."""
    critic_B: np.ndarray
    """int64: which critic learns from each sample."""

    @property
    def shard_tokens(self) -> list[int]:
        """[W]: trained tokens of each data shard, over all minibatches."""
        return [sum(counts) for counts in zip(*(one.shard_tokens for one in self.minibatches), strict=True)]


def plan_step(
    shard: Shard, config: Config, method: Method, version: int, mesh: TrainerMesh, *, share_rows: bool
) -> StepPlan:
    """Pack, several sequences to a micro-batch or each alone, check the laws, and agree on counts: one collective.

    Raises:
        ContractError: on every rank, when the batch of any breaks the age contract, its own counts, or is damaged.
    """
    train, fault = config.train, ""
    ages = max(age_of(max(shard.min_version, 0), shard.step) + 1, 1)
    parts: list[list[MicroBatch]] = [[] for _ in range(train.minibatches)]
    histogram = np.zeros(ages, dtype=np.int64)
    credit: Credit | None = None
    critic_B = deal([entry.group_id for entry in shard.batch], method.critics, config.run.seed)
    try:
        parts = [
            pack(part, min_version=shard.min_version, max_tokens=train.max_tokens_per_microbatch, share_rows=share_rows)
            for part in split_minibatches(shard, train.minibatches)
        ]
        age_T = trained_ages(shard.step, [micro for part in parts for micro in part])
        check_ages(shard, version, age_T, train)
        check_taught(config, [micro for part in parts for micro in part])
        histogram = np.bincount(age_T, minlength=ages)
        ratio = max(train.async_ratio, train.max_token_age or 0)
        credit = assign_credit(shard, config.algorithm, method.estimator, ratio)
    except ContractError as error:
        fault = str(error)

    tokens = sum(sample.trajectory.length for sample in shard.samples)
    counts = [
        count
        for part in parts
        for count in (len(part), *trained_counts(part), *critic_counts(part, critic_B, method.critics))
    ]
    micros = [micro for part in parts for micro in part]
    sizes = [sum(len(one.input_P) for one in micros), sum(len(one.computed.place_U) for one in micros)]
    row = torch.tensor([bool(fault), tokens, *sizes, *histogram.tolist(), *counts])
    rows = mesh.gather_rows(row).cpu()
    raise_on_all_ranks(fault, rows[:, 0], f"their part of the batch of step {shard.step}")
    assert credit is not None, "without a fault there is credit"

    grid = rows[:, 4 + ages :].reshape(len(rows), train.minibatches, 3 + method.critics).numpy()
    minibatches = [
        MinibatchPlan(
            # At least one micro-batch, so that every rank reports the same statistics.
            micro_batches=part + [DUMMY] * (max(int(grid[:, index, 0].max()), 1) - len(part)),
            shard_tokens=grid[:, index, 1].tolist(),
            total_sequences=int(grid[:, index, 2].sum()),
            critic_tokens=grid[:, index, 3:].sum(0).tolist(),
        )
        for index, part in enumerate(parts)
    ]
    check_totals(shard, minibatches)
    _, tokens, packed, computed, *aged = rows[:, : 4 + ages].sum(0).tolist()
    return StepPlan(minibatches, credit, tokens, 1 - computed / max(packed, 1), aged, critic_B)


def check_ages(shard: Shard, version: int, age_T: np.ndarray, train: TrainConfig) -> None:
    """The age contract at consumption: version n trains only tokens of versions n − ⌈α⌉ … n, or up to their bound."""
    if shard.step != version:
        raise ContractError(f"a batch for version {shard.step} reached a trainer that holds version {version}")
    if age_T.size and (age_T.max() > train.max_age or age_T.min() < 0):
        raise ContractError(
            f"step {shard.step}: token ages run from {age_T.min()} to {age_T.max()}, train.async_ratio and "
            f"max_token_age allow 0 to {train.max_age}; the hub's min_version was {shard.min_version}"
        )


def check_taught(config: Config, micro_batches: Sequence[MicroBatch]) -> None:
    """Where a server holds the teacher, what it says of each trained token came with its sample."""
    teacher = config.algorithm.teacher
    if teacher is None or teacher.url is None:
        return
    if not all(np.isfinite(micro.teacher_T[micro.mask_T]).all() for micro in micro_batches):
        raise ContractError(
            "a sample comes without its teacher's log-probs: it was made before algorithm.teacher.url was set; go on "
            "with algorithm.teacher.path, or begin a new run"
        )


def trained_ages(step: int, micro_batches: Sequence[MicroBatch]) -> np.ndarray:
    """int64: the age of every unmasked token of these micro-batches."""
    ages = [age_of(micro.version_T[micro.mask_T], step) for micro in micro_batches]
    return np.concatenate(ages) if ages else np.zeros(0, dtype=np.int64)


def trained_counts(micro_batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Unmasked tokens, and sequences that have one."""
    tokens = sum(int(micro.mask_T.sum()) for micro in micro_batches)
    return tokens, sum(len(np.unique(micro.sequence_T[micro.mask_T])) for micro in micro_batches)


def critic_counts(micro_batches: Sequence[MicroBatch], critic_B: np.ndarray, critics: int) -> list[int]:
    """[M]: unmasked tokens that each critic learns from."""
    counts = np.zeros(critics, dtype=np.int64)
    for micro in micro_batches:
        counts += np.bincount(critic_B[micro.index_T[micro.mask_T]], minlength=critics)[:critics]
    return counts.tolist()


def check_totals(shard: Shard, minibatches: Sequence[MinibatchPlan]) -> None:
    """What the ranks hold together is what the hub says it dealt."""
    tokens = sum(part.total_tokens for part in minibatches)
    sequences = sum(part.total_sequences for part in minibatches)
    if (tokens, sequences) != (shard.total_tokens, shard.total_sequences):
        raise ContractError(
            f"step {shard.step}: the ranks hold {tokens} trained tokens in {sequences} sequences, the hub dealt "
            f"{shard.total_tokens} in {shard.total_sequences}"
        )
