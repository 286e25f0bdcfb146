"""The policy as the trainer holds it: a Hugging Face causal LM, sharded by FSDP2, run on packed sequences.

Where ranks divide layers or experts, they do so by transformers' own plans, below FSDP, which shards over the others.

Master weights are float32; the forward pass runs in the configured dtype, on the packed rows of
`flash.trainer.model.packed`. Everything that touches parameters is a collective: all ranks call it together.

A trainer rank never holds a whole model: it is made without memory for its weights, sharded, and then each rank reads
its own part of one tensor after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from flash.config.learning import TrainConfig
from flash.config.tree import ModelConfig, ParallelConfig
from flash.errors import ConfigError
from flash.foreign.peft import described_in
from flash.foreign.torch import inputs_wait_on
from flash.foreign.transformers import (
    default_attention,
    layer_types,
    positions_by_length,
    running_layers,
    runs_on,
    stored_tensors,
    takes_attention,
    without_weights,
)
from flash.trainer.mesh import TrainerMesh, gather_full
from flash.trainer.model.fused import can_fuse, fuse_layers
from flash.trainer.model.output_layer import replace_output_layer
from flash.trainer.model.packed import PACKED_ATTENTION, packed_attention, takes_packed_rows

DIVIDED = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Kinds of models whose gradients are, their layers divided, those of one process: `tests/trainer/test_parallel.py`
shows it, as of those below."""
MIXTURES = {
    "deepseek_v3": "n_routed_experts",
    "glm4_moe": "n_routed_experts",
    "mixtral": "num_local_experts",
    "olmoe": "num_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
}
"""Kinds whose experts may be divided, and what says how many they are."""


Recompute = bool | str
"""Whether decoder layers run again in the backward pass, or the device on which their inputs wait until then."""


def recomputed(train: TrainConfig, host: str = "cpu") -> Recompute:
    """What `[train]` says of it."""
    return train.activation_checkpointing and (host if "activations" in train.offload else True)


def load_model(config: ModelConfig) -> PreTrainedModel:
    """The whole model on the CPU, in float32, ready for `shard_model`.

    Raises:
        ConfigError: the folder or hub id holds no causal language model that can be loaded, or a quantized one.
    """
    try:
        _described(config)
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            dtype=torch.float32,
            local_files_only=Path(config.path).is_dir(),
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, KeyError) as error:
        raise _cannot_load(config, error) from error
    return model


def empty_model(config: ModelConfig, layers: int | None = None) -> PreTrainedModel:
    """The same with parameters on the meta device, which take no memory; buffers are as they should be.

    With `layers`, it has the first so many of its decoder layers.

    Raises:
        ConfigError: as `load_model`.
    """
    try:
        _described(config)
        model = without_weights(config.path, trusted=config.trust_remote_code, layers=layers)
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        raise _cannot_load(config, error) from error
    model.tie_weights()
    with suppress(OSError):
        local = Path(config.path).is_dir()
        model.generation_config = GenerationConfig.from_pretrained(config.path, local_files_only=local)
    return model


def _described(config: ModelConfig) -> PreTrainedConfig:
    """Raises ValueError: the weights are quantized, in which form an engine would also wait for each version."""
    described = AutoConfig.from_pretrained(
        config.path, local_files_only=Path(config.path).is_dir(), trust_remote_code=config.trust_remote_code
    )
    if getattr(described, "quantization_config", None) is not None:
        raise ValueError("its config.json has a quantization_config: expected whole weights, such as bfloat16 ones")
    return described


def _cannot_load(config: ModelConfig, error: Exception) -> ConfigError:
    return ConfigError(f"model.path: cannot load a causal language model from {config.path!r}: {error}")


def load_sharded(
    config: ModelConfig, mesh: TrainerMesh, *, recompute: Recompute = False, backbone: bool = False
) -> PreTrainedModel:
    """What `shard_model` makes of the model at `config.path`, or of its `backbone`, all but the output layer.

    Raises:
        ConfigError: as `load_model` and `shard_model`.
    """
    whole = empty_model(config)
    model: Any = whole.base_model if backbone else whole
    names = {id(tensor): name for name, tensor in _named_weights(whole)}
    stored = [names[id(tensor)] for _, tensor in _named_weights(model)]
    tensors = _Stored(config, whole)
    shard_model(model, mesh, config, recompute=recompute)
    return _fill(model, tensors, stored, mesh.weight_device)


def load_plain(config: ModelConfig, mesh: TrainerMesh) -> PreTrainedModel:
    """The model as transformers makes it, in float32 with its own attention and output layer, only sharded.

    Its `state_dict` fits what `shard_model` makes of an `empty_model` of this configuration.

    Raises:
        ConfigError: as `load_model`, or its layers cannot be divided.
    """
    model = empty_model(config)
    if takes_attention(model):
        model.set_attn_implementation(default_attention(model))
    names, tensors = [name for name, _ in _named_weights(model)], _Stored(config, model)
    _shard(model, mesh, MixedPrecisionPolicy(), recompute=False)
    return _fill(model, tensors, names, mesh.weight_device)


