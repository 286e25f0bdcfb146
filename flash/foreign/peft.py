"""peft: adapters in a model, and the model without them. Imported where it is used: that takes seconds."""

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
"""In the form of `flash.foreign.vllm.TOUCHED`."""

ADAPTER = "default"
"""What peft calls a model's first adapter."""
PREFIX = "base_model.model."
"""Begins the names of tensors in peft's files."""


def settings(*, base: str, rank: int, alpha: float, targets: Sequence[str]) -> Any:
    """peft's description of adapters for the model at `base`, which `save_pretrained` writes beside their tensors."""
    from peft import LoraConfig

    # peft takes an integer, and computes with it alone.
    scale: Any = int(alpha) if alpha == int(alpha) else alpha
    return LoraConfig(
        r=rank, lora_alpha=scale, target_modules=list(targets), task_type="CAUSAL_LM", base_model_name_or_path=base
    )


def insert(model: nn.Module, described: Any) -> None:
    """Put adapters in float32 into a model, in place and without memory; they alone are to be trained from then on."""
    from peft import inject_adapter_in_model
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    # peft moves what it makes, which torch cannot do with tensors that only say what they would be.
    with unset_fake_temporarily():
        inject_adapter_in_model(described, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()


def described_in(model: nn.Module) -> Any:
    """What `insert` was given for this model; None: it has no adapters."""
    return getattr(model, "peft_config", {}).get(ADAPTER)


def file_name(name: str) -> str:
    """What peft calls an adapter's tensor in its files."""
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def save(folder: Path, described: Any) -> None:
    """Write the description."""
    described.save_pretrained(str(folder))


@contextmanager
def without_adapters(model: nn.Module) -> Generator[None]:
    """The model computes as its base inside of the block. No backward pass may run there."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # Not by `enable_adapters`, which also changes what needs a gradient, and FSDP looks at that once.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
