"""Computes the memory that a trainer rank needs, by running its step on tensors without data; used by `flash plan`.

The model is made, divided, sharded and run by the code that trains it. Inside the block `counted()` tensors have a
shape and no data, and the bytes of living tensors are counted. In this block, the device "cpu" stands for the rank's
own device and "meta" for the host's memory. The other ranks do not exist (`flash.foreign.torch.absent_ranks`), so a
layout of 512 ranks needs one process.

The numbers equal the numbers of a real run, with three exceptions. Activations are counted for the CPU's kernels; a
GPU's fused kernels keep less. Experts that are divided over ranks are assumed to get equally many tokens. If all
decoder layers are alike, only a few are run, and each further layer is counted like the last of these.

A *micro-batch* is the input of one forward and backward pass. *Moments* are the tensors that the optimizer keeps for
each weight. *Pinned* memory is memory of the host from which a GPU copies fast. A *kept set* has the tokens that a
setting such as top_k left in the distribution from which a token was sampled.

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
from flash.trainer.model.logprobs import KeptSets, token_logprobs
from flash.trainer.model.model import Recompute, empty_model, recompute_mode, shard_model
from flash.trainer.model.packed import takes_packed_rows
from flash.trainer.objective import make_objective, resolve_method
from flash.trainer.optimizer import make_optimizer
from flash.trainer.packing import in_one_row

FEW = 3
"""Number of decoder layers that are run if all are alike. One is too few, because the first layer differs from the
others: its input needs no gradient."""
HOST = "meta"
"""Device that stands for the host's memory. Tensors on this device are not counted as memory of the rank's device."""


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
    """Weights of layers that FSDP has gathered from all ranks, activations and logits of one micro-batch of the policy,
    or the memory of an update if that is more."""
    loading: int
    """Weights when the run begins. With adapters, and a `model.dtype` other than float32, the base is then held in
    float32 in addition."""
    host: int
    """Bytes in the host's memory, because of `train.offload`. If `train.offload` names the weights, everything that a
    rank keeps between steps is on the host, and the fields above are 0 except `parameters` and `at_work`."""

    @property
    def total(self) -> int:
        """Largest number of bytes on the device."""
        return max(self.weights + self.gradients + self.moments + self.others + self.at_work, self.loading)


def rank_memory(config: Config, ranks: int, few: int = FEW) -> RankMemory:
    """Return the memory of one of `ranks` trainer ranks, for a micro-batch filled with the longest sequences.

    The function makes a default process group and destroys it; there must be none before. It needs `config.json` of the
    model and no weights. `flash plan` also calls this for changed configurations, to propose one that fits.

    Args:
        config: the run.
        ranks: number of trainer ranks.
        few: number of decoder layers that are run if all are alike.

    Raises:
        ConfigError: the model cannot be divided or trained.
    """
    with absent_ranks(ranks):
        mesh = trainer_mesh("cpu", config.parallel, offloads="weights" in config.train.offload)
        policy = _sharded_policy(config, mesh)
        moments = _new_moment_bytes(policy, config.train)
        weights, trained = _parameter_bytes(policy), _parameter_bytes(policy, trained=True)
        if not takes_packed_rows(policy):
            # Such a model gets one sequence at a time, so a micro-batch is not filled beyond the longest sequence.
            longest = min(config.train.max_tokens_per_microbatch, config.model.max_length)
            train = msgspec.structs.replace(config.train, max_tokens_per_microbatch=longest)
            config = msgspec.structs.replace(config, train=train)
        at_work = _work_bytes(config, mesh, policy, few)
        others = _other_bytes(config, mesh)
        loading = weights
        # When the run begins, the rank holds the base in float32, too, and then converts it to the dtype of the run.
        if config.lora is not None and config.model.dtype != "float32":
            loading += _parameter_bytes(_sharded_model(config.model, config.model.path, mesh))
    numbers = sum(parameter.numel() for parameter in policy.parameters())
    host = moments[1] + others[1] + _offloaded_inputs(config, policy)
    if mesh.offloads:
        # Moments and other models are on the device of the weights, which is the host here. `pinned` counts the weights
        # and the gradients.
        pinned = _parameter_bytes(policy, pinned=True) + _parameter_bytes(policy, trained=True, pinned=True)
        host += pinned + moments[0] + others[0]
        return RankMemory(numbers, 0, 0, 0, 0, at_work, 0, host)
    return RankMemory(numbers, weights, trained, moments[0], others[0], at_work, loading, host)


def _offloaded_inputs(config: Config, policy: PreTrainedModel) -> int:
    """Return the bytes that the inputs of all decoder layers take on the host; 0 if they stay on the device.

    With `activations` in `train.offload`, a layer's input waits on the host until the backward pass computes the layer
    again.
    """
    # The mode is the name of the device that keeps the inputs, if they leave the rank's device; else True or False.
    if not isinstance(recompute_mode(config.train), str):
        return 0
    tokens = config.train.max_tokens_per_microbatch // config.parallel.context
    width = policy.config.get_text_config().hidden_size * getattr(torch, config.model.dtype).itemsize
    return layer_count(policy) * _pinned_size(tokens * width)


def _work_bytes(config: Config, mesh: TrainerMesh, policy: PreTrainedModel, few: int) -> int:
    """Return the bytes that a step needs on the device, in addition to the memory that the rank always keeps.

    If all decoder layers are alike, `few` of them are run, then one more, and the difference counts for each further
    layer. Otherwise all layers are run. `policy` is the sharded policy.
    """
    layers = [
        module for module in policy.modules() if type(module).__name__.removeprefix("FSDP") in layer_types(policy)
    ]
    copied = 0
    if mesh.offloads:
        # Weights are copied from the host in their own dtype and then cast to the run's dtype. In a float32 run, all
        # copies of a layer exist at once. Otherwise one copy exists at a time, because it is cast before the next one.
        copied_at_once = sum if config.model.dtype == "float32" else max
        copied = max((copied_at_once(sizes) for layer in layers if (sizes := _shard_sizes(layer))), default=0)
    # Layers with different shapes are unlike, for example dense layers and layers with experts.
    unlike = len({tuple(parameter.shape for parameter in layer.parameters()) for layer in layers}) > 1
    if unlike or len(layers) <= few + 1:
        return _step_bytes(config, mesh, len(layers)) + copied
    with_few, with_one_more = (_step_bytes(config, mesh, count) for count in (few, few + 1))
    return with_few + (len(layers) - few) * (with_one_more - with_few) + copied


def _step_bytes(config: Config, mesh: TrainerMesh, layers: int) -> int:
    """Return the largest number of bytes that a step needs in addition to weights, gradients and moments.

    The step runs one micro-batch, filled with the longest sequences, and an update. The model has `layers` decoder
    layers.
    """
    tokens, longest = config.train.max_tokens_per_microbatch, config.model.max_length
    lengths = [min(longest, tokens - start) for start in range(0, tokens, longest)]
    # All tokens differ, so that no sequences share a beginning, which would be computed only once.
    packed = in_one_row(np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]))
    # All tokens but the first of each sequence are predicted. `before_T` has the place before each predicted token.
    before_T = np.concatenate([np.arange(start, stop - 1) for start, stop in pairwise(packed.offset_S)])
    target_T = np.arange(len(before_T))
    model = _sharded_policy(config, mesh, recompute=recompute_mode(config.train, HOST), layers=layers)
    with counted() as count:
        model.to_empty(device="cpu")  # still without data; "cpu" stands for the rank's device
        # Make a first update, so that moments exist, as in every step but the first, and gradients, as in every
        # micro-batch of a step but the first.
        optimizer = make_optimizer(model, config.train, HOST)
        _update_once(model, optimizer)
        result = token_logprobs(model, packed, before_T, target_T, kept=_kept_sets(config, len(before_T)))
        result.logp_T.sum().backward()
        optimizer.step()  # an update needs memory of its own, which may be the most
        kept = _parameter_bytes(model) + _parameter_bytes(model, trained=True) + _moment_bytes(optimizer)[0]
    return max(count.most - kept, 0)


def _kept_sets(config: Config, tokens: int) -> KeptSets | None:
    """Return kept sets of the largest size for this many tokens; None if the run samples from all tokens."""
    if not config.sampling.has_kept_sets:
        return None
    size = config.sampling.top_k
    count_T, zeros_N = torch.full((tokens,), size), torch.zeros(tokens * size)
    lists = (zeros_N.long(), zeros_N.double(), zeros_N.double(), count_T, count_T.cumsum(0) - count_T, size)
    return KeptSets(*lists, torch.full_like(count_T, -1), torch.zeros((0, 0), dtype=torch.uint8))


def _update_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make an update with gradients of zero, so that the optimizer makes its moments. The gradients are kept."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _new_moment_bytes(model: nn.Module, train: TrainConfig) -> tuple[int, int]:
    """Return the bytes of the moments that the optimizer will keep for a model: on the device and on the host.

    The given model has no memory. Afterwards it has tensors without data.
    """
    with counted():
        model.to_empty(device="cpu")
        optimizer = make_optimizer(model, train, HOST)
        _update_once(model, optimizer)
        return _moment_bytes(optimizer)


def _moment_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes of this rank's moments in an optimizer: on the device and on the host."""
    found = [0, 0]  # on the device, on the host
    # Tensors without a dimension are counters of updates.
    for one in (one for state in optimizer.state.values() for one in state.values() if one.dim() > 0):
        part = getattr(one, "_local_tensor", one)
        on_host, size = part.device.type == HOST, part.numel() * part.element_size()
        found[on_host] += _pinned_size(size) if on_host else size
    return found[0], found[1]


