"""Compute the memory that a trainer rank needs, by running its step on tensors without data; used by `flash plan`.

The model is made, divided, sharded and run by the code that trains it, while the bytes of all living tensors are
counted. The other ranks do not exist (`flash.foreign.torch.absent_ranks`), so that a layout of 512 ranks needs one
process. The numbers are those of a real run, with three exceptions. Activations are those of the CPU's kernels; a GPU's
fused kernels keep less. Experts that are divided over ranks are assumed to get equally many tokens. If all decoder
layers are alike, only a few are run, and each of the others is counted like the last one that was run.

A *kept set* has the tokens that a setting such as top_k left in the distribution from which a token was sampled.

Shape legend: T = predicted tokens, N = tokens of all kept sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from flash.config.learning import TrainConfig
from flash.config.tree import Config, ModelConfig
from flash.foreign.torch import absent_ranks, counted
from flash.foreign.transformers import head_width, layer_configs, layer_count, layer_types
from flash.trainer.mesh import TrainerMesh, trainer_mesh
from flash.trainer.model.adapters import empty_policy
from flash.trainer.model.logprobs import token_logprobs
from flash.trainer.model.model import Recompute, empty_model, recompute_mode, shard_model
from flash.trainer.model.output_layer import KeptSets
from flash.trainer.model.packed import takes_packed_rows
from flash.trainer.model.prefixes import in_one_row
from flash.trainer.objective import make_objective, resolve_method
from flash.trainer.optimizer import make_optimizer

FEW = 3
"""Number of decoder layers that are run. One is too few, because the first layer differs from the others: its input
needs no gradient."""
ABSENT = "meta"
"""Device that stands for the host's memory. Tensors on it are not counted as the rank's device memory."""


@dataclass(frozen=True)
class RankMemory:
    """Memory of one trainer rank in bytes, at the moment of a step at which it needs the most."""

    parameters: int
    """Number of parameters of the whole policy; not bytes."""
    weights: int
    """This rank's shard of the weights: float32, except for a base under adapters."""
    gradients: int
    """Gradients of the trained weights."""
    moments: int
    """Moments of the optimizer that are on the device."""
    others: int
    """This rank's shards of the critics with gradients and moments, the reference, the teacher and the average."""
    at_work: int
    """Gathered layers, activations and logits of one micro-batch of the policy."""
    loading: int
    """Weights when the run begins. With adapters, the base is then held in float32 in addition."""
    host: int
    """Bytes in the host's memory, because of `train.offload`."""

    @property
    def total(self) -> int:
        """Largest number of bytes on the device."""
        return max(self.weights + self.gradients + self.moments + self.others + self.at_work, self.loading)


def rank_memory(config: Config, ranks: int, few: int = FEW) -> RankMemory:
    """Return the memory of one of `ranks` trainer ranks, for a micro-batch filled with the longest sequences.

    Makes a default process group and destroys it; there must be none. Needs `config.json` of the model, no weights.
    `few` decoder layers are run if all layers are alike.

    Raises:
        ConfigError: the model cannot be divided or trained.
    """
    with absent_ranks(ranks):
        mesh = trainer_mesh("cpu", config.parallel, offloads="weights" in config.train.offload)
        policy = _policy(config, mesh)
        moments = _moments_of_model(policy, config.train)
        weights, trained = _parameter_bytes(policy), _parameter_bytes(policy, trained=True)
        if not takes_packed_rows(policy):
            # Each sequence is a micro-batch of its own.
            longest = min(config.train.max_tokens_per_microbatch, config.model.max_length)
            train = msgspec.structs.replace(config.train, max_tokens_per_microbatch=longest)
            config = msgspec.structs.replace(config, train=train)
        at_work = _at_work(config, mesh, policy, few)
        others = _others(config, mesh)
        loading = weights
        if config.lora is not None and config.model.dtype != "float32":
            loading += _parameter_bytes(_frozen(config.model, config.model.path, mesh))
    numbers = sum(parameter.numel() for parameter in policy.parameters())
    host = moments[1] + others[1] + _offloaded_inputs(config, policy)
    if mesh.offloads:
        pinned = _parameter_bytes(policy, pinned=True) + _parameter_bytes(policy, trained=True, pinned=True)
        host += pinned + moments[0] + others[0]
        return RankMemory(numbers, 0, 0, 0, 0, at_work, 0, host)
    return RankMemory(numbers, weights, trained, moments[0], others[0], at_work, loading, host)


