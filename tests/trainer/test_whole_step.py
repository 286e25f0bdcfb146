"""Gradient of a complete step with many combinations of its parts, against loops in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from flash import branches
from flash.config.tree import RolloutConfig
from flash.errors import ContractError
from flash.types import Shard, Trajectory
from tests.trainer.critic_cases import Reference, set_head
from tests.trainer.step_reference import (
    Recipe,
    Token,
    by_age,
    by_sample,
    by_sequence,
    by_token,
    gae_credit,
    group_credit,
    naive_values,
    reference_loss,
    sequences,
    teacher_credit,
    tokens_of,
    whitened_credit,
)
from tests.trainer.trainer_cases import (
    aged_shard,
    forked_shard,
    gradient_of,
    reference_model,
    relative_error,
    trainer_at,
    unpacked_logprobs,
    weights_of,
    whole,
)


def per_sequence(shard: Shard, tokens: list[Token], token: Token) -> float:
    """Return a token's weight in the mean over sequences of the mean over tokens."""
    lengths = [len(sequence) for sequence in sequences(tokens) if sequence[0].sample == token.sample]
    return 1 / lengths[0] / len(sequences(tokens))


def overlong_credit(shard: Shard, tokens: list[Token]) -> None:
    """Set each advantage to R − mean of the group, after the overlong penalty of the recipe "shaping"."""
    shaped = [entry.reward - 0.5 * min(max((entry.tokens - 4) / 8, 0.0), 1.0) for entry in shard.batch]
    for token in tokens:
        group = shard.batch[token.sample].group_id
        members = [reward for reward, entry in zip(shaped, shard.batch, strict=True) if entry.group_id == group]
        token.advantage = shaped[token.sample] - sum(members) / len(members)


def turn_credit(shard: Shard, tokens: list[Token]) -> None:
    """Set each advantage to the whitened return of the token's turn, compared within the group (γ = 0.5)."""
    gamma = 0.5
    returns = [
        [sum(gamma ** (later - at) * entry.turns[later] for later in range(at, len(entry.turns)))
         for at in range(len(entry.turns))]
        for entry in shard.batch
    ]  # fmt: skip
    for token in tokens:
        group = shard.batch[token.sample].group_id
        members = [
            mine[token.turn]
            for mine, entry in zip(returns, shard.batch, strict=True)
            if entry.group_id == group and token.turn < len(mine)
        ]
        mean = sum(members) / len(members)
        std = math.sqrt(sum((one - mean) ** 2 for one in members) / len(members))
        token.advantage = (returns[token.sample][token.turn] - mean) / std if std > 0 else 0.0


def k2(logp: torch.Tensor, reference: float) -> torch.Tensor:
    """Return 0.3 times the estimate k2 of the KL to the reference."""
    return 0.3 * (logp - reference) ** 2 / 2


def k3(logp: torch.Tensor, reference: float) -> torch.Tensor:
    """Return 0.3 times the estimate k3 of the KL to the reference."""
    return 0.3 * ((reference - logp).exp() - 1 - (reference - logp))


