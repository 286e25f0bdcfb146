"""One training step: a shard in, new weights and metrics out.

Every rank is given its part of the same batch and makes the same collectives in the same order; a fault that one rank
finds in its part is raised on all. Losses are weighed with denominators of the whole batch, so the gradient does not
depend on how the batch was cut into ranks and micro-batches.

Shape legend: T = action tokens of a micro-batch, S = its sequences, B = samples of the whole batch, W = ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from algorithms.advantages import FloatArray, group_advantages
from algorithms.aggregation import token_weights
from algorithms.base import Objective, PackedTokens
from flash.config import AlgorithmConfig, Config, TrainConfig
from flash.errors import ContractError
from flash.imports import check_options, load_objective
from flash.trainer.model import TokenLogprobs, load_model, shard_model, token_logprobs, trainer_mesh
from flash.trainer.packing import DUMMY, MicroBatch, pack, split_minibatches
from flash.types import Shard


@dataclass(frozen=True)
class MinibatchPlan:
    """One optimizer update: this rank's micro-batches, as many as on any other rank, and counts over all ranks."""

    micro_batches: list[MicroBatch]
    total_tokens: int
    total_sequences: int


@dataclass(frozen=True)
class StepPlan:
    """A step before its first forward pass, agreed on by all ranks."""

    minibatches: list[MinibatchPlan]
    advantage_B: FloatArray
    tokens: int
    """Prompts and responses over all ranks."""
    age_histogram: list[int]
    """Trained tokens of age 0, 1, … over all ranks."""


class Tally:
    """Sums, minima and maxima over micro-batches, then over ranks. Every rank adds under the same names."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._least: dict[str, Tensor] = {}
        self._most: dict[str, Tensor] = {}

    def add(self, name: str, value_T: Tensor, mask_T: Tensor) -> None:
        """Add the unmasked values, whatever the masked ones hold."""
        total = value_T.detach().double().where(mask_T, 0.0).sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def bound(self, name: str, value_T: Tensor, mask_T: Tensor) -> None:
        """Keep the least and the greatest of the unmasked values."""
        value_T = value_T.detach().double()
        least, most = value_T.where(mask_T, math.inf).amin(), value_T.where(mask_T, -math.inf).amax()
        self._least[name] = least.minimum(self._least.get(name, least))
        self._most[name] = most.maximum(self._most.get(name, most))

    def reduce(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Sums, minima and maxima over all ranks, in one collective."""
        kinds = [dict(sorted(values.items())) for values in (self._sums, self._least, self._most)]
        row = torch.stack([value for values in kinds for value in values.values()])
        rows = gather_rows(row).cpu().numpy()
        first, second = len(kinds[0]), len(kinds[0]) + len(kinds[1])
        columns = (rows[:, :first].sum(0), rows[:, first:second].min(0), rows[:, second:].max(0))
        sums, least, most = (
            dict(zip(values, column.tolist(), strict=True)) for values, column in zip(kinds, columns, strict=True)
        )
        return sums, least, most


