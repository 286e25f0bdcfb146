"""Load the policy's model for the trainer, and shard it: a Hugging Face causal language model under FSDP2.

The model is created on the meta device, without memory for its weights (`empty_model`), and then sharded
(`shard_model`). Then each rank reads its own part of one tensor after another (`load_sharded`). So a rank never holds a
whole model, unless the files cannot be read tensor by tensor (`_StoredWeights`). `flash.trainer.step` loads the policy,
`flash.trainer.references` loads the models that it is compared with, and `flash.trainer.critic` loads the critics.

A *collective* is a function in which ranks exchange data, so that all of them must call it together. Functions that are
collectives say so. Invariants: the weights that the optimizer updates (*master weights*) are float32, while the forward
pass runs in the configured dtype. Dropout is off.

Layers are first divided over ranks by tensor and expert parallelism, with the plans of transformers. FSDP (fully
sharded data parallelism) *shards* each part over the remaining ranks: each rank keeps a part of every parameter, as a
`DTensor`, and the ranks *gather* the parameters of a layer while it computes.
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
from flash.foreign.peft import config_in
from flash.foreign.torch import offload_inputs
from flash.foreign.transformers import (
    default_attention,
    is_recurrent,
    layer_types,
    positions_by_length,
    recurrent_layers,
    stored_tensors,
    takes_attention,
    without_weights,
)
from flash.trainer.mesh import TrainerMesh, gather_full
from flash.trainer.model.fused import can_fuse, fuse_layers
from flash.trainer.model.logprobs import replace_output_layer
from flash.trainer.model.packed import PACKED_ATTENTION, packed_attention, takes_packed_rows

TENSOR_PARALLEL_KINDS = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Kinds of models whose gradients under tensor parallelism equal the gradients of one process, as
`tests/trainer/test_parallel.py` shows. Other kinds are refused."""
EXPERT_COUNTS = {
    "deepseek_v3": "n_routed_experts",
    "glm4_moe": "n_routed_experts",
    "mixtral": "num_local_experts",
    "olmoe": "num_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
}
"""Kinds of models whose experts may be divided over ranks, each with the key of its config.json that holds the number
of experts. `tests/trainer/test_parallel.py` shows that dividing them does not change gradients."""

Recompute = bool | str
"""Activation checkpointing of decoder layers. False: none. True: each layer runs again in the backward pass. A device:
each layer runs again, and its inputs are kept on this device until then."""


def recompute_mode(train: TrainConfig, host: str = "cpu") -> Recompute:
    """Return the activation checkpointing that `[train]` configures.

    `host` is the device to which inputs are offloaded. Only the prediction of memory (`flash.trainer.memory`) passes
    another device than the CPU.
    """
    return train.activation_checkpointing and (host if "activations" in train.offload else True)


def load_model(config: ModelConfig) -> PreTrainedModel:
    """Return the whole model on the CPU, in float32, ready for `shard_model`.

    Commands that work with a whole model in one process use this function, and so does `_StoredWeights`.

    Raises:
        ConfigError: `model.path` has no causal language model that can be loaded, or its weights are quantized.
    """
    try:
        _check_unquantized(config)
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            dtype=torch.float32,
            local_files_only=Path(config.path).is_dir(),
            trust_remote_code=config.trust_remote_code,
        )
    except Exception as error:  # damaged files cause errors of many types, and a model's own code may raise any
        raise _cannot_load(config, error) from error
    return model


def empty_model(config: ModelConfig, layers: int | None = None) -> PreTrainedModel:
    """Return the model with parameters on the meta device, which take no memory. Buffers have their values.

    With `layers`, the model has only its first `layers` decoder layers, which is enough to predict its memory.

    Raises:
        ConfigError: `model.path` has no causal language model that can be loaded, or its weights are quantized.
    """
    try:
        _check_unquantized(config)
        model = without_weights(config.path, trusted=config.trust_remote_code, layers=layers)
    except Exception as error:  # of any type, as in `load_model`
        raise _cannot_load(config, error) from error
    model.tie_weights()
    # The generation_config is exported together with the trained model. Some models have none.
    with suppress(OSError):
        local = Path(config.path).is_dir()
        model.generation_config = GenerationConfig.from_pretrained(config.path, local_files_only=local)
    return model


