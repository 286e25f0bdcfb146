"""Steps of a trainer on one rank: gradients and metrics against loops in float64, clipping, faults and ages."""

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

from flash.branches import split_branches
from flash.config.learning import TrainConfig
from flash.errors import ConfigError, ContractError
from flash.trainer.optimizer import learning_rate
from flash.trainer.packing import pack
from flash.types import Shard, Trajectory, VersionRun
from tests.trainer.trainer_cases import (
    Trainer,
    aged_shard,
    branched_shard,
    forked_shard,
    frozen_at,
    gradient_of,
    make_config,
    make_shard,
    make_trajectory,
    partly_kept,
    random_shard,
    reference_model,
    relative_error,
    sampled_at,
    trainer_at,
    unpacked_logprobs,
    weights_of,
)

OBJECTIVES = ["grpo", "decoupled_ppo"]
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]
PAIRS = [("grpo", AGGREGATIONS[0]), ("decoupled_ppo", AGGREGATIONS[1]), ("grpo", AGGREGATIONS[2])]
"""Pairs of objectives and aggregations. Both occur in several pairs, because they are independent of each other."""


def naive_advantages(shard: Shard) -> list[float]:
    """Return the advantage of each sample: (R − mean) / std of its group."""
    result = []
    for entry in shard.batch:
        members = [other.reward for other in shard.batch if other.group_id == entry.group_id]
        mean = sum(members) / len(members)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in members) / len(members))
        result.append((entry.reward - mean) / std if std > 0 else 0.0)
    return result


def naive_loss(model: Any, shard: Shard, objective: str, aggregation: str) -> torch.Tensor:
    """Return the batch's loss by loops over samples, branches and tokens, in float64, for one update per batch."""
    found = []
    for sample, advantage in zip(shard.samples, naive_advantages(shard), strict=True):
        branches = [one for one in split_branches(sample.trajectory) if one.trained_tokens(shard.min_version)]
        found += [naive_losses(model, branch, shard.min_version, objective, advantage) for branch in branches]
    if aggregation == "token_mean":
        return torch.cat(found).sum() / shard.total_tokens
    if aggregation == "seq_mean_token_mean":
        return sum(one.mean() for one in found) / shard.total_sequences
    return sum(one.sum() for one in found) / shard.total_sequences


def naive_losses(
    model: Any, trajectory: Trajectory, min_version: int, objective: str, advantage: float
) -> torch.Tensor:
    """Return the losses of the trained tokens of one sequence, before aggregation.

    With `decoupled_ppo` and a single update, the proximal policy is the trained policy. So the ratio is 1, and the
    weight is the ratio to the policy that sampled, or 0 above the objective's default cap of 5.
    """
    logp = unpacked_logprobs(model, trajectory)
    losses = []
    for place, (behaviour, version) in enumerate(
        zip(trajectory.behaviour().tolist(), trajectory.action_versions().tolist(), strict=True)
    ):
        if version < min_version:
            continue
        if objective == "grpo":
            ratio, weight = (logp[place] - behaviour).exp(), 1.0
        else:
            ratio = (logp[place] - logp[place].detach()).exp()
            weight = math.exp(logp[place].item() - behaviour)
            weight = weight if weight <= 5.0 else 0.0
        clipped = ratio.clamp(0.8, 1.2)
        losses.append(-weight * torch.minimum(ratio * advantage, clipped * advantage))
    return torch.stack(losses)


def stale_shard(garbage: float) -> Shard:
    """Return a shard for version 3 of the weights. Tokens of version 1 are masked and have `garbage` as log-probs."""
    rng = np.random.default_rng(5)

    def spoil(one: Trajectory) -> Trajectory:
        # Replace the log-probs of tokens of version 1.
        behaviour = one.behaviour().copy()
        behaviour[one.action_versions() < 2] = garbage
        return msgspec.structs.replace(one, logprobs=behaviour.tobytes())

    runs = [[VersionRun(1, 4), VersionRun(2, 3), VersionRun(3, 2)], [VersionRun(1, 6)], [VersionRun(3, 5)]]
    trajectories = [
        spoil(make_trajectory(group, member, run, rng, reward=float(member * group)))
        for group in (1, 2)
        for member, run in enumerate(runs)
    ]
    return make_shard(trajectories, step=3, min_version=2)


