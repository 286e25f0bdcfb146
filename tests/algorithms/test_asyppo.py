"""The tokens that AsyPPO leaves out by the critics' disagreement."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.base import PackedTokens
from algorithms.objectives.trust_region import AsyPpo
from tests.algorithms.cases import on_policy, random_tokens, step, with_limit

SHARES = st.sampled_from([0.0, 0.1, 0.2, 0.29, 0.5, 0.9, 1 - 1e-13])
"""Shares of tokens to leave out. 0.29 · 100 is below 29 in floats, and the last one is almost 1, which is refused."""
# Values of σ of the tokens of a batch, many of them equal.
LEVELS = st.lists(st.integers(0, 6), min_size=1, max_size=60)


def judged(deviations: list[float], mask_lowest: float, filter_highest: float) -> tuple[list[bool], list[bool]]:
    """Return two lists with True for each token that the shares leave out, given the σ of all tokens.

    In the first list the token is masked (it has no policy loss), in the second it is filtered (no entropy bonus).
    """
    deviation_N = torch.tensor(deviations, dtype=torch.float64)
    low, high = AsyPpo(mask_lowest=mask_lowest, filter_highest=filter_highest).bounds(deviation_N)
    return (deviation_N < low).tolist(), (deviation_N > high).tolist()


@given(LEVELS, SHARES, SHARES)
def test_the_tokens_left_out_are_one_end_of_the_order_and_at_most_the_share(
    levels: list[int], mask_lowest: float, filter_highest: float
) -> None:
    count = len(levels)
    masked, filtered = judged([level / 7 for level in levels], mask_lowest, filter_highest)
    for chosen, share, sign in ((masked, mask_lowest, 1), (filtered, filter_highest, -1)):
        taken = sorted(sign * level for level, out in zip(levels, chosen, strict=True) if out)
        rest = sorted(sign * level for level, out in zip(levels, chosen, strict=True) if not out)
        assert len(taken) <= share * count + 1e-9
        assert not taken or taken[-1] < rest[0]
        # The next level up would be more than the share, or leave nothing.
        assert len(taken) + rest.count(rest[0]) > min(math.floor(share * count + 1e-9), count - 1)


@pytest.mark.parametrize("count", [5, 10, 100, 101])
@pytest.mark.parametrize("share", [0.2, 0.29, 0.3, 0.7])
def test_if_all_deviations_differ_the_share_is_exact(count: int, share: float) -> None:
    order = np.random.default_rng(count).permutation(count)
    masked, filtered = judged([1.0 + float(one) for one in order], share, share)
    expected = math.floor(share * count + 1e-9)
    assert sum(masked) == sum(filtered) == expected
    assert {int(one) for one, out in zip(order, masked, strict=True) if out} == set(range(expected))
    assert {int(one) for one, out in zip(order, filtered, strict=True) if out} == set(range(count - expected, count))


@pytest.mark.parametrize("level", [0.0, 0.4])
def test_equal_disagreement_everywhere_leaves_no_token_out(level: float) -> None:
    """Check σ = 0 everywhere, as of new critics, which are equal, and another constant."""
    masked, filtered = judged([level] * 10, 0.5, 0.5)
    assert not any(masked + filtered)


def test_deviations_that_differ_by_rounding_are_on_the_same_side_of_a_bound() -> None:
    rounded = [0.4 + 1e-6 * one for one in range(10)]
    masked, filtered = judged([0.1, *rounded, 0.9], 0.5, 0.5)
    assert masked == [True] + [False] * 11
    assert filtered == [False] * 11 + [True]


def test_without_a_token_the_bounds_are_infinite() -> None:
    assert AsyPpo().bounds(torch.zeros(0)) == (-math.inf, math.inf)


def halves(tokens: PackedTokens, objective: AsyPpo) -> tuple[PackedTokens, torch.Tensor]:
    """Return the tokens with the objective's bounds, and bool [T]: True for tokens whose policy loss is kept."""
    (tokens,) = with_limit(objective, [tokens])
    return tokens, tokens.deviation_T >= tokens.bounds[0]


def test_on_policy_it_is_the_policy_gradient_of_the_tokens_on_which_critics_disagree() -> None:
    objective = AsyPpo()
    tokens, learned_T = halves(on_policy(random_tokens()), objective)
    _, (gradient_T,) = step(objective, [tokens], "token_mean")
    expected_T = (-tokens.advantage_T / tokens.mask_T.sum()).where(tokens.mask_T & learned_T, 0.0)
    torch.testing.assert_close(gradient_T, expected_T, rtol=1e-12, atol=0)
    assert 0 < (tokens.mask_T & ~learned_T).sum() == math.floor(0.2 * int(tokens.mask_T.sum()))


def test_a_masked_token_stays_in_the_denominator() -> None:
    tokens = on_policy(random_tokens())
    _, (plain_T,) = step(AsyPpo(mask_lowest=0.0), [tokens])
    _, (masked_T,) = step(AsyPpo(), [tokens])
    kept_T = masked_T != 0
    torch.testing.assert_close(masked_T[kept_T], plain_T[kept_T], rtol=1e-12, atol=0)
    assert kept_T.sum() < (plain_T != 0).sum()


def test_the_bonus_leaves_the_tokens_on_which_critics_disagree_most() -> None:
    objective = AsyPpo(filter_highest=0.25)
    tokens, _ = halves(random_tokens(), objective)
    bonus_T = objective(tokens).bonus_T
    assert bonus_T is not None
    without = sorted(tokens.deviation_T[tokens.mask_T & (bonus_T == 0)].tolist())
    kept = sorted(tokens.deviation_T[tokens.mask_T & (bonus_T == 1)].tolist())
    assert len(without) == math.floor(0.25 * (len(without) + len(kept))) > 0
    assert without[0] > kept[-1]


def test_options_of_the_decoupled_form_have_no_effect_without_it() -> None:
    assert set(AsyPpo().without_effect()) == {"weight_cap", "cap", "proximal", "ewma_decay"}
    assert set(AsyPpo(decoupled=True).without_effect()) == {"ewma_decay"}
    assert AsyPpo(decoupled=True, proximal="ewma").without_effect() == {}
