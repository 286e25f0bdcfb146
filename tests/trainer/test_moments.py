"""AdamW with moments in bfloat16, or in another memory than the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flash.config.learning import TrainConfig
from flash.trainer.optimizer import MOMENTS, LeanAdamW, make_optimizer, round_at_random

TRAIN = TrainConfig(learning_rate=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
SHAPES = ((40, 30), (7,))


def weights() -> nn.ParameterList:
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
    return [state[name] for state in made.state.values() for name in MOMENTS]


def test_moments_elsewhere_give_the_updates_of_adamw() -> None:
    expected, plain = updated(5)
    found, elsewhere = updated(5, offload=["moments"])
    assert type(plain) is torch.optim.AdamW
    assert type(elsewhere) is LeanAdamW
    for one, other in zip([*found, *moments(elsewhere)], [*expected, *moments(plain)], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_moments_in_bfloat16_stay_near_those_of_adamw_and_are_the_same_again() -> None:
    expected, plain = updated(50)
    found, lean = updated(50, moments="bfloat16")
    again, _ = updated(50, moments="bfloat16")
    assert all(map(torch.equal, found, again))
    assert {moment.dtype for moment in moments(lean)} == {torch.bfloat16}
    moved = [one - before for one, before in zip(expected, weights(), strict=True)]
    for one, other, way in zip(found, expected, moved, strict=True):
        assert 0 < float((one - other).detach().norm() / way.detach().norm()) < 0.05
    for one, other in zip(moments(lean), moments(plain), strict=True):
        assert float((one - other).norm() / other.norm()) < 0.05


def test_a_number_is_rounded_to_a_neighbour_and_on_average_to_itself() -> None:
    torch.manual_seed(0)
    numbers_N = torch.cat([torch.randn(200) * scale for scale in (1e-30, 1e-4, 1.0, 1e20)])
    generator, times = torch.Generator().manual_seed(1), 20_000
    total_N, square_N = torch.zeros(800, dtype=torch.float64), torch.zeros(800, dtype=torch.float64)
    for _ in range(times):
        rounded_N = round_at_random(numbers_N, generator)
        assert rounded_N.dtype == torch.bfloat16
        error_N = rounded_N.double() / numbers_N.double() - 1
        assert float(error_N.abs().max()) < 2**-7
        total_N, square_N = total_N + error_N, square_N + error_N.square()
    mean_N, deviation_N = total_N / times, (square_N / times).sqrt()
    # The largest of 800 means is about four standard deviations from 0. Rounding to nearest is off by up to half a
    # digit.
    assert float((mean_N.abs() / deviation_N.clamp(min=1e-9) * times**0.5).max()) < 5
    nearest_N = numbers_N.bfloat16().double() / numbers_N.double() - 1
    assert float(nearest_N.abs().mean()) > 30 * float(mean_N.abs().mean())
    kept_N = numbers_N.bfloat16()
    assert torch.equal(round_at_random(kept_N.float(), generator), kept_N)


def test_a_moment_that_changes_by_less_than_a_digit_still_moves() -> None:
    """For a constant gradient g the second moment is g² (1 − β2ⁿ). Rounding to nearest would stop at half of that."""
    model, updates = nn.ParameterList([nn.Parameter(torch.zeros(4_000))]), 700
    made = make_optimizer(model, replace(TRAIN, learning_rate=0.0, moments="bfloat16"))
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(updates):
        model[0].grad = torch.full((4_000,), 3.0)
        made.step()
        nearest = (nearest.float() * 0.999 + 9.0 * 0.001).bfloat16()
    exact = 9.0 * (1 - 0.999**updates)
    assert float(moments(made)[1].float().mean()) == pytest.approx(exact, rel=0.01)
    assert float(nearest) < 0.9 * exact


def test_a_large_weight_is_updated_part_by_part() -> None:
    found: list[Tensor] = []
    for at_once in (7, 10**6):
        weight = nn.Parameter(torch.arange(100.0))
        made = LeanAdamW([weight], {"lr": 1e-2}, torch.float32, "cpu", at_once)
        for _ in range(3):
            weight.grad = torch.arange(100.0).sin()
            made.step()
        found.append(weight.detach())
    assert torch.equal(*found)


def test_on_a_gpu_moments_are_on_the_host_and_nothing_is_computed_there() -> None:
    """Tensors without data refuse operations on two devices, as a GPU does."""
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(8, 4, device="cuda"))
        made = LeanAdamW([weight], {"lr": 1e-3}, torch.float32, "cpu")
        for _ in range(2):
            weight.grad = torch.empty_like(weight)
            made.step()
        assert weight.device.type == "cuda"
        assert {moment.device.type for moment in moments(made)} == {"cpu"}
        made.load_state_dict(made.state_dict())
        assert {moment.device.type for moment in moments(made)} == {"cpu"}
