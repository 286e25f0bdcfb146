"""The policy as the trainer holds it: a Hugging Face causal LM, sharded by FSDP2, run on packed sequences.

Master weights are float32; the forward pass runs in the configured dtype. Sequences of a micro-batch lie one after the
other in one row; attention spreads them over the rows of a padded batch, so that none sees another. Padding comes after
the tokens and attention is causal, so no mask is needed, and fast kernels apply.

Everything that touches parameters is a collective: all ranks call it together.
Shape legend: P = packed tokens, S = sequences, L = longest sequence, H = heads, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from flash.config.tree import ModelConfig
from flash.errors import ConfigError
from flash.foreign.transformers import layer_types, takes_attention
from flash.trainer.output_layer import replace_output_layer

PACKED_ATTENTION = "packed"
"""Our name in transformers' attention interface. Not in its mask interface, so no dense mask is built. It must contain
none of transformers' own names, such as sdpa: the rules for that one would apply."""


class AttentionWatch(Protocol):
    """Looks on while the layers attend."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, scaling: float | None, sliding_window: int | None
    ) -> None:
        """What one layer compares, as the model made it: query [1, H, P, D], key [1, heads of keys, P, D]."""
        ...


class PackedLayout(NamedTuple):
    """Where the tokens of a packed row go in a padded batch, and who looks on."""

    slot_P: Tensor
    """int64: sequence · L + position."""
    sequences: int
    """S."""
    longest: int
    """L."""
    watch: AttentionWatch | None = None
    """Is told of every layer's attention."""

    @property
    def even(self) -> bool:
        """Whether all sequences are of one length: the packed row then is the padded batch."""
        return len(self.slot_P) == self.sequences * self.longest


def packed_layout(position_P: Tensor, offset_S: Tensor, longest: int) -> PackedLayout:
    """From the fields of `flash.trainer.packing.MicroBatch` and the length of its longest sequence."""
    sequences = len(offset_S) - 1
    sequence_P = torch.repeat_interleave(
        torch.arange(sequences, device=position_P.device), offset_S.diff(), output_size=len(position_P)
    )
    return PackedLayout(slot_P=sequence_P * longest + position_P, sequences=sequences, longest=longest)


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


def trainer_mesh(device: Literal["cpu", "cuda"]) -> DeviceMesh:
    """One dimension over all ranks of the default process group."""
    return init_device_mesh(device, (dist.get_world_size(),))


def shard_model(model: PreTrainedModel, mesh: DeviceMesh, dtype: Literal["float32", "bfloat16"]) -> PreTrainedModel:
    """Shard in place: each decoder layer, then the rest.

    Also selects packed attention, lets the output layer answer with log-probs, and turns dropout off.

    Raises:
        ConfigError: the model's attention cannot be replaced, so packed sequences would see each other; or its output
            layer cannot.
    """
    if not takes_attention(model):
        raise ConfigError(
            f"model.path: {type(model).__name__} does not use transformers' attention interface; "
            "packed training needs it, choose another model"
        )
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    model.set_attn_implementation(PACKED_ATTENTION)
    replace_output_layer(model)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if dtype == "bfloat16" else MixedPrecisionPolicy()
    # On one rank there is nothing to free between forward and backward; resharding would only copy.
    reshard = mesh.size() > 1
    whole = layer_types(model)
    for module in list(model.modules()):
        if type(module).__name__ in whole:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    # Dropout stays off: the trained log-probs are those of the policy that acts.
    return model.eval()


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row: query [1, H, P, D] to output [1, P, H, D]."""
    if packed_layout is None:
        raise ConfigError(
            f"model.path: {class_name(module)} does not pass on what its attention is told of packed sequences; choose "
            "another model"
        )
    if attention_mask is not None:
        raise ConfigError(
            f"model.path: {class_name(module)} makes a mask of its own for its attention, which packed training would "
            "have to ignore; choose another model"
        )
    if other.get("softcap") is not None or other.get("s_aux") is not None:
        raise ConfigError(f"model.path: {class_name(module)} uses capped or sink attention, which is not supported")
    if packed_layout.watch is not None:
        packed_layout.watch(module, query, key, scaling, sliding_window)
    longest = packed_layout.longest
    band = None
    if sliding_window is not None and longest > sliding_window:
        distance = torch.arange(longest, device=query.device)
        distance = distance[:, None] - distance[None, :]
        band = (distance >= 0) & (distance < sliding_window)
    output = scaled_dot_product_attention(
        _spread(query, packed_layout),
        _spread(key, packed_layout),
        _spread(value, packed_layout),
        attn_mask=band,
        is_causal=band is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    output_SLHD = output.transpose(1, 2).reshape(-1, *output.shape[1:2], output.shape[3])
    packed = output_SLHD if packed_layout.even else output_SLHD[packed_layout.slot_P]
    return packed.unsqueeze(0), None


def class_name(module: nn.Module) -> str:
    """The name of a module's class as transformers has it; FSDP puts its own before it."""
    return type(module).__name__.removeprefix("FSDP")


def _spread(packed: Tensor, layout: PackedLayout) -> Tensor:
    """[1, H, P, D] to a zero-padded [S, H, L, D]."""
    if layout.even:
        return packed[0].unflatten(1, (layout.sequences, layout.longest)).transpose(0, 1)
    _, heads, _, width = packed.shape
    rows = packed.new_zeros(layout.sequences * layout.longest, heads, width)
    rows = rows.index_copy(0, layout.slot_P, packed[0].transpose(0, 1))
    return rows.view(layout.sequences, layout.longest, heads, width).transpose(1, 2)


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