class _Stored:
    """The weights at `model.path`, by the model's own names. What cannot be read by tensor each rank loads whole."""

    def __init__(self, config: ModelConfig, model: PreTrainedModel) -> None:
        self._path = config.path
        self._shapes = {name: tensor.shape for name, tensor in _named_weights(model)}
        try:
            read = stored_tensors(config.path, model, self._shapes)
        except ValueError as error:
            raise _cannot_load(config, error) from error
        self._read = load_model(config).state_dict().__getitem__ if read is None else read

    def read(self, name: str) -> Tensor:
        """In the dtype of its file.

        Raises:
            ConfigError: a part of it is missing.
        """
        try:
            tensor, shape = self._read(name), self._shapes[name]
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"model.path: {self._path} holds {name} in parts that do not fit together: {error}"
            ) from error
        if tensor.shape != shape:
            raise ConfigError(f"model.path: {self._path} holds {name} as {[*tensor.shape]}, expected {[*shape]}")
        return tensor


def _fill(model: PreTrainedModel, stored: _Stored, names: Sequence[str], home: str) -> PreTrainedModel:
    """Give each weight, in their order, this rank's part of what is stored under its name, to be kept at `home`."""
    found: dict[str, Tensor] = {}
    for (own, tensor), name in zip(_named_weights(model), names, strict=True):
        whole = stored.read(name)
        if isinstance(tensor, DTensor):
            # No rank sends: each cuts its own part, as a copy, so that no more than one tensor is whole at a time.
            local = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            found[own] = local.to(home, torch.float32, copy=True)
        elif isinstance(tensor, nn.Parameter):
            found[own] = whole.to(torch.float32, copy=True)
        else:
            found[own] = whole.to(tensor, copy=True)
    model.load_state_dict(found, strict=False, assign=True)
    return model.eval()


def _named_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """What its files hold: parameters, and buffers that are no mere tables."""
    return [*model.named_parameters(), *kept_buffers(model)]


def shard_model(
    model: PreTrainedModel, mesh: TrainerMesh, config: ModelConfig, *, recompute: Recompute = False
) -> PreTrainedModel:
    """Divide and shard in place, as a model of this kind: each decoder layer, then the rest.

    Also selects packed attention where it can be replaced, lets the output layer answer with log-probs, and turns
    dropout off. With `recompute` a decoder layer's activations are not kept for the backward pass (Chen et al. 2016,
    arXiv 1604.06174).

    Raises:
        ConfigError: the model's output layer cannot be replaced, or its layers cannot be divided.
    """
    if takes_attention(model):
        AttentionInterface.register(PACKED_ATTENTION, packed_attention)
        model.set_attn_implementation(PACKED_ATTENTION)
    replace_output_layer(model, wide=config.head_dtype == "float32", context=mesh.context)
    half = MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32)
    if mesh.device.type == "cuda" and mesh.tensor is None and can_fuse():
        fuse_layers(model, whole=takes_packed_rows(model) and not runs_on(model))
    _shard(model, mesh, MixedPrecisionPolicy() if config.dtype == "float32" else half, recompute=recompute)
    # Dropout stays off: the trained log-probs are those of the policy that acts.
    return model.eval()


def _shard(model: PreTrainedModel, mesh: TrainerMesh, policy: MixedPrecisionPolicy, *, recompute: Recompute) -> None:
    check_divisible(model.config, mesh.parallel)
    experts = list[nn.Module]()
    if mesh.tensor is not None or mesh.experts is not None:
        from flash.foreign.dividing import divide_layers

        # Embedding and output layer stay whole, and their gradients are computed on each rank of a tensor group.
        experts = divide_layers(model, mesh.tensor, None if mesh.experts is None else mesh.experts["expert"])
    # With one rank there is nothing to free between forward and backward; resharding would only copy. But from a host
    # each layer is to be there alone.
    ranks = mesh.fsdp.size()
    reshard = ranks > 1 or mesh.offloads
    for module in experts:
        _shard_experts(module, mesh, policy)

    def along(parameter: nn.Parameter) -> Shard | None:
        # Of experts that are not divided whole most ranks would have none, and all would gather as many as ranks.
        return None if parameter.dim() < 3 else _dividing(parameter, ranks)

    whole, within = layer_types(model), set[nn.Module]()
    for module in list(model.modules()):
        # Of some models a part of a layer is named, too.
        if type(module).__name__ in whole and module not in within:
            within.update(module.modules())
            if recompute:
                checkpoint(module)
            if isinstance(recompute, str):
                inputs_wait_on(module, recompute)
            fully_shard(
                module,
                mesh=mesh.fsdp,
                mp_policy=policy,
                offload_policy=mesh.offload_policy,
                reshard_after_forward=reshard,
                shard_placement_fn=along,
            )
    fully_shard(
        model, mesh=mesh.fsdp, mp_policy=policy, offload_policy=mesh.offload_policy, reshard_after_forward=False
    )


