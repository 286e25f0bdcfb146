"""One update of a model: the learning rate of a step, the gradient clipped and checked."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from flash.config.tree import TrainConfig
from flash.errors import ContractError


def make_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all parameters."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=train.learning_rate,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
    )


def learning_rate(train: TrainConfig, steps: int, step: int) -> float:
    """Of step 0 … steps − 1: linear warm-up to the peak, then the decay, whose end the step after them would have: it
    may be 0, and no batch is trained for nothing."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    if train.decay == "constant":
        return train.learning_rate
    done = min((step - train.warmup_steps) / max(steps - train.warmup_steps, 1), 1.0)
    left = 1 - done if train.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return train.final_learning_rate + (train.learning_rate - train.final_learning_rate) * left


def apply_gradient(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rate: float,
    max_norm: float,
    trained: bool,
    on_nonfinite: Literal["stop", "skip"],
    whose: str,
    advice: str,
    share: float = 1.0,
) -> tuple[float, bool]:
    """Clip, check and apply the gradient, unless nothing was trained. Returns its global norm, and whether it applied.

    `share` is the part of its denominator that was kept in the end.

    Raises:
        ContractError: the gradient is not finite and `on_nonfinite` is "stop"; with `whose` it is and `advice`.
    """
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if share not in (0.0, 1.0):
        for grad in grads:
            grad.div_(share)
    norm_tensor = get_total_norm(grads)
    norm = float(norm_tensor.full_tensor() if isinstance(norm_tensor, DTensor) else norm_tensor)
    if not math.isfinite(norm) and on_nonfinite == "stop":
        raise ContractError(f'{whose}: the gradient norm is {norm}; {advice}, or set train.on_nonfinite = "skip"')
    applied = trained and math.isfinite(norm)
    if applied:
        if norm > max_norm:
            for grad in grads:
                grad.mul_(max_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    optimizer.zero_grad()
    return norm, applied
