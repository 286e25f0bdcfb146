"""Every objective against its reference: values, gradients, statistics, and what they become on policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import torch

from algorithms import OBJECTIVES
from algorithms.base import Objective, PackedTokens
from tests.algorithms.cases import (
    CASES,
    DEFAULTS,
    OPTIONS,
    objective_class,
    on_policy,
    random_tokens,
    rows_of,
    step,
    with_limit,
)
from tests.algorithms.reference import REFERENCES

NAMED = pytest.mark.parametrize(("name", "objective"), CASES, ids=str)
CASES_OF = {name: [objective for other, objective in CASES if other == name] for name in OPTIONS}
UNMASKED = [objective for objective in DEFAULTS if objective.critics == 1]
"""Objectives that leave no token out."""
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)


def weights_of(tokens: PackedTokens) -> torch.Tensor:
    """Return a weight for each token's loss, 0 for masked ones. They differ, so that errors cannot cancel out."""
    return torch.linspace(0.3, 1.7, len(tokens.logp_T), dtype=torch.float64).where(tokens.mask_T, 0.0)


def gradient_of(objective: Objective, tokens: PackedTokens) -> torch.Tensor:
    """Return [T]: the gradient of the weighted sum of losses (`weights_of`) by the log-probs."""
    leaf_T = tokens.logp_T.clone().requires_grad_()
    (objective(tokens._replace(logp_T=leaf_T)).loss_T * weights_of(tokens)).sum().backward()
    assert leaf_T.grad is not None
    return leaf_T.grad


def test_every_objective_is_tested() -> None:
    assert set(OPTIONS) == set(REFERENCES) == set(OBJECTIVES)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("rloo", "kimi15")])
def test_the_cases_reach_both_sides_of_every_bound(name: str) -> None:
    (tokens,) = with_limit(CASES_OF[name][-1], [random_tokens()])
    clipped_K = CASES_OF[name][-1](tokens).stats["clipped"][tokens.mask_T]
    assert 0 < clipped_K.sum() < len(clipped_K)


@NAMED
@DTYPES
def test_loss_gradient_and_statistics_equal_a_loop_over_tokens(
    name: str, objective: Objective, dtype: torch.dtype, tolerance: float
) -> None:
    (tokens,) = with_limit(objective, [random_tokens(dtype)])
    rows, weight_T = rows_of(tokens), weights_of(tokens)
    kept = torch.nonzero(tokens.mask_T).flatten().tolist()
    expected = {t: REFERENCES[name](objective, rows, t) for t in kept}
    gradient_T = torch.zeros(len(rows), dtype=torch.float64)
    for t, one in expected.items():
        for u, slope in one.gradient.items():
            gradient_T[u] += weight_T[t] * slope

    output = objective(tokens)
    assert output.loss_T.dtype == dtype
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    loss_K = torch.tensor([one.loss for one in expected.values()], dtype=torch.float64)
    torch.testing.assert_close(output.loss_T[kept].double(), loss_K, **close)
    torch.testing.assert_close(gradient_of(objective, tokens).double(), gradient_T, **close)
    assert set(output.stats) == set(expected[kept[0]].stats)
    for key, stat_T in output.stats.items():
        stat_K = torch.tensor([one.stats[key] for one in expected.values()], dtype=torch.float64)
        torch.testing.assert_close(stat_T[kept].double(), stat_K, **close)
        assert not stat_T.requires_grad


