"""Reductions over the unmasked tokens of each sequence.

Sums are taken in float64: a log-ratio of 10,000 tokens is a sum of small numbers of both signs. Shape legend:
T = packed tokens, S = sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.base import PackedTokens


def sequence_sum(tokens: PackedTokens, value_T: Tensor) -> Tensor:
    """float64 [S]: the sum over each sequence's unmasked tokens, whatever the masked slots hold."""
    kept_T = value_T.where(tokens.mask_T, 0.0).double()
    return kept_T.new_zeros(tokens.sequences).index_add(0, tokens.sequence_T, kept_T)


def sequence_lengths(tokens: PackedTokens) -> Tensor:
    """float64 [S]: unmasked tokens of each sequence, at least 1, to divide by."""
    return sequence_sum(tokens, tokens.mask_T.double()).clamp(min=1)


def sequence_mean(tokens: PackedTokens, value_T: Tensor) -> Tensor:
    """float64 [S]: the mean over each sequence's unmasked tokens; 0 for one that has none."""
    return sequence_sum(tokens, value_T) / sequence_lengths(tokens)
