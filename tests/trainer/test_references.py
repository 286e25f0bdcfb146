"""Log-probs of other policies before the first update: proximal policies, references, limits, faults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from flash.errors import ConfigError, ContractError
from flash.types import Shard
from tests.trainer.trainer_cases import (
    Trainer,
    aged_shard,
    gradient_of,
    local,
    make_config,
    reference_model,
    relative_error,
    trainer_at,
    unpacked_logprobs,
    weights_of,
    whole,
)

# Options of `[train]`: tokens of `aged_shard` are young enough, several micro-batches are needed, nothing is clipped.
TRAIN = {"async_ratio": 2.0, "max_tokens_per_microbatch": 40, "max_grad_norm": 1e9, "learning_rate": 1e-2}


def decoupled(proximal: str, **options: Any) -> dict[str, Any]:
    """Return the table `[algorithm]` of decoupled PPO with this proximal policy."""
    return {"objective": "decoupled_ppo", "options": {"proximal": proximal} | options}


def naive_gradient(folder: Path, shard: Shard, proximal: dict[int, list[float]]) -> dict[str, torch.Tensor | None]:
    """Return the float64 gradient of decoupled PPO, given each sample's proximal log-probs of its action tokens."""
    model = reference_model(folder)
    total = torch.zeros((), dtype=torch.float64)
    for sample in shard.samples:
        entry = shard.batch[sample.index]
        members = [other.reward for other in shard.batch if other.group_id == entry.group_id]
        std = float(np.std(members))
        advantage = (entry.reward - float(np.mean(members))) / std if std > 0 else 0.0
        logp = unpacked_logprobs(model, sample.trajectory)
        trajectory = sample.trajectory
        for place, (then, version) in enumerate(
            zip(trajectory.behaviour().tolist(), trajectory.action_versions().tolist(), strict=True)
        ):
            if version < shard.min_version:
                continue
            near = proximal[sample.index][place]
            ratio, weight = (logp[place] - near).exp(), math.exp(near - then)
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total - (weight if weight <= 5.0 else 0.0) * surrogate
    (total / shard.total_tokens).backward()
    return {name: value.grad for name, value in model.named_parameters()}


def naive_logprobs(folder: Path, shard: Shard) -> dict[int, list[float]]:
    """Return the log-probs of the action tokens of each sample, by the sample's index, under the model in a folder."""
    model = reference_model(folder)
    with torch.no_grad():
        return {sample.index: unpacked_logprobs(model, sample.trajectory).tolist() for sample in shard.samples}


def test_the_loglinear_proximal_lies_between_behaviour_and_now_by_the_age_of_each_token(tied_model: Path) -> None:
    shard = aged_shard()
    trainer = trainer_at(3, tied_model, algorithm=decoupled("loglinear"), train=TRAIN)
    trainer.train_step(shard)
    now = naive_logprobs(tied_model, shard)
    proximal = {}
    for sample in shard.samples:
        ages = [3 - version for version in sample.trajectory.action_versions().tolist()]
        proximal[sample.index] = [
            then + age / (age + 1) * (logp - then)
            for then, age, logp in zip(sample.trajectory.behaviour().tolist(), ages, now[sample.index], strict=True)
        ]
    assert relative_error(gradient_of(trainer), naive_gradient(tied_model, shard, proximal)) < 1e-5


