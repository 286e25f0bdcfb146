"""Updates a model once: the learning rate of a step, the check and the clipping of the gradient, and the optimizers.

`flash.trainer.step` and `flash.trainer.critic` call `apply_gradient` after the backward passes of a minibatch, the part
of a batch for one update. All ranks make the same calls with the same numbers: the gradient's norm is reduced over all
ranks first. Version n is the weights after n training steps. *Moments* are the moving averages that Adam keeps for each
weight.

Shape legend: N = elements of a parameter that are updated at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm

from flash.config.learning import TrainConfig
from flash.errors import ContractError
from flash.trainer.mesh import gather_full

log = logging.getLogger("flash")

FIRST_SCALE, MOST_SCALE = 2.0**14, 2.0**16
"""First and largest factor of float16 losses. A token's share of a loss is 1e-3 to 1e-6, so with a factor in this range
gradients stay far from both ends of float16's range."""
GROW_AFTER = 200
"""Number of finite updates in a row after which the factor of float16 losses is doubled. A factor that is too large
costs an update, so it grows seldom."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names that torch's AdamW gives the two moments of a parameter."""
AT_ONCE = 2**24
"""Largest number of elements of a parameter that `OffloadedAdamW` updates at a time. This bounds the memory of an
update, in which five float32 tensors of this size exist."""

MOMENTUM = 0.95
"""μ of Muon, with the value of its authors (Jordan et al. 2024), as the two constants below."""
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's Newton-Schulz iteration."""
ITERATIONS = 5
"""Number of Newton-Schulz iterations of Muon."""
LIKE_ADAMW = 0.2
"""Approximate root mean square of an AdamW update (Moonshot 2025, arXiv 2502.16982, section 2.2). Muon's updates are
scaled to this size, so that learning rates and weight decay mean the same as for AdamW."""


def learning_rate(train: TrainConfig, steps: int, step: int) -> float:
    """Return the scheduled learning rate of a step.

    A linear warm-up ends at the full rate in step `warmup_steps` − 1. Then the decay begins. It reaches the final rate
    one step after the last step. So no batch is trained at a rate of 0, even if the final rate is 0.

    `step`: number of the step, which is also the version that it trains, from 0 to `steps` − 1.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    if train.decay == "constant":
        return train.learning_rate
    done = min((step - train.warmup_steps) / max(steps - train.warmup_steps, 1), 1.0)
    left = 1 - done if train.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return train.final_learning_rate + (train.learning_rate - train.final_learning_rate) * left


class LossScale:
    """Factor of a loss that keeps float16 gradients from vanishing. In wider dtypes the factor is 1.

    In float16, gradients below 6e-8 are 0 and gradients above 65,504 are infinite. If an update's gradient is not
    finite, the factor is halved and the update is left out. After `GROW_AFTER` finite updates in a row it is doubled.
    The factor is equal on all ranks, since all of them compute the same gradient norm.

    Args:
        dtype: dtype in which the model computes.
    """

    def __init__(self, dtype: str) -> None:
        self.active = dtype == "float16"
        """True if the model's dtype needs a factor."""
        self.value = FIRST_SCALE if self.active else 1.0
        """The factor by which the next loss is multiplied."""
        self.finite_in_a_row = 0
        """Number of updates with a finite gradient since the factor last changed or an update was left out."""

    def observe(self, *, finite: bool) -> bool:
        """Adjust the factor for the next update. `finite` is True if the gradient of this update is finite.

        Returns True if the gradient is not finite because the factor was too large: the factor was above 1, and is now
        halved. With a factor of 1 the loss itself is at fault, so the result is False.
        """
        if not self.active:
            return False
        if finite:
            self.finite_in_a_row += 1
            if self.finite_in_a_row == GROW_AFTER:
                self.value, self.finite_in_a_row = min(self.value * 2, MOST_SCALE), 0
            return False
        self.finite_in_a_row = 0
        if self.value <= 1:
            return False
        self.value /= 2
        return True


