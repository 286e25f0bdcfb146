"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685): W + alpha / rank · B A, where only A and B are trained.

A run has adapters if its configuration has a `[lora]` table. The policy is then the *base*, the model at `model.path`
with its weights W, together with the adapters, small matrices A and B for each chosen linear layer. The base weights W
have the dtype of the run, to which the forward pass would round them anyway. Adapters, their gradients and their
moments are float32. B begins as 0, so that version 0 equals the base bit for bit. With its adapters disabled the policy
is its base, which makes a reference policy that costs no memory.

To other modules, an adapted model is a model of which only a part is trained
(`flash.trainer.model.model.published_parameters`). FSDP shards the adapters; tensor and expert parallelism are refused
with adapters. Names and files follow the library peft, so that its users can load them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from flash.config.learning import LoraConfig
from flash.config.tree import Config, ModelConfig
from flash.errors import ConfigError
from flash.foreign import peft
from flash.foreign.transformers import linear_layers, make_weights_readable
from flash.trainer.model.model import empty_model, kept_buffers, named_full_tensors
from flash.weights.image import Fingerprint

WEIGHTS = "adapter_model.safetensors"
"""peft's name for the file of adapter weights."""


def empty_policy(config: Config, layers: int | None = None) -> PreTrainedModel:
    """Return the policy with parameters on the meta device, with adapters if the run trains them.

    The trainer then shards the model and fills it with `fill_policy`. Predictions of memory, and a dry run, use it
    without weights. With `layers`, the model has only its first `layers` decoder layers.

    Raises:
        ConfigError: the model cannot be loaded, or adapters cannot be made for it (`add_adapters`).
    """
    model = empty_model(config.model, layers)
    return model if config.lora is None else add_adapters(model, config.model, config.lora)


def add_adapters(model: PreTrainedModel, described: ModelConfig, lora: LoraConfig) -> PreTrainedModel:
    """Add adapters to a model on the meta device, freeze all its other parameters, and return it.

    The parameters of the base get the dtype of the run. No parameter has values yet: `fill_policy` sets them.

    Args:
        model: result of `empty_model`. It is changed.
        described: configuration of the base.
        lora: options of the adapters.

    Raises:
        ConfigError: the model lacks a layer that `lora.targets` names, or peft does not support one of the layers.
    """
    names = linear_layers(model)
    if unknown := [target for target in lora.targets if target not in names]:
        known = f"the linear layers of {type(model).__name__} are {', '.join(names)}"
        raise ConfigError(f"lora.targets: there is no {', '.join(map(repr, unknown))}; {known}")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, described.dtype))
    targets = lora.targets or names
    try:
        peft.insert_adapters(
            model, peft.adapter_config(base=described.path, rank=lora.rank, alpha=lora.alpha, targets=targets)
        )
    except ValueError as error:
        raise ConfigError(
            f"lora.targets: peft does not support all of these layers of {type(model).__name__} ({error}); expected "
            f"some of {', '.join(names)}, got {', '.join(targets)}"
        ) from error
    return model


def fill_policy(model: PreTrainedModel, plain: PreTrainedModel, seed: int) -> None:
    """Give a sharded policy the weights of a model from `load_plain`. A collective.

    Without adapters, the policy takes over the tensors of `plain`. With adapters, the base weights are cast to the
    dtype of the run, A is drawn with the seed, from the distribution that peft uses, and B is 0.
    """
    state: dict[str, Any] = plain.state_dict()
    if peft.config_in(model) is None:
        model.load_state_dict(state, assign=True)
        return
    found: dict[str, Any] = {name: state.pop(_base_name(name)) for name, _ in kept_buffers(model)}
    generator = torch.Generator().manual_seed(seed)
    # Ranks keep their shards on this device, which is the host if weights are offloaded.
    device = next(plain.parameters()).device
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            found[name] = state.pop(_base_name(name)).to(parameter.dtype)
            continue
        # Every rank draws the same whole matrix, and keeps its own part. The functions of nn.init would depend on the
        # random numbers that this process has drawn before.
        whole = torch.rand(parameter.shape, generator=generator).mul_(2).sub_(1).div_(parameter.shape[1] ** 0.5)
        whole = whole if ".lora_A." in name else torch.zeros_like(whole)
        assert isinstance(parameter, DTensor), "the policy is sharded"
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        found[name] = part.to(device)
    model.load_state_dict(found, strict=False, assign=True)


def fingerprint_of(model: nn.Module) -> tuple[int, ...]:
    """Return the fingerprint of a sharded model's parameters over all ranks. A collective.

    A fingerprint is two exact sums over all weights (`flash.weights.image.Fingerprint`). Checkpoints of adapters hold
    the fingerprint of the base, so that adapters are never combined with another base.
    """
    # The sum over the ranks' parts is the fingerprint of the whole parameters.
    fingerprint = Fingerprint()
    for parameter in model.parameters():
        fingerprint.add(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
    parts: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(parts, fingerprint.sums)
    whole = Fingerprint()
    for part in parts:
        whole.add_sums(part)
    return tuple(whole.sums)


def engine_tensors(model: nn.Module, lora: LoraConfig | None) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of everything that engines load of a version: all parameters, or the adapters alone.

    A version is the weights that `flash.trainer.loop` publishes after a step. A collective. Adapters get the names that
    peft uses in its files. B is multiplied by alpha / rank here and not in the engine, so that the engine holds the
    published tensors bit for bit. `lora` is None if the run trains all weights.
    """
    if lora is None:
        yield from named_full_tensors(model)
        return
    for name, tensor in named_full_tensors(model):
        yield peft.file_name(name), tensor * (lora.alpha / lora.rank) if ".lora_B." in name else tensor


def write_adapters(folder: Path, described: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write a folder that peft's `PeftModel.from_pretrained` can read.

    `described` is peft's configuration of the adapters; this function sets its mode to inference. `tensors` has the
    adapters by their names in the adapted model.
    """
    from safetensors.torch import save_file

    described.inference_mode = True
    peft.save_config(folder, described)
    named = {peft.file_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    make_weights_readable(folder)


@torch.no_grad()
def merge_adapters(model: PreTrainedModel, tensors: Mapping[str, Tensor], lora: LoraConfig) -> None:
    """Add adapters to the weights of their base, in place, for an export of the whole model: W + alpha / rank · B A.

    `tensors` has the adapters by their names in the adapted model.
    """
    for name, a in tensors.items():
        layer, found, rest = name.partition(".lora_A.")
        if found:
            weight = model.get_parameter(f"{layer}.weight")
            weight += (lora.alpha / lora.rank) * (tensors[f"{layer}.lora_B.{rest}"] @ a)


def _base_name(name: str) -> str:
    """Return the name in the base model of a tensor of the adapted model. peft moves the weights of an adapted
    layer into a submodule `base_layer`."""
    return name.replace(".base_layer.", ".")
