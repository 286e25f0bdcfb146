"""The critics: value models of their own, which say what return the policy may expect before each action token.

A critic's backbone starts as the policy's model, or as `critic.path`; on top is one linear output that starts at zero.
It is sharded like the policy, keeps float32 master weights, and has its own optimizer. The value head runs in float32
also where the backbone runs in bfloat16: returns differ by less than bfloat16 resolves. Several critics begin alike and
come apart by what they learn from: each has responses of its own (`algorithms.critics`).

Everything here is a collective: all ranks make the same calls in the same order, with equally many micro-batches.
Shape legend: P = packed tokens, T = action tokens of a micro-batch, M = those that this rank answers for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from flash.config.tree import Config
from flash.errors import ConfigError, ContractError
from flash.trainer.mesh import TrainerMesh, to_device
from flash.trainer.model.model import load_sharded, recompute_mode, reshard
from flash.trainer.model.packed import PackedRow, model_inputs, packed_row
from flash.trainer.optimizer import LossScale, apply_gradient, make_optimizer
from flash.trainer.packing import MicroBatch, select_sequences

NO_VARIANCE = 1e-12
"""Share of the mean square below which a variance is rounding: float64 sums of up to some 10⁶ terms."""


class ValueModel(nn.Module):
    """A decoder and a linear head that maps each hidden state to one number."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1)
        # A random head would start the advantages with noise; from zero, they start as the returns themselves.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, row: PackedRow, kept_M: Tensor) -> Tensor:
        """float32 [M, 1]: the value of the state that ends at each of these tokens of what this rank has of the row."""
        output = self.backbone(**model_inputs(self.backbone, row))
        return self.head(output.last_hidden_state[0, kept_M].float())


class Lesson(NamedTuple):
    """What a critic is shown of a micro-batch."""

    micro: MicroBatch
    return_T: Tensor
    """What it is to learn."""
    old_T: Tensor
    """What its `values` said at the start of the step."""


def lesson_of(micro: MicroBatch, return_T: Tensor, old_T: Tensor, keep_S: np.ndarray) -> Lesson:
    """Of these sequences alone; without any, a masked token, so that all ranks have equally many micro-batches."""
    if not keep_S.any():
        return Lesson(select_sequences(micro, keep_S), torch.zeros(1), torch.zeros(1))
    keep_T = torch.from_numpy(keep_S[micro.sequence_T]).to(return_T.device)
    return Lesson(select_sequences(micro, keep_S), return_T[keep_T], old_T[keep_T])


