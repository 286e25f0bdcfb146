"""One update of a model: the learning rate of a step, the gradient clipped and checked, and where moments are kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm

from algorithms.base import PackedTokens
from algorithms.staleness import Lag
from flash.ages import version_of
from flash.config.learning import TrainConfig
from flash.errors import ContractError
from flash.trainer.mesh import TrainerMesh, gathered, sent

log = logging.getLogger("flash")

FIRST_SCALE, MOST_SCALE = 2.0**14, 2.0**16
"""Of float16 losses. A token's share of a loss is 1e-3 to 1e-6, so gradients stay far from both ends."""
GROW_AFTER = 200
"""Updates."""


MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight, by torch's names."""
AT_ONCE = 2**24
"""Numbers of a weight that are updated at a time: five tensors of so many float32 are alive for it."""
SEEDS_APART = 1_000_003
"""Of two updates; a model has fewer parameters."""


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
    """What `orthogonal` makes of the whole matrix, on the ranks' device, and of that this rank's part."""
    if not isinstance(matrix, DTensor):
        return orthogonal(matrix)
    whole = orthogonal(gathered(matrix))
    return distribute_tensor(whole, matrix.device_mesh, matrix.placements, src_data_rank=None).to(matrix.device)


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


def make_optimizer(model: nn.Module, train: TrainConfig, host: str = "cpu") -> torch.optim.AdamW:
    """Return AdamW over what is trained, or `Muon`, for which `model` is a language model.

    AdamW passes once over memory, where torch's default makes some ten passes. `host` is where moments are that
    `train.offload` names alone: beside weights that are on the CPU they are there, too.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {
        "lr": train.learning_rate, "betas": train.betas, "eps": train.eps, "weight_decay": train.weight_decay,
    }  # fmt: skip
    apart = "moments" in train.offload and "weights" not in train.offload
    if train.moments != "float32" or apart:
        where = host if apart else None
        return LeanAdamW(parameters, options, getattr(torch, train.moments), where)
    options["fused"] = parameters[0].device.type in ("cpu", "cuda")
    if train.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **options)
    ends = {id(parameter) for layer in _ends(model) for parameter in layer.parameters()}
    hidden = [one for one in parameters if one.ndim == 2 and id(one) not in ends]
    known = {id(one) for one in hidden}
    experts = sum(one.numel() for one in parameters if one.ndim == 3)
    if experts and not (dist.is_initialized() and dist.get_rank()):
        log.warning("Muon moves matrices: experts, %d weights in tensors of three dimensions, move by AdamW", experts)
    return Muon([{"params": hidden}, {"params": [one for one in parameters if id(one) not in known]}], **options)


def _ends(model: Any) -> list[nn.Module]:
    """Embeddings and output layer, whose rows are tokens or places."""
    return [*(one for one in model.modules() if isinstance(one, nn.Embedding)), model.get_output_embeddings()]


class LeanAdamW(torch.optim.AdamW):
    """AdamW whose moments are in bfloat16, or in another memory than the weights. All arithmetic is in float32.

    bfloat16 is rounded up or down at random, so that a moment is right on average: rounded to the nearest, one that is
    to change by less than its last digit, a 256th, never would. What is drawn follows from the update and the
    parameter, so ranks that hold the same weights keep the same moments, and a run that goes on draws what it would
    have drawn. Checkpoints are those of AdamW.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        options: dict[str, Any],
        dtype: torch.dtype,
        where: str | None,
        at_once: int = AT_ONCE,
    ) -> None:
        super().__init__(parameters, **options)
        self._dtype, self._where, self._at_once = dtype, where, at_once

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of all parameters that have a gradient."""
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._update(parameter, group, index)

    def _update(self, parameter: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = self._empty(parameter)
        # Anew: so its value is known where tensors have no data.
        state["step"] = state["step"] + 1
        steps, (beta1, beta2), rate = int(state["step"]), group["betas"], group["lr"]
        generator = None
        if self._dtype != torch.float32:
            generator = torch.Generator(parameter.device).manual_seed(steps * SEEDS_APART + index)
        tensors: list[Any] = [parameter, parameter.grad, *(state[name] for name in MOMENTS)]
        locals_N = [_own_part(one).view(-1) for one in tensors]
        for weight_N, grad_N, *moments_N in zip(*(one.split(self._at_once) for one in locals_N), strict=True):
            first_N, second_N = (one.to(weight_N.device, torch.float32, non_blocking=True) for one in moments_N)
            first_N.lerp_(grad_N, 1 - beta1)
            second_N.mul_(beta2).addcmul_(grad_N, grad_N, value=1 - beta2)
            weight_N.mul_(1 - rate * group["weight_decay"])
            scale_N = (second_N.sqrt() / math.sqrt(1 - beta2**steps)).add_(group["eps"])
            weight_N.addcdiv_(first_N, scale_N, value=-rate / (1 - beta1**steps))
            for kept_N, wide_N in zip(moments_N, (first_N, second_N), strict=True):
                kept_N.copy_(wide_N if generator is None else round_at_random(wide_N, generator))

    def _empty(self, parameter: Tensor) -> Tensor:
        """In pinned memory where a GPU reads it: copies are several times as fast."""
        pinned = self._where == "cpu" and parameter.device.type == "cuda" and torch.cuda.is_available()
        return torch.zeros_like(parameter, dtype=self._dtype, device=self._where, pin_memory=pinned)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of this optimizer: moments stay of the dtype and in the memory that they have. torch would move them."""
        super().load_state_dict({**state_dict, "state": {}})
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for name, parameter in zip(names, parameters, strict=True):
            if name in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][name])