@pytest.mark.parametrize(("objective", "aggregation"), PAIRS)
def test_the_gradient_equals_a_naive_unpacked_float64_loop(model: Path, objective: str, aggregation: str) -> None:
    shard = partly_kept(sampled_at(random_shard(), 0.8, 1.0, 1.3))
    algorithm = {"objective": objective, "aggregation": aggregation}
    trainer = Trainer(make_config(model, algorithm=algorithm))
    metrics = trainer.train_step(shard)
    reference = reference_model(model)
    loss = naive_loss(reference, shard, objective, aggregation)
    loss.backward()
    expected = {name: value.grad for name, value in reference.named_parameters()}
    assert relative_error(gradient_of(trainer), expected) < 1e-5
    assert metrics["loss"] == pytest.approx(loss.item(), abs=2e-5)
    norm = math.sqrt(sum(float(value.square().sum()) for value in expected.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_branches_are_sequences_with_the_advantage_of_their_sample(untied_model: Path, aggregation: str) -> None:
    shard = branched_shard()
    assert shard.total_sequences > len(shard.samples)
    algorithm = {"objective": "grpo", "aggregation": aggregation}
    trainer = trainer_at(3, untied_model, algorithm=algorithm, train={"async_ratio": 1.0})
    trainer.train_step(shard)
    reference = reference_model(untied_model)
    naive_loss(reference, shard, "grpo", aggregation).backward()
    expected = {name: value.grad for name, value in reference.named_parameters()}
    assert relative_error(gradient_of(trainer), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "budget"), [(0, 30), (1, 64), (2, 400)])
def test_trees_have_the_loss_and_gradient_of_their_sequences(untied_model: Path, seed: int, budget: int) -> None:
    """Sequences with common beginnings form trees, of which the beginnings are computed once per micro-batch."""
    shard = forked_shard(seed)
    algorithm = {"objective": "grpo", "aggregation": "token_mean", "kl": {"estimator": "k3", "coefficient": 0.3}}
    trainer = Trainer(make_config(untied_model, algorithm=algorithm, train={"max_tokens_per_microbatch": budget}))
    metrics = trainer.train_step(shard)
    reference = reference_model(untied_model)
    loss = naive_loss(reference, shard, "grpo", "token_mean")
    loss.backward()
    expected = {name: value.grad for name, value in reference.named_parameters()}
    assert relative_error(gradient_of(trainer), expected) < 1e-5
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    micros = pack(shard.samples, min_version=0, max_tokens=budget)
    computed = sum(len(micro.computed.place_U) for micro in micros)
    packed = sum(len(micro.input_P) for micro in micros)
    assert metrics["shared_token_share"] == pytest.approx(1 - computed / packed)
    assert metrics["shared_token_share"] > 0.1


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_on_policy_the_gradient_is_reinforce_with_the_advantage(untied_model: Path, objective: str) -> None:
    reference = reference_model(untied_model)
    trajectories = []
    for sample in random_shard().samples:
        with torch.no_grad():
            logp = unpacked_logprobs(reference, sample.trajectory)
        behaviour = logp.numpy().astype("<f4").tobytes()
        trajectories.append(msgspec.structs.replace(sample.trajectory, logprobs=behaviour))
    shard = make_shard(trajectories)
    algorithm = {"objective": objective, "aggregation": "token_mean"}
    trainer = Trainer(make_config(untied_model, algorithm=algorithm))
    metrics = trainer.train_step(shard)
    loss = -sum(
        advantage * unpacked_logprobs(reference, sample.trajectory).sum()
        for sample, advantage in zip(shard.samples, naive_advantages(shard), strict=True)
    )
    (loss / shard.total_tokens).backward()
    expected = {name: value.grad for name, value in reference.named_parameters()}
    assert relative_error(gradient_of(trainer), expected) < 1e-5
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["mismatch_max"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregation", "ways"),
    [
        ("token_mean", [(1000, None), (26, 1)]),
        ("seq_mean_token_mean", [(1000, None), (26, None), (64, 1), (100, 2)]),
        ("seq_mean_token_sum", [(1000, None), (26, 1)]),
    ],
)
def test_the_gradient_is_the_same_for_any_budget_and_any_order(
    untied_model: Path, aggregation: str, ways: list[tuple[int, int | None]]
) -> None:
    shard = random_shard()
    gradients = []
    for budget, seed in ways:
        samples = list(shard.samples)
        if seed is not None:
            random.Random(seed).shuffle(samples)
        config = make_config(
            untied_model,
            train={"learning_rate": 1e-3, "max_grad_norm": 1e9, "max_tokens_per_microbatch": budget},
            algorithm={"aggregation": aggregation},
        )
        trainer = Trainer(config)
        trainer.train_step(msgspec.structs.replace(shard, samples=samples))
        gradients.append(gradient_of(trainer))
    for gradient in gradients[1:]:
        assert relative_error(gradient, gradients[0]) < 1e-5


@pytest.mark.parametrize(("objective", "aggregation"), PAIRS)
def test_garbage_in_masked_slots_changes_neither_metrics_nor_gradient(
    tied_model: Path, objective: str, aggregation: str
) -> None:
    trainer = frozen_at(3, tied_model, algorithm={"objective": objective, "aggregation": aggregation})
    results = []
    for value in (0.0, math.nan, 1e30, -1e30, math.inf):
        trainer.version = 3
        results.append((trainer.train_step(stale_shard(value)), gradient_of(trainer)))
    (clean_metrics, clean), *spoilt = results
    for metrics, gradient in spoilt:
        assert metrics == clean_metrics
        assert all(torch.equal(gradient[name], clean[name]) for name in clean)


def test_masked_tokens_count_in_neither_numerator_nor_denominator(tied_model: Path) -> None:
    shard = stale_shard(0.0)
    trainer = trainer_at(3, tied_model)
    trainer.train_step(shard)
    reference = reference_model(tied_model)
    naive_loss(reference, shard, "decoupled_ppo", "token_mean").backward()
    expected = {name: value.grad for name, value in reference.named_parameters()}
    assert relative_error(gradient_of(trainer), expected) < 1e-5


def test_metrics_equal_a_naive_count(tied_model: Path) -> None:
    shard = stale_shard(0.0)
    metrics = trainer_at(3, tied_model, algorithm={"objective": "grpo"}).train_step(shard)
    reference = reference_model(tied_model)
    gaps, ratios, ages, advantages, clipped = [], [], [], [], 0
    for sample, advantage in zip(shard.samples, naive_advantages(shard), strict=True):
        with torch.no_grad():
            logp = unpacked_logprobs(reference, sample.trajectory).tolist()
        behaviour = sample.trajectory.behaviour().tolist()
        for now, then, version in zip(logp, behaviour, sample.trajectory.action_versions().tolist(), strict=True):
            if version >= 2:
                ratios.append(math.exp(now - then))
                ages.append(3 - version)
                advantages.append(abs(advantage))
                clipped += (advantage > 0 and ratios[-1] > 1.2) or (advantage < 0 and ratios[-1] < 0.8)
            if version == 3:
                gaps.append(now - then)
    count = len(ratios)
    rewards = [entry.reward for entry in shard.batch]
    assert metrics["trained_tokens"] == count == shard.total_tokens
    assert metrics["tokens"] == sum(sample.trajectory.length for sample in shard.samples)
    assert metrics["ratio_mean"] == pytest.approx(sum(ratios) / count, rel=1e-5)
    assert metrics["ratio_min"] == pytest.approx(min(ratios), rel=1e-5)
    assert metrics["ratio_max"] == pytest.approx(max(ratios), rel=1e-5)
    assert metrics["clip_fraction"] == pytest.approx(clipped / count)
    assert metrics["mismatch_kl"] == pytest.approx(-sum(gaps) / len(gaps), rel=1e-5)
    k3 = sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps)
    assert metrics["mismatch_k3"] == pytest.approx(k3, rel=1e-5)
    assert metrics["mismatch_max"] == pytest.approx(max(map(abs, gaps)), rel=1e-5)
    assert metrics["age_mean"] == pytest.approx(sum(ages) / count)
    assert metrics["age_max"] == 1.0
    assert metrics["age_0"] == pytest.approx(ages.count(0) / count)
    assert metrics["age_1"] == pytest.approx(ages.count(1) / count)
    assert metrics["reward_mean"] == pytest.approx(np.mean(rewards))
    assert metrics["reward_std"] == pytest.approx(np.std(rewards))
    assert metrics["advantage_abs_mean"] == pytest.approx(np.mean(advantages))
    assert metrics["ess"] == pytest.approx(sum(ratios) ** 2 / (count * sum(ratio**2 for ratio in ratios)), rel=1e-5)
    assert metrics["masked_old_share"] == pytest.approx(1 - count / sum(entry.tokens for entry in shard.batch))
    assert metrics["masked_correction_share"] == metrics["masked_cap_share"] == 0.0
    for age in (0, 1):
        mine = sorted(ratio for ratio, other in zip(ratios, ages, strict=True) if other == age)
        for percent, at in ((1, 0), (99, -1)):
            log_ratio = math.log(metrics[f"ratio_p{percent}_age_{age}"])
            assert log_ratio == pytest.approx(math.log(mine[at]), rel=0.011, abs=2e-5)
    assert all(math.isfinite(value) for value in metrics.values())


