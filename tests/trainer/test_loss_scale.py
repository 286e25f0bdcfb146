"""float16: losses are scaled so that small gradients survive, and a scale that is too large is lowered."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flash.errors import ContractError
from flash.trainer import checkpoint
from flash.trainer.optimizer import FIRST_SCALE, GROW_AFTER, MOST_SCALE, LossScale
from tests.trainer.trainer_cases import Trainer, aged_shard, gradient_of, kept, make_config, relative_error, weights_of


def trainer(folder: Path, dtype: str, **train: Any) -> Trainer:
    """Return a new trainer at version 3, which `aged_shard` needs, with forward passes in this dtype."""
    model = {"path": str(folder), "dtype": dtype, "max_length": 64}
    made = Trainer(make_config(folder, model=model, train={"async_ratio": 2.0, "max_grad_norm": 1e9} | train))
    made.version = 3
    return made


@pytest.mark.slow
def test_a_gradient_in_float16_equals_float32_up_to_rounding(tied_model: Path) -> None:
    found, expected = (trainer(tied_model, dtype) for dtype in ("float16", "float32"))
    metrics = [one.train_step(aged_shard()) for one in (found, expected)]
    assert relative_error(gradient_of(found), gradient_of(expected)) < 0.02
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=0.02)
    assert metrics[0]["loss_scale"] == FIRST_SCALE
    assert "loss_scale" not in metrics[1]


def test_without_the_scale_small_gradients_vanish(tied_model: Path) -> None:
    scaled, plain = (trainer(tied_model, "float16") for _ in range(2))
    plain.scale.value = 2.0**-12
    for one in (scaled, plain):
        one.train_step(aged_shard())
    zeros = [
        sum(int((grad == 0).sum()) for grad in gradient_of(one).values() if grad is not None) for one in (plain, scaled)
    ]
    assert zeros[0] > 1.2 * zeros[1]


def test_a_scale_that_is_too_large_is_halved_and_the_update_left_out_and_counted(tied_model: Path) -> None:
    made = trainer(tied_model, "float16", on_nonfinite="stop")
    made.scale.value = 2.0**40
    before = weights_of(made)
    metrics = made.train_step(aged_shard())
    assert metrics["loss_scale"] == 2.0**39
    assert metrics["skipped_steps"] == 1
    assert all(torch.equal(value, before[name]) for name, value in weights_of(made).items())


def test_a_gradient_that_no_scale_makes_finite_stops_the_run() -> None:
    scale = LossScale("float16")
    told = [scale.observe(finite=False) for _ in range(int(math.log2(FIRST_SCALE)) + 2)]
    assert told == [True] * int(math.log2(FIRST_SCALE)) + [False, False]
    assert scale.value == 1


def test_the_scale_grows_after_many_finite_updates_in_a_row_and_not_beyond_its_end() -> None:
    scale = LossScale("float16")
    for _ in range(GROW_AFTER - 1):
        assert not scale.observe(finite=True)
    assert scale.observe(finite=False)
    assert scale.value == FIRST_SCALE / 2
    for _ in range(GROW_AFTER * 20):
        scale.observe(finite=True)
    assert scale.value == MOST_SCALE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_have_no_scale(dtype: str) -> None:
    scale = LossScale(dtype)
    assert scale.value == 1
    assert not scale.observe(finite=False)
    assert scale.value == 1


def test_a_resumed_run_has_the_scale_of_its_checkpoint(tied_model: Path, tmp_path: Path) -> None:
    made = trainer(tied_model, "float16")
    made.scale.value, made.scale.finite_in_a_row = 512.0, 7
    path = checkpoint.save(tmp_path, made, kept(b"hub"), keep=1)
    other = trainer(tied_model, "float16")
    checkpoint.load(path, other)
    assert (other.scale.value, other.scale.finite_in_a_row) == (512.0, 7)


def test_a_gradient_that_is_not_finite_still_stops_in_other_dtypes(tied_model: Path) -> None:
    made = trainer(tied_model, "float32")
    made.scale.value = math.inf
    with pytest.raises(ContractError, match="the gradient norm is"):
        made.train_step(aged_shard())