# For each case, by its name: options of `[algorithm]`, and the recipe of the reference for the same step.
RECIPES: dict[str, tuple[dict[str, Any], Recipe]] = {
    "kl k2": ({"kl": {"estimator": "k2", "coefficient": 0.3}}, Recipe(group_credit, kl=k2)),
    "kl k3": ({"kl": {"estimator": "k3", "coefficient": 0.3}}, Recipe(group_credit, kl=k3)),
    "entropy": ({"entropy_bonus": 0.2}, Recipe(group_credit, entropy_bonus=0.2)),
    "token tis": (
        {"corrections": [{"kind": "token_tis", "cap": 0.1}]},
        Recipe(group_credit, by_token(lambda w: min(w, 0.1))),
    ),
    "two corrections": (
        {"corrections": [{"kind": "token_tis", "cap": 0.1}, {"kind": "icepop", "low": 0.01, "high": 0.2}]},
        Recipe(group_credit, by_token(lambda w: min(w, 0.1) * (w if 0.01 <= w <= 0.2 else 0.0))),
    ),
    "sequence mask": (
        {"corrections": [{"kind": "sequence_mask", "low": 1e-13, "high": 1e-4}]},
        Recipe(group_credit, by_sequence(1e-13, 1e-4, mean=False)),
    ),
    "geometric": (
        {"corrections": [{"kind": "geometric", "low": 0.03, "high": 0.06}]},
        Recipe(group_credit, by_sequence(0.03, 0.06, mean=True)),
    ),
    "geometric, by sequence": (
        {
            "corrections": [{"kind": "geometric", "low": 0.03, "high": 0.06}],
            "aggregation": "seq_mean_token_mean",
        },
        Recipe(group_credit, by_sequence(0.03, 0.06, mean=True), scale=per_sequence),
    ),
    "geometric, kl and entropy": (
        {
            "corrections": [{"kind": "geometric", "low": 0.03, "high": 0.06}],
            "kl": {"estimator": "k3", "coefficient": 0.3},
            "entropy_bonus": 0.2,
        },
        Recipe(group_credit, by_sequence(0.03, 0.06, mean=True), kl=k3, entropy_bonus=0.2),
    ),
    "staleness": (
        {"staleness": {"kind": "exponential", "decay": 0.5}},
        Recipe(group_credit, by_age(0.5)),
    ),
    "shaping": (
        {"advantage": "group_mean", "shaping": [{"kind": "overlong", "limit": 12, "buffer": 8, "penalty": 0.5}]},
        Recipe(overlong_credit),
    ),
    "turns": ({"advantage": "turn", "gamma": 0.5}, Recipe(turn_credit)),
    "whitened, kl in the reward": (
        {"advantage": "batch", "kl": {"estimator": "k1", "coefficient": 0.1, "place": "reward"}},
        Recipe(whitened_credit(0.1)),
    ),
    "teacher": ({"teacher": {"coefficient": 0.4}}, Recipe(teacher_credit(0.4))),
    "teacher and rewards": ({"teacher": {"reward": True}}, Recipe(teacher_credit(1.0, rewards=group_credit))),
    "teacher and a reference": (
        {"teacher": {"coefficient": 0.4}, "kl": {"estimator": "k3", "coefficient": 0.3}},
        Recipe(teacher_credit(0.4), kl=k3),
    ),
    "constant": (
        {"aggregation": "constant"},
        Recipe(
            group_credit, scale=lambda shard, tokens, token: 1 / RolloutConfig().max_new_tokens / shard.total_sequences
        ),
    ),
    "all together": (
        {
            "kl": {"estimator": "k3", "coefficient": 0.3},
            "entropy_bonus": 0.2,
            "staleness": {"kind": "exponential", "decay": 0.5},
        },
        Recipe(group_credit, by_age(0.5), kl=k3, entropy_bonus=0.2),
    ),
}


@pytest.fixture(scope="module")
def plain_gradient(tied_model: Path) -> dict[str, Any]:
    """Return the gradient of a step that adds nothing to the surrogate."""
    plain, shard = reference_model(tied_model), aged_shard()
    reference_loss(tokens_of(plain, None, shard), shard, Recipe(group_credit)).backward()
    return {name: value.grad for name, value in plain.named_parameters()}


@pytest.mark.parametrize("name", RECIPES)
def test_the_gradient_of_a_composed_step_equals_a_naive_float64_loop(
    tied_model: Path, untied_model: Path, plain_gradient: dict[str, Any], name: str
) -> None:
    algorithm, recipe = RECIPES[name]
    pulled = [(key, name) for key, name in (("kl", "reference"), ("teacher", "path")) if key in algorithm]
    for key, place in pulled:
        algorithm = algorithm | {key: algorithm[key] | {place: str(untied_model)}}
    shard = aged_shard()
    trainer = trainer_at(
        3,
        tied_model,
        algorithm={"objective": "grpo", "aggregation": "token_mean"} | algorithm,
        train={"async_ratio": 2.0, "max_tokens_per_microbatch": 40, "max_grad_norm": 1e9},
    )
    metrics = trainer.train_step(shard)
    model = reference_model(tied_model)
    tokens = tokens_of(model, reference_model(untied_model) if pulled else None, shard)
    assert len(tokens) == shard.total_tokens
    loss = reference_loss(tokens, shard, recipe)
    loss.backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    assert relative_error(gradient_of(trainer), expected) < 1e-5
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=2e-5)
    dropped = sum(token.correction == 0 for token in tokens) / len(tokens)
    assert metrics["masked_correction_share"] == pytest.approx(dropped)
    assert metrics["advantage_abs_mean"] == pytest.approx(np.mean([abs(token.advantage) for token in tokens]), rel=1e-4)
    assert relative_error(plain_gradient, expected) > 1e-2, "what is asked for makes a difference"


