"""The models that the policy is compared with, and their forward passes before an update.

The models are the reference of a KL (an earlier or other policy, from which the policy may not move far), a teacher (a
model that the policy shall imitate), the critics (value models), and an exponentially weighted moving average of the
policy's weights. `flash.trainer.step` loads these models at the start of a run, calls `forward_passes` in each step
before the policy changes, and keeps the average and a refreshed reference up to date.

The average follows Hilton et al. 2021 (arXiv 2110.00641, section 3.2). In the average over the versions 0 … n, version
n − i has the weight decay^i. The weights are divided by their sum, so that early averages are not biased towards the
first version.

Every pass is a collective, because FSDP gathers a layer's weights from all ranks in each pass: all ranks run the same
passes in the same order, with equally many micro-batches. After the passes of a model, `reshard` frees the gathered
weights.

Shape legend: T = action tokens of a micro-batch, M = critics.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flash.config.tree import Config
from flash.errors import ConfigError
from flash.foreign.peft import without_adapters
from flash.trainer.critic import Critic
from flash.trainer.mesh import TrainerMesh, device_of, to_device
from flash.trainer.model.logprobs import policy_logprobs, watch_attention
from flash.trainer.model.model import load_sharded, published_parameters, reshard
from flash.trainer.model.packing_check import check_packing
from flash.trainer.packing import MicroBatch
from flash.trainer.rhythm import MicroSignals, RhythmPass


@dataclass(frozen=True)
class StepModels:
    """The policy, and all models whose results a step needs before its first update."""

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    """Reference of the KL; None without a KL. With LoRA, it is the policy itself if the reference is the policy's
    base: the pass then runs without the adapters."""
    teacher: PreTrainedModel | None
    """Teacher in this process; None if there is none, or if a server's log-probs came with the samples."""
    critics: Sequence[Critic]
    average: Mapping[str, Tensor] | None
    """Moving average of the policy's weights. None if the objective does not use the average as its proximal policy,
    the policy around which the objective clips."""


@dataclass(frozen=True)
class ModelOutputs:
    """Results of the forward passes over one micro-batch before the update; [T] float32, no gradient.

    A result is None if the step does not need it.
    """

    start_T: Tensor | None
    """Log-probs of the tokens under the policy at the start of the step."""
    average_T: Tensor | None
    """Log-probs under the average of the policy's weights."""
    reference_T: Tensor | None
    """Log-probs under the reference."""
    teacher_T: Tensor | None
    """Log-probs under the teacher."""
    value_MT: Tensor | None
    """Values of the critics."""
    signals: MicroSignals | None
    """Signals of the policy's attention at the start of the step; None if no pass here observes it. They multiply
    advantages (`flash.trainer.rhythm`)."""


@torch.no_grad()
def forward_passes(
    micro_batches: Sequence[MicroBatch],
    models: StepModels,
    device: torch.device,
    *,
    start: bool,
    rhythm: RhythmPass | None,
    served_teacher: bool,
) -> list[ModelOutputs]:
    """Run the forward passes of a step, one model after another, and return their results per micro-batch.

    All ranks must call this together.

    Args:
        micro_batches: this rank's micro-batches of the step.
        models: the models of the step.
        device: where the log-probs of a served teacher are put.
        start: True computes the policy's log-probs at the start of the step.
        rhythm: observes the policy's attention, if given.
        served_teacher: True if the teacher runs on a server. The log-probs of this teacher came with the samples, and
            are taken from the micro-batches.

    Raises:
        ConfigError: a model changes its logits after its output layer in a way that is not known.
        ContractError: a critic has no embedding for a token of this rank, or an engine reported experts that the policy
            does not have. Only the rank that holds such a token raises this; its process then ends.
    """
    nothing: list[Tensor | None] = [None] * len(micro_batches)

    def logprobs(model: PreTrainedModel | None, *, routed: bool = True) -> list[Tensor | None]:
        # Return the log-probs of all micro-batches under a model; None for each if there is no model. With `routed`, a
        # mixture of experts uses the experts that the engine chose when it sampled, if the samples come with them.
        if model is None:
            return nothing
        found: list[Tensor | None] = [
            policy_logprobs(model, micro if routed else replace(micro, routes=None)).logp_T for micro in micro_batches
        ]
        reshard(model)
        return found

    # Run the policy itself. If only its attention is needed, the output layer computes no more than one token.
    starts, signals = nothing, list[MicroSignals | None]([None] * len(micro_batches))
    if start or rhythm is not None:
        starts = []
        for place, micro in enumerate(micro_batches):
            watch = None if rhythm is None else rhythm.watch(micro)
            logp_T = None
            if start:
                logp_T = policy_logprobs(models.policy, micro, watch=watch).logp_T
            elif watch is not None:
                watch_attention(models.policy, micro, watch)
            starts.append(logp_T)
            if rhythm is not None and watch is not None:
                signals[place] = rhythm.collect(watch)
        reshard(models.policy)
    with without_adapters(models.policy) if models.reference is models.policy else nullcontext():
        # The reference chooses its own experts, even if it is the policy without its adapters, because the engines
        # chose their routes with the adapters.
        references = logprobs(models.reference, routed=False)
    if served_teacher:
        teachers: list[Tensor | None] = [to_device(micro.teacher_T, device) for micro in micro_batches]
    else:
        teachers = logprobs(models.teacher)
    averages = nothing
    if models.average is not None:
        with swapped_in(models.average, models.policy):
            averages = logprobs(models.policy)
    values = nothing
    if models.critics:
        values = [torch.stack([critic.values(micro) for critic in models.critics]) for micro in micro_batches]
    columns = zip(starts, averages, references, teachers, values, signals, strict=True)
    return [ModelOutputs(*column) for column in columns]


