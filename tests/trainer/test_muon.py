"""Muon against its formula in float64, and against torch's Muon, which computes in bfloat16."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from flash.config.learning import TrainConfig
from flash.trainer.optimizer import make_optimizer, orthogonal
from tests.trainer.trainer_cases import Trainer, gradient_of, make_config, random_shard, weights_of

RATE = 1e-2
"""Learning rate of all updates."""


def polynomial(matrix: torch.Tensor) -> torch.Tensor:
    """Apply the iteration to the singular values of a matrix, which its decomposition gives."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 7)])
def test_the_iteration_changes_only_singular_values_and_moves_most_of_them_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    found = orthogonal(matrix)
    torch.testing.assert_close(found.double(), polynomial(matrix), rtol=1e-3, atol=1e-4)
    assert orthogonal(torch.zeros(shape)).abs().max() == 0
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_hidden_matrices_follow_the_formula_and_other_parameters_adamw(model: Path) -> None:
    train = {"learning_rate": RATE, "weight_decay": 0.1, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 64}
    muon, adamw = (Trainer(make_config(model, train=train | {"optimizer": name})) for name in ("muon", "adamw"))
    before = weights_of(muon)
    for trainer in (muon, adamw):
        trainer.train_step(random_shard())
    gradient, others, found = gradient_of(adamw), weights_of(adamw), weights_of(muon)
    hidden = [name for name in found if ".layers." in name and found[name].ndim == 2]
    assert len(hidden) == 14
    for name, value in found.items():
        if name not in hidden:
            torch.testing.assert_close(value, others[name], rtol=0, atol=0)
            continue
        scale = RATE * 0.2 * math.sqrt(max(value.shape))
        expected = before[name].double() * (1 - RATE * 0.1) - scale * polynomial(gradient[name])
        moved = (expected - before[name]).norm()
        assert (value - expected).norm() < 2e-3 * moved


class Language(nn.Module):
    """Stand-in for a language model with the parts that an optimizer needs."""

    def __init__(self) -> None:
        """Make two hidden matrices, and an embedding that is also the output layer."""
        super().__init__()
        self.wide, self.tall, self.ends = nn.Linear(8, 5, bias=False), nn.Linear(3, 9, bias=False), nn.Embedding(4, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.ends

    def get_output_embeddings(self) -> nn.Module:
        return self.ends


def test_experts_of_a_mixture_are_updated_by_adamw_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    mixture = Language()
    mixture.experts = nn.Parameter(torch.zeros(4, 6, 5))
    matrices, others = make_optimizer(mixture, TrainConfig(optimizer="muon")).param_groups
    assert [one.shape for one in matrices["params"]] == [(5, 8), (9, 3)]
    assert any(one is mixture.experts for one in others["params"])
    assert "experts, 120 weights in tensors of three dimensions, are updated by AdamW" in caplog.text


def test_several_updates_equal_torchs_muon_up_to_its_rounding() -> None:
    torch.manual_seed(0)
    ours, theirs = Language(), Language()
    theirs.load_state_dict(ours.state_dict())
    before = [ours.wide.weight.detach().clone(), ours.tall.weight.detach().clone()]
    mine = make_optimizer(ours, TrainConfig(optimizer="muon", learning_rate=RATE, weight_decay=0.1))
    other = torch.optim.Muon(
        [theirs.wide.weight, theirs.tall.weight], lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        for one, same in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            same.grad = one.grad.clone()
        mine.step()
        other.step()
    pairs = ((ours.wide, theirs.wide), (ours.tall, theirs.tall))
    for (one, same), begun in zip(pairs, before, strict=True):
        assert (one.weight - same.weight).norm() < 0.05 * (same.weight - begun).norm()