def round_at_random(wide_N: Tensor, generator: torch.Generator) -> Tensor:
    """Finite float32 in bfloat16, up or down by chance: on average they are what they were.

    bfloat16 is the upper half of float32, so what is drawn for the lower half either carries over or is cut off.
    """
    noise_N = torch.randint(2**16, wide_N.shape, dtype=torch.int32, device=wide_N.device, generator=generator)
    return ((wide_N.view(torch.int32) + noise_N) & -(2**16)).view(torch.float32).bfloat16()


def _own_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


LARGEST_LOG_RATIO = 2.0
"""|log π − log π_behaviour| of a token that counts as it is, ten times what the default budget allows in the mean: one
token's fluke is not to hold a whole batch down."""
FORGETTING = 0.9
"""What an older step's disagreement of engine and trainer counts for, beside that of the next one."""


def lags_behind(train: TrainConfig) -> bool:
    """Whether any update meets tokens of a policy that is not the one it changes."""
    return train.max_age > 0 or train.minibatches * train.updates_per_batch > 1


class LagPass:
    """Holds the updates of step after step. Every rank makes the same calls and is given the same numbers."""

    def __init__(self, options: Lag, train: TrainConfig, steps: int, mesh: TrainerMesh) -> None:
        self._mesh = mesh
        self._options, self._train, self._steps = options, train, steps
        self._updates = train.minibatches * train.updates_per_batch
        self._ages = train.max_age + 1
        self._row = torch.zeros(2 + self._ages, dtype=torch.float64, device=mesh.device)
        self._applied: list[float] = []
        self._scales: list[float] = []
        self._distances: list[float] = []
        self.rates: dict[int, float] = {}
        """By version, the mean rate of the updates that left it. One that is not there had the scheduled rate."""
        self.apart = (0.0, 0.0)
        """Sum of the squares at tokens that the present weights have sampled, and their number; older ones decayed."""

    def add(self, tokens: PackedTokens, age_T: np.ndarray, mask_T: np.ndarray) -> None:
        """Look at a micro-batch of the next update; `mask_T` is that of the tokens."""
        log_ratio_T = (tokens.logp_T - tokens.behaviour_T).detach().double().where(tokens.mask_T, 0.0)
        square_T = log_ratio_T.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).square()
        self._row[0] += square_T.sum()
        self._row[1] += square_T.where(sent(age_T == 0, square_T.device), 0.0).sum()
        self._row[2:] += sent(np.bincount(age_T[mask_T], minlength=self._ages), square_T.device)

    def held(self, rate: float, version: int) -> float:
        """The rate of the update whose micro-batches were all added. A collective."""
        square, fresh, *counts = self._mesh.gather_rows(self._row).sum(0).tolist()
        self._row.zero_()
        if not self._applied:
            total, number = self.apart
            self.apart = (fresh + FORGETTING * total, counts[0] + FORGETTING * number)
        drift = square - self.disagreement * sum(counts)
        scale = self._options.scale(rate, drift, counts, *self._way(version))
        self._scales.append(scale)
        self._distances.append(square / max(sum(counts), 1.0))
        return rate * scale

    @property
    def disagreement(self) -> float:
        """Mean square by which engine and trainer are apart at equal weights."""
        total, number = self.apart
        return total / number if number else 0.0

    def made(self, rate: float) -> None:
        """An update was made with this rate; with 0, it was left out."""
        self._applied.append(rate)

    def finish(self, version: int) -> dict[str, float]:
        """The step that left this version is over. Returns its metrics."""
        self._row.zero_()  # of updates that only critics made
        self.rates[version] = sum(self._applied) / self._updates
        self.rates = {one: rate for one, rate in self.rates.items() if one > version + 1 - self._ages}
        scales, distances = self._scales, self._distances
        self._applied, self._scales, self._distances = [], [], []
        if not scales:
            return {}
        return {
            "lag_scale": sum(scales) / len(scales),
            "lag_distance": sum(distances) / len(distances),
            "lag_disagreement": self.disagreement,
        }

    def _way(self, version: int) -> tuple[list[float], list[float]]:
        """By age: the lag of this update, and what the rates of the updates in between add up to, in versions."""
        lags, moved = [len(self._applied) / self._updates], [sum(self._applied) / self._updates]
        for age in range(1, self._ages):
            lags.append(lags[-1] + 1)
            moved.append(moved[-1] + self._rate_of(version_of(age, version)))
        return lags, moved

    def _rate_of(self, version: int) -> float:
        if version < 0:
            return 0.0
        found = self.rates.get(version)
        return learning_rate(self._train, self._steps, version) if found is None else found