@NAMED
def test_gradients_equal_finite_differences_that_leave_detached_factors_alone(name: str, objective: Objective) -> None:
    (tokens,) = with_limit(objective, [random_tokens()])
    rows, weights = rows_of(tokens), weights_of(tokens).tolist()
    kept = [t for t, row in enumerate(rows) if row.mask]

    def loss(moved: int, by: float) -> float:
        # Return the reference's loss of a sequence after `logp` of its token `moved` has changed, but not `fixed`.
        there = [*rows]
        there[moved] = dataclasses.replace(rows[moved], logp=rows[moved].logp + by)
        mine = [t for t in kept if rows[t].sequence == rows[moved].sequence]
        return sum(weights[t] * REFERENCES[name](objective, there, t).loss for t in mine)

    slope_T = [(loss(t, 1e-6) - loss(t, -1e-6)) / 2e-6 if t in kept else 0.0 for t in range(len(rows))]
    found_T = gradient_of(objective, tokens)
    torch.testing.assert_close(found_T, torch.tensor(slope_T, dtype=torch.float64), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("objective", UNMASKED, ids=repr)
def test_on_policy_every_method_is_the_policy_gradient(objective: Objective) -> None:
    tokens = on_policy(random_tokens())
    _, (gradient_T,) = step(objective, [tokens], "token_mean")
    policy_gradient_T = (-tokens.advantage_T / tokens.mask_T.sum()).where(tokens.mask_T, 0.0)
    torch.testing.assert_close(gradient_T, policy_gradient_T, rtol=1e-12, atol=0)


def test_on_policy_weighted_topr_is_the_policy_gradient_times_its_weights() -> None:
    tokens = on_policy(random_tokens())
    objective = objective_class("topr_weighted")(positive=0.5, negative=2.0)
    found_T = gradient_of(objective, tokens)
    factor_T = torch.where(tokens.reward_T > 0, 0.5, 2.0)
    torch.testing.assert_close(found_T, -factor_T * tokens.advantage_T * weights_of(tokens), rtol=1e-12, atol=0)


@pytest.mark.parametrize("objective", DEFAULTS, ids=repr)
def test_a_method_that_corrects_staleness_depends_on_the_policy_that_sampled(objective: Objective) -> None:
    tokens = random_tokens()
    moved = tokens._replace(behaviour_T=tokens.behaviour_T - 0.1)
    _, (one,) = step(objective, [tokens])
    _, (other,) = step(objective, [moved])
    assert objective.corrects_staleness == (not torch.equal(one, other))


def test_stale_data_is_corrected_on_the_first_update_of_a_step() -> None:
    tokens = random_tokens()
    first = tokens._replace(proximal_T=tokens.logp_T)
    for name in ("grpo", "ppo", "reinforce_pp", "m2po"):
        stats = objective_class(name)()(first).stats
        assert (stats["ratio"] - 1).abs().mean() > 0.1
    for name in ("decoupled_ppo", "tis"):
        stats = objective_class(name)()(first).stats
        assert (stats["ratio"] == 1).all()
        assert (stats["weight"] - 1).abs().mean() > 0.1


# For each objective: its advantage estimator, its aggregation, and True if it corrects for old data.
METHODS: dict[str, tuple[str, str, bool]] = {
    "grpo": ("group", "seq_mean_token_mean", True),
    "dapo": ("group", "token_mean", True),
    "dr_grpo": ("group_mean", "constant", True),
    "ppo": ("gae", "token_mean", True),
    "asyppo": ("gae", "seq_mean_token_mean", True),
    "decoupled_ppo": ("group", "token_mean", True),
    "tis": ("group", "token_mean", True),
    "tis_reinforce": ("group", "token_mean", True),
    "topr": ("group", "seq_mean_token_mean", True),
    "topr_weighted": ("group", "seq_mean_token_mean", True),
    "cispo": ("group", "token_mean", True),
    "gspo": ("group", "seq_mean_token_mean", True),
    "reinforce_pp": ("batch", "token_mean", True),
    "rloo": ("leave_one_out", "seq_mean_token_sum", False),
    "kimi15": ("group_mean", "seq_mean_token_sum", True),
    "aipo": ("group", "token_mean", True),
    "m2po": ("group", "token_mean", True),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_method_names_its_own_estimator_and_aggregation(name: str) -> None:
    kind = objective_class(name)
    assert (kind.advantage, kind.aggregation, kind.corrects_staleness) == METHODS[name]


@pytest.mark.parametrize("where", ["recompute", "loglinear", "ewma"])
def test_decoupled_ppo_reports_the_source_of_its_proximal_policy(where: str) -> None:
    objective = objective_class("decoupled_ppo")(proximal=where, ewma_decay=0.5)
    assert objective.proximal_policy == where
    assert objective.proximal_decay == 0.5


def test_hooks_that_a_method_does_not_define_raise() -> None:
    objective, tokens = objective_class("grpo")(), random_tokens()
    assert objective.proximal_policy == "recompute"
    with pytest.raises(TypeError, match="Grpo does not define proximal_decay"):
        _ = objective.proximal_decay
    with pytest.raises(TypeError, match="Grpo does not define limit"):
        objective.limit(tokens.logp_T, tokens.advantage_T)
    with pytest.raises(TypeError, match="Grpo does not define bounds"):
        objective.bounds(tokens.deviation_T)
    with pytest.raises(TypeError, match="Objective does not define __call__"):
        Objective()(tokens)


# Pairs of an objective's name and options that must be refused.
OUT_OF_RANGE: list[tuple[str, dict[str, Any]]] = [
    *[
        (name, bad)
        for name in (
            "grpo",
            "dapo",
            "dr_grpo",
            "ppo",
            "asyppo",
            "decoupled_ppo",
            "tis",
            "cispo",
            "gspo",
            "reinforce_pp",
        )
        for bad in ({"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": -0.1})
    ],
    ("ppo", {"dual_clip": 1.0}),
    ("asyppo", {"mask_lowest": 1.0}),
    ("asyppo", {"mask_lowest": -0.1}),
    ("asyppo", {"filter_highest": 1.0}),
    ("asyppo", {"filter_highest": -0.1}),
    ("asyppo", {"decoupled": 1}),
    ("asyppo", {"weight_cap": 0.0}),
    ("decoupled_ppo", {"weight_cap": 0.0}),
    ("decoupled_ppo", {"cap": "drop"}),
    ("decoupled_ppo", {"proximal": "behaviour"}),
    ("decoupled_ppo", {"ewma_decay": 1.0}),
    ("tis", {"cap": 0.0}),
    ("tis_reinforce", {"low": 1.1}),
    ("tis_reinforce", {"high": 0.9}),
    ("topr", {"low": -0.1}),
    ("topr", {"high": 0.5}),
    ("topr", {"high": 1e9}),
    ("topr", {"split": "sign"}),
    ("topr_weighted", {"positive": -1.0}),
    ("topr_weighted", {"negative": -1.0}),
    ("kimi15", {"tau": 0.0}),
    ("kimi15", {"penalty": "batch"}),
    ("aipo", {"cap": 0.5}),
    ("m2po", {"tau": 0.0}),
    *[(name, {"unknown": 1}) for name in OBJECTIVES],
    ("grpo", {"clip_high": "x"}),
]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_options_out_of_range_or_unknown_are_refused(name: str) -> None:
    for options in [bad for other, bad in OUT_OF_RANGE if other == name]:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(options, objective_class(name))


@pytest.mark.parametrize("name", OPTIONS)
def test_options_in_range_are_taken(name: str) -> None:
    for options in OPTIONS[name]:
        made = msgspec.convert(options, objective_class(name))
        assert made == objective_class(name)(**options)