def _offloaded_inputs(config: Config, policy: PreTrainedModel) -> int:
    """Return the bytes that the inputs of all decoder layers take on the host; 0 if they are not kept there."""
    if not isinstance(recompute_mode(config.train), str):
        return 0
    tokens = config.train.max_tokens_per_microbatch // config.parallel.context
    width = policy.config.get_text_config().hidden_size * getattr(torch, config.model.dtype).itemsize
    return layer_count(policy) * _pinned_size(tokens * width)


def _at_work(config: Config, mesh: TrainerMesh, policy: PreTrainedModel, few: int) -> int:
    """Return the bytes that a step needs in addition to the memory that the rank always keeps.

    `policy` is the sharded policy, and `few` the number of layers that are run if all are alike.
    """
    layers = [
        module for module in policy.modules() if type(module).__name__.removeprefix("FSDP") in layer_types(policy)
    ]
    copied = 0
    if mesh.offloads:
        # Weights are copied from the host in their own dtype and then cast to the run's. If the run is in float32, all
        # copies of a layer exist at once. Otherwise only one does, because each is cast before the next one is copied.
        copied_at_once = sum if config.model.dtype == "float32" else max
        copied = max((copied_at_once(sizes) for layer in layers if (sizes := _shard_sizes(layer))), default=0)
    unlike = len({tuple(parameter.shape for parameter in layer.parameters()) for layer in layers}) > 1
    if unlike or len(layers) <= few + 1:
        return _step_bytes(config, mesh, len(layers)) + copied
    # Each further layer needs as much as the last of the few.
    one, other = (_step_bytes(config, mesh, count) for count in (few, few + 1))
    return one + (len(layers) - few) * (other - one) + copied


def _step_bytes(config: Config, mesh: TrainerMesh, layers: int) -> int:
    """Return the bytes that a step of a model with this many layers needs in addition to weights, gradients and
    moments."""
    tokens, longest = config.train.max_tokens_per_microbatch, config.model.max_length
    lengths = [min(longest, tokens - start) for start in range(0, tokens, longest)]
    # All tokens differ, so that no sequences share a beginning, which would be computed only once.
    packed = in_one_row(np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]))
    before_T = np.concatenate([np.arange(start, stop - 1) for start, stop in pairwise(packed.offset_S)])
    target_T = np.arange(len(before_T))
    model = _policy(config, mesh, recompute=recompute_mode(config.train, ABSENT), layers=layers)
    with counted() as count:
        model.to_empty(device="cpu")
        # A first update, so that moments and gradients exist, as they do from a step's second micro-batch on.
        optimizer = make_optimizer(model, config.train, ABSENT)
        _update_once(model, optimizer)
        result = token_logprobs(model, packed, before_T, target_T, kept=_kept_sets(config, len(before_T)))
        result.logp_T.sum().backward()
        optimizer.step()
        kept = _parameter_bytes(model) + _parameter_bytes(model, trained=True) + _moments(optimizer)[0]
    return max(count.most - kept, 0)


def _kept_sets(config: Config, tokens: int) -> KeptSets | None:
    """Return kept sets of the largest size for this many tokens; None if the run samples from all tokens."""
    if not config.sampling.keeps:
        return None
    size = config.sampling.top_k
    count_T, zeros_N = torch.full((tokens,), size), torch.zeros(tokens * size)
    return KeptSets(zeros_N.long(), zeros_N.double(), zeros_N.double(), count_T, count_T.cumsum(0) - count_T, size)