def _pinned_size(size: int) -> int:
    """Return the bytes that torch allocates for `size` bytes of pinned memory: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def _other_bytes(config: Config, mesh: TrainerMesh) -> tuple[int, int]:
    """Return the bytes of all tensors that a rank keeps beside the policy, as two numbers.

    The tensors are a moving average of the policy's weights, the reference of a KL, the teacher, and the critics with
    their gradients and moments. A teacher on a server (`algorithm.teacher.url`) takes no memory here.

    Returns:
        The bytes on the device on which a rank keeps its weights, and the bytes of moments that `train.offload` keeps
        on the host. With `mesh.offloads` the first device is the host, too, and the caller adds both numbers.
    """
    method = resolve_method(config, make_objective(config.algorithm))
    device, host = 0, 0
    if method.proximal == "ewma":
        # The average is a plain copy of the weights (`start_average`), which is never pinned.
        device += _parameter_bytes(_sharded_policy(config, mesh), trained=True)
    kl, teacher = config.algorithm.kl, config.algorithm.teacher
    frozen = [kl.reference or config.model.path] if kl is not None else []
    if config.lora is not None and frozen == [config.model.path]:
        frozen = []  # the reference is the policy without its adapters
    frozen += [teacher.path] if teacher is not None and teacher.path is not None else []
    # If weights are on the host, FSDP pins the shards of each model that it holds, and pinned shards take more bytes.
    device += sum(_parameter_bytes(_sharded_model(config.model, path, mesh), pinned=mesh.offloads) for path in frozen)
    if method.critics:
        assert config.critic is not None
        critic = _sharded_model(config.model, config.critic.path or config.model.path, mesh)
        # Critics always have AdamW, also if `train.optimizer` is another optimizer (`flash.trainer.critic`).
        moments = _new_moment_bytes(critic, msgspec.structs.replace(config.train, optimizer="adamw"))
        # The factor 2 counts weights and gradients.
        device += method.critics * (2 * _parameter_bytes(critic, pinned=mesh.offloads) + moments[0])
        host = method.critics * moments[1]
    return device, host


def _sharded_policy(
    config: Config, mesh: TrainerMesh, *, recompute: Recompute = False, layers: int | None = None
) -> PreTrainedModel:
    """Return the sharded policy without memory, with all decoder layers or the first `layers`."""
    return shard_model(empty_policy(config, layers), mesh, config.model, recompute=recompute)


def _sharded_model(model: ModelConfig, path: str, mesh: TrainerMesh) -> PreTrainedModel:
    """Return the sharded model at `path` without memory."""
    named = msgspec.structs.replace(model, path=path)
    return shard_model(empty_model(named), mesh, named)


def _parameter_bytes(model: nn.Module, *, trained: bool = False, pinned: bool = False) -> int:
    """Return the bytes of this rank's shard of the parameters.

    Args:
        model: the model.
        trained: True counts trained parameters only.
        pinned: True counts the bytes that the shard takes in pinned memory, which are more (`_pinned_size`).
    """
    sizes = _shard_sizes(model, trained=trained)
    return sum(map(_pinned_size, sizes) if pinned else sizes)


def _shard_sizes(model: nn.Module, *, trained: bool = False) -> list[int]:
    """Return the bytes of this rank's shard of each parameter. With `trained`, frozen parameters are left out."""
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
    """Return the memory of an engine that serves a policy of `parameters` parameters. Needs the model's config.json.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    size, split = getattr(torch, config.model.dtype).itemsize, config.engine.tensor_parallel
    # A token has a key and a value per head. If there are fewer key-value heads than GPUs, each GPU holds one head.
    numbers = sum(
        2 * max(layer.num_key_value_heads / split, 1) * head_width(layer)
        for layer in layer_configs(empty_model(config.model))
    )
    return EngineMemory(parameters * size // split, numbers * size)
