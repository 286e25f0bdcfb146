"""The critics: value models that predict the return the policy may expect before each action token.

A run has critics if the advantage estimator is `gae`, which compares rewards with the critics' values. A critic's
backbone starts as the policy's model, or as the model at `critic.path`. On top is one linear output that starts at
zero. A critic is sharded like the policy, keeps float32 master weights, and has its own optimizer. Several critics
start with equal weights. They become different because each learns from its own part of the responses
(`algorithms.critics.assign_critics`).

`flash.trainer.references` calls `Critic.values` before the policy changes, and `flash.trainer.step` calls
`Critic.update` for each minibatch. The *return* of a token is the regression target of its value
(`flash.trainer.plan.TokenAdvantages`). An *action token* is a token that the policy sampled.

Making a critic, `Critic.values`, `Critic.update` and `critic_metrics` are collectives, in which ranks exchange data:
all ranks make these calls in the same order, with equally many micro-batches (the input of one forward and backward
pass).

Shape legend: P = packed tokens, S = sequences, T = action tokens of a micro-batch, M = action tokens whose hidden state
is on this rank (with context parallelism a rank has only a part of the tokens). In other modules M is the number of
critics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

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
"""Share of the returns' mean square. If the variance of the returns is below this share, it is only rounding error, in
float64 sums of up to about 10⁶ terms. `explained_variance`, which divides by the variance, would then be noise."""


class ValueModel(nn.Module):
    """A decoder without its output layer, and a linear head that maps each hidden state to one number, the value."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1)
        # With a random head the first advantages would be noise. With a head of zeros all values are 0, so that the
        # first advantages are the returns themselves.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, row: PackedRow, kept_M: Tensor) -> Tensor:
        """Return float32 [M, 1]: the value of the state that ends at each of the places `kept_M`.

        A place is an index into this rank's part of the row. The row has the sequences of a micro-batch one after
        another.
        """
        output = self.backbone(**model_inputs(self.backbone, row))
        # The head runs in float32 even with a bfloat16 backbone, because returns differ by less than bfloat16 resolves.
        return self.head(output.last_hidden_state[0, kept_M].float())


class CriticBatch(NamedTuple):
    """Input of a critic's update from one micro-batch: the sequences that this critic learns from."""

    micro: MicroBatch
    return_T: Tensor
    """Regression target of each token's value."""
    old_T: Tensor
    """Value of each token at the start of the step."""


def critic_batch(micro: MicroBatch, return_T: Tensor, old_T: Tensor, keep_S: np.ndarray) -> CriticBatch:
    """Return the input of `Critic.update` for the sequences of a micro-batch that one critic learns from.

    `flash.trainer.step` calls this for each critic. If no sequence is chosen, the input is a micro-batch of one masked
    token (`flash.trainer.packing.DUMMY`). All ranks must run equally many micro-batches, because each micro-batch is a
    collective.

    Args:
        micro: the micro-batch.
        return_T: regression target of each action token's value.
        old_T: value of each action token at the start of the step.
        keep_S: bool [S], True for the chosen sequences.
    """
    if not keep_S.any():
        return CriticBatch(select_sequences(micro, keep_S), torch.zeros(1), torch.zeros(1))
    keep_T = torch.from_numpy(keep_S[micro.sequence_T]).to(return_T.device)
    return CriticBatch(select_sequences(micro, keep_S), return_T[keep_T], old_T[keep_T])