class Trainer:
    """The policy, its optimizer and its version. The default process group must consist of all trainer ranks."""

    def __init__(self, config: Config) -> None:
        """Load and shard the model.

        Raises:
            ConfigError: the model or the objective cannot be made from the configuration.
        """
        self._config = config
        self._objective = make_objective(config.algorithm)
        device: Literal["cpu", "cuda"] = "cuda" if config.gpus_per_node > 0 else "cpu"
        self.model = shard_model(load_model(config.model), trainer_mesh(device), config.model.dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.train.learning_rate,
            betas=config.train.betas,
            eps=config.train.eps,
            weight_decay=config.train.weight_decay,
        )
        self.version = 0
        """Policy version of the weights: the number of steps taken."""
        self.skipped_steps = 0
        """Optimizer updates left out so far: their gradient was not finite, or they had no token to train."""

    def train_step(self, shard: Shard) -> dict[str, float]:
        """Train on one batch and make the next version. Returns metrics over all ranks, the same on each.

        Raises:
            ContractError: the batch breaks the age contract or its own counts, or a gradient is not finite and
                train.on_nonfinite is "stop". The version stays what it was.
        """
        plan = self._plan(shard)
        proximal = self._proximal(plan) if len(plan.minibatches) > 1 else None
        rate = learning_rate(self._config.train, self._config.run.steps, self.version)
        tally, norms = Tally(), list[float]()
        for index, minibatch in enumerate(plan.minibatches):
            for place, micro in enumerate(minibatch.micro_batches):
                self._backward(micro, minibatch, shard.step, proximal[index][place] if proximal else None, tally)
            norms.append(self._update(rate, trained=minibatch.total_tokens > 0))
        self.version += 1
        finite = [norm for norm in norms if math.isfinite(norm)]
        return (
            batch_metrics(shard, plan)
            | token_metrics(tally, len(plan.minibatches))
            | {
                "grad_norm": sum(finite) / len(finite) if finite else 0.0,
                "learning_rate": rate,
                "skipped_steps": float(self.skipped_steps),
            }
        )

    def _plan(self, shard: Shard) -> StepPlan:
        """Pack, check the laws, and agree on counts: one collective."""
        config, fault = self._config.train, ""
        ages = max(shard.step - max(shard.min_version, 0) + 1, 1)
        parts: list[list[MicroBatch]] = [[] for _ in range(config.minibatches)]
        advantage_B = np.zeros(0)
        histogram = np.zeros(ages, dtype=np.int64)
        try:
            advantage_B = batch_advantages(shard)
            parts = [
                pack(
                    part,
                    advantage_B,
                    min_version=shard.min_version,
                    max_tokens=config.max_tokens_per_microbatch,
                )
                for part in split_minibatches(shard, config.minibatches)
            ]
            age_T = trained_ages(shard.step, [micro for part in parts for micro in part])
            self._check_ages(shard, age_T)
            histogram = np.bincount(age_T, minlength=ages)
        except ContractError as error:
            fault = str(error)

        tokens = sum(sample.trajectory.length for sample in shard.samples)
        counts = [count for part in parts for count in (len(part), *trained_counts(part))]
        row = torch.tensor([bool(fault), tokens, *histogram.tolist(), *counts], device=self.model.device)
        rows = gather_rows(row).cpu().numpy()
        if rows[:, 0].any():
            ranks = np.flatnonzero(rows[:, 0]).tolist()
            raise ContractError(fault or f"trainer ranks {ranks} refused their part of the batch of step {shard.step}")

        grid = rows[:, 2 + ages :].reshape(len(rows), config.minibatches, 3)
        minibatches = [
            MinibatchPlan(
                # At least one micro-batch, so that every rank reports the same statistics.
                micro_batches=part + [DUMMY] * (max(int(grid[:, index, 0].max()), 1) - len(part)),
                total_tokens=int(grid[:, index, 1].sum()),
                total_sequences=int(grid[:, index, 2].sum()),
            )
            for index, part in enumerate(parts)
        ]
        check_totals(shard, minibatches)
        return StepPlan(minibatches, advantage_B, int(rows[:, 1].sum()), rows[:, 2 : 2 + ages].sum(0).tolist())

    def _check_ages(self, shard: Shard, age_T: np.ndarray) -> None:
        """The age contract at consumption: version n trains only tokens of versions n − α … n."""
        if shard.step != self.version:
            raise ContractError(f"a batch for version {shard.step} reached a trainer that holds version {self.version}")
        limit = self._config.train.async_ratio
        if age_T.size and (age_T.max() > limit or age_T.min() < 0):
            raise ContractError(
                f"step {shard.step}: token ages run from {age_T.min()} to {age_T.max()}, the contract allows 0 to "
                f"{limit:g} (train.async_ratio); the hub's min_version was {shard.min_version}"
            )

    @torch.no_grad()
    def _proximal(self, plan: StepPlan) -> list[list[Tensor]]:
        """Log-probs under the weights before the first update, per minibatch and micro-batch."""
        return [[self._forward(micro).logp_T for micro in part.micro_batches] for part in plan.minibatches]

    def _forward(self, micro: MicroBatch) -> TokenLogprobs:
        return token_logprobs(
            self.model,
            input_P=self._tensor(micro.input_P),
            position_P=self._tensor(micro.position_P),
            offset_S=self._tensor(micro.offset_S),
            keep_T=self._tensor(micro.keep_T),
            target_T=self._tensor(micro.target_T),
            longest=int(np.diff(micro.offset_S).max()),
            temperature=self._config.rollout.temperature,
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)

    def _backward(
        self, micro: MicroBatch, whole: MinibatchPlan, step: int, proximal_T: Tensor | None, tally: Tally
    ) -> None:
        """Add one micro-batch's share of the gradient, and book its statistics."""
        now = self._forward(micro)
        mask_T = self._tensor(micro.mask_T)
        # Masked slots are emptied before the arithmetic: 0 · NaN in a backward pass would still be NaN.
        tokens = PackedTokens(
            logp_T=now.logp_T.where(mask_T, 0.0),
            behaviour_T=self._tensor(micro.behaviour_T).where(mask_T, 0.0),
            proximal_T=(now.logp_T.detach() if proximal_T is None else proximal_T).where(mask_T, 0.0),
            advantage_T=self._tensor(micro.advantage_T).where(mask_T, 0.0),
            mask_T=mask_T,
            sequence_T=self._tensor(micro.sequence_T),
            sequences=micro.sequences,
        )
        output = self._objective(tokens)
        weight_T = token_weights(
            self._config.algorithm.aggregation,
            mask_T,
            tokens.sequence_T,
            tokens.sequences,
            total_tokens=whole.total_tokens,
            total_sequences=whole.total_sequences,
        )
        loss_T = output.loss_T.where(mask_T, 0.0) * weight_T
        # FSDP averages gradients over ranks; the loss is already a share of the whole batch.
        (loss_T.sum() * dist.get_world_size()).backward()

        current_T = mask_T & (self._tensor(micro.version_T) == step)
        book_tokens(tally, tokens, current_T)
        tally.add("loss", loss_T, mask_T)
        tally.add("entropy", now.entropy_T, mask_T)
        for name, stat_T in output.stats.items():
            tally.add(f"stat {name}", stat_T, mask_T)
            tally.bound(f"stat {name}", stat_T, mask_T)

    def _update(self, rate: float, *, trained: bool) -> float:
        """Clip, check and apply the gradient. Returns its global norm before clipping."""
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm_tensor = get_total_norm(grads)
        norm = float(norm_tensor.full_tensor() if isinstance(norm_tensor, DTensor) else norm_tensor)
        if not math.isfinite(norm) and self._config.train.on_nonfinite == "stop":
            raise ContractError(
                f"step {self.version}: the gradient norm is {norm}; look at the last metrics for a loss or ratio that "
                'runs away, lower train.learning_rate, or set train.on_nonfinite = "skip"'
            )
        if trained and math.isfinite(norm):
            limit = self._config.train.max_grad_norm
            if norm > limit:
                for grad in grads:
                    grad.mul_(limit / norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        else:
            self.skipped_steps += 1
        self.optimizer.zero_grad()
        return norm


def make_objective(config: AlgorithmConfig) -> Objective:
    """The configured objective with its options.

    Raises:
        ConfigError: there is no such objective, or an option does not fit.
    """
    kind = load_objective(config.objective)
    return kind(**check_options(kind, config.options, "algorithm.options"))


def learning_rate(train: TrainConfig, steps: int, step: int) -> float:
    """Of step 0 … steps − 1: linear warm-up to the peak, then the decay, which ends at the last step."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    if train.decay == "constant":
        return train.learning_rate
    done = min((step - train.warmup_steps) / max(steps - 1 - train.warmup_steps, 1), 1.0)
    left = 1 - done if train.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return train.final_learning_rate + (train.learning_rate - train.final_learning_rate) * left


def gather_rows(row: Tensor) -> Tensor:
    """[N] of each rank to [W, N] on all."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def batch_advantages(shard: Shard) -> FloatArray:
    """float64 [B]: every sample's advantage, computed alike on every rank from the rewards of the whole batch.

    Members of a group that were trained before count for its mean and deviation.
    """
    known = [*shard.rewards, *shard.earlier]
    try:
        advantages = group_advantages([entry.reward for entry in known], [entry.group_id for entry in known])
        return advantages[: len(shard.rewards)]
    except ValueError as error:
        raise ContractError(f"step {shard.step}: {error}") from error


def trained_ages(step: int, micro_batches: Sequence[MicroBatch]) -> np.ndarray:
    """int64: the age of every unmasked token of these micro-batches."""
    ages = [step - micro.version_T[micro.mask_T] for micro in micro_batches]
    return np.concatenate(ages) if ages else np.zeros(0, dtype=np.int64)


def trained_counts(micro_batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Unmasked tokens, and sequences that have one."""
    tokens = sum(int(micro.mask_T.sum()) for micro in micro_batches)
    return tokens, sum(len(np.unique(micro.sequence_T[micro.mask_T])) for micro in micro_batches)


def check_totals(shard: Shard, minibatches: Sequence[MinibatchPlan]) -> None:
    """What the ranks hold together must be what the hub said it dealt."""
    tokens = sum(part.total_tokens for part in minibatches)
    sequences = sum(part.total_sequences for part in minibatches)
    if (tokens, sequences) != (shard.total_tokens, shard.total_sequences):
        raise ContractError(
            f"step {shard.step}: the ranks hold {tokens} trained tokens in {sequences} sequences, the hub dealt "
            f"{shard.total_tokens} in {shard.total_sequences}"
        )


def book_tokens(tally: Tally, tokens: PackedTokens, current_T: Tensor) -> None:
    """Book how far the engine's log-probs are from the trainer's, for all tokens and for the current version's."""
    log_ratio_T = tokens.proximal_T - tokens.behaviour_T
    k3_T = log_ratio_T.exp() - 1 - log_ratio_T
    for which, chosen_T in (("all", tokens.mask_T), ("current", current_T)):
        tally.add(f"count {which}", chosen_T, chosen_T)
        tally.add(f"k1 {which}", -log_ratio_T, chosen_T)
        tally.add(f"k3 {which}", k3_T, chosen_T)
        tally.bound(f"gap {which}", log_ratio_T.abs(), chosen_T)


def token_metrics(tally: Tally, minibatches: int) -> dict[str, float]:
    """Means over the trained tokens of all ranks.

    The mismatch is engine against trainer at equal weights, so it is taken over tokens of the current version; over all
    tokens when there are none, and then it contains the policy's drift.
    """
    sums, least, most = tally.reduce()
    which = "current" if sums["count current"] > 0 else "all"
    count, compared = max(sums["count all"], 1.0), max(sums[f"count {which}"], 1.0)
    metrics = {
        "loss": sums["loss"] / minibatches,
        "entropy": sums["entropy"] / count,
        "trained_tokens": sums["count all"],
        "mismatch_kl": sums[f"k1 {which}"] / compared,
        "mismatch_k3": sums[f"k3 {which}"] / compared,
        "mismatch_max": max(most[f"gap {which}"], 0.0),
    }
    for name in (key.removeprefix("stat ") for key in sums if key.startswith("stat ")):
        mean = sums[f"stat {name}"] / count
        if name == "clipped":
            metrics["clip_fraction"] = mean
        elif sums["count all"]:
            metrics |= {
                f"{name}_mean": mean,
                f"{name}_min": least[f"stat {name}"],
                f"{name}_max": most[f"stat {name}"],
            }
    return metrics


def batch_metrics(shard: Shard, plan: StepPlan) -> dict[str, float]:
    """What is known of the batch without a forward pass."""
    reward_B = np.array([entry.reward for entry in shard.rewards])
    counts = np.array(plan.age_histogram, dtype=np.float64)
    share = counts / max(counts.sum(), 1.0)
    ages = np.flatnonzero(counts)
    return {
        "tokens": float(plan.tokens),
        "age_mean": float(share @ np.arange(len(share))),
        "age_max": float(ages.max()) if ages.size else 0.0,
        **{f"age_{age}": float(share[age]) for age in ages},
        "reward_mean": float(reward_B.mean()),
        "reward_std": float(reward_B.std()),
        "advantage_abs_mean": float(np.abs(plan.advantage_B).mean()),
    }