def test_minibatches_are_separate_updates_and_the_ratio_leaves_one_only_after_the_first(tied_model: Path) -> None:
    """The ratio is to the policy at the start of the step (`decoupled_ppo`), so the first update has a ratio of 1."""
    shard = random_shard()
    train = {"learning_rate": 0.02, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 64}
    single = Trainer(make_config(tied_model, train=train)).train_step(shard)
    trainer = Trainer(make_config(tied_model, train=train | {"minibatches": 2}))
    metrics = trainer.train_step(shard)
    assert single["ratio_min"] == single["ratio_max"] == 1.0
    assert metrics["ratio_max"] > 1.0 > metrics["ratio_min"]
    assert trainer.version == 1
    assert all(int(state["step"]) == 2 for state in trainer.optimizer.state.values())


def test_a_minibatch_has_the_gradient_of_a_batch_of_its_own(tied_model: Path) -> None:
    shard = random_shard()
    first = make_shard([s.trajectory for s in shard.samples if s.trajectory.task.group_id in (0, 1)])
    second = make_shard([s.trajectory for s in shard.samples if s.trajectory.task.group_id in (2, 3)])
    trainer = frozen_at(0, tied_model)
    halves = []
    for part in (first, second):
        trainer.version = 0
        trainer.train_step(part)
        halves.append(gradient_of(trainer))
    both = frozen_at(0, tied_model, train={"minibatches": 2})
    both.train_step(shard)
    # With β1 = 0, the first moment is the gradient of the last update.
    assert relative_error(gradient_of(both), halves[1]) < 1e-5
    assert relative_error(halves[0], halves[1]) > 0.1


