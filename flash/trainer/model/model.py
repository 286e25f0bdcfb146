"""The policy as the trainer holds it: a Hugging Face causal LM, sharded by FSDP2, run on packed sequences.

Where ranks divide layers, they do so by transformers' own plan, below FSDP, which shards over the other ranks.

Master weights are float32; the forward pass runs in the configured dtype, on the packed rows of
`flash.trainer.model.packed`. Everything that touches parameters is a collective: all ranks call it together.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from flash.config.tree import ModelConfig
from flash.errors import ConfigError
from flash.foreign.transformers import divide_layers, layer_types, takes_attention
from flash.trainer.mesh import TrainerMesh
from flash.trainer.model.fused import fuse_layers
from flash.trainer.model.output_layer import replace_output_layer
from flash.trainer.model.packed import PACKED_ATTENTION, packed_attention

DIVIDED = ("llama", "qwen2", "qwen3")
"""Kinds of models whose gradients are, divided, those of one process: `tests/trainer/test_tensor.py` shows it."""


def load_model(config: ModelConfig) -> PreTrainedModel:
    """The model on the CPU, in float32, ready for `shard_model`.

    Raises:
        ConfigError: the folder or hub id holds no causal language model that can be loaded.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            dtype=torch.float32,
            local_files_only=Path(config.path).is_dir(),
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: cannot load a causal language model from {config.path!r}: {error}") from error
    return model


def shard_model(
    model: PreTrainedModel, mesh: TrainerMesh, config: ModelConfig, *, recompute: bool = False
) -> PreTrainedModel:
    """Divide and shard in place, as a model of this kind: each decoder layer, then the rest.

    Also selects packed attention, lets the output layer answer with log-probs, and turns dropout off. With `recompute`
    a decoder layer's activations are not kept for the backward pass (Chen et al. 2016, arXiv 1604.06174).

    Raises:
        ConfigError: the model's attention cannot be replaced, so packed sequences would see each other; its output
            layer cannot; or its layers cannot be divided.
    """
    if not takes_attention(model):
        raise ConfigError(
            f"model.path: {type(model).__name__} does not use transformers' attention interface; "
            "packed training needs it, choose another model"
        )
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    model.set_attn_implementation(PACKED_ATTENTION)
    replace_output_layer(model, wide=config.head_dtype == "float32")
    half = MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy() if config.dtype == "float32" else half
    fuse_layers(model, cuda=mesh.device.type == "cuda" and mesh.tensor is None)
    if mesh.tensor is not None:
        # Embedding and output layer stay whole, and their gradients are computed on each rank of a group.
        check_divisible(model.config, mesh.tensor.size())
        divide_layers(model, mesh.tensor)
    # With one data shard there is nothing to free between forward and backward; resharding would only copy.
    reshard = mesh.data_shards > 1
    whole = layer_types(model)
    for module in list(model.modules()):
        if type(module).__name__ in whole:
            if recompute:
                checkpoint(module)
            fully_shard(module, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)
    # Dropout stays off: the trained log-probs are those of the policy that acts.
    return model.eval()


def check_divisible(described: PreTrainedConfig, ranks: int) -> None:
    """Whether so many ranks can divide the layers of a model of this configuration.

    Raises:
        ConfigError: heads or widths do not divide, or nothing has shown that it is exact for a model of this kind.
    """
    described = described.get_text_config()
    if described.model_type not in DIVIDED:
        raise ConfigError(
            f"parallel.tensor: expected 1 for a {described.model_type}; it is known to be exact for "
            f"{', '.join(DIVIDED)} alone, got {ranks}"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (count := getattr(described, name)) % ranks:
            raise ConfigError(f"parallel.tensor: expected a divisor of the model's {name} = {count}, got {ranks}")


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters after a forward pass that no backward pass follows.

    They would stay gathered, and the next forward pass would not see an update of the sharded ones.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face name and full float32 tensor of each parameter, on every rank, one at a time.

    A tied output layer is the input embedding and is not repeated.
    """
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        yield name, value.full_tensor() if isinstance(value, DTensor) else value