def _check_unquantized(config: ModelConfig) -> None:
    """Check that the model's weights are not quantized.

    The engines would load a quantized model and expect quantized weights for each version, but the trainer publishes
    weights that are not quantized.

    Raises:
        ValueError: the model's config.json has a quantization_config.
        Exception: the configuration cannot be read. The callers turn all errors into a ConfigError.
    """
    described = AutoConfig.from_pretrained(
        config.path, local_files_only=Path(config.path).is_dir(), trust_remote_code=config.trust_remote_code
    )
    if getattr(described, "quantization_config", None) is not None:
        raise ValueError(
            "its config.json has a quantization_config: expected weights that are not quantized, such as bfloat16 ones"
        )


def _cannot_load(config: ModelConfig, error: Exception) -> ConfigError:
    """Return the error to raise for a model that cannot be loaded. `error` is the reason."""
    reason = f"{type(error).__name__}: {error}"
    return ConfigError(f"model.path: cannot load a causal language model from {config.path!r}: {reason}")


def load_sharded(
    config: ModelConfig, mesh: TrainerMesh, *, recompute: Recompute = False, backbone: bool = False
) -> PreTrainedModel:
    """Return the model at `config.path`, sharded by `shard_model` and with its weights. A collective.

    `flash.trainer.references` loads a reference and a teacher in this way. `flash.trainer.critic` passes `backbone`,
    because a critic needs the model without its output layer.

    Raises:
        ConfigError: the model cannot be loaded, its output layer cannot be replaced, or its layers cannot be divided.
    """
    # The files have the tensor names of the whole model. Look the names up before `shard_model` replaces layers.
    whole = empty_model(config)
    model: Any = whole.base_model if backbone else whole
    names = {id(tensor): name for name, tensor in _named_weights(whole)}
    stored = [names[id(tensor)] for _, tensor in _named_weights(model)]
    tensors = _StoredWeights(config, whole)
    shard_model(model, mesh, config, recompute=recompute)
    return _fill(model, tensors, stored, mesh.weight_device)


def load_plain(config: ModelConfig, mesh: TrainerMesh) -> PreTrainedModel:
    """Return the model as transformers makes it, in float32, with its own attention and output layer. A collective.

    The model is sharded, dropout is off, and it is otherwise unchanged. The trainer samples the canary (the text on
    which engines are checked) from it: the canary must be sampled in float32 and by transformers' own code, before
    `shard_model` replaces attention and output layer. Then `fill_policy` moves the weights into the policy. They have
    the names and shards of a policy without adapters.

    Raises:
        ConfigError: the model cannot be loaded, or its layers cannot be divided.
    """
    model = empty_model(config)
    # transformers would select sdpa, which ignores the cap on attention scores that some models have.
    # `default_attention` selects eager for these models.
    if takes_attention(model):
        model.set_attn_implementation(default_attention(model))
    names, tensors = [name for name, _ in _named_weights(model)], _StoredWeights(config, model)
    _shard(model, mesh, MixedPrecisionPolicy(), recompute=False)
    return _fill(model, tensors, names, mesh.weight_device)