def test_gradients_are_clipped_to_the_configured_norm(tied_model: Path) -> None:
    free = Trainer(make_config(tied_model))
    metrics = free.train_step(random_shard())
    limit = metrics["grad_norm"] / 3
    train = {"learning_rate": 1e-3, "max_grad_norm": limit, "max_tokens_per_microbatch": 64}
    clipped = Trainer(make_config(tied_model, train=train))
    assert clipped.train_step(random_shard())["grad_norm"] == pytest.approx(metrics["grad_norm"])
    expected = {name: value / 3 for name, value in gradient_of(free).items()}
    assert relative_error(gradient_of(clipped), expected) < 1e-5


def with_first_behaviour(shard: Shard, value: float) -> Shard:
    """Return the shard with this behaviour log-prob at the first token. A very negative one lets the ratio overflow."""
    sample = shard.samples[0]
    behaviour = sample.trajectory.behaviour().copy()
    behaviour[0] = value
    spoilt = msgspec.structs.replace(
        sample, trajectory=msgspec.structs.replace(sample.trajectory, logprobs=behaviour.tobytes())
    )
    return msgspec.structs.replace(shard, samples=[spoilt, *shard.samples[1:]])


def test_a_gradient_that_is_not_finite_stops_the_run(tied_model: Path) -> None:
    trainer = Trainer(make_config(tied_model, algorithm={"objective": "grpo"}))
    before = weights_of(trainer)
    with pytest.raises(ContractError, match=r"gradient norm is (nan|inf)"):
        trainer.train_step(with_first_behaviour(random_shard(), -1e5))
    assert trainer.version == 0
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())


