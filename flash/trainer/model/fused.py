"""Fused GPU kernels by torch.compile: of decoder layers, and of the work on logits.

Between matrix products, each operation reads and writes every number once, and this memory traffic bounds a step more
than the products do. A fused kernel makes one pass over memory where torch's own kernels make many;
benchmarks/results/gpu_check.json has the gain. torch.compile builds the kernels in the first step, which takes some
seconds more. The part of a layer before attention and the part after it are compiled separately, since the parts of
packed attention differ from micro-batch to micro-batch. TORCHDYNAMO_DISABLE=1, torch's own variable, turns all
compilation off.

`shard_model` calls `fuse_layers` before it shards; `flash.trainer.model.logprobs` calls `fused`.
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

from flash.foreign.torch import set_recompile_limit
from flash.foreign.transformers import layer_types, routers

Call = TypeVar("Call", bound=Callable[..., Any])

KINDS = ("Norm", "MLP")
"""Endings of the class names of modules that are fused one by one if their whole layer cannot be."""
COMPILERS = ("gcc", "clang")
"""C compilers. Triton calls one of them, unless the variable CC names another."""

KERNELS = 64
"""Number of variants of one kind of layer that torch.compile keeps: for each width, with and without gradients, for one
length and for any length. torch's default is 8. More variants would run on torch's own slower kernels without any
error."""

log = logging.getLogger("flash")


@cache
def can_fuse() -> bool:
    """Return True if this machine has a C compiler, which Triton needs to build its kernels. If not, a warning is
    logged once."""
    if any(shutil.which(name) for name in (os.environ.get("CC"), *COMPILERS) if name):
        return True
    log.warning("there is no C compiler (gcc, clang or the program in CC): the trainer's steps take longer")
    return False


def fused(call: Call, *, cuda: bool) -> Call:
    """Return the function compiled to fused kernels if it runs on a GPU, else the function itself.

    `cuda` is True if the function will get tensors on a GPU. Without a C compiler, the function is returned unchanged.
    """
    return _compiled(call) if cuda and can_fuse() else call


@cache
def _compiled(call: Any) -> Any:
    """Return the compiled function. The cache lets all layers and passes share one compilation."""
    return torch.compile(call)


def fuse_layers(model: PreTrainedModel, *, whole: bool, compiled: Callable[..., Any] = torch.compile) -> None:
    """Compile a model's layers in place. Must be called before the model is sharded.

    With `whole`, all of a decoder layer except its attention is compiled, else only its norms and MLPs: the caller does
    not set it for models with their own attention or a recurrent state. A layer that chooses experts is never compiled
    as a whole, because each token may go to other experts, and routing replay may make the choice
    (`flash.trainer.model.routing_replay`). `compiled` is the function that compiles a method; tests on a CPU pass
    another function than torch.compile.
    """
    set_recompile_limit(KERNELS)
    choosing = {router.module for router in routers(model)}
    kinds, inside = layer_types(model) if whole else set[str](), set[nn.Module]()
    for module in model.modules():
        if module in inside or not choosing.isdisjoint(module.modules()):
            continue
        # The forward method is replaced and not the module, so that FSDP's hooks stay around the compiled code.
        if type(module).__name__ in kinds:
            inside.update(module.modules())
            # Rows have different lengths. With dynamic shapes from the start, the second row needs no recompilation.
            module.forward = compiled(module.forward, dynamic=True)
        elif type(module).__name__.endswith(KINDS):
            module.forward = compiled(module.forward)
