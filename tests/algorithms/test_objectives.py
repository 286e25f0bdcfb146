from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch

from algorithms.base import Objective, PackedTokens
from algorithms.decoupled_ppo import DecoupledPpo
from algorithms.grpo import Grpo

CASES: list[Objective] = [
    Grpo(),
    Grpo(clip_low=0.1, clip_high=0.28),
    DecoupledPpo(),
    DecoupledPpo(clip_low=0.1, clip_high=0.28, weight_cap=1.2, cap="mask"),
    DecoupledPpo(weight_cap=1.2, cap="clamp"),
]


def random_tokens(dtype: torch.dtype, count: int = 200) -> PackedTokens:
    generator = torch.Generator().manual_seed(3)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    logp_T = -2 + normal(0.5)
    proximal_T = logp_T + normal(0.2)
    return PackedTokens(
        logp_T=logp_T.to(dtype),
        behaviour_T=(proximal_T + normal(0.5)).to(dtype),
        proximal_T=proximal_T.to(dtype),
        advantage_T=normal(1.0).to(dtype),
        mask_T=torch.ones(count, dtype=torch.bool),
        sequence_T=torch.arange(count) // 10,
        sequences=count // 10,
    )


def naive(objective: Any, logp: float, behaviour: float, proximal: float, advantage: float) -> dict[str, float]:
    """Loss, gradient with respect to logp, and statistics of one token."""
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if isinstance(objective, Grpo):
        ratio, weight = math.exp(logp - behaviour), 1.0
    else:
        ratio, weight = math.exp(logp - proximal), math.exp(proximal - behaviour)
        if weight > objective.weight_cap:
            weight = 0.0 if objective.cap == "mask" else objective.weight_cap
    stopped = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
    used = min(max(ratio, low), high) if stopped else ratio
    return {
        "loss": -weight * used * advantage,
        "gradient": 0.0 if stopped else -weight * ratio * advantage,
        "ratio": ratio,
        "clipped": float(stopped),
        "weight": weight,
    }


@pytest.mark.parametrize("objective", CASES, ids=repr)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
def test_loss_gradient_and_statistics_equal_a_loop_over_tokens(
    objective: Objective, dtype: torch.dtype, tolerance: float
) -> None:
    tokens = random_tokens(dtype)
    logp_T = tokens.logp_T.clone().requires_grad_()
    output = objective(tokens._replace(logp_T=logp_T))
    output.loss_T.sum().backward()
    columns = [one.double().tolist() for one in tokens[:4]]
    rows = [naive(objective, *values) for values in zip(*columns, strict=True)]
    found = {"loss": output.loss_T, "gradient": logp_T.grad, **output.stats}
    for name, value_T in found.items():
        expected = torch.tensor([row[name] for row in rows], dtype=torch.float64)
        torch.testing.assert_close(value_T.detach().double(), expected, rtol=4 * tolerance, atol=tolerance)
    assert 0 < output.stats["clipped"].sum() < len(logp_T)


@pytest.mark.parametrize("objective", CASES, ids=repr)
def test_gradients_equal_finite_differences(objective: Objective) -> None:
    tokens = random_tokens(torch.float64)
    logp_T = tokens.logp_T.clone().requires_grad_()
    objective(tokens._replace(logp_T=logp_T)).loss_T.sum().backward()
    step = 1e-6
    up = objective(tokens._replace(logp_T=tokens.logp_T + step)).loss_T
    down = objective(tokens._replace(logp_T=tokens.logp_T - step)).loss_T
    torch.testing.assert_close(logp_T.grad, (up - down) / (2 * step), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("objective", CASES, ids=repr)
def test_on_policy_the_gradient_is_minus_the_advantage(objective: Objective) -> None:
    tokens = random_tokens(torch.float64)
    logp_T = tokens.logp_T.clone().requires_grad_()
    on_policy = tokens._replace(logp_T=logp_T, behaviour_T=tokens.logp_T, proximal_T=tokens.logp_T)
    objective(on_policy).loss_T.sum().backward()
    torch.testing.assert_close(logp_T.grad, -tokens.advantage_T, rtol=1e-12, atol=0)


def test_grpo_corrects_stale_data_on_the_first_update_of_a_step() -> None:
    tokens = random_tokens(torch.float64)
    output = Grpo()(tokens._replace(proximal_T=tokens.logp_T))
    torch.testing.assert_close(output.stats["ratio"], (tokens.logp_T - tokens.behaviour_T).exp())
    assert (output.stats["ratio"] - 1).abs().mean() > 0.1


def test_a_weight_above_the_cap_is_masked_or_clamped() -> None:
    tokens = random_tokens(torch.float64)
    raw = (tokens.proximal_T - tokens.behaviour_T).exp()
    masked = DecoupledPpo(weight_cap=1.2, cap="mask")(tokens)
    clamped = DecoupledPpo(weight_cap=1.2, cap="clamp")(tokens)
    above = raw > 1.2
    assert 0 < above.sum() < len(raw)
    assert (masked.loss_T[above] == 0).all()
    assert (clamped.stats["weight"][above] == 1.2).all()
    torch.testing.assert_close(masked.loss_T[~above], clamped.loss_T[~above])


@pytest.mark.parametrize("options", [{"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": "x"}, {"clip": 0.2}])
@pytest.mark.parametrize("kind", [Grpo, DecoupledPpo])
def test_options_out_of_range_or_unknown_are_refused(kind: type[Objective], options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, kind)


def test_importing_the_objectives_needs_no_torch() -> None:
    code = (
        "import sys, importlib, algorithms\n"
        "for path in algorithms.OBJECTIVES.values():\n"
        "    module, name = path.split(':')\n"
        "    getattr(importlib.import_module(module), name)()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