@pytest.mark.slow
def test_the_ewma_proximal_is_the_average_of_all_versions_so_far(tied_model: Path, tmp_path: Path) -> None:
    decay = 0.6
    trainer = trainer_at(0, tied_model, algorithm=decoupled("ewma", ewma_decay=decay), train=TRAIN)
    trainer.version = 0
    versions = [weights_of(trainer)]
    average: dict[str, torch.Tensor] = {}
    for step in range(3):
        trainer.train_step(at_step(aged_shard(step), step))
        versions.append(weights_of(trainer))
        expected = {
            name: sum(decay ** (step + 1 - at) * values[name].double() for at, values in enumerate(versions))
            / sum(decay ** (step + 1 - at) for at in range(len(versions)))
            for name in versions[0]
        }
        assert trainer.average is not None
        average = {name: whole(value) for name, value in trainer.average.items()}
        assert relative_error(average, expected) < 1e-6
    assert relative_error(versions[-1], average) > 1e-4

    # The step computes its proximal log-probs with the average, and leaves the policy unchanged.
    model = reference_model(tied_model)
    model.load_state_dict({name: value.double() for name, value in average.items()}, strict=False)
    model.save_pretrained(tmp_path / "average")
    policy = reference_model(tied_model)
    policy.load_state_dict({name: value.double() for name, value in versions[-1].items()}, strict=False)
    policy.save_pretrained(tmp_path / "policy")
    shard = aged_shard(7)
    for group in trainer.optimizer.param_groups:
        group["betas"] = (0.0, 0.95)
    trainer.train_step(shard)
    found = {
        name: trainer.optimizer.state[parameter]["exp_avg"].full_tensor()
        for name, parameter in trainer.model.named_parameters()
    }
    expected = naive_gradient(tmp_path / "policy", shard, naive_logprobs(tmp_path / "average", shard))
    assert relative_error(found, expected) < 1e-4


def at_step(shard: Shard, step: int) -> Shard:
    """Return the shard with all tokens sampled by version `step`, which also trains on them."""
    samples = []
    for sample in shard.samples:
        runs = [
            msgspec.structs.replace(sample.trajectory.versions[0], version=step, count=sample.trajectory.action_count)
        ]
        trajectory = msgspec.structs.replace(sample.trajectory, versions=runs)
        samples.append(msgspec.structs.replace(sample, trajectory=trajectory))
    return msgspec.structs.replace(
        shard,
        step=step,
        min_version=step,
        samples=samples,
        batch=[sample.trajectory.batch_sample() for sample in samples],
        total_tokens=sum(sample.trajectory.action_count for sample in samples),
        total_sequences=len(samples),
    )


