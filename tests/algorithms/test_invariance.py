"""Results do not depend on masked slots, the order of sequences, or the cut of a minibatch."""

from __future__ import annotations

import math

import pytest
import torch

from algorithms.base import Aggregation, Objective
from tests.algorithms.cases import (
    CASES,
    LENGTHS,
    filled,
    is_finite,
    on_policy,
    random_tokens,
    step,
    take,
    with_limit,
)

OBJECTIVE = pytest.mark.parametrize("objective", [objective for _, objective in CASES], ids=repr)
AGGREGATIONS: list[Aggregation] = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
# An objective knows neither the aggregation nor the numbers in masked slots. So each case is tested with some of them,
# and all cases together with all of them. The full product would find nothing more.
AGGREGATED = pytest.mark.parametrize(
    ("objective", "aggregation"), [(one, AGGREGATIONS[at % 4]) for at, (_, one) in enumerate(CASES)], ids=repr
)
GARBAGE = pytest.mark.parametrize(
    ("objective", "garbages"),
    [(one, (math.nan, (1e30, -1e30, math.inf, -math.inf)[at % 4])) for at, (_, one) in enumerate(CASES)],
    ids=repr,
)


@GARBAGE
def test_masked_slots_change_neither_loss_nor_gradient(objective: Objective, garbages: tuple[float, float]) -> None:
    tokens = random_tokens()
    clean, (clean_T,) = step(objective, [tokens])
    for garbage in garbages:
        dirty, (dirty_T,) = step(objective, [filled(tokens, garbage)])
        assert dirty == clean
        assert torch.equal(dirty_T, clean_T)
        assert (dirty_T[~tokens.mask_T] == 0).all()


@GARBAGE
def test_an_objective_that_is_given_garbage_in_masked_slots_is_right_in_the_others(
    objective: Objective, garbages: tuple[float, float]
) -> None:
    (clean,) = with_limit(objective, [random_tokens()])
    kept_T = clean.mask_T
    results = []
    for tokens in (clean, *(with_limit(objective, [filled(clean, garbage)])[0] for garbage in garbages)):
        leaf_T = tokens.logp_T.clone().requires_grad_()
        output = objective(tokens._replace(logp_T=leaf_T))
        output.loss_T.where(kept_T, 0.0).sum().backward()
        assert leaf_T.grad is not None
        results.append([output.loss_T, leaf_T.grad, *output.stats.values()])
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one[kept_T], other[kept_T]) for other in others)


@AGGREGATED
def test_the_order_of_sequences_in_a_pack_does_not_matter(objective: Objective, aggregation: Aggregation) -> None:
    tokens = random_tokens()
    repacked, place_T = take(tokens, torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(5)).tolist())
    loss, (gradient_T,) = step(objective, [tokens], aggregation)
    again, (again_T,) = step(objective, [repacked], aggregation)
    assert again == pytest.approx(loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(again_T, gradient_T[place_T], rtol=1e-12, atol=1e-15)


@AGGREGATED
def test_any_split_over_ranks_and_micro_batches_gives_the_same_gradient(
    objective: Objective, aggregation: Aggregation
) -> None:
    tokens = random_tokens()
    loss, (gradient_T,) = step(objective, [tokens], aggregation)
    for cut in ([[0], [1, 2], [3], [4, 5, 6, 7, 8]], [[8, 3, 1], [0, 7, 6, 5], [4, 2]]):
        parts, places = zip(*(take(tokens, part) for part in cut), strict=True)
        shared, gradients = step(objective, parts, aggregation)
        assert shared == pytest.approx(loss, rel=1e-12, abs=1e-12)
        torch.testing.assert_close(torch.cat(gradients), gradient_T[torch.cat(places)], rtol=1e-12, atol=1e-15)


@OBJECTIVE
def test_a_batch_without_a_trained_token_gives_a_zero_gradient(objective: Objective) -> None:
    tokens = random_tokens()
    masked = filled(tokens._replace(mask_T=torch.zeros_like(tokens.mask_T)), math.nan)
    loss, (gradient_T,) = step(objective, [masked])
    assert loss == 0
    assert (gradient_T == 0).all()


@OBJECTIVE
def test_zero_advantages_give_no_gradient(objective: Objective) -> None:
    """Check advantages of 0, as a group with equal rewards has them.

    The tokens are on policy, because off policy kimi15 has a penalty that does not depend on the advantage.
    """
    tokens = on_policy(random_tokens())
    _, (gradient_T,) = step(objective, [tokens._replace(advantage_T=torch.zeros_like(tokens.logp_T))])
    assert (gradient_T == 0).all()


@OBJECTIVE
def test_a_single_token_is_a_batch(objective: Objective) -> None:
    alone, _ = take(random_tokens(), [1])
    loss, gradients = step(objective, [alone])
    assert len(alone.logp_T) == 1
    assert is_finite(loss, gradients)


@OBJECTIVE
def test_a_large_gap_between_the_policies_stays_finite_in_float32(objective: Objective) -> None:
    """Check log-ratios of ±12 per token, which are more than ±100 over a sequence."""
    tokens = random_tokens(torch.float32)
    gap_T = torch.where(tokens.sequence_T % 2 == 0, 12.0, -12.0)
    far = tokens._replace(behaviour_T=tokens.logp_T - gap_T, proximal_T=tokens.logp_T - 0.1)
    assert is_finite(*step(objective, [far]))