def apply_gradient(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scale: LossScale,
    *,
    rate: float,
    max_norm: float,
    trained: bool,
    on_nonfinite: Literal["stop", "skip"],
    name: str,
    advice: str,
    share: float = 1.0,
) -> tuple[float, bool]:
    """Check, clip and apply the gradient, and clear it. A collective.

    The gradient is also cleared if the update is left out, but not if an error is raised.

    Args:
        model: its parameters hold the gradients.
        optimizer: makes the update.
        scale: factor that the loss was multiplied by; adjusted here.
        rate: learning rate of this update.
        max_norm: norm to which a larger gradient is scaled down.
        trained: False if no token was trained; the gradient is then dropped.
        on_nonfinite: "skip" leaves out an update whose gradient is not finite; "stop" raises an error.
        name: name of the update in the error message.
        advice: advice that the error message gives.
        share: share of the loss's denominator that corrections did not reject; the gradient is divided by this share.
            With 0, no token was trained, and the gradient is not divided.

    Returns:
        The global gradient norm before clipping, which may be inf or NaN, and True if the update was made.

    Raises:
        ContractError: the gradient is not finite although the loss was not scaled too far, and `on_nonfinite` is
            "stop".
    """
    # Undo the scaling of the loss, and correct its denominator.
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    divisor = scale.value * (share or 1.0)
    if divisor != 1:
        for grad in grads:
            grad.div_(divisor)
    # Decide whether to make the update. All ranks have the same norm, so all decide alike.
    norm = global_norm(grads)
    scaled_too_far = scale.observe(finite=math.isfinite(norm))
    if not math.isfinite(norm) and not scaled_too_far and on_nonfinite == "stop":
        raise ContractError(f'{name}: the gradient norm is {norm}; {advice}, or set train.on_nonfinite = "skip"')
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