def test_a_gradient_that_is_not_finite_can_be_skipped_and_is_counted(tied_model: Path) -> None:
    train = {"on_nonfinite": "skip", "max_tokens_per_microbatch": 64}
    trainer = Trainer(make_config(tied_model, train=train, algorithm={"objective": "grpo"}))
    before = weights_of(trainer)
    metrics = trainer.train_step(with_first_behaviour(random_shard(), -1e5))
    assert metrics["skipped_steps"] == 1.0
    assert trainer.version == 1
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())
    shard = msgspec.structs.replace(random_shard(1), step=1)
    assert trainer.train_step(shard)["skipped_steps"] == 1.0
    assert any(not torch.equal(value, before[name]) for name, value in weights_of(trainer).items())


def test_a_batch_without_a_token_to_train_leaves_the_weights_alone(tied_model: Path) -> None:
    rng = np.random.default_rng(0)
    old = [make_trajectory(0, i, [VersionRun(1, 4)], rng, reward=float(i)) for i in range(2)]
    trainer = trainer_at(3, tied_model)
    before = weights_of(trainer)
    metrics = trainer.train_step(make_shard(old, step=3, min_version=2))
    assert metrics["trained_tokens"] == 0.0
    assert metrics["skipped_steps"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())


def test_the_mismatch_at_age_0_is_reported_by_environment(tied_model: Path) -> None:
    shard = aged_shard()
    kinds = [("math", "code")[entry.group_id % 2] for entry in shard.batch]
    shard = replace(
        shard,
        samples=[
            replace(one, trajectory=replace(one.trajectory, task=replace(one.trajectory.task, kind=kinds[one.index])))
            for one in shard.samples
        ],
    )
    train = {"async_ratio": 2.0, "max_tokens_per_microbatch": 40}
    metrics = trainer_at(3, tied_model, algorithm={"objective": "grpo"}, train=train).train_step(shard)
    found: dict[str, list[float]] = {"math": [], "code": []}
    model = reference_model(tied_model)
    for sample in shard.samples:
        trajectory = sample.trajectory
        gap_T = unpacked_logprobs(model, trajectory).detach().numpy() - trajectory.behaviour()
        gap_T = gap_T[trajectory.action_versions() == shard.step]
        found[kinds[sample.index]] += (np.exp(gap_T) - 1 - gap_T).tolist()
    for kind, values in found.items():
        assert metrics[f"mismatch_k3_env_{kind}"] == pytest.approx(np.mean(values), rel=1e-4)
    assert metrics["mismatch_k3_age_0"] == pytest.approx(np.mean(found["math"] + found["code"]), rel=1e-4)


def test_a_batch_whose_every_sample_is_rejected_leaves_the_weights_alone(tied_model: Path) -> None:
    corrections = [{"kind": "sequence_mask", "low": 1e8, "high": 1e9}]
    trainer = Trainer(make_config(tied_model, algorithm={"objective": "grpo", "corrections": corrections}))
    before = weights_of(trainer)
    metrics = trainer.train_step(random_shard())
    assert metrics["skipped_steps"] == metrics["trained_tokens"] == 0.0
    assert metrics["masked_correction_share"] == 1.0
    assert metrics["loss"] == 0.0
    assert "ratio_mean" not in metrics
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())


def test_a_rejected_sample_whose_ratio_overflows_spoils_no_gradient(tied_model: Path) -> None:
    corrections = [{"kind": "geometric", "low": 0.0, "high": 10.0}]
    shard = random_shard()
    first = shard.samples[0]
    far = np.full(first.trajectory.action_count, -300.0, dtype="<f4")
    spoilt = replace(first, trajectory=replace(first.trajectory, logprobs=far.tobytes()))
    trainer = Trainer(make_config(tied_model, algorithm={"objective": "grpo", "corrections": corrections}))
    metrics = trainer.train_step(replace(shard, samples=[spoilt, *shard.samples[1:]]))
    assert metrics["skipped_steps"] == 0.0
    assert 0 < metrics["masked_correction_share"] < 1
    assert math.isfinite(metrics["loss"])


