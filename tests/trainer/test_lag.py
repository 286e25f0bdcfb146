"""Steps whose learning rate is limited by the lag, against loops over tokens in float64.

The *lag* is the distance of the policy from the policies that sampled. `algorithms.staleness.Lag` has the rule.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from algorithms.staleness import Lag
from flash.config.learning import AlgorithmConfig
from flash.trainer import checkpoint
from flash.types import Shard
from tests.trainer.trainer_cases import (
    Trainer,
    aged_shard,
    kept,
    local,
    make_config,
    reference_model,
    relative_error,
    trainer_at,
    unpacked_logprobs,
    weights_of,
)

# Options of `[train]`: nothing is clipped, and tokens of `aged_shard` are young enough.
TRAIN: dict[str, Any] = {
    "learning_rate": 1e-3,
    "max_grad_norm": 1e9,
    "max_tokens_per_microbatch": 64,
    "async_ratio": 2.0,
}
STEP = 3
"""Version that the first step of a test trains."""
BUDGET = 0.25
"""Lag budget at which the rate lies between its bounds if no earlier step has lowered it."""
SPREAD = (0.15, 0.6, 0.9)
"""Standard deviations of the log-ratios of a batch, by age."""


def drifted(model: Path, seed: int = 0, step: int = STEP) -> Shard:
    """Return `aged_shard`, sampled by policies that differ more from the model the older their tokens are."""
    reference, shard, rng = reference_model(model), aged_shard(seed, step=step), np.random.default_rng(seed)
    samples = []
    for sample in shard.samples:
        one = sample.trajectory
        ages = np.clip(step - one.action_versions(), 0, 2)
        ratios = (rng.standard_normal(len(ages)) * np.array(SPREAD)[ages]).clip(-1.9, 1.9)
        logprobs = unpacked_logprobs(reference, one).detach().numpy() - ratios
        samples.append(replace(sample, trajectory=replace(one, logprobs=logprobs.astype("<f4").tobytes())))
    return replace(shard, samples=samples)


def lagging(model: Path, budget: float = BUDGET, **train: Any) -> Trainer:
    """Return a new trainer at version `STEP` whose rate is limited by this budget. `train` are options of `[train]`."""
    return trainer_at(STEP, model, algorithm={"lag": {"budget": budget}}, train=TRAIN | train)


def naive_square(model: Path, shard: Shard) -> tuple[float, list[int], float]:
    """Return Σ (log-ratio)² of the trained tokens, their ages, and the mean of the squares at age 0."""
    reference, square, ages, fresh = reference_model(model), 0.0, list[int](), list[float]()
    for sample in shard.samples:
        one = sample.trajectory
        logp = unpacked_logprobs(reference, one).tolist()
        for now, then, version in zip(logp, one.behaviour().tolist(), one.action_versions().tolist(), strict=True):
            if version >= shard.min_version:
                square += (now - then) ** 2
                ages.append(shard.step - version)
                fresh += [(now - then) ** 2] * (version == shard.step)
    return square, ages, sum(fresh) / len(fresh)


def moved(before: dict[str, torch.Tensor], trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the change of each weight since `before`."""
    return {name: value - before[name] for name, value in weights_of(trainer).items()}


@pytest.mark.parametrize("objective", ["grpo", "topr", "m2po"])
def test_the_update_has_the_rate_that_a_float64_loop_gives(untied_model: Path, objective: str) -> None:
    shard = drifted(untied_model)
    algorithm: dict[str, Any] = {"objective": objective}
    trainer = trainer_at(STEP, untied_model, algorithm=algorithm | {"lag": {"budget": 2 * BUDGET}}, train=TRAIN)
    trainer.lag.rates = {2: 5e-4, 1: 7e-4}  # pyright: ignore[reportOptionalMemberAccess]
    before = weights_of(trainer)
    metrics = trainer.train_step(shard)

    square, ages, apart = naive_square(untied_model, shard)
    way = {0: 0.0, 1: 5e-4, 2: 1.2e-3}
    lag_square = sum(age**2 for age in ages) / len(ages)
    way_square = sum(way[age] ** 2 for age in ages) / len(ages)
    distance = square / len(ages)
    scale = math.sqrt(2 * BUDGET / (distance - apart) * way_square / lag_square) / 1e-3
    assert 1 / (1 + math.sqrt(lag_square)) < scale < 1, "the case is to be between the bounds"
    assert metrics["lag_distance"] == pytest.approx(distance, rel=1e-4)
    assert metrics["lag_disagreement"] == pytest.approx(apart, rel=1e-4)
    assert metrics["lag_scale"] == pytest.approx(scale, rel=1e-4)
    assert metrics["learning_rate"] == 1e-3

    held = trainer_at(STEP, untied_model, algorithm=algorithm, train=TRAIN | {"learning_rate": 1e-3 * scale})
    held.train_step(shard)
    assert relative_error(moved(before, trainer), moved(before, held)) < 1e-3