def _shard_experts(module: nn.Module, mesh: TrainerMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard what this rank has of a layer's experts over those that have the same.

    They are given the tokens of all ranks that have others, so their gradient is a sum over these.
    """
    assert mesh.experts is not None
    others = mesh.experts["fsdp"]

    def along(parameter: nn.Parameter) -> Shard:
        if (found := _dividing(parameter, others.size())) is None:
            shape = tuple(parameter.shape)
            raise ConfigError(f"parallel.expert: {others.size()} ranks cannot divide weights of {shape} of experts")
        return found

    sharded: Any = fully_shard(
        module,
        mesh=others,
        mp_policy=replace(policy, cast_forward_inputs=False),
        offload_policy=mesh.offload_policy,
        reshard_after_forward=others.size() > 1 or mesh.offloads,
        shard_placement_fn=along,
    )
    sharded.set_gradient_divide_factor(float(mesh.fsdp.size()))
    # Only nccl divides on the way. One rank has nothing to reduce, and would divide twice.
    sharded.set_force_sum_reduction_for_comms(others.size() > 1)


def _dividing(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """The first dimension that is divided evenly: FSDP divides no width otherwise."""
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return next((Shard(dim) for dim, size in enumerate(own.shape) if size % ranks == 0), None)


def check_divisible(described: PreTrainedConfig, parallel: ParallelConfig) -> None:
    """Whether ranks can divide the layers, rows and experts of a model of this configuration.

    Raises:
        ConfigError: a count does not divide, or nothing has shown that it is exact for a model of this kind.
    """
    described = described.get_text_config()
    if parallel.tensor > 1 or parallel.expert > 1:
        try:
            import_module("flash.foreign.dividing")
        except ImportError as error:
            key = "tensor" if parallel.tensor > 1 else "expert"
            raise ConfigError(
                f"parallel.{key}: expected 1 with transformers {transformers.__version__}, which divides models in "
                f"another way ({error}); install transformers 5.19"
            ) from error
    kind, tensor, context, expert = described.model_type, parallel.tensor, parallel.context, parallel.expert
    for key, ranks, exact in (("tensor", tensor, DIVIDED), ("expert", expert, MIXTURES)):
        if ranks > 1 and kind not in exact:
            known = ", ".join(exact)
            raise ConfigError(
                f"parallel.{key}: expected 1 for a {kind}; it is known to be exact for {known} alone, got {ranks}"
            )
    if tensor > 1 and expert == 1 and kind in MIXTURES:
        raise ConfigError(f"parallel.expert: expected a multiple of parallel.tensor = {tensor} for a {kind}, got 1")
    if context > 1 and (running := running_layers(described)):
        raise ConfigError(
            f"parallel.context: expected 1 for a {kind}, which has layers whose state runs on from one token to the "
            f"next ({running}), got {context}"
        )
    if context > 1 and (scaling := positions_by_length(described)) is not None:
        raise ConfigError(
            f"parallel.context: expected 1 for a {kind} whose positions ({scaling}) depend on how long the longest "
            f"sequence is, got {context}"
        )
    wanted = [("tensor", tensor, name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")]
    wanted += [("context", tensor * context, "num_attention_heads"), ("expert", expert, MIXTURES.get(kind, ""))]
    for key, ranks, name in wanted:
        if ranks == 1:
            continue
        if (count := getattr(described, name, None)) is None:
            raise ConfigError(f"parallel.{key}: expected 1 for a {kind}, which has no {name}, got {ranks}")
        if count % ranks:
            of = f"{context} · parallel.tensor = {ranks}" if key == "context" and tensor > 1 else ranks
            raise ConfigError(f"parallel.{key}: expected a divisor of the model's {name} = {count}, got {of}")


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters after a forward pass that no backward pass follows.

    They would stay gathered, and the next forward pass would not see an update of the sharded ones.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes. Its weights may be elsewhere: on the host, but for those that are gathered."""
    one = next(model.parameters())
    return torch.device(one.device_mesh.device_type) if isinstance(one, DTensor) else one.device


def kept_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Those that belong to a model's files, such as what biases the choice of experts. Nothing trains them."""
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def named_full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name in the model and full float32 tensor of each parameter of a version, on every rank's device, one at a time.

    A tied output layer is the input embedding and is not repeated.
    """
    for name, parameter in trained(model):
        value = parameter.detach()
        yield name, gather_full(value) if isinstance(value, DTensor) else value


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that a version is: all, or those of its adapters. Some models hold one still themselves."""
    adapted = described_in(model) is not None
    return [(name, one) for name, one in model.named_parameters() if one.requires_grad or not adapted]
