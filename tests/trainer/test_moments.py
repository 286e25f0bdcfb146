"""AdamW with moments in another memory than the weights."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flash.config.learning import TrainConfig
from flash.trainer.optimizer import MOMENTS, OffloadedAdamW, make_optimizer

TRAIN = TrainConfig(learning_rate=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
SHAPES = ((40, 30), (7,))
"""Shapes of the two parameters."""


def weights() -> nn.ParameterList:
    """Return two parameters, a matrix and a vector, with the same random numbers in each call."""
    torch.manual_seed(3)
    return nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])


def updated(updates: int, **changes: Any) -> tuple[nn.ParameterList, torch.optim.AdamW]:
    """Return weights and their optimizer after a number of updates. Every call uses the same gradients."""
    model = weights()
    made = make_optimizer(model, replace(TRAIN, **changes))
    for update in range(updates):
        gradients = torch.Generator().manual_seed(update)
        for weight in model:
            weight.grad = torch.randn(weight.shape, generator=gradients)
        made.step()
    return model, made


def moments(made: torch.optim.AdamW) -> list[Tensor]:
    """Return both moments of each parameter."""
    return [state[name] for state in made.state.values() for name in MOMENTS]


def test_moments_elsewhere_give_the_updates_of_adamw() -> None:
    expected, plain = updated(5)
    found, elsewhere = updated(5, offload=["moments"])
    assert type(plain) is torch.optim.AdamW
    assert type(elsewhere) is OffloadedAdamW
    for one, other in zip([*found, *moments(elsewhere)], [*expected, *moments(plain)], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_large_weight_is_updated_part_by_part() -> None:
    found: list[Tensor] = []
    for at_once in (7, 10**6):
        weight = nn.Parameter(torch.arange(100.0))
        made = OffloadedAdamW([weight], {"lr": 1e-2}, "cpu", at_once)
        for _ in range(3):
            weight.grad = torch.arange(100.0).sin()
            made.step()
        found.append(weight.detach())
    assert torch.equal(*found)


def test_on_a_gpu_moments_are_on_the_host_and_nothing_is_computed_there() -> None:
    """Tensors without data refuse operations on two devices, as a GPU does."""
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(8, 4, device="cuda"))
        made = OffloadedAdamW([weight], {"lr": 1e-3}, "cpu")
        for _ in range(2):
            weight.grad = torch.empty_like(weight)
            made.step()
        assert weight.device.type == "cuda"
        assert {moment.device.type for moment in moments(made)} == {"cpu"}
        made.load_state_dict(made.state_dict())
        assert {moment.device.type for moment in moments(made)} == {"cpu"}
