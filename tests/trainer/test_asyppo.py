"""AsyPPO's complete step against its formulas in float64, token by token; and the later updates of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from algorithms.critics import assign_critics
from algorithms.objectives.trust_region import EQUAL_DEVIATION, AsyPpo
from flash.types import Shard
from tests.trainer.critic_cases import Reference, Sequenced, critic_gradient, critic_weights, set_head
from tests.trainer.step_reference import (
    Token,
    by_age,
    by_sample,
    by_sequence,
    gae_credit,
    group_credit,
    naive_values,
    sequences,
    tokens_of,
)
from tests.trainer.trainer_cases import (
    Trainer,
    aged_shard,
    gradient_of,
    local,
    reference_model,
    relative_error,
    trainer_at,
    weights_of,
    write_model,
)

GAMMA, LAM, BETA = 0.9, 0.8, 0.3
"""Discount γ, λ of GAE, and factor β of the entropy."""
# Options of `[train]`: tokens of ages up to 8 are allowed, several micro-batches are needed, and nothing is clipped.
TRAIN = {"async_ratio": 2.0, "max_tokens_per_microbatch": 40, "max_grad_norm": 1e9}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with the policies' tokenizer and fewer layers."""
    return write_model(tmp_path_factory.mktemp("small") / "model", tied=True, num_hidden_layers=1)


class ThreeCritics(AsyPpo, frozen=True):
    """AsyPPO with another number of critics."""

    critics = 3


def asyppo(
    model: Path, small: Path, *, critics: int = 2, train: dict[str, Any] | None = None, **algorithm: Any
) -> Trainer:
    """Return a trainer at version 3 whose critics, from the model `small`, have different heads.

    `train` and `algorithm` are options of the tables of these names.
    """
    objective = {2: "asyppo", 3: f"{__name__}:ThreeCritics"}[critics]
    table = {"objective": objective, "gamma": GAMMA, "entropy_bonus": BETA} | algorithm
    critic = {"path": str(small), "lam": LAM, "clip": None}
    trainer = trainer_at(3, model, algorithm=table, critic=critic, train=TRAIN | (train or {}))
    assert len(trainer.critics) == critics
    for index, one in enumerate(trainer.critics):
        set_head(one, index)
    return trainer