@pytest.mark.slow
def test_a_served_teacher_gives_the_gradient_of_the_same_teacher_in_the_trainer(
    tied_model: Path, untied_model: Path
) -> None:
    """Check a batch with branches, and a batch with tokens that are too old.

    The samples of the second trainer come with the log-probs that the same teacher gives each branch.
    """
    teacher = reference_model(untied_model)

    def taught(one: Trajectory) -> Trajectory:
        # Return the trajectory with the teacher's log-probs, as a server would give them.
        with torch.no_grad():
            said = [unpacked_logprobs(teacher, branch) for branch in branches.split_branches(one)]
        return replace(one, teacher=torch.cat(said).float().numpy().tobytes())

    for shard in (forked_shard(), aged_shard()):
        told = replace(shard, samples=[replace(one, trajectory=taught(one.trajectory)) for one in shard.samples])
        found = []
        for where, batch in (({"path": str(untied_model)}, shard), ({"url": "http://teacher"}, told)):
            trainer = trainer_at(
                shard.step,
                tied_model,
                algorithm={"objective": "grpo", "teacher": where},
                train={"async_ratio": 2.0, "max_grad_norm": 1e9},
            )
            found.append((trainer.train_step(batch), gradient_of(trainer)))
        (held, expected), (served, gradient) = found
        assert served["kl_teacher"] == pytest.approx(held["kl_teacher"], abs=1e-5)
        assert relative_error(gradient, expected) < 1e-5
    trainer.version = shard.step
    with pytest.raises(ContractError, match="without its teacher's log-probs"):
        trainer.train_step(shard)


@pytest.mark.parametrize("objective", ["grpo", "m2po"])
def test_truncated_samples_leave_the_loss_but_not_the_baseline(tied_model: Path, objective: str) -> None:
    """Check `mask_truncated`: truncated samples count for the mean of their group, but have no loss."""
    shard = aged_shard()
    entries = [replace(entry, truncated=index % 3 == 0) for index, entry in enumerate(shard.batch)]
    shard = replace(shard, batch=entries)
    options = {"options": {"tau": 1e9}} if objective == "m2po" else {}
    trainer = trainer_at(
        3,
        tied_model,
        algorithm={"objective": objective, "aggregation": "token_mean", "mask_truncated": True, **options},
        train={"async_ratio": 2.0, "max_tokens_per_microbatch": 40, "max_grad_norm": 1e9},
    )
    metrics = trainer.train_step(shard)
    model = reference_model(tied_model)
    tokens = tokens_of(model, None, shard)
    if objective == "grpo":

        def masked(shard: Shard, tokens: list[Token]) -> None:
            # Reject all tokens of truncated samples.
            for token in tokens:
                token.rejected = shard.batch[token.sample].truncated

        loss = reference_loss(tokens, shard, Recipe(group_credit, masked))
        loss.backward()
        expected = {name: value.grad for name, value in model.named_parameters()}
        assert relative_error(gradient_of(trainer), expected) < 1e-5
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=2e-5)
    dropped = sum(shard.batch[token.sample].truncated for token in tokens) / len(tokens)
    assert metrics["masked_correction_share"] == pytest.approx(dropped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tables", "how"),
    [
        ({}, {}),
        (
            {"algorithm": {"objective": "grpo", "advantage": "gae"}, "critic": {"lam": 0.8}},
            {"offload": ["activations"]},
        ),
        ({"algorithm": {"objective": "grpo", "rhythm": {"credit": "global"}}}, {}),
    ],
    ids=["policy", "critic, inputs aside", "rhythm"],
)
def test_recomputed_activations_give_the_same_gradient(
    untied_model: Path, tables: dict[str, Any], how: dict[str, Any]
) -> None:
    train = {"async_ratio": 2.0, "max_tokens_per_microbatch": 64, "max_grad_norm": 1e9}
    kept, recomputed = (
        trainer_at(3, untied_model, **tables, train=train | learning)
        for learning in ({}, {"activation_checkpointing": True} | how)
    )
    calls = {kept: 0, recomputed: 0}
    for trainer in calls:
        layer = trainer.model.get_submodule("model.layers.0.mlp")
        layer.register_forward_pre_hook(lambda *_, trainer=trainer: calls.update({trainer: calls[trainer] + 1}))
    expected, found = (trainer.train_step(aged_shard()) for trainer in (kept, recomputed))
    assert calls[recomputed] > calls[kept], "layers run again in the backward pass"
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert relative_error(gradient_of(recomputed), gradient_of(kept)) < 1e-6
    for ours, theirs in zip(recomputed.critics, kept.critics, strict=True):
        for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("penalised", [False, True])