@pytest.mark.slow
def test_the_rate_is_the_same_for_any_packing_and_any_order(untied_model: Path) -> None:
    shard = drifted(untied_model)
    found = []
    for budget, seed in ((1000, None), (26, None), (64, 1), (100, 2)):
        samples = list(shard.samples)
        if seed is not None:
            random.Random(seed).shuffle(samples)
        trainer = lagging(untied_model, max_tokens_per_microbatch=budget)
        found.append(trainer.train_step(msgspec.structs.replace(shard, samples=samples)))
    for metrics in found[1:]:
        assert metrics["lag_scale"] == pytest.approx(found[0]["lag_scale"], rel=1e-6)
        assert metrics["lag_distance"] == pytest.approx(found[0]["lag_distance"], rel=1e-6)
    assert found[0]["lag_scale"] < 1


def test_each_update_is_limited_by_its_minibatch_and_by_the_updates_before_it(tied_model: Path) -> None:
    """The budget is so small that each update has the smallest rate, which depends on the lags of its tokens.

    For the second of two updates, each lag is greater by half a version.
    """
    shard = drifted(tied_model)
    trainer = lagging(tied_model, budget=1e-9, minibatches=2)
    metrics = trainer.train_step(shard)
    assert trainer.lag is not None
    assert trainer.lag.rates[STEP] == pytest.approx(1e-3 * metrics["lag_scale"], rel=1e-12)
    floors = []
    for update, groups in enumerate(((0, 1), (2, 3))):
        _, ages, _ = naive_square(
            tied_model,
            msgspec.structs.replace(
                shard, samples=[one for one in shard.samples if shard.batch[one.index].group_id in groups]
            ),
        )
        floors.append(1 / (1 + math.sqrt(sum((age + update / 2) ** 2 for age in ages) / len(ages))))
    assert metrics["lag_scale"] == pytest.approx(sum(floors) / 2, rel=1e-9)


def test_a_batch_of_the_current_version_has_its_whole_rate(tied_model: Path) -> None:
    shard = aged_shard()
    fresh = [
        msgspec.structs.replace(
            one,
            trajectory=msgspec.structs.replace(
                one.trajectory,
                versions=[msgspec.structs.replace(run, version=STEP) for run in one.trajectory.versions],
            ),
        )
        for one in shard.samples
    ]
    tokens = sum(one.trajectory.action_count for one in fresh)
    shard = msgspec.structs.replace(shard, samples=fresh, total_tokens=tokens)
    metrics = lagging(tied_model, budget=1e-9).train_step(shard)
    assert metrics["lag_scale"] == 1.0
    assert metrics["lag_distance"] > 0.1


def test_a_wide_budget_changes_nothing(tied_model: Path) -> None:
    held, free = lagging(tied_model, budget=100.0), trainer_at(STEP, tied_model, train=TRAIN)
    shard = aged_shard()
    metrics = held.train_step(shard)
    free.train_step(shard)
    theirs = weights_of(free)
    assert metrics["lag_scale"] == 1.0
    assert all(torch.equal(value, theirs[name]) for name, value in weights_of(held).items())


def test_versions_whose_updates_were_left_out_count_with_a_rate_of_zero(tied_model: Path) -> None:
    """In the first step only the critics learn, so the policy does not move."""
    trainer = trainer_at(STEP, tied_model, algorithm={"objective": "ppo", "lag": {}},
                         critic={"warmup_steps": STEP + 1}, train=TRAIN)  # fmt: skip
    metrics = trainer.train_step(aged_shard())
    assert "lag_scale" not in metrics
    assert trainer.lag is not None
    assert trainer.lag.rates == {STEP: 0.0}
    metrics = trainer.train_step(aged_shard(1, step=STEP + 1))
    assert metrics["lag_scale"] <= 1
    assert trainer.lag.rates == {STEP: 0.0, STEP + 1: pytest.approx(1e-3 * metrics["lag_scale"])}


@pytest.mark.slow
def test_a_resumed_run_has_the_recorded_rates_of_its_checkpoint(tied_model: Path, tmp_path: Path) -> None:
    original = lagging(tied_model, budget=0.3, max_token_age=2)
    for step in (STEP, STEP + 1, STEP + 2):
        original.train_step(drifted(tied_model, step, step=step))
    path = checkpoint.save(tmp_path, original, kept(b""), keep=1)
    restored = lagging(tied_model, budget=0.3, max_token_age=2)
    checkpoint.load(path, restored)
    assert original.lag is not None
    assert restored.lag is not None
    assert restored.lag.rates == original.lag.rates
    assert restored.lag.disagreement_sums == original.lag.disagreement_sums != (0.0, 0.0)
    assert list(restored.lag.rates) == [STEP + 1, STEP + 2], "no more than the age contract asks for"
    shard = drifted(tied_model, 9, step=STEP + 3)
    mine, theirs = original.train_step(shard), restored.train_step(shard)
    assert mine == theirs
    assert all(torch.equal(value, weights_of(restored)[name]) for name, value in weights_of(original).items())