class Paper:
    """Formulas of the paper (`AsyPpo`), computed with plain models in float64."""

    def __init__(self, policy: Path, small: Path, shard: Shard, critics: int = 2) -> None:
        """Compute the values of all trained tokens. `small` is the model of the critics, whose heads `asyppo` sets."""
        self.shard = shard
        self.policy = reference_model(policy)
        self.critics = [Reference(small, index) for index in range(critics)]
        self.tokens = tokens_of(self.policy, None, shard)
        self.deviation: dict[tuple[int, int], float] = {}
        """σ of each trained token, by its sample and its place in the sample."""
        for sample, mine in zip(shard.samples, by_sample(shard, self.tokens), strict=True):
            values = [naive_values(critic, sample.trajectory) for critic in self.critics]
            for token in mine:
                said = [one[token.place] for one in values]
                token.value = sum(said) / len(said)
                spread = sum((one - token.value) ** 2 for one in said) / len(said)
                self.deviation[token.sample, token.place] = math.sqrt(spread)

    def rank(self, token: Token) -> tuple[int, int]:
        """Return how many trained tokens of the batch have a lower σ, and how many a higher one."""
        mine, others = self.deviation[token.sample, token.place], self.deviation.values()
        # The first tokens of a group follow the same prompt and tie. Tied tokens are all kept.
        low, high = mine * (1 - EQUAL_DEVIATION), mine * (1 + EQUAL_DEVIATION)
        return sum(one < low for one in others), sum(one > high for one in others)

    def loss(
        self, adjust: Callable[[Shard, list[Token]], None], *, decoupled: bool, k: float = 0.2, h: float = 0.2
    ) -> torch.Tensor:
        """Return −J, the negated objective.

        `adjust` applies corrections and weights. `k` is the share of tokens that are masked (I^A = 0), and `h` the
        share without an entropy bonus (I^H = 0).
        """
        tokens, count = self.tokens, len(self.tokens)
        gae_credit(GAMMA, LAM)(self.shard, tokens)
        adjust(self.shard, tokens)
        answers = sequences([token for token in tokens if not token.rejected])
        total = torch.zeros((), dtype=torch.float64)
        for answer in answers:
            for token in answer:
                below, above = self.rank(token)
                centre = token.logp.item() if decoupled else token.behaviour
                weight = math.exp(centre - token.behaviour)
                weight = 0.0 if decoupled and weight > 5.0 else weight
                ratio = (token.logp - centre).exp()
                surrogate = torch.minimum(ratio * token.advantage, ratio.clamp(0.8, 1.2) * token.advantage)
                learned = 0.0 if count - above <= math.floor(k * count) else 1.0
                explored = 0.0 if count - below <= math.floor(h * count) else 1.0
                term = learned * weight * surrogate * token.correction * token.staleness
                total = total - (term + BETA * explored * token.entropy) / len(answer) / len(answers)
        return total

    def returns(self, index: int) -> Sequenced:
        """Return one sample with the discounted rewards that follow each of its action tokens."""
        trajectory, mask = self.shard.samples[index].trajectory, []
        positions = np.flatnonzero(trajectory.action_mask())
        mask = trajectory.action_versions() >= self.shard.min_version
        turns = [sum(int(at >= span.stop) for span in trajectory.action_spans) for at in positions]
        returns, following = np.zeros(len(positions)), 0.0
        for place in reversed(np.flatnonzero(mask).tolist()):
            last = place + 1 == len(turns) or turns[place + 1] != turns[place]
            following = (self.shard.batch[index].turns[turns[place]] if last else 0.0) + GAMMA * following
            returns[place] = following
        ids = trajectory.tokens().astype(np.int64)
        return Sequenced(ids, positions, mask, returns, np.zeros(len(positions)))

    def lessons(self, critic: int) -> list[Sequenced]:
        """Return D_m: the samples from which a critic learns."""
        groups = [entry.group_id for entry in self.shard.batch]
        dealt = assign_critics(groups, len(self.critics), 0).tolist()
        return [self.returns(index) for index, one in enumerate(dealt) if one == critic]


def nothing(shard: Shard, tokens: list[Token]) -> None:
    """Apply no weight and no filter."""


# For each variant: options of `[algorithm]`, and the function that applies the same corrections to the reference.
VARIANTS: dict[str, tuple[dict[str, Any], Callable[[Shard, list[Token]], None]]] = {
    "plain": ({}, nothing),
    "other shares": ({"options": {"mask_lowest": 0.5, "filter_highest": 0.6}}, nothing),
    "filtered": (
        {"corrections": [{"kind": "geometric", "low": 0.03, "high": 0.06}]},
        by_sequence(0.03, 0.06, mean=True),
    ),
    "decoupled, weighed by age": (
        {"options": {"decoupled": True}, "staleness": {"kind": "exponential", "decay": 0.5}},
        by_age(0.5),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "critics"), [("plain", 2), *((name, 3) for name in VARIANTS if name != "plain")])
def test_the_gradients_of_policy_and_critics_equal_the_paper_in_float64(
    tied_model: Path, small_model: Path, name: str, critics: int
) -> None:
    algorithm, adjust = VARIANTS[name]
    shard = aged_shard()
    trainer = asyppo(tied_model, small_model, critics=critics, **algorithm)
    metrics = trainer.train_step(shard)

    paper, options = Paper(tied_model, small_model, shard, critics), algorithm.get("options", {})
    shares = {"k": options.get("mask_lowest", 0.2), "h": options.get("filter_highest", 0.2)}
    loss = paper.loss(adjust, decoupled=options.get("decoupled", False), **shares)
    loss.backward()
    expected = {name: value.grad for name, value in paper.policy.named_parameters()}
    assert relative_error(gradient_of(trainer), expected) < 1e-5
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=2e-5)
    kept = [token for token in paper.tokens if not token.rejected]
    sigma = [paper.deviation[token.sample, token.place] for token in kept]
    assert metrics["deviation_mean"] == pytest.approx(np.mean(sigma), rel=1e-4)

    squares = 0.0
    for index, (critic, reference) in enumerate(zip(trainer.critics, paper.critics, strict=True)):
        lessons = paper.lessons(index)
        assert relative_error(critic_gradient(critic), reference.gradient(lessons, None)) < 1e-5
        with torch.no_grad():
            squares += float(reference.loss(lessons, None)) * sum(int(one.mask.sum()) for one in lessons)
    assert metrics["critic_loss"] == pytest.approx(squares / shard.total_tokens, rel=1e-4)


