"""peft: adapters in a model, and the model without them. peft is imported where it is used, which takes seconds."""

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
"""Attributes of peft and torch that this module uses, in the form of `flash.foreign.vllm.TOUCHED`."""

ADAPTER = "default"
"""peft's name of a model's first adapter."""
PREFIX = "base_model.model."
"""Prefix of the names of tensors in peft's files."""


def adapter_config(*, base: str, rank: int, alpha: float, targets: Sequence[str]) -> Any:
    """Return peft's configuration of adapters for the model at `base`, for `save_config`."""
    from peft import LoraConfig

    # peft declares alpha as an integer but only computes with it, so other numbers work too.
    scale: Any = int(alpha) if alpha == int(alpha) else alpha
    return LoraConfig(
        r=rank, lora_alpha=scale, target_modules=list(targets), task_type="CAUSAL_LM", base_model_name_or_path=base
    )


def insert_adapters(model: nn.Module, config: Any) -> None:
    """Put adapters in float32 into a model, in place, and freeze everything else. Empty models get empty adapters."""
    from peft import inject_adapter_in_model
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    # peft moves the tensors that it makes, which fails for fake tensors.
    with unset_fake_temporarily():
        inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()


def config_in(model: nn.Module) -> Any:
    """Return the configuration with which `insert_adapters` was called for this model; None: it has no adapters."""
    return getattr(model, "peft_config", {}).get(ADAPTER)


def file_name(name: str) -> str:
    """Return the name of an adapter's tensor in peft's files."""
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def save_config(folder: Path, config: Any) -> None:
    """Write the configuration of adapters into a folder."""
    config.save_pretrained(str(folder))


@contextmanager
def without_adapters(model: nn.Module) -> Generator[None]:
    """Let the model compute as its base, without adapters, inside this block. No backward pass may run there."""
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
