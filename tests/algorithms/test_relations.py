"""Relations between objectives: options with which one equals another, and properties that only one has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.base import Objective, PackedTokens
from algorithms.objectives.sequence import Gspo
from algorithms.objectives.trust_region import M2po
from tests.algorithms.cases import LENGTHS, objective_class, random_tokens, rows_of, step, take, with_limit
from tests.algorithms.reference import m2po_dropped

# Pairs of a name and options. Both objectives of a pair must have equal losses on `random_tokens`.
EQUAL: list[tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = [
    (("grpo", {"clip_high": 0.28}), ("dapo", {})),
    (("grpo", {}), ("dr_grpo", {})),
    (("grpo", {}), ("ppo", {})),
    (("grpo", {}), ("reinforce_pp", {})),
    (("tis", {"cap": 1.2}), ("decoupled_ppo", {"weight_cap": 1.2, "cap": "clamp"})),
    (("decoupled_ppo", {"weight_cap": 1e9}), ("tis", {"cap": 1e9})),
    (("aipo", {"cap": 1.0}), ("tis_reinforce", {})),
    (("aipo", {"cap": 6.0}), ("cispo", {})),
    (("topr", {}), ("topr_weighted", {})),
    (("asyppo", {"mask_lowest": 0.0}), ("ppo", {})),
    (("asyppo", {"mask_lowest": 0.0, "decoupled": True, "weight_cap": 1.2}), ("decoupled_ppo", {"weight_cap": 1.2})),
    (("m2po", {"tau": 1e9}), ("grpo", {"clip_low": 1.0, "clip_high": 1e9})),
]


def build(made: tuple[str, dict[str, Any]]) -> Objective:
    """Return the objective with this name and these options."""
    return objective_class(made[0])(**made[1])


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=str)
def test_objectives_with_these_options_are_equal(
    one: tuple[str, dict[str, Any]], other: tuple[str, dict[str, Any]]
) -> None:
    tokens = random_tokens()
    loss, (gradient_T,) = step(build(one), [tokens], "token_mean")
    same, (same_T,) = step(build(other), [tokens], "token_mean")
    assert same == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(same_T, gradient_T, rtol=1e-12, atol=1e-15)


def singles() -> PackedTokens:
    """Return the tokens of `random_tokens`, each as a sequence of its own."""
    tokens = random_tokens()
    count = len(tokens.logp_T)
    return tokens._replace(sequence_T=torch.arange(count), sequences=count)


def test_on_sequences_of_one_token_gspo_is_grpo() -> None:
    options = {"clip_low": 0.1, "clip_high": 0.2}
    _, (one,) = step(objective_class("gspo")(**options), [singles()])
    _, (other,) = step(objective_class("grpo")(**options), [singles()])
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_on_bad_sequences_of_one_token_topr_is_reinforce_with_truncated_weights() -> None:
    tokens = singles()._replace(reward_T=torch.full_like(singles().reward_T, -1.0))
    _, (one,) = step(objective_class("topr")(), [tokens])
    _, (other,) = step(objective_class("tis_reinforce")(), [tokens], "seq_mean_token_mean")
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_gspo_has_value_and_gradient_of_the_sequence_level_formula() -> None:
    tokens, objective = random_tokens(), Gspo(clip_low=0.05, clip_high=0.1)
    advantage_S = torch.linspace(-1, 1, len(LENGTHS), dtype=torch.float64)
    tokens = tokens._replace(advantage_T=advantage_S[tokens.sequence_T])
    leaf_T = tokens.logp_T.clone().requires_grad_()
    terms = []
    for sequence in range(len(LENGTHS)):
        kept_T = tokens.mask_T & (tokens.sequence_T == sequence)
        if kept_T.any():
            ratio = (leaf_T - tokens.behaviour_T)[kept_T].mean().exp()
            terms.append(torch.minimum(ratio * advantage_S[sequence], ratio.clip(0.95, 1.1) * advantage_S[sequence]))
    expected = -torch.stack(terms).mean()
    expected.backward()
    assert leaf_T.grad is not None

    loss, (gradient_T,) = step(objective, [tokens])
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient_T, leaf_T.grad, rtol=1e-12, atol=1e-15)


def test_topr_splits_by_the_reward_and_not_by_the_advantage() -> None:
    tokens = random_tokens()
    good_T, above_T = tokens.reward_T > 0, tokens.advantage_T > 0
    assert (good_T != above_T).any()
    by_reward = objective_class("topr")()(tokens).stats["weight"]
    by_advantage = objective_class("topr")(split="advantage")(tokens).stats["weight"]
    assert (by_reward[good_T] == 1).all()
    assert (by_reward[~good_T] < 1).any()
    assert (by_advantage[above_T] == 1).all()
    assert not torch.equal(by_reward, by_advantage)


def test_a_weight_above_the_cap_is_masked_or_clamped() -> None:
    tokens = random_tokens()
    raw_T = (tokens.proximal_T - tokens.behaviour_T).exp()
    masked = objective_class("decoupled_ppo")(weight_cap=1.2, cap="mask")(tokens)
    clamped = objective_class("decoupled_ppo")(weight_cap=1.2, cap="clamp")(tokens)
    above_T = raw_T > 1.2
    assert 0 < above_T.sum() < len(raw_T)
    assert (masked.loss_T[above_T] == 0).all()
    assert (clamped.stats["weight"][above_T] == 1.2).all()
    torch.testing.assert_close(masked.loss_T[~above_T], clamped.loss_T[~above_T])


def test_the_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    tokens = random_tokens()
    bad = tokens._replace(advantage_T=torch.full_like(tokens.logp_T, -1.0), behaviour_T=tokens.logp_T - 3)
    assert objective_class("ppo")()(bad).loss_T.max() == pytest.approx(math.exp(3))
    bounded = objective_class("ppo")(dual_clip=3.0)(bad)
    assert bounded.loss_T.max() == 3
    assert (bounded.stats["clipped"] == 1).all()

    good = bad._replace(advantage_T=-bad.advantage_T / 2)
    assert torch.equal(objective_class("ppo")(dual_clip=3.0)(good).loss_T, objective_class("ppo")()(good).loss_T)


GAPS = st.lists(
    st.tuples(st.sampled_from([-2.0, -0.5, -0.1, 0.0, 0.1, 0.3, 1.5]), st.sampled_from([-1.0, 0.0, 2.0])), max_size=30
)
"""Tokens of a minibatch: pairs of log-ratio and advantage."""


@given(GAPS, st.sampled_from([0.001, 0.04, 0.5, 3.0]))
def test_m2po_drops_the_fewest_tokens_that_reach_its_threshold(gaps: list[tuple[float, float]], tau: float) -> None:
    log_ratio_N = torch.tensor([gap for gap, _ in gaps], dtype=torch.float64)
    advantage_N = torch.tensor([advantage for _, advantage in gaps], dtype=torch.float64)
    limit = M2po(tau=tau).limit(log_ratio_N, advantage_N)
    charge = sorted(gap**2 for gap, advantage in gaps if gap * advantage > 0)
    kept = [square for square in charge if square < limit]
    dropped = charge[len(kept) :]
    assert not kept or sum(kept) / len(kept) <= tau * (1 + 1e-12)
    if dropped:
        assert limit == dropped[0]
        with_the_next = [*kept, *(square for square in dropped if square == dropped[0])]
        assert sum(with_the_next) / len(with_the_next) > tau * (1 - 1e-12)
    else:
        assert limit == math.inf


def test_the_limit_of_m2po_depends_on_the_whole_minibatch() -> None:
    tokens, objective = random_tokens(), M2po(tau=0.1)
    (whole,) = with_limit(objective, [tokens])
    dropped_T = objective(whole).stats["clipped"].bool() & tokens.mask_T
    assert set(torch.nonzero(dropped_T).flatten().tolist()) == m2po_dropped(0.1, rows_of(tokens))
    assert 0 < dropped_T.sum() < tokens.mask_T.sum()

    alone = [with_limit(objective, [take(tokens, [sequence])[0]])[0] for sequence in range(len(LENGTHS))]
    alone_T = torch.cat([objective(part).stats["clipped"] for part in alone]).bool() & tokens.mask_T
    assert not torch.equal(alone_T, dropped_T)


def test_m2po_keeps_tokens_that_move_back_towards_the_behaviour_policy() -> None:
    log_ratio_T = torch.tensor([3.0, -3.0, 3.0, -3.0], dtype=torch.float64)
    zero_T = torch.zeros(4, dtype=torch.float64)
    four = PackedTokens(
        logp_T=log_ratio_T,
        behaviour_T=zero_T,
        proximal_T=zero_T,
        advantage_T=torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64),
        reward_T=zero_T,
        mask_T=torch.ones(4, dtype=torch.bool),
        sequence_T=torch.zeros(4, dtype=torch.int64),
        sequences=1,
        deviation_T=zero_T,
    )
    (four,) = with_limit(M2po(), [four])
    assert M2po()(four).stats["clipped"].tolist() == [1, 0, 0, 1]