def test_the_masks_make_a_difference_in_the_test_batch(tied_model: Path, small_model: Path) -> None:
    gradients = []
    for shares in ((0.0, 0.0), (0.2, 0.0), (0.0, 0.2)):
        paper = Paper(tied_model, small_model, aged_shard())
        paper.loss(nothing, decoupled=False, k=shares[0], h=shares[1]).backward()
        gradients.append({name: value.grad for name, value in paper.policy.named_parameters()})
    assert relative_error(gradients[1], gradients[0]) > 1e-2
    assert relative_error(gradients[2], gradients[0]) > 1e-3


def moved(parameters: dict[str, torch.nn.Parameter], direction: dict[str, torch.Tensor], by: float) -> None:
    """Add `by` times the direction to the parameters, in place."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            local(parameter).add_(direction[name], alpha=by)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["policy", "critic"])
def test_the_gradient_of_a_whole_step_equals_finite_differences_of_its_loss(
    tied_model: Path, small_model: Path, which: str
) -> None:
    """Check the gradient of the policy, and the gradient of the second critic.

    The metric `critic_loss` is over the tokens of both critics, so it changes by the share of this critic's tokens.
    """
    shard = aged_shard()

    def stepped(by: float, direction: dict[str, torch.Tensor] | None = None) -> tuple[float, Trainer]:
        # Return the loss of a step after the weights have been moved, and the trainer.
        trainer = asyppo(tied_model, small_model)
        model = trainer.model if which == "policy" else trainer.critics[1].model
        if direction is not None:
            moved(dict(model.named_parameters()), direction, by)
        metrics = trainer.train_step(shard)
        return metrics["loss" if which == "policy" else "critic_loss"], trainer

    _, trainer = stepped(0.0)
    gradient = gradient_of(trainer) if which == "policy" else critic_gradient(trainer.critics[1])
    norm = math.sqrt(sum(float(one.square().sum()) for one in gradient.values()))
    direction = {name: one / norm for name, one in gradient.items()}
    slope = (stepped(2e-3, direction)[0] - stepped(-2e-3, direction)[0]) / 4e-3
    share = 1.0
    if which == "critic":
        mine = Paper(tied_model, small_model, shard).lessons(1)
        share = sum(int(one.mask.sum()) for one in mine) / shard.total_tokens
    assert slope == pytest.approx(norm * share, rel=5e-3)


@pytest.mark.slow
def test_the_step_depends_neither_on_the_token_budget_nor_on_the_order_of_samples(
    tied_model: Path, small_model: Path
) -> None:
    results = []
    for budget, order in ((26, 1), (40, -1), (10_000, 1)):
        train = {"max_tokens_per_microbatch": budget, "minibatches": 2, "updates_per_batch": 2}
        trainer = asyppo(tied_model, small_model, train=train)
        shard = aged_shard()
        shard.samples[:] = shard.samples[::order]
        metrics = trainer.train_step(shard)
        results.append((metrics, gradient_of(trainer), [critic_gradient(one) for one in trainer.critics]))
    for metrics, gradient, critics in results[1:]:
        # A shared prefix is computed once only within one micro-batch.
        metrics["shared_token_share"] = results[0][0]["shared_token_share"]
        assert metrics == pytest.approx(results[0][0], rel=1e-3, abs=1e-5)
        assert relative_error(gradient, results[0][1]) < 1e-4
        for mine, theirs in zip(critics, results[0][2], strict=True):
            assert relative_error(mine, theirs) < 1e-4


@pytest.mark.slow
def test_new_critics_are_equal_so_no_token_is_masked_and_later_they_differ(tied_model: Path) -> None:
    tables = {"algorithm": {"objective": "asyppo"}, "critic": {"learning_rate": 1e-2}, "train": TRAIN}
    trainer = trainer_at(3, tied_model, **tables)
    first, second = trainer.critics
    assert all(torch.equal(value, critic_weights(second)[name]) for name, value in critic_weights(first).items())
    metrics = trainer.train_step(aged_shard())
    assert metrics["deviation_max"] == 0.0
    assert metrics["learned_mean"] == metrics["bonus_mean"] == 1.0
    metrics = trainer.train_step(aged_shard(1, step=4))
    assert metrics["deviation_mean"] > 0.0
    assert 0.8 <= metrics["learned_mean"] < 1.0
    assert metrics["masked_cap_share"] == 0.0
    assert 0.8 <= metrics["bonus_mean"] < 1.0


def test_a_batch_of_which_every_token_is_too_old_changes_nothing(tied_model: Path, small_model: Path) -> None:
    trainer, shard = asyppo(tied_model, small_model), aged_shard()
    old = msgspec.structs.replace(
        shard, min_version=4, total_tokens=0, total_sequences=0, batch=[
            msgspec.structs.replace(entry, oldest_version=0) for entry in shard.batch
        ]
    )  # fmt: skip
    before = [weights_of(trainer), *map(critic_weights, trainer.critics)]
    metrics = trainer.train_step(old)
    assert metrics["trained_tokens"] == 0.0
    assert metrics["critic_loss"] == 0.0
    for one, other in zip(before, [weights_of(trainer), *map(critic_weights, trainer.critics)], strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "passes"), [("grpo", 2), ("decoupled_ppo", 4)])
def test_each_update_of_a_batch_equals_a_naive_float64_loop(tied_model: Path, objective: str, passes: int) -> None:
    """Check a step that trains its batch `passes` times.

    A large ε keeps Adam from amplifying float32's rounding errors. The ratios of `decoupled_ppo` are to the policy at
    the start of the step, the ratios of `grpo` to the policy that sampled.
    """
    train = {"updates_per_batch": passes, "max_grad_norm": 1e9, "learning_rate": 0.5, "async_ratio": 2.0,
             "max_tokens_per_microbatch": 40}  # fmt: skip
    algorithm = {"objective": objective, "aggregation": "token_mean", "options": {"clip_low": 0.05, "clip_high": 0.05}}
    trainer, shard = trainer_at(3, tied_model, algorithm=algorithm, train=train), aged_shard()
    for group in trainer.optimizer.param_groups:
        group["eps"] = 1.0
    before = weights_of(trainer)
    metrics = trainer.train_step(shard)
    assert trainer.version == 4
    assert metrics["trained_tokens"] == shard.total_tokens

    model, losses = reference_model(tied_model), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0)
    centres: list[float] = []
    for _ in range(passes):
        tokens = tokens_of(model, None, shard)
        group_credit(shard, tokens)
        centres = centres or [one.logp.item() if objective == "decoupled_ppo" else one.behaviour for one in tokens]
        loss = torch.zeros((), dtype=torch.float64)
        for token, centre in zip(tokens, centres, strict=True):
            ratio, weight = (token.logp - centre).exp(), math.exp(centre - token.behaviour)
            surrogate = torch.minimum(ratio * token.advantage, ratio.clamp(0.95, 1.05) * token.advantage)
            loss = loss - (weight if weight <= 5.0 else 0.0) * surrogate / len(tokens)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    named = dict(model.named_parameters())
    step = {name: value.detach().double() - before[name].double() for name, value in named.items()}
    found = {name: value.double() - before[name].double() for name, value in weights_of(trainer).items()}
    assert relative_error(found, step) < 1e-3
    assert metrics["loss"] == pytest.approx(sum(losses) / passes, rel=1e-3, abs=1e-5)