@pytest.mark.slow
def test_age_contract_a_token_older_than_the_limit_stops_the_run(tied_model: Path) -> None:
    """The limit is `train.max_token_age` (`bound`) or, without it, 4 · ⌈`train.async_ratio`⌉ (`alpha`)."""
    for alpha, bound, age, allowed in (
        (0.5, 1, 2, False),
        (1.0, 1, 2, False),
        (1.1, 2, 2, True),
        (1.0, 2, 2, True),
        (0.5, None, 4, True),
        (0.5, None, 5, False),
        (2.0, None, 8, True),
        (2.0, None, 9, False),
    ):
        rng = np.random.default_rng(0)
        old = [make_trajectory(0, i, [VersionRun(9 - age, 4)], rng, reward=float(i)) for i in range(2)]
        train = {"async_ratio": alpha, "max_token_age": bound, "max_tokens_per_microbatch": 64}
        trainer = trainer_at(9, tied_model, train=train)
        shard = make_shard(old, step=9, min_version=0)
        if allowed:
            assert trainer.train_step(shard)["age_max"] == age
        else:
            with pytest.raises(ContractError, match=f"ages run from {age} to {age}"):
                trainer.train_step(shard)
            assert trainer.version == 9


def test_age_contract_a_token_from_the_future_stops_the_run(tied_model: Path) -> None:
    rng = np.random.default_rng(0)
    early = [make_trajectory(0, 0, [VersionRun(4, 4)], rng, reward=1.0)]
    with pytest.raises(ContractError, match="ages run from -1"):
        trainer_at(3, tied_model).train_step(make_shard(early, step=3, min_version=2))


def test_a_batch_for_another_version_stops_the_run(tied_model: Path) -> None:
    with pytest.raises(ContractError, match=r"batch for version 0 .* holds version 3"):
        trainer_at(3, tied_model).train_step(random_shard())


def test_counts_that_differ_from_what_the_hub_dealt_stop_the_run(tied_model: Path) -> None:
    shard = random_shard()
    for wrong in (
        msgspec.structs.replace(shard, total_tokens=shard.total_tokens + 1),
        msgspec.structs.replace(shard, total_sequences=shard.total_sequences - 1),
    ):
        with pytest.raises(ContractError, match="the hub dealt"):
            Trainer(make_config(tied_model)).train_step(wrong)


def test_an_unknown_objective_or_option_is_a_config_error(tied_model: Path) -> None:
    for algorithm in ({"objective": "grop"}, {"objective": "grpo", "options": {"clip": 0.1}}):
        with pytest.raises(ConfigError):
            Trainer(make_config(tied_model, algorithm=algorithm))


def test_the_learning_rate_warms_up_and_reaches_its_end_one_step_after_the_last() -> None:
    train = TrainConfig(learning_rate=1.0, warmup_steps=2, decay="linear", final_learning_rate=0.2)
    assert [learning_rate(train, 7, step) for step in range(7)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.84, 0.68, 0.52, 0.36]
    )
    cosine = TrainConfig(learning_rate=1.0, decay="cosine")
    assert [learning_rate(cosine, 3, step) for step in range(4)] == pytest.approx([1.0, 0.75, 0.25, 0.0], abs=1e-12)
    assert learning_rate(TrainConfig(learning_rate=0.3), 5, 4) == 0.3


def test_the_step_uses_the_learning_rate_of_its_version(tied_model: Path) -> None:
    train = {"learning_rate": 1e-3, "warmup_steps": 4, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 64}
    trainer = Trainer(make_config(tied_model, train=train))
    before = weights_of(trainer)
    assert trainer.train_step(random_shard())["learning_rate"] == pytest.approx(2.5e-4)
    moved = max(float((value - before[name]).abs().max()) for name, value in weights_of(trainer).items())
    assert moved == pytest.approx(2.5e-4, rel=1e-2)