class Critic:
    """A value model and its optimizer. The default process group consists of all trainer ranks."""

    def __init__(self, config: Config, mesh: TrainerMesh) -> None:
        """Load and shard the value model of `config.critic`, which must be there. `mesh`: the policy's.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        assert config.critic is not None, "a run without [critic] has no critic"
        self._config, self.mesh = config.critic, mesh
        self._on_nonfinite: Literal["stop", "skip"] = config.train.on_nonfinite
        self.model = ValueModel(_backbone(config, mesh)).eval()
        fully_shard(self.model, mesh=mesh.fsdp, offload_policy=mesh.offload_policy, reshard_after_forward=False)
        rate = self._config.learning_rate
        train = msgspec.structs.replace(config.train, learning_rate=rate, optimizer="adamw")
        self.optimizer = make_optimizer(self.model, train)
        self.scale = LossScale(config.model.dtype)
        self.tally = _Tally(mesh.device)
        """Of its updates since the last `critic_metrics`."""

    @torch.no_grad()
    def values(self, micro: MicroBatch) -> Tensor:
        """float32 [T], on the model's device: V of the state before each action token, masked ones included.

        The state before an action token is everything up to and including the token at its `keep_T`.
        """
        value_T = self._forward(micro)
        reshard(self.model)
        return value_T

    def update(self, lessons: Sequence[Lesson], total_tokens: int) -> None:
        """One optimizer update towards the returns, by the clipped value loss.

        Masked slots of returns and old values may hold anything. `total_tokens` counts the trained tokens of the
        lessons over all ranks: the loss is the mean over them, so the gradient does not depend on how the minibatch was
        cut. With none, nothing changes.

        Raises:
            ContractError: the gradient is not finite and train.on_nonfinite is "stop".
        """
        share = self.mesh.data_shards / max(total_tokens, 1)
        for micro, return_T, old_T in lessons:
            mask_T = self._tensor(micro.mask_T)
            # Masked slots are emptied before the arithmetic: 0 · NaN in a backward pass would still be NaN.
            value_T, return_T, old_T = (
                tensor_T.to(mask_T.device).where(mask_T, 0.0) for tensor_T in (self._forward(micro), return_T, old_T)
            )
            loss_T = value_loss(value_T, return_T, old_T, self._config.clip)
            # FSDP averages gradients over data shards; the loss is already a share of the whole minibatch.
            (loss_T.sum() * (share * self.scale.value)).backward()
            self.tally.add(loss_T, return_T, old_T, mask_T)
        norm, _ = apply_gradient(
            self.model,
            self.optimizer,
            self.scale,
            rate=self._config.learning_rate,
            max_norm=self._config.max_grad_norm,
            trained=total_tokens > 0,
            on_nonfinite=self._on_nonfinite,
            name="critic",
            advice="look at critic_loss and return_mean, lower critic.learning_rate",
        )
        self.tally.norms.append(norm)

    def _forward(self, micro: MicroBatch) -> Tensor:
        vocabulary = int(self.model.backbone.config.vocab_size)
        if micro.input_P.max() >= vocabulary:
            raise ContractError(
                f"critic.path: the policy's token {micro.input_P.max()} lies outside of the critic's vocabulary of "
                f"{vocabulary}; choose a critic with the policy's tokenizer"
            )
        row = packed_row(micro, self.mesh.device).sliced(self.mesh.context)
        part, row_T = row.layout.row_slice, row.row_P[micro.keep_T]
        value_M1 = self.model(row, self._tensor(row_T[part.holds(row_T)] - part.first))
        return part.gather_answers(value_M1, row_T)[:, 0]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.mesh.device)


def critic_metrics(critics: Sequence[Critic]) -> dict[str, float]:
    """Over all updates of all critics since the last call, and over all ranks: the same on each.

    critic_loss; explained_variance = 1 − Var(R − V) / Var(R), value_mean and return_mean over the trained tokens, each
    by the critic that learns from it, with V as `old` had it, so before any of the updates; critic_grad_norm before
    clipping; critic_skipped, the updates left out because of a gradient that is not finite. Returns that do not vary
    have no explained_variance.
    """
    sums = torch.stack([critic.tally.sums for critic in critics]).sum(0)
    critics[0].mesh.reduce_sum(sums)
    norms = [norm for critic in critics for norm in critic.tally.norms]
    for critic in critics:
        critic.tally.clear()
    tokens, *totals = sums.tolist()
    loss, value, returned, square, error, error_square = (total / max(tokens, 1.0) for total in totals)
    finite = [norm for norm in norms if math.isfinite(norm)]
    metrics = {
        "critic_loss": loss,
        "value_mean": value,
        "return_mean": returned,
        "critic_grad_norm": sum(finite) / len(finite) if finite else 0.0,
        "critic_skipped": float(len(norms) - len(finite)),
    }
    variance = square - returned**2
    if variance > NO_VARIANCE * square:
        metrics["explained_variance"] = 1 - (error_square - error**2) / variance
    return metrics


def check_tokenizer(config: Config, key: str, path: str) -> None:
    """Whether the model at a path, which a key names, reads tokens as the policy writes them, as far as both models
    have a tokenizer.

    Raises:
        ConfigError: their tokenizers give some token different numbers, or only one of them has it.
    """
    if path == config.model.path:
        return
    policy, reader = (_vocabulary(one, trust=config.model.trust_remote_code) for one in (config.model.path, path))
    if not policy or not reader or policy == reader:
        return
    token = min(policy.items() ^ reader.items(), key=lambda item: item[1])[0]
    mine, other = (str(one.get(token, "no number")) for one in (policy, reader))
    raise ConfigError(
        f"{key}: the tokenizer of {path} is not that of the policy {config.model.path}: {token!r} has {other} "
        f"there and {mine} here; choose a model with the policy's tokenizer"
    )


def _vocabulary(path: str, *, trust: bool) -> dict[str, int]:
    """Token to number; empty where there is no tokenizer."""
    from transformers import AutoTokenizer

    local = Path(path).is_dir()
    if local and not any(Path(path).glob("tokenizer*")):
        return {}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=local, trust_remote_code=trust)
    except (OSError, ValueError):
        return {}
    return dict(tokenizer.get_vocab())


def value_loss(value_T: Tensor, return_T: Tensor, old_T: Tensor, clip: float | None) -> Tensor:
    """Squared error [T]; with a clip, that of old + clip(value − old, ±clip) where that is the larger.

    A value that moved further than `clip` towards its return has no gradient; one that moved away keeps it. From the
    implementation of PPO (Schulman et al. 2017; see Engstrom et al. 2020, section 3, "value function clipping").
    """
    error_T = (value_T - return_T).square()
    if clip is None:
        return error_T
    clipped_T = old_T + (value_T - old_T).clamp(-clip, clip)
    return error_T.maximum((clipped_T - return_T).square())


def _backbone(config: Config, mesh: TrainerMesh) -> PreTrainedModel:
    """The decoder without its output layer, sharded."""
    assert config.critic is not None
    path = config.critic.path or config.model.path
    model = msgspec.structs.replace(config.model, path=path)
    try:
        return load_sharded(model, mesh, recompute=recompute_mode(config.train), backbone=True)
    except ConfigError as error:
        if config.critic.path is None:
            raise
        raise ConfigError(f"critic.path: {str(error).removeprefix('model.path: ')}") from error


class _Tally:
    """Sums over the trained tokens of this rank's micro-batches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Start anew."""
        self.norms: list[float] = []
        self.sums = torch.zeros(7, dtype=torch.float64, device=self._device)

    def add(self, loss_T: Tensor, return_T: Tensor, old_T: Tensor, mask_T: Tensor) -> None:
        """Masked slots of the three hold zeros or what follows from them, and are left out."""
        return_T, old_T = return_T.double(), old_T.double()
        error_T = return_T - old_T
        rows = (torch.ones_like(old_T), loss_T.detach().double(), old_T, return_T, return_T.square(), error_T,
                error_T.square())  # fmt: skip
        self.sums += torch.stack(rows).where(mask_T, 0.0).sum(-1)
