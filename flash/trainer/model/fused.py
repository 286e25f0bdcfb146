"""What a GPU does in one pass over memory where torch's own kernels take many: norms, MLPs, and what follows logits.

Between matrix products each number is read and written once per operation, and that bounds a step more than the
products do: benchmarks/results/gpu_check.json has what it gives. torch.compile makes the kernels in the first step,
which takes some seconds more. Attention stays as it is: packed rows are cut anew for each micro-batch.
TORCHDYNAMO_DISABLE=1, torch's own variable, turns all of it off.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from flash.foreign.torch import keep_kernels
from flash.foreign.transformers import routers

Call = TypeVar("Call", bound=Callable[..., Any])

KINDS = ("Norm", "MLP")
"""Ends of the class names of layers that are fused."""
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


def fuse_layers(model: PreTrainedModel, *, cuda: bool) -> None:
    """The same for a model's norms and MLPs, in place. To be called before the model is sharded.

    Not for what chooses experts: each token's way is another one, and may be told (`flash.trainer.model.replay`).
    """
    if not cuda or not can_fuse():
        return
    keep_kernels(KERNELS)
    choosing = {router.module for router in routers(model)}
    for module in model.modules():
        if type(module).__name__.endswith(KINDS) and choosing.isdisjoint(module.modules()):
            module.compile()