def _update_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make an update with gradients of zero, and keep the gradients."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _moments_of_model(model: nn.Module, train: TrainConfig) -> tuple[int, int]:
    """Return the bytes of the optimizer's moments for a model on the meta device: on the device and on the host."""
    with counted():
        model.to_empty(device="cpu")
        optimizer = make_optimizer(model, train, ABSENT)
        _update_once(model, optimizer)
        return _moments(optimizer)


def _moments(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes of this rank's moments in an optimizer: on the device and on the host."""
    found = [0, 0]
    for one in (one for state in optimizer.state.values() for one in state.values() if one.dim() > 0):
        part = getattr(one, "_local_tensor", one)
        on_host, size = part.device.type == ABSENT, part.numel() * part.element_size()
        found[on_host] += _pinned_size(size) if on_host else size
    return found[0], found[1]


def _pinned_size(size: int) -> int:
    """Return the bytes that torch allocates for `size` bytes of pinned memory: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def _others(config: Config, mesh: TrainerMesh) -> tuple[int, int]:
    """Return the bytes of all tensors that a rank keeps beside the policy: on the device and on the host."""
    method = resolve_method(config, make_objective(config.algorithm))
    device, host = 0, 0
    if method.proximal == "ewma":
        device += _parameter_bytes(_policy(config, mesh), trained=True)
    kl, teacher = config.algorithm.kl, config.algorithm.teacher
    frozen = [kl.reference or config.model.path] if kl is not None else []
    if config.lora is not None and frozen == [config.model.path]:
        frozen = []  # the reference is the policy without its adapters
    frozen += [teacher.path] if teacher is not None and teacher.path is not None else []
    device += sum(_parameter_bytes(_frozen(config.model, path, mesh), pinned=mesh.offloads) for path in frozen)
    if method.critics:
        assert config.critic is not None
        critic = _frozen(config.model, config.critic.path or config.model.path, mesh)
        moments = _moments_of_model(critic, msgspec.structs.replace(config.train, optimizer="adamw"))
        device += method.critics * (2 * _parameter_bytes(critic, pinned=mesh.offloads) + moments[0])
        host = method.critics * moments[1]
    return device, host


def _policy(
    config: Config, mesh: TrainerMesh, *, recompute: Recompute = False, layers: int | None = None
) -> PreTrainedModel:
    """Return the sharded policy, on the meta device."""
    return shard_model(empty_policy(config, layers), mesh, config.model, recompute=recompute)


def _frozen(model: ModelConfig, path: str, mesh: TrainerMesh) -> PreTrainedModel:
    """Return the sharded model at `path`, on the meta device."""
    named = msgspec.structs.replace(model, path=path)
    return shard_model(empty_model(named), mesh, named)


def _parameter_bytes(model: nn.Module, *, trained: bool = False, pinned: bool = False) -> int:
    """Return the bytes of this rank's shard of the parameters.

    Args:
        model: the model.
        trained: True counts trained parameters only.
        pinned: True counts the bytes that the shard takes in pinned memory.
    """
    sizes = _shard_sizes(model, trained=trained)
    return sum(map(_pinned_size, sizes) if pinned else sizes)


def _shard_sizes(model: nn.Module, *, trained: bool = False) -> list[int]:
    """Return the bytes of this rank's shard of each parameter."""
    parts = [getattr(one, "_local_tensor", one) for one in model.parameters() if one.requires_grad or not trained]
    return [part.numel() * part.element_size() for part in parts]


@dataclass(frozen=True)
class EngineMemory:
    """Memory on each GPU of an engine, in bytes."""

    weights: int
    """Bytes of the weights, in the dtype of the run."""
    token: float
    """Bytes of the KV cache for one token."""


def engine_memory(config: Config, parameters: int) -> EngineMemory:
    """Return the memory of an engine that serves a policy of `parameters` parameters. Needs the model's config.json."""
    size, split = getattr(torch, config.model.dtype).itemsize, config.engine.tensor_parallel
    # If there are fewer key-value heads than GPUs, each GPU holds one.
    numbers = sum(
        2 * max(layer.num_key_value_heads / split, 1) * head_width(layer)
        for layer in layer_configs(empty_model(config.model))
    )
    return EngineMemory(parameters * size // split, numbers * size)