def global_norm(grads: Sequence[Tensor]) -> float:
    """Return the L2 norm of all gradients together, over all ranks; 0 without gradients.

    A collective if the gradients are sharded.
    """
    # Gradients of layers that ranks divide (`parallel.tensor`, `parallel.expert`) belong to another device mesh than
    # the other gradients, and torch cannot compute one norm over two meshes.
    by_mesh: dict[object, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [get_total_norm(some) for some in by_mesh.values()]
    return math.hypot(*(float(norm.full_tensor() if isinstance(norm, DTensor) else norm) for norm in norms))


def make_optimizer(model: nn.Module, train: TrainConfig, host: str = "cpu") -> torch.optim.AdamW:
    """Return the configured optimizer of the trainable parameters.

    The optimizer is `OffloadedAdamW` if moments are kept apart from the weights; else the one that `train.optimizer`
    names: torch's AdamW or `Muon`, which is for language models only.

    Args:
        model: the sharded model.
        train: the options of the optimizer.
        host: device of moments that `train.offload` moves away from the device of the weights. If `train.offload` also
            moves the weights, the moments stay with the weights.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"lr": train.learning_rate, "betas": train.betas, "weight_decay": train.weight_decay}
    if "moments" in train.offload and "weights" not in train.offload:
        return OffloadedAdamW(parameters, options, host)
    # The fused kernel reads and writes memory once, where torch's default does so about ten times.
    options["fused"] = parameters[0].device.type in ("cpu", "cuda")
    if train.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **options)
    # Muon is for matrices between hidden states. Embeddings and the output layer are no such matrices: their rows are
    # tokens or positions. Their parameters and all vectors form a second group, for AdamW.
    language_model: Any = model
    ends = [one for one in model.modules() if isinstance(one, nn.Embedding)] + [language_model.get_output_embeddings()]
    excluded = {id(parameter) for layer in ends for parameter in layer.parameters()}
    matrices = [one for one in parameters if one.ndim == 2 and id(one) not in excluded]
    known = {id(one) for one in matrices}
    experts = sum(one.numel() for one in parameters if one.ndim == 3)
    if experts and not (dist.is_initialized() and dist.get_rank()):
        log.warning(
            "Muon updates matrices only: the experts, %d weights in tensors of three dimensions, are updated by AdamW",
            experts,
        )
    return Muon([{"params": matrices}, {"params": [one for one in parameters if id(one) not in known]}], **options)


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024) for the matrices in the first parameter group, and AdamW for the other groups.

    M ← μ M + (1 − μ) G, W ← (1 − η λ) W − η 0.2 √max(rows, columns) · orthogonal(μ M + (1 − μ) G), with the weights W,
    their gradient G, the momentum M, the learning rate η and the weight decay λ. A sharded matrix is gathered for its
    update, one matrix at a time, so the update does not depend on the number of ranks. The step is therefore a
    collective.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient. A collective if the matrices are sharded.

        `closure` is part of torch's interface and always None.
        """
        # AdamW's own step updates the other groups, so it must not see the first one.
        matrices, *adamw_groups = self.param_groups
        self.param_groups = adamw_groups
        super().step(closure)
        self.param_groups = [matrices, *adamw_groups]
        for parameter in (one for one in matrices["params"] if one.grad is not None):
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
                # The step is a tensor because AdamW's code, which loads the states of all parameters, expects one.
                state["step"] = torch.zeros((), device=parameter.device)
            state["step"] += 1
            momentum = state["momentum"].lerp_(parameter.grad, 1 - MOMENTUM)
            update = parameter.grad.lerp(momentum, MOMENTUM)
            if isinstance(update, DTensor):
                # Each rank computes the update of the whole matrix, and keeps its own shard of it.
                full = orthogonal(gather_full(update))
                mesh, placements = update.device_mesh, update.placements
                # The result is put where the parameter is: with offloaded weights, this is the host.
                update = distribute_tensor(full, mesh, placements, src_data_rank=None).to(update.device)
            else:
                update = orthogonal(update)
            parameter.mul_(1 - matrices["lr"] * matrices["weight_decay"])
            parameter.add_(update, alpha=-matrices["lr"] * LIKE_ADAMW * math.sqrt(max(parameter.shape)))


def orthogonal(matrix: Tensor) -> Tensor:
    """Return approximately U Vᵀ by Newton-Schulz iterations, where U S Vᵀ is the matrix's singular value decomposition.

    The iterations change only the singular values. Values of at least 0.15 % of the matrix's norm become about 0.7 to
    1.2. Smaller values stay smaller: 0.1 % becomes 0.5, 0.01 % becomes 0.05, and 0 stays 0. On a GPU the iterations run
    in bfloat16, which is precise enough for such a result.
    """
    # The product of the matrix with its own transpose is smallest if the matrix has at most as many rows as columns.
    tall = matrix.shape[0] > matrix.shape[1]
    estimate = matrix.T if tall else matrix
    estimate = estimate.bfloat16() if matrix.is_cuda else estimate
    # The iterations diverge for singular values well above 1. After the division by the norm, none is above 1. With a
    # norm of at least 1e-7, a matrix of zeros does not become NaN.
    estimate = estimate / estimate.norm().clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = estimate @ estimate.T
        estimate = a * estimate + (b * gram + c * gram @ gram) @ estimate
    return (estimate.T if tall else estimate).to(matrix.dtype)


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with moments on another device than the weights. Checkpoints have AdamW's format."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        options: dict[str, Any],
        device: str,
        at_once: int = AT_ONCE,
    ) -> None:
        """Optimize `parameters` as one group. The moments are made at the first update of each parameter.

        Args:
            parameters: the parameters to train.
            options: options of torch's AdamW.
            device: device of the moments.
            at_once: largest number of elements that are updated at a time.
        """
        super().__init__(parameters, **options)
        self._device, self._at_once = device, at_once

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient. Each rank updates its own shards, without a collective.

        `closure` is part of torch's interface and always None.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter with the arithmetic of AdamW, in parts of `at_once` elements.

        The moments are copied to the parameter's device for the update, and back. They are made here before the first
        update. `group` has the options.
        """
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = self._empty(parameter)
        # A new tensor, not an update in place. `flash.trainer.memory` runs this with tensors without data. torch then
        # knows the value of a small new tensor, which `int` below needs, but not the value after an update in place.
        state["step"] = state["step"] + 1
        steps, (beta1, beta2), rate = int(state["step"]), group["betas"], group["lr"]
        tensors: list[Any] = [parameter, parameter.grad, *(state[name] for name in MOMENTS)]
        locals_N = [(one.to_local() if isinstance(one, DTensor) else one).view(-1) for one in tensors]
        for weight_N, grad_N, *moments_N in zip(*(one.split(self._at_once) for one in locals_N), strict=True):
            first_N, second_N = (one.to(weight_N.device, non_blocking=True) for one in moments_N)
            first_N.lerp_(grad_N, 1 - beta1)
            second_N.mul_(beta2).addcmul_(grad_N, grad_N, value=1 - beta2)
            weight_N.mul_(1 - rate * group["weight_decay"])
            scale_N = (second_N.sqrt() / math.sqrt(1 - beta2**steps)).add_(group["eps"])
            weight_N.addcdiv_(first_N, scale_N, value=-rate / (1 - beta1**steps))
            for kept_N, updated_N in zip(moments_N, (first_N, second_N), strict=True):
                kept_N.copy_(updated_N)

    def _empty(self, parameter: Tensor) -> Tensor:
        """Return a moment of zeros for a parameter, on the device of this optimizer's moments.

        If a GPU reads the moment from the host, the memory is pinned, which makes the copies several times faster.
        """
        pinned = self._device == "cpu" and parameter.device.type == "cuda" and torch.cuda.is_available()
        return torch.zeros_like(parameter, device=self._device, pin_memory=pinned)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load the options of the groups, and take over the moments as they are in `state_dict`, without a copy.

        torch's method would move each moment to the device of its parameter. Here the moments are on the right device
        already: a checkpoint is read into tensors that this optimizer has made (`flash.trainer.checkpoint`). A
        parameter without an entry was never updated, and gets no moments.
        """
        # torch's method loads the options alone if there is no state.
        super().load_state_dict({**state_dict, "state": {}})
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for name, parameter in zip(names, parameters, strict=True):
            if name in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][name])
