"""An exponentially weighted average of the policy's weights, kept sharded beside it.

Hilton et al. 2021 (arXiv 2110.00641, section 3.2): the average over the versions 0 … n, where version n − i weighs
decay^i, divided by the sum of the weights, so that early averages lean on no version in particular.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flash.trainer.model.model import device_of, reshard, trained_parameters


def start_average(model: nn.Module) -> dict[str, Tensor]:
    """The average at version 0: a copy of the trained parameters, sharded alike, by name."""
    return {name: parameter.detach().clone() for name, parameter in trained_parameters(model)}


@torch.no_grad()
def update_average(average: Mapping[str, Tensor], model: nn.Module, decay: float, version: int) -> None:
    """Take in the weights of `version`, the next after those that the average holds."""
    share = (1 - decay) / (1 - decay ** (version + 1))
    for name, parameter in trained_parameters(model):
        _local(average[name]).lerp_(_local(parameter), share)


@torch.no_grad()
def take_over(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Make these the weights of a model, sharded alike."""
    for name, parameter in model.named_parameters():
        _local(weights[name]).copy_(_local(parameter))


@contextmanager
def swapped_in(average: Mapping[str, Tensor], model: nn.Module) -> Generator[None]:
    """The model computes with the average inside of the block. No backward pass may run there."""
    _exchange(average, model)
    try:
        yield
    finally:
        _exchange(average, model)


@torch.no_grad()
def _exchange(average: Mapping[str, Tensor], model: nn.Module) -> None:
    """Swap contents, one parameter at a time, so that no second copy of the model is held."""
    reshard(model)
    if device_of(model).type == "cuda":
        # The GPU may still have to copy weights from the host, which waits for nothing.
        torch.cuda.synchronize()
    for name, parameter in trained_parameters(model):
        mine, other = _local(parameter), _local(average[name])
        held = mine.clone()
        mine.copy_(other)
        other.copy_(held)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part; changing it changes the whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