class _StoredWeights:
    """Reader of the weights at `model.path`, by the names of the unsharded model.

    The reader reads one tensor at a time. If there are no safetensors files, or if they lack a tensor, each rank loads
    all weights into memory.

    Raises:
        ConfigError: the weights cannot be loaded.
    """

    def __init__(self, config: ModelConfig, model: PreTrainedModel) -> None:
        self._path = config.path
        self._shapes = {name: tensor.shape for name, tensor in _named_weights(model)}
        try:
            read = stored_tensors(config.path, model, self._shapes)
        except Exception as error:  # of any type, as in `load_model`
            raise _cannot_load(config, error) from error
        # `read` returns one stored tensor by name. It is None if there are no usable safetensors files.
        self._read = load_model(config).state_dict().__getitem__ if read is None else read

    def read(self, name: str) -> Tensor:
        """Return the whole stored tensor of this name: in the dtype of its file, or float32 if all weights were loaded.

        Raises:
            ConfigError: parts of the tensor do not fit together, or it has another shape than the model expects.
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


def _fill(model: PreTrainedModel, stored: _StoredWeights, names: Sequence[str], device: str) -> PreTrainedModel:
    """Set each weight of a sharded model from its stored tensor. Returns the same model, with dropout off.

    Args:
        model: the model. Its weights are replaced.
        stored: reads the stored tensors.
        names: for each weight of the model, in the order of `_named_weights`, the name of its stored tensor. This name
            may differ from the weight's own name, because the model may be only a backbone, and because `shard_model`
            replaces layers.
        device: the device for this rank's part of sharded weights, in float32. A buffer keeps its own dtype and device.
    """
    state: dict[str, Tensor] = {}
    for (own, tensor), name in zip(_named_weights(model), names, strict=True):
        whole = stored.read(name)
        if isinstance(tensor, DTensor):
            # No rank sends data: each rank cuts out its own part, as a copy, so that at most one tensor is whole at a
            # time.
            local = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            state[own] = local.to(device, torch.float32, copy=True)
        elif isinstance(tensor, nn.Parameter):
            # FSDP turns every parameter that it shards into a DTensor. Any other parameter is whole on each rank.
            state[own] = whole.to(torch.float32, copy=True)
        else:
            state[own] = whole.to(tensor, copy=True)
    # `assign`: parameters on the meta device have no memory to copy to, so they are replaced. `strict` is off because
    # buffers that are computed from the config are in no file.
    model.load_state_dict(state, strict=False, assign=True)
    return model.eval()


def _named_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return name and tensor of each weight that a model's files hold.

    The weights are the parameters, and the buffers that cannot be computed from the config. Tied parameters occur once.
    """
    return [*model.named_parameters(), *kept_buffers(model)]


def shard_model(
    model: PreTrainedModel, mesh: TrainerMesh, config: ModelConfig, *, recompute: Recompute = False
) -> PreTrainedModel:
    """Prepare a model for training and shard it, in place. Returns the same model. A collective.

    The parameters may be on the meta device; the caller then fills them. The function selects packed attention if the
    model's attention can be replaced, replaces the output layer by an `OutputLayer`, fuses layers on a GPU, and turns
    dropout off. `OutputLayer` computes log-probs of tokens, because all logits at once would take too much memory. With
    `recompute`, the activations of decoder layers are not kept for the backward pass (Chen et al. 2016, arXiv
    1604.06174).

    Raises:
        ConfigError: the model's output layer cannot be replaced, or its layers cannot be divided.
    """
    if takes_attention(model):
        AttentionInterface.register(PACKED_ATTENTION, packed_attention)
        model.set_attn_implementation(PACKED_ATTENTION)
    replace_output_layer(model, wide=config.head_dtype == "float32", context=mesh.context)
    # Gradients are summed over ranks in float32, whatever the dtype of the forward pass.
    half = MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32)
    if mesh.device.type == "cuda" and mesh.tensor is None and can_fuse():
        fuse_layers(model, whole=takes_packed_rows(model) and not is_recurrent(model))
    _shard(model, mesh, MixedPrecisionPolicy() if config.dtype == "float32" else half, recompute=recompute)
    # Dropout also stays off in training, because the engine samples without dropout, and log-probs must agree with it.
    return model.eval()


def _shard(model: PreTrainedModel, mesh: TrainerMesh, policy: MixedPrecisionPolicy, *, recompute: Recompute) -> None:
    """Divide layers and experts over ranks by tensor and expert parallelism, and shard the parts over other ranks.

    Each decoder layer is sharded on its own, so that layers can be gathered one at a time, and then the rest of the
    model. With `recompute`, activations of decoder layers are not kept for the backward pass.

    Raises:
        ConfigError: the layers or experts cannot be divided.
    """
    check_divisible(model.config, mesh.parallel)
    experts = list[nn.Module]()
    if mesh.tensor is not None or mesh.experts is not None:
        from flash.foreign.dividing import divide_layers

        # The ranks of a tensor group divide each layer. Embedding and output layer are not divided: every rank of the
        # group computes the whole gradients of both.
        experts = divide_layers(model, mesh.tensor, None if mesh.experts is None else mesh.experts["expert"])
    # With one rank, resharding between forward and backward pass frees nothing and only copies. But with weights
    # offloaded to the host, only one layer at a time may be on the device.
    ranks = mesh.fsdp.size()
    reshard = ranks > 1 or mesh.offloads
    for module in experts:
        _shard_experts(module, mesh, policy)

    def placement(parameter: nn.Parameter) -> Shard | None:
        # Return the dimension along which FSDP shards a parameter; None: FSDP's default, the first one. Experts are in
        # tensors of three dimensions, which would then be sharded by expert.
        # With fewer experts than ranks, some ranks would have no expert, and all ranks would gather padding instead.
        return None if parameter.dim() < 3 else _even_shard(parameter, ranks)

    layers, inside = layer_types(model), set[nn.Module]()
    for module in list(model.modules()):
        # Some models also list the class of a module inside a layer. Such a module is sharded together with the layer.
        if type(module).__name__ in layers and module not in inside:
            inside.update(module.modules())
            if recompute:
                checkpoint(module)
            if isinstance(recompute, str):
                offload_inputs(module, recompute)
            fully_shard(
                module,
                mesh=mesh.fsdp,
                mp_policy=policy,
                offload_policy=mesh.offload_policy,
                reshard_after_forward=reshard,
                shard_placement_fn=placement,
            )
    fully_shard(
        model, mesh=mesh.fsdp, mp_policy=policy, offload_policy=mesh.offload_policy, reshard_after_forward=False
    )


