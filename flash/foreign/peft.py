"""LoRA adapters in a model, with peft, and the model without them.

An *adapter* is a pair of small trained matrices beside a frozen linear layer. The *base* is the model without adapters.
`flash.trainer.model.adapters` calls these functions in trainer ranks, and in commands that read or write adapters. peft
is imported inside the functions, because the import takes seconds.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

TOUCHED = (
    "peft:LoraConfig",
    "peft:inject_adapter_in_model",
    "peft.tuners.tuners_utils:BaseTunerLayer._disable_adapters",
    "torch._subclasses.fake_tensor:unset_fake_temporarily",
)
"""Attributes of peft and torch that this module uses, as `module:Class.attribute`. A test looks for each of them."""

ADAPTER = "default"
"""Name that peft gives to a model's first adapter. Flash uses no other adapter."""
PREFIX = "base_model.model."
"""Prefix of the names of tensors in files of peft."""


def adapter_config(*, base: str, rank: int, alpha: float, targets: Sequence[str]) -> Any:
    """Return peft's configuration of adapters, for `insert_adapters` and `save_config`.

    Args:
        base: folder or hub id of the base.
        rank: rank of the matrices.
        alpha: scale of the adapters: the product of the matrices is multiplied by alpha / rank.
        targets: last parts of the names of the linear layers that get adapters, such as `q_proj`.
    """
    from peft import LoraConfig

    # peft declares alpha as an integer but only computes with it, so other numbers work too.
    scale: Any = int(alpha) if alpha == int(alpha) else alpha
    return LoraConfig(
        r=rank, lora_alpha=scale, target_modules=list(targets), task_type="CAUSAL_LM", base_model_name_or_path=base
    )


def insert_adapters(model: nn.Module, config: Any) -> None:
    """Put adapters in float32 into a model, in place, and freeze everything else. `config` is from `adapter_config`.

    If the parameters of the model are on the meta device, without memory, the adapters are there, too.

    Raises:
        ValueError: peft does not support one of the layers.
    """
    from peft import inject_adapter_in_model
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    # peft moves the tensors that it makes. Inside `flash.foreign.torch.counted`, where new tensors have no data, this
    # would fail.
    with unset_fake_temporarily():
        inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
        for parameter in model.parameters():
            if parameter.requires_grad:  # only the adapters, which may have the precision of their layers
                parameter.data = parameter.data.float()


def config_in(model: nn.Module) -> Any:
    """Return peft's configuration of the adapters in a model; None if it has no adapters. Callers use it to find out if
    a model has some, and to write it beside their tensors."""
    return getattr(model, "peft_config", {}).get(ADAPTER)


def file_name(name: str) -> str:
    """Return the name that a tensor of an adapter has in files of peft, where the adapter's name is left out. `name` is
    the name of the parameter in the model."""
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def save_config(folder: Path, config: Any) -> None:
    """Write the configuration of adapters into a folder. With the tensors beside it, peft can load the folder."""
    config.save_pretrained(str(folder))


@contextmanager
def without_adapters(model: nn.Module) -> Generator[None]:
    """Let the model compute as its base, without adapters, inside this block.

    So one model serves as policy and as reference model: trainer ranks compute the reference's log-probs in the block.
    No backward pass may run inside.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # `enable_adapters` would also change which parameters need a gradient, and FSDP reads that only once.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
