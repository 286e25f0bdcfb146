"""What a GPU does in one pass over memory where torch's own kernels take many: layers, and what follows logits.

Between matrix products each number is read and written once per operation, and that bounds a step more than the
products do: benchmarks/results/gpu_check.json has what it gives. torch.compile makes the kernels in the first step,
which takes some seconds more. What comes before attention is one part of a layer, and what comes after it another:
packed rows are cut anew for each micro-batch. TORCHDYNAMO_DISABLE=1, torch's own variable, turns all of it off.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from flash.foreign.torch import keep_kernels
from flash.foreign.transformers import layer_types, routers

Call = TypeVar("Call", bound=Callable[..., Any])

KINDS = ("Norm", "MLP")
"""Ends of the class names of what is fused by itself, where whole layers are not."""
COMPILERS = ("gcc", "clang")
"""Programs of which Triton calls one, unless CC names another."""

KERNELS = 64
"""Forms of one kind of layer: its widths, with and without gradients, of one length and of any. Beyond torch's 8, all
others would go through torch's own kernels again."""

log = logging.getLogger("flash")


@cache
def can_fuse() -> bool:
    """Whether kernels can be made here: Triton compiles what launches them, in C."""
    if any(shutil.which(name) for name in (os.environ.get("CC"), *COMPILERS) if name):
        return True
    log.warning("there is no C compiler (gcc, clang or what CC names): the trainer's steps take longer")
    return False


def fused(call: Call, *, cuda: bool) -> Call:
    """The function, where it works on a GPU with as few passes over memory as can be."""
    return _compiled(call) if cuda and can_fuse() else call


@cache
def _compiled(call: Any) -> Any:
    return torch.compile(call)


def fuse_layers(model: PreTrainedModel, *, whole: bool, compiled: Callable[..., Any] = torch.compile) -> None:
    """The same for a model's layers, in place. To be called before the model is sharded.

    `whole`: all of a decoder layer but its attention; else its norms and MLPs alone. A layer that chooses experts is
    never taken whole: each token's way is another one, and may be told (`flash.trainer.model.routing_replay`).
    """
    keep_kernels(KERNELS)
    choosing = {router.module for router in routers(model)}
    kinds, inside = layer_types(model) if whole else set[str](), set[nn.Module]()
    for module in model.modules():
        if module in inside or not choosing.isdisjoint(module.modules()):
            continue
        # Its hooks are FSDP's, which come around it.
        if type(module).__name__ in kinds:
            inside.update(module.modules())
            # Rows are of any length, as is known from the first one on.
            module.forward = compiled(module.forward, dynamic=True)
        elif type(module).__name__.endswith(KINDS):
            module.forward = compiled(module.forward)