def test_the_gradient_with_a_critic_equals_a_naive_float64_loop(
    tied_model: Path, untied_model: Path, penalised: bool
) -> None:
    algorithm: dict[str, Any] = {"objective": "grpo", "aggregation": "token_mean", "advantage": "gae", "gamma": 0.9}
    if penalised:
        kl = {"estimator": "k1", "coefficient": 0.1, "place": "reward", "reference": str(untied_model)}
        algorithm["kl"] = kl
    train = {"async_ratio": 2.0, "max_tokens_per_microbatch": 40, "max_grad_norm": 1e9}
    trainer = trainer_at(3, tied_model, algorithm=algorithm, critic={"lam": 0.8}, train=train)
    set_head(trainer.critics[0])
    shard = aged_shard()
    metrics = trainer.train_step(shard)

    model, value_model = reference_model(tied_model), Reference(tied_model)
    tokens = tokens_of(model, reference_model(untied_model) if penalised else None, shard)
    for sample, sequence in zip(shard.samples, by_sample(shard, tokens), strict=True):
        values = naive_values(value_model, sample.trajectory)
        for token in sequence:
            token.value = values[token.place]
    for token in tokens:
        token.penalty = 0.1 * (token.logp.item() - token.reference) if penalised else 0.0
    loss = reference_loss(tokens, shard, Recipe(gae_credit(0.9, 0.8)))
    loss.backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    assert relative_error(gradient_of(trainer), expected) < 1e-5
    assert metrics["critic_warmup"] == 0.0
    assert metrics["value_mean"] == pytest.approx(np.mean([token.value for token in tokens]), rel=1e-4)
    returns = [token.advantage + token.value for token in tokens]
    assert metrics["return_mean"] == pytest.approx(np.mean(returns), rel=1e-4)


def test_in_the_warm_up_only_the_critic_learns_and_the_version_rises(tied_model: Path) -> None:
    trainer = trainer_at(3, tied_model, algorithm={"objective": "ppo"}, critic={"warmup_steps": 4},
                         train={"async_ratio": 2.0, "max_tokens_per_microbatch": 40})  # fmt: skip
    before = weights_of(trainer)
    head = whole(trainer.critics[0].model.head.weight).clone()
    metrics = trainer.train_step(aged_shard())
    assert trainer.version == 4
    assert metrics["critic_warmup"] == 1.0
    assert metrics["grad_norm"] == 0.0
    assert metrics["skipped_steps"] == 0.0
    assert metrics["entropy"] > 0
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())
    assert not torch.equal(whole(trainer.critics[0].model.head.weight), head)
    metrics = trainer.train_step(aged_shard(1, step=4))
    assert metrics["critic_warmup"] == 0.0
    assert metrics["grad_norm"] > 0
    assert any(not torch.equal(value, before[name]) for name, value in weights_of(trainer).items())