def load_reference(config: Config, mesh: TrainerMesh, policy: PreTrainedModel) -> PreTrainedModel | None:
    """Return the reference policy of the configured KL, sharded like the policy; None without a KL.

    With LoRA and no other reference, the result is `policy` itself: `forward_passes` runs it without its adapters.

    Raises:
        ConfigError: the reference cannot be loaded or packed, has another tokenizer, or is to be refreshed and has
            other shapes than the policy.
    """
    kl = config.algorithm.kl
    if kl is None:
        return None
    path = kl.reference or config.model.path
    if config.lora is not None and path == config.model.path:
        reference = policy
    else:
        reference = load_frozen(config, mesh, "algorithm.kl.reference", path)
    if kl.refresh is None:
        return reference
    # The policy will be copied to the reference, tensor by tensor.
    own, other = ({name: value.shape for name, value in one.named_parameters()} for one in (policy, reference))
    if own != other:
        name = min(own.items() ^ other.items())[0]
        raise ConfigError(
            f"algorithm.kl.refresh: the policy cannot become the reference {kl.reference}, whose {name} has the shape "
            f"{tuple(other.get(name, ()))} and not {tuple(own.get(name, ()))}; "
            "remove algorithm.kl.refresh or algorithm.kl.reference"
        )
    return reference


def load_frozen(config: Config, mesh: TrainerMesh, key: str, path: str) -> PreTrainedModel:
    """Return the model at `path`, sharded like the policy and never trained. `key` is its key in the configuration.

    Raises:
        ConfigError: the model cannot be loaded or packed, or has another tokenizer than the policy. The message begins
            with `key`.
    """
    described = msgspec.structs.replace(config.model, path=path)
    try:
        check_tokenizer(config, key, path)
        model = load_sharded(described, mesh).requires_grad_(False)
        check_packing(model, config)
    except ConfigError as error:
        raise ConfigError(f"{key}: {str(error).removeprefix('model.path: ').removeprefix(key + ': ')}") from error
    return model


def check_tokenizer(config: Config, key: str, path: str) -> None:
    """Check that the model at `path` has the policy's tokenizer. `key` is its key in the configuration.

    All models get the policy's token ids, so a model with another tokenizer would read another text. The check is
    skipped if the policy or the model comes without a tokenizer.

    Raises:
        ConfigError: the tokenizers give a token different numbers, or only one of them has it.
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
    """Return the id of each token of a model; empty if the model comes without a tokenizer that can be loaded.

    `trust` is True if code that comes with the model may be run.
    """
    from transformers import AutoTokenizer

    local = Path(path).is_dir()
    if local and not any(Path(path).glob("tokenizer*")):
        return {}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=local, trust_remote_code=trust)
    except Exception:  # damaged files cause errors of many types, and a model's own code may raise any
        return {}
    return dict(tokenizer.get_vocab())


@torch.no_grad()
def copy_weights(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copy a model's parameters into `weights`, by name. `weights` must be sharded like the model.

    `flash.trainer.step` refreshes the reference with it. Each rank copies its own shards.
    """
    for name, parameter in model.named_parameters():
        _local(weights[name]).copy_(_local(parameter))


def start_average(model: nn.Module) -> dict[str, Tensor]:
    """Return the average at version 0: a copy of the published parameters by name, sharded like the model."""
    return {name: parameter.detach().clone() for name, parameter in published_parameters(model)}


@torch.no_grad()
def update_average(average: Mapping[str, Tensor], model: nn.Module, decay: float, version: int) -> None:
    """Add the weights of `version` to the average, which holds all versions before `version`.

    Call this once for each version from 1 on, in order: the average at version 0 is `start_average`. The share of
    version n in the average over 0 … n is (1 − decay) / (1 − decay^(n + 1)), because its weight is decay^0 = 1 and all
    weights sum to (1 − decay^(n + 1)) / (1 − decay).

    Args:
        average: the average, which is changed.
        model: the model, which now has the weights of `version`.
        decay: weight of a version relative to the next one, below 1 (`ewma_decay`).
        version: number of the version.
    """
    share = (1 - decay) / (1 - decay ** (version + 1))
    for name, parameter in published_parameters(model):
        _local(average[name]).lerp_(_local(parameter), share)


@contextmanager
def swapped_in(average: Mapping[str, Tensor], model: nn.Module) -> Generator[None]:
    """Make the model compute with the weights of the average inside of the block. No backward pass may run in it.

    After the block, also after an error, model and average have their own weights again.
    """
    _exchange(average, model)
    try:
        yield
    finally:
        _exchange(average, model)


@torch.no_grad()
def _exchange(average: Mapping[str, Tensor], model: nn.Module) -> None:
    """Swap the contents of the average and the model; `swapped_in` does so before and after its block.

    One parameter is swapped at a time, so that memory does not have to hold another copy of the model.
    """
    # Free gathered weights. Otherwise FSDP would continue to use weights that it had gathered before the swap.
    reshard(model)
    if device_of(model).type == "cuda":
        # The GPU may still be copying weights from the host, and a write on the host does not wait for that.
        torch.cuda.synchronize()
    for name, parameter in published_parameters(model):
        mine, other = _local(parameter), _local(average[name])
        held = mine.clone()
        mine.copy_(other)
        other.copy_(held)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which shares memory with `tensor`. If `tensor` is not sharded, return it whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