class Critic:
    """A value model and its optimizer. The default process group must consist of all trainer ranks."""

    def __init__(self, config: Config, mesh: TrainerMesh) -> None:
        """Load and shard the value model of `config.critic`, which must be set. `mesh` is the mesh of the policy.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        assert config.critic is not None, "a run without [critic] has no critic"
        self._config, self.mesh = config.critic, mesh
        self._on_nonfinite: Literal["stop", "skip"] = config.train.on_nonfinite
        self._max_grad_norm = config.train.max_grad_norm
        # `eval` turns dropout off; it does not turn gradients off.
        self.model = ValueModel(_backbone(config, mesh)).eval()
        fully_shard(self.model, mesh=mesh.fsdp, offload_policy=mesh.offload_policy, reshard_after_forward=False)
        rate = self._config.learning_rate
        # Muon is for the matrices of a language model, so a critic always has AdamW.
        train = msgspec.structs.replace(config.train, learning_rate=rate, optimizer="adamw")
        self.optimizer = make_optimizer(self.model, train)
        self.scale = LossScale(config.model.dtype)
        """Factor of the loss in float16; 1 in other dtypes."""
        self.sums = torch.zeros(7, dtype=torch.float64, device=mesh.device)
        """Sums over the trained tokens of this rank since the last call of `critic_metrics`: of 1 (the count), loss, V,
        R, R², R − V and (R − V)², where V is the value at the start of the step and R the return."""
        self.norms: list[float] = []
        """Gradient norms of the updates since the last call of `critic_metrics`."""

    @torch.no_grad()
    def values(self, micro: MicroBatch) -> Tensor:
        """Return float32 [T], on the model's device: the value of the state before each action token.

        Tokens that are not trained get a value, too. The state before an action token includes all tokens up to the
        place `before_T` of the micro-batch.

        Raises:
            ContractError: the micro-batch has a token that the backbone has no embedding for.
        """
        value_T = self._forward(micro)
        reshard(self.model)
        return value_T

    def update(self, batches: Sequence[CriticBatch], total_tokens: int) -> None:
        """Make one optimizer update towards the returns, with the clipped value loss, and add to the metrics.

        Args:
            batches: this rank's micro-batches. Returns and old values of tokens that are not trained may be anything.
            total_tokens: trained tokens of the batches over all ranks. The loss is the mean over these tokens, so the
                gradient does not depend on how the minibatch was cut. With 0, no weight changes.

        Raises:
            ContractError: the gradient is not finite and `train.on_nonfinite` is "stop", or the backbone has no
                embedding for a token.
        """
        # FSDP averages gradients over data shards. The loss is divided by the tokens of all shards already, so the
        # gradients must be summed instead: the factor `data_shards` in `share` undoes FSDP's division.
        share = self.mesh.data_shards / max(total_tokens, 1)
        for micro, return_T, old_T in batches:
            mask_T = to_device(micro.mask_T, self.mesh.device)
            # Values of tokens that are not trained are set to 0 first: 0 · NaN in a backward pass would still be NaN.
            value_T, return_T, old_T = (
                tensor_T.to(mask_T.device).where(mask_T, 0.0) for tensor_T in (self._forward(micro), return_T, old_T)
            )
            loss_T = value_loss(value_T, return_T, old_T, self._config.clip)
            (loss_T.sum() * (share * self.scale.value)).backward()
            return_T, old_T = return_T.double(), old_T.double()
            error_T = return_T - old_T
            rows = (torch.ones_like(old_T), loss_T.detach().double(), old_T, return_T, return_T.square(), error_T,
                    error_T.square())  # fmt: skip
            self.sums += torch.stack(rows).where(mask_T, 0.0).sum(-1)
        norm, _ = apply_gradient(
            self.model,
            self.optimizer,
            self.scale,
            rate=self._config.learning_rate,
            max_norm=self._max_grad_norm,
            trained=total_tokens > 0,
            on_nonfinite=self._on_nonfinite,
            name="critic",
            advice="look at critic_loss and return_mean, lower critic.learning_rate",
        )
        self.norms.append(norm)

    def _forward(self, micro: MicroBatch) -> Tensor:
        """Return [T]: the value before each action token, with a gradient if gradients are enabled.

        Raises:
            ContractError: the micro-batch has a token that the backbone has no embedding for.
        """
        vocabulary = int(self.model.backbone.config.vocab_size)
        if micro.input_P.max() >= vocabulary:
            raise ContractError(
                f"critic.path: the policy's token {micro.input_P.max()} lies outside of the critic's vocabulary of "
                f"{vocabulary}; choose a critic with the policy's tokenizer"
            )
        # Each rank of a context group computes a part of the row, and gets the values of the other parts.
        row = packed_row(micro, self.mesh.device).sliced(self.mesh.context)
        part, row_T = row.layout.row_slice, row.row_P[micro.before_T]
        value_M1 = self.model(row, to_device(row_T[part.holds(row_T)] - part.first, self.mesh.device))
        return part.gather_answers(value_M1, row_T)[:, 0]


def critic_metrics(critics: Sequence[Critic]) -> dict[str, float]:
    """Return the metrics of all critics since the last call, and clear `sums` and `norms`.

    All ranks must call this together, and the metrics are over all ranks. The metrics over the trained tokens are:

    - critic_loss, value_mean and return_mean;
    - explained_variance = 1 − Var(R − V) / Var(R), if the returns vary (`NO_VARIANCE`). R is the return of a token. V
      is the value at the start of the step, given by the critic that learns from the token.

    The metrics over the updates are:

    - critic_grad_norm, the mean norm before clipping;
    - critic_skipped, the number of updates left out because their gradient was not finite.
    """
    # A norm belongs to the whole gradient, so all ranks already have the same number. Only the sums must be reduced.
    sums = torch.stack([critic.sums for critic in critics]).sum(0)
    critics[0].mesh.reduce_sum(sums)
    norms = [norm for critic in critics for norm in critic.norms]
    for critic in critics:
        critic.sums = torch.zeros_like(critic.sums)
        critic.norms = []
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


def value_loss(value_T: Tensor, return_T: Tensor, old_T: Tensor, clip: float | None) -> Tensor:
    """Return [T]: the loss of each value. `old_T` has the values at the start of the step.

    If `clip` is None, the loss is (value − return)². Otherwise it is the larger of (value − return)² and
    (clipped − return)². The clipped value is `old` plus the difference value − old, and this difference is limited to
    −clip … clip. So a value that has moved further than `clip` towards its return has no gradient, unless it has moved
    past the return and is further from it than the clipped value. A value that has moved away from its return keeps its
    gradient. PPO's implementation has this rule (Schulman et al. 2017; Engstrom et al. 2020, section 3, "value function
    clipping").
    """
    error_T = (value_T - return_T).square()
    if clip is None:
        return error_T
    clipped_T = old_T + (value_T - old_T).clamp(-clip, clip)
    return error_T.maximum((clipped_T - return_T).square())


def _backbone(config: Config, mesh: TrainerMesh) -> PreTrainedModel:
    """Return the critic's decoder without an output layer, sharded. All ranks must call this together.

    The decoder comes from the model at `critic.path`; without this key, from the policy's model.

    Raises:
        ConfigError: the model cannot be loaded. The message names `critic.path` if that is set.
    """
    assert config.critic is not None
    path = config.critic.path or config.model.path
    model = msgspec.structs.replace(config.model, path=path)
    try:
        return load_sharded(model, mesh, recompute=recompute_mode(config.train), backbone=True)
    except ConfigError as error:
        if config.critic.path is None:
            raise
        raise ConfigError(f"critic.path: {str(error).removeprefix('model.path: ')}") from error
