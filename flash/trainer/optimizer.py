"""One update of a model: the learning rate of a step, the gradient clipped and checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm

from flash.config.learning import TrainConfig
from flash.errors import ContractError

FIRST_SCALE, MOST_SCALE = 2.0**14, 2.0**16
"""Of float16 losses. A token's share of a loss is 1e-3 to 1e-6, so gradients stay far from both ends."""
GROW_AFTER = 200
"""Updates."""


MOMENTUM = 0.95
"""Of Muon."""
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of its iteration, which is made `ITERATIONS` times."""
ITERATIONS = 5
LIKE_ADAMW = 0.2
"""Root mean square of an update of AdamW's, about (Moonshot 2025, arXiv 2502.16982, section 2.2): with updates of Muon
scaled to it, learning rates and decay are those of AdamW."""


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024) for the parameters of the first group, matrices, and AdamW for those of the others.

    M ← μ M + (1 − μ) G, W ← (1 − η λ) W − η 0.2 √max(rows, columns) · orthogonal(μ M + (1 − μ) G). A sharded matrix is
    gathered for that, one at a time, so that the update is that of the whole, on however many ranks.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update, of parameters that have a gradient."""
        matrices, *others = self.param_groups
        self.param_groups = others
        super().step(closure)
        self.param_groups = [matrices, *others]
        for parameter in (one for one in matrices["params"] if one.grad is not None):
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
                state["step"] = torch.zeros((), device=parameter.device)  # as AdamW, which loads both, has it
            state["step"] += 1
            momentum = state["momentum"].lerp_(parameter.grad, 1 - MOMENTUM)
            update = _orthogonal_part(parameter.grad.lerp(momentum, MOMENTUM))
            parameter.mul_(1 - matrices["lr"] * matrices["weight_decay"])
            parameter.add_(update, alpha=-matrices["lr"] * LIKE_ADAMW * math.sqrt(max(parameter.shape)))


def _orthogonal_part(matrix: Tensor) -> Tensor:
    """What `orthogonal` makes of the whole matrix, and of that this rank's part."""
    if not isinstance(matrix, DTensor):
        return orthogonal(matrix)
    whole = orthogonal(matrix.full_tensor())
    return distribute_tensor(whole, matrix.device_mesh, matrix.placements, src_data_rank=None)


def orthogonal(matrix: Tensor) -> Tensor:
    """About U Vᵀ of a matrix U S Vᵀ, by Newton and Schulz; its singular values come to lie from 0.7 to 1.2.

    On a GPU in bfloat16, which loses nothing that matters in that range.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found.bfloat16() if matrix.is_cuda else found
    found = found / found.norm().clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return (found.T if tall else found).to(matrix.dtype)


def make_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over what is trained, or `Muon`, for which `model` is a language model.

    On the CPU AdamW passes once over memory, where torch's default makes some ten passes.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[Any] = parameters
    kind = torch.optim.AdamW
    if train.optimizer == "muon":
        ends = {id(parameter) for layer in _ends(model) for parameter in layer.parameters()}
        hidden = [one for one in parameters if one.ndim == 2 and id(one) not in ends]
        known = {id(one) for one in hidden}
        groups, kind = [{"params": hidden}, {"params": [one for one in parameters if id(one) not in known]}], Muon
    return kind(
        groups,
        lr=train.learning_rate,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        fused=parameters[0].device.type == "cpu",
    )


def _ends(model: Any) -> list[nn.Module]:
    """Embeddings and output layer, whose rows are tokens or places."""
    return [*(one for one in model.modules() if isinstance(one, nn.Embedding)), model.get_output_embeddings()]


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


class LossScale:
    """What a loss is multiplied by, so that gradients in float16 do not vanish; in wider dtypes nothing is.

    Gradients below 6e-8 are 0 in float16, and above 65,504 infinite. The scale is halved where an update's gradient is
    not finite, and that update left out; after `GROW_AFTER` finite ones in a row it is doubled. All ranks do so alike.
    """

    def __init__(self, dtype: str) -> None:
        self.moves = dtype == "float16"
        """Whether there is a scale at all."""
        self.value = FIRST_SCALE if self.moves else 1.0
        self.finite = 0
        """Finite updates in a row."""

    def seen(self, *, finite: bool) -> bool:
        """Whether the scale is the reason of a gradient that is not finite."""
        if not self.moves:
            return False
        if finite:
            self.finite += 1
            if self.finite == GROW_AFTER:
                self.value, self.finite = min(self.value * 2, MOST_SCALE), 0
            return False
        self.finite = 0
        if self.value <= 1:
            return False
        self.value /= 2
        return True


def global_norm(grads: Sequence[Tensor]) -> float:
    """Of all parameters together; a divided layer's lie on another mesh than the others."""
    by_mesh: dict[object, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [get_total_norm(some) for some in by_mesh.values()]
    return math.hypot(*(float(norm.full_tensor() if isinstance(norm, DTensor) else norm) for norm in norms))


def apply_gradient(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scale: LossScale,
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

    `scale` is what the loss was multiplied by, `share` the part of its denominator that was kept in the end.

    Raises:
        ContractError: the gradient is not finite and `on_nonfinite` is "stop"; with `whose` it is and `advice`.
    """
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    by = scale.value * (share or 1.0)
    if by != 1:
        for grad in grads:
            grad.div_(by)
    norm = global_norm(grads)
    scaled_too_far = scale.seen(finite=math.isfinite(norm))
    if not math.isfinite(norm) and not scaled_too_far and on_nonfinite == "stop":
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
