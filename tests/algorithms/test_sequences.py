"""Reductions over sequences, and the weights that aggregate token losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from algorithms.base import Aggregation
from algorithms.sequences import sequence_lengths, sequence_mean, sequence_sum, token_weights
from tests.algorithms.cases import ALL_MASKED, LENGTHS, random_tokens


def test_sums_means_and_lengths_count_unmasked_tokens_only() -> None:
    tokens = random_tokens()
    value_T = torch.arange(len(tokens.logp_T), dtype=torch.float64)
    sums, lengths = sequence_sum(tokens, value_T), sequence_lengths(tokens)
    means = sequence_mean(tokens, value_T)
    for sequence in range(len(LENGTHS)):
        kept = value_T[tokens.mask_T & (tokens.sequence_T == sequence)].tolist()
        assert sums[sequence] == sum(kept)
        assert lengths[sequence] == max(len(kept), 1)
        assert means[sequence] == sum(kept) / max(len(kept), 1)
    assert sums[ALL_MASKED] == 0


def test_a_long_sum_of_float32_numbers_of_both_signs_does_not_drift() -> None:
    count = 20_000
    value_T = torch.linspace(-1, 1, count).repeat(2).add(1e-4)
    tokens = random_tokens()._replace(
        mask_T=torch.ones(2 * count, dtype=torch.bool),
        sequence_T=torch.zeros(2 * count, dtype=torch.int64),
        sequences=1,
    )
    assert abs(sequence_sum(tokens, value_T).item() - math.fsum(value_T.tolist())) < 1e-9


def test_gradients_reach_unmasked_tokens_only() -> None:
    tokens = random_tokens()
    leaf_T = tokens.logp_T.where(tokens.mask_T, math.nan).requires_grad_()
    sequence_sum(tokens, leaf_T).sum().backward()
    assert leaf_T.grad is not None
    assert torch.equal(leaf_T.grad, tokens.mask_T.double())


MODES: list[Aggregation] = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
COUNTS = [3, 1, 7, 4, 2]
"""Number of tokens of each sequence of `batch`."""
CONSTANT = 12.0
"""Tokens by which the aggregation `constant` divides each sequence."""


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss, mask and sequence of each token.

    Each sequence has an unmasked token, except for the last one.
    """
    generator = torch.Generator().manual_seed(0)
    loss_T = torch.randn(sum(COUNTS), generator=generator, dtype=torch.float64)
    mask_T = torch.rand(sum(COUNTS), generator=generator) < 0.7
    mask_T[0] = mask_T[3] = mask_T[4] = mask_T[11] = True
    mask_T[-COUNTS[-1] :] = False
    sequence_T = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))
    return loss_T, mask_T, sequence_T


def naive(mode: Aggregation, loss: list[float], mask: list[bool], sequence: list[int]) -> float:
    """Return the loss of the batch by an aggregation, computed sequence by sequence from the definition."""
    kept = [[x for x, m, s in zip(loss, mask, sequence, strict=True) if m and s == at] for at in range(len(COUNTS))]
    kept = [one for one in kept if one]
    if mode == "token_mean":
        return sum(map(sum, kept)) / sum(map(len, kept))
    divisors = {"seq_mean_token_mean": None, "seq_mean_token_sum": 1, "constant": CONSTANT}
    return sum(sum(one) / (divisors[mode] or len(one)) for one in kept) / len(kept)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
def test_the_weighted_sum_equals_a_loop_over_sequences(mode: Aggregation, dtype: torch.dtype, tolerance: float) -> None:
    loss_T, mask_T, sequence_T = batch()
    totals = {"total_tokens": int(mask_T.sum()), "total_sequences": len(set(sequence_T[mask_T].tolist()))}
    weight_T = token_weights(mode, mask_T, sequence_T, len(COUNTS), **totals, constant=CONSTANT)
    found = (weight_T * loss_T.to(dtype)).sum().item()
    assert found == pytest.approx(naive(mode, loss_T.tolist(), mask_T.tolist(), sequence_T.tolist()), abs=tolerance)
    assert (weight_T[~mask_T] == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_any_split_into_micro_batches_gives_the_same_weights(mode: Aggregation) -> None:
    _, mask_T, sequence_T = batch()
    totals = {"total_tokens": int(mask_T.sum()), "total_sequences": len(set(sequence_T[mask_T].tolist()))}
    whole = token_weights(mode, mask_T, sequence_T, len(COUNTS), **totals)
    for first in range(1, len(COUNTS)):
        cut = int(np.cumsum(COUNTS)[first - 1])
        left = token_weights(mode, mask_T[:cut], sequence_T[:cut], first, **totals)
        right = token_weights(mode, mask_T[cut:], sequence_T[cut:] - first, len(COUNTS) - first, **totals)
        torch.testing.assert_close(torch.cat([left, right]), whole, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_trained_tokens_weighs_nothing(mode: Aggregation) -> None:
    mask_T = torch.zeros(3, dtype=torch.bool)
    weight_T = token_weights(mode, mask_T, torch.tensor([0, 0, 1]), 2, total_tokens=0, total_sequences=0)
    assert (weight_T == 0).all()


def test_with_the_aggregation_constant_the_weight_does_not_depend_on_the_length() -> None:
    _, mask_T, sequence_T = batch()
    weight_T = token_weights("constant", mask_T, sequence_T, 5, total_tokens=9, total_sequences=4, constant=CONSTANT)
    assert weight_T[mask_T].unique().tolist() == [1 / 4 / CONSTANT]