@pytest.mark.slow
def test_a_checkpoint_without_rates_stands_for_scheduled_rates(tied_model: Path, tmp_path: Path) -> None:
    plain = trainer_at(STEP, tied_model, train=TRAIN)
    path = checkpoint.save(tmp_path, plain, kept(b""), keep=1)
    loaded, fresh = lagging(tied_model), lagging(tied_model)
    fresh.lag.rates = {STEP - 1: 1e-3, STEP - 2: 1e-3}  # pyright: ignore[reportOptionalMemberAccess]
    checkpoint.load(path, loaded)
    shard = drifted(tied_model)
    assert loaded.train_step(shard)["lag_scale"] == fresh.train_step(shard)["lag_scale"] < 1


@pytest.mark.slow
def test_disagreement_of_engine_and_trainer_does_not_lower_the_rate(untied_model: Path) -> None:
    """Disagreement is a constant part of the distance: a lower rate would only increase its share of the distance."""
    trainer = trainer_at(STEP, untied_model, algorithm={"lag": {}}, train=TRAIN | {"learning_rate": 1e-9})
    rng, reference = np.random.default_rng(0), reference_model(untied_model)
    scales = []
    for step in range(STEP, STEP + 12):
        shard = drifted(untied_model, step, step=step)
        samples = []
        for sample in shard.samples:
            # A rate of 1e-9 moves nothing, so all of the distance is disagreement. Its square is 1.5 times the budget.
            noise = 0.25 * rng.standard_normal(sample.trajectory.action_count)
            logprobs = unpacked_logprobs(reference, sample.trajectory).detach().numpy() - noise
            one = replace(sample.trajectory, logprobs=logprobs.astype("<f4").tobytes())
            samples.append(replace(sample, trajectory=one))
        scales.append(trainer.train_step(replace(shard, samples=samples))["lag_scale"])
    assert np.mean(scales) > 0.9


def test_log_probs_that_are_not_finite_do_not_switch_the_limit_off_for_later_steps(untied_model: Path) -> None:
    trainer = lagging(untied_model, on_nonfinite="skip")
    assert trainer.lag is not None
    trainer.train_step(drifted(untied_model))
    before = trainer.lag.disagreement_sums
    weight = local(next(iter(trainer.model.parameters())))
    with torch.no_grad():
        whole = weight.clone()
        weight.fill_(math.nan)
        assert trainer.train_step(drifted(untied_model, step=STEP + 1))["skipped_steps"] == 1.0
        weight.copy_(whole)
    assert trainer.lag.disagreement_sums == before
    metrics = trainer.train_step(drifted(untied_model, step=STEP + 2))
    assert metrics["lag_scale"] < 1
    assert math.isfinite(metrics["lag_disagreement"])


def test_a_single_outlier_does_not_lower_the_rate_of_a_batch(untied_model: Path) -> None:
    """Check a log-ratio of 20. It is cut to 2, so it adds at most 4 / tokens to the mean of the squares."""
    shard = drifted(untied_model)
    first = shard.samples[0].trajectory
    far = np.frombuffer(first.logprobs, "<f4").copy()
    far[0] -= 20
    changed = replace(shard.samples[0], trajectory=replace(first, logprobs=far.tobytes()))
    near, off = (
        lagging(untied_model).train_step(one) for one in (shard, replace(shard, samples=[changed, *shard.samples[1:]]))
    )
    tokens = near["trained_tokens"]
    assert off["lag_distance"] - near["lag_distance"] < 4 / tokens + 1e-6


def test_without_the_option_there_is_no_limit(tied_model: Path) -> None:
    assert Trainer(make_config(tied_model)).lag is None


def test_synchronous_training_with_one_update_per_batch_has_no_limit(tied_model: Path) -> None:
    table = {"lag": {"budget": 1e-9}}
    assert trainer_at(STEP, tied_model, algorithm=table, train=TRAIN | {"async_ratio": 0.0}).lag is None
    assert trainer_at(STEP, tied_model, algorithm=table, train=TRAIN | {"async_ratio": 0.0, "minibatches": 2}).lag
    assert msgspec.convert({}, AlgorithmConfig).lag == Lag(budget=0.04)