def _shard_experts(module: nn.Module, mesh: TrainerMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard this rank's experts of a layer over its `holders`, the ranks that hold the same experts.

    The ranks of an expert group hold different experts, and send each token to the ranks of its experts. So a rank's
    gradient of its experts is already the sum over the tokens of its group. FSDP adds the gradients of the holders,
    which are in different groups. The result is the sum over all ranks. The gradient of every other parameter is a mean
    over `mesh.fsdp`, so this sum is divided by the size of `mesh.fsdp`.

    Raises:
        ConfigError: the ranks that hold the same experts cannot divide the expert weights.
    """
    assert mesh.experts is not None
    holders = mesh.experts["fsdp"]

    def placement(parameter: nn.Parameter) -> Shard:
        # Return the dimension along which FSDP shards the experts, or raise the ConfigError of the docstring above.
        if (shard := _even_shard(parameter, holders.size())) is None:
            shape = tuple(parameter.shape)
            raise ConfigError(f"parallel.expert: {holders.size()} ranks cannot divide expert weights of shape {shape}")
        return shard

    sharded: Any = fully_shard(
        module,
        mesh=holders,
        # The FSDP unit of the whole layer has already cast the hidden states. Routing weights may be float32, and
        # undivided experts get them without a cast.
        mp_policy=replace(policy, cast_forward_inputs=False),
        offload_policy=mesh.offload_policy,
        reshard_after_forward=holders.size() > 1 or mesh.offloads,
        shard_placement_fn=placement,
    )
    sharded.set_gradient_divide_factor(float(mesh.fsdp.size()))
    # By default FSDP divides during the reduction, which only nccl can do. With forced sums it adds first and divides
    # afterwards, on every backend. With a single holder FSDP reduces nothing and only divides. With forced sums it
    # would divide twice.
    sharded.set_force_sum_reduction_for_comms(holders.size() > 1)


def _even_shard(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Return a shard along the first dimension whose size is divisible by `ranks`; None if there is no such dimension.

    FSDP can shard a dimension other than the first one only evenly. If tensor or expert parallelism has already divided
    the parameter, the sizes of this rank's part count.
    """
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return next((Shard(dim) for dim, size in enumerate(own.shape) if size % ranks == 0), None)


def check_divisible(config: PreTrainedConfig, parallel: ParallelConfig) -> None:
    """Check that ranks can divide a model of this configuration, without a change of its gradients.

    Tensor parallelism divides its layers, and expert parallelism its experts. Context parallelism divides *rows*: the
    tokens of a micro-batch, one sequence after another. `_shard` checks each model that it divides, and a dry run
    checks the policy before anything starts.

    Raises:
        ConfigError: the number of heads, the intermediate size or the number of experts is not divisible by the number
            of ranks; it is not shown that dividing this kind of model leaves its gradients unchanged; or the installed
            transformers divides models in another way.
    """
    text_config = config.get_text_config()
    if parallel.tensor > 1 or parallel.expert > 1:
        try:
            import_module("flash.foreign.dividing")
        except ImportError as error:
            key = "tensor" if parallel.tensor > 1 else "expert"
            raise ConfigError(
                f"parallel.{key}: expected 1 with transformers {transformers.__version__}, which divides models in "
                f"another way ({error}); install transformers 5.19"
            ) from error
    kind, tensor, context, expert = text_config.model_type, parallel.tensor, parallel.context, parallel.expert
    # Allow only kinds of models whose gradients are known not to change.
    for key, ranks, exact in (("tensor", tensor, TENSOR_PARALLEL_KINDS), ("expert", expert, EXPERT_COUNTS)):
        if ranks > 1 and kind not in exact:
            known = ", ".join(exact)
            raise ConfigError(
                f"parallel.{key}: expected 1 for a {kind}; it is known to be exact for {known} alone, got {ranks}"
            )
    # With tensor parallelism alone, transformers would divide the weights within each expert, for which no test shows
    # that gradients do not change. The check of the configuration has already checked that a larger number is a
    # multiple of parallel.tensor.
    if tensor > 1 and expert == 1 and kind in EXPERT_COUNTS:
        raise ConfigError(f"parallel.expert: expected a multiple of parallel.tensor = {tensor} for a {kind}, got 1")
    # Refuse models whose layers or positions need the whole row on one rank.
    if context > 1 and (running := recurrent_layers(text_config)):
        raise ConfigError(
            f"parallel.context: expected 1 for a {kind}, which has layers whose state runs on from one token to the "
            f"next ({running}), got {context}"
        )
    if context > 1 and (scaling := positions_by_length(text_config)) is not None:
        raise ConfigError(
            f"parallel.context: expected 1 for a {kind} whose positions ({scaling}) depend on how long the longest "
            f"sequence is, got {context}"
        )
    # Check divisibility. The ranks of a context group exchange whole heads of queries, so the size of the group must
    # divide their number. With tensor parallelism, a group has only 1 / tensor of the heads. Heads of keys are repeated
    # if there are fewer of them than ranks.
    wanted = [("tensor", tensor, name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")]
    wanted += [("context", tensor * context, "num_attention_heads"), ("expert", expert, EXPERT_COUNTS.get(kind, ""))]
    for key, ranks, name in wanted:
        if ranks == 1:
            continue
        if (count := getattr(text_config, name, None)) is None:
            raise ConfigError(f"parallel.{key}: expected 1 for a {kind}, which has no {name}, got {ranks}")
        if count % ranks:
            of = f"{context} · parallel.tensor = {ranks}" if key == "context" and tensor > 1 else ranks
            raise ConfigError(f"parallel.{key}: expected a divisor of the model's {name} = {count}, got {of}")


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of a model after a forward pass without a backward pass, such as one of a reference.

    In a forward pass, FSDP gathers the parameters of each layer from all ranks, and a backward pass frees these copies.
    Without a backward pass the copies may stay, and the next forward pass would use them in place of updated
    parameters. This is no collective.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def kept_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return name and tensor of each buffer that a model's files hold, for example a bias for the choice of experts.

    Buffers are not trained, but a model that is loaded or exported needs them. Buffers that are computed from the
    config are left out.
    """
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def named_full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and whole float32 tensor of each parameter of a version, one at a time, on the device of each rank.

    A version is the weights that the trainer publishes to the engines after a step. This is a collective: all ranks
    must take every tensor. If the output layer is tied to the input embedding, their tensor is yielded once.
    """
    for name, parameter in published_parameters(model):
        value = parameter.detach()
        yield name, gather_full(value) if isinstance(value, DTensor) else value


def described(model: nn.Module) -> str:
    """Return a phrase with a model's class and number of parameters, such as `a LlamaForCausalLM of 135M parameters`.

    The dry runs show it to the user.
    """
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"a {type(model).__name__} of {parameter_count(size)} parameters"


def parameter_count(parameters: int) -> str:
    """Return a number of parameters with three digits, in millions or billions: `0.0784M`, `135M`, `7.24B`."""
    # The limits are half a digit below 1000, because 999.6 is rounded to 1000, which `.3g` would write as 1e+03.
    unit, letter = (1e6, "M") if parameters < 999.5e6 else (1e9, "B")
    number = parameters / unit
    return f"{number:.3g}{letter}" if number < 999.5 else f"{number:,.0f}{letter}"


def published_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return name and tensor of each parameter that a published version has.

    If the model has adapters (LoRA), only the parameters of the adapters are returned, because engines have the rest
    already. Otherwise all parameters are returned, even if the model itself freezes some of them, because engines and
    exports need the whole model.
    """
    adapted = config_in(model) is not None
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad or not adapted]