@pytest.mark.slow
def test_the_recomputed_proximal_policy_is_that_at_the_start_of_the_step(tied_model: Path) -> None:
    shard = aged_shard()
    frozen = TRAIN | {"minibatches": 2, "learning_rate": 1e-30, "betas": [0.0, 0.95]}
    moving = TRAIN | {"minibatches": 2, "betas": [0.0, 0.95]}
    still, moved = (trainer_at(3, tied_model, algorithm=decoupled("recompute"), train=one) for one in (frozen, moving))
    first, second = still.train_step(shard), moved.train_step(shard)
    # The update between the minibatches does not change w = exp(proximal − behaviour), but changes the ratio.
    assert first["weight_mean"] == pytest.approx(second["weight_mean"], rel=1e-6)
    assert first["ess"] == pytest.approx(second["ess"], rel=1e-6)
    assert first["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert second["ratio_max"] > 1.001


@pytest.mark.slow
def test_the_reference_is_the_initial_policy_unless_another_is_named(tied_model: Path, untied_model: Path) -> None:
    kl: dict[str, Any] = {"coefficient": 0.1}
    trainer = trainer_at(3, tied_model, algorithm={"objective": "grpo", "kl": kl}, train=TRAIN)
    assert trainer.train_step(aged_shard())["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert trainer.train_step(aged_shard(1, step=4))["kl_reference"] > 1e-5, "the policy moved, the reference did not"
    other = trainer_at(
        3, tied_model, algorithm={"objective": "grpo", "kl": kl | {"reference": str(untied_model)}}, train=TRAIN
    )
    assert other.train_step(aged_shard())["kl_reference"] > 0.1


@pytest.mark.slow
def test_a_refreshed_reference_is_the_policy_at_the_time_of_the_refresh(tied_model: Path, untied_model: Path) -> None:
    refreshed = {"objective": "grpo", "kl": {"coefficient": 0.1, "refresh": 2}}
    trainer = trainer_at(3, tied_model, algorithm=refreshed, train={"async_ratio": 2.0})
    found = [trainer.train_step(aged_shard(step, step=step))["kl_reference"] for step in (3, 4, 5, 6)]
    assert found[0] == pytest.approx(0.0, abs=1e-6)
    assert found[1] == pytest.approx(0.0, abs=1e-6), "version 4 became the reference"
    assert found[2] > 1e-5
    assert found[3] == pytest.approx(0.0, abs=1e-6), "version 6 did"
    other = refreshed | {"kl": {"coefficient": 0.1, "refresh": 2, "reference": str(untied_model)}}
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.refresh: the policy cannot become the reference .*lm_head"):
        trainer_at(3, tied_model, algorithm=other)


def test_a_reference_that_cannot_be_loaded_is_reported_under_its_own_key(tied_model: Path, tmp_path: Path) -> None:
    kl = {"coefficient": 0.1, "reference": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"^algorithm\.kl\.reference: cannot load"):
        Trainer(make_config(tied_model, algorithm={"kl": kl}))


@pytest.mark.parametrize("budget", [40, 1000])
def test_the_m2po_limit_is_computed_over_the_whole_minibatch_however_it_is_cut(tied_model: Path, budget: int) -> None:
    shard = aged_shard()
    trainer = trainer_at(
        3,
        tied_model,
        algorithm={"objective": "m2po", "options": {"tau": 0.2}},
        train=TRAIN | {"max_tokens_per_microbatch": budget},
    )
    metrics = trainer.train_step(shard)
    model = reference_model(tied_model)
    rows = []
    for sample in shard.samples:
        entry = shard.batch[sample.index]
        members = [other.reward for other in shard.batch if other.group_id == entry.group_id]
        std = float(np.std(members))
        advantage = (entry.reward - float(np.mean(members))) / std if std > 0 else 0.0
        logp, behaviour = unpacked_logprobs(model, sample.trajectory), sample.trajectory.behaviour().tolist()
        for place, version in enumerate(sample.trajectory.action_versions().tolist()):
            if version >= shard.min_version:
                rows.append((logp[place], behaviour[place], advantage))
    squares = sorted((now.item() - then) ** 2 for now, then, advantage in rows if (now.item() - then) * advantage > 0)
    kept = sum(sum(squares[: at + 1]) / (at + 1) <= 0.2 for at in range(len(squares)))
    assert 0 < kept < len(squares)
    total = torch.zeros((), dtype=torch.float64)
    dropped = 0
    for now, then, advantage in rows:
        if (now.item() - then) * advantage > 0 and (now.item() - then) ** 2 >= squares[kept]:
            dropped += 1
        else:
            total = total - (now - then).exp() * advantage
    (total / len(rows)).backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    assert relative_error(gradient_of(trainer), expected) < 1e-5
    assert metrics["clip_fraction"] == pytest.approx(dropped / len(rows))


def test_an_advantage_that_is_not_finite_stops_the_run_and_its_sample_is_named(tied_model: Path) -> None:
    kl = {"estimator": "k1", "coefficient": 0.1, "place": "reward"}
    trainer = trainer_at(3, tied_model, algorithm={"objective": "grpo", "kl": kl}, train=TRAIN)
    with torch.no_grad():
        local(next(iter(trainer.model.parameters()))).fill_(math.nan)
    with pytest.raises(ContractError, match=r"sample \d+: the advantage of its action token \d+ is nan"):
        trainer.train_step(aged_shard())
    assert trainer.version == 3


def test_a_value_that_is_not_finite_stops_the_run_and_its_sample_is_named(tied_model: Path) -> None:
    trainer = trainer_at(3, tied_model, algorithm={"objective": "ppo"}, critic={}, train=TRAIN)
    with torch.no_grad():
        local(trainer.critics[0].model.head.bias).fill_(math.nan)
    with pytest.raises(ContractError, match=r"sample \d+: the critic's value of its action token \d+ is nan"):
        trainer.train_step(aged_shard())


def test_gae_without_a_critic_is_a_config_error(tied_model: Path) -> None:
    with pytest.raises(ConfigError, match="critic"):
        Trainer(make_config(tied_model, algorithm={"objective": "ppo"}))
