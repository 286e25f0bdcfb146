from __future__ import annotations

import math

import torch

from algorithms.sequences import sequence_lengths, sequence_mean, sequence_sum
from tests.algorithms.cases import ALL_MASKED, LENGTHS, random_tokens


def test_sums_means_and_lengths_are_those_of_the_unmasked_tokens() -> None:
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
