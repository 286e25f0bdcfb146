"""Reductions over packed sequences: sums and means within a sequence, and the weights that aggregate token losses.

`flash.trainer.step` calls `token_weights` for each micro-batch, the part of a minibatch that a rank computes at a time.
`algorithms.objectives` and `algorithms.corrections` use the sums and means.

`token_weights` gives each token a weight. The loss of a minibatch is then the plain sum of weight · loss over all
micro-batches on all ranks. The sum does not depend on the division into micro-batches, because the denominators count
the whole minibatch, and each sequence is in one micro-batch.

A token is *masked* if it has no part in the loss. A correction that rejects a sequence (`algorithms.corrections`) masks
the tokens of the sequence. This takes the tokens out of the denominators: out of the length n_s of the sequence at
once, and out of the two totals when the trainer divides the gradient by the accepted share. A token to which an
objective or a weight gives 0 still counts: `icepop`, `m2po` and a cap that masks (`decoupled_ppo`, as in AReaL)
average over all tokens, also over those with weight 0.

Shape legend: T = action tokens of a micro-batch, S = its sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.base import Aggregation, PackedTokens


def sequence_sum(tokens: PackedTokens, value_T: Tensor) -> Tensor:
    """Return float64 [S]: the sum over the unmasked tokens of each sequence. Values of masked tokens may be anything.

    A log-ratio of 10,000 tokens is a sum of small numbers of both signs, of which float32 would lose digits by
    cancellation. So the sum is taken in float64.
    """
    kept_T = value_T.where(tokens.mask_T, 0.0).double()
    return kept_T.new_zeros(tokens.sequences).index_add(0, tokens.sequence_T, kept_T)


def sequence_lengths(tokens: PackedTokens) -> Tensor:
    """Return float64 [S]: the number of unmasked tokens of each sequence.

    A sequence without unmasked tokens has length 1, so that callers may divide by it.
    """
    return sequence_sum(tokens, tokens.mask_T.double()).clamp(min=1)


def sequence_mean(tokens: PackedTokens, value_T: Tensor) -> Tensor:
    """Return float64 [S]: the mean over the unmasked tokens of each sequence; 0 for a sequence without any."""
    return sequence_sum(tokens, value_T) / sequence_lengths(tokens)


def token_weights(
    aggregation: Aggregation,
    mask_T: Tensor,
    sequence_T: Tensor,
    sequences: int,
    *,
    total_tokens: int,
    total_sequences: int,
    constant: float = 1.0,
) -> Tensor:
    """Return float64 [T]: the weight of each token's loss; 0 where `mask_T` is False.

    The weights are float64, so that the sum of many small shares is exact enough.

    With n_s unmasked tokens in the token's sequence, the weight of an unmasked token is:

        token_mean             1 / total_tokens
        seq_mean_token_mean    1 / (n_s · total_sequences)
        seq_mean_token_sum     1 / total_sequences
        constant               1 / (constant · total_sequences)

    Args:
        aggregation: way to aggregate the losses of tokens: one of the four names above.
        mask_T: bool, True for tokens in the loss: trained, and not rejected by a correction.
        sequence_T: index of each token's sequence.
        sequences: number of sequences in this micro-batch.
        total_tokens: trained tokens of the whole minibatch over all ranks. Tokens that corrections reject are still
            counted here, because they are not known yet; the trainer divides the gradient by the accepted share later.
        total_sequences: sequences of the whole minibatch that have a trained token, over all ranks. Sequences that
            corrections reject are still counted here, too.
        constant: number of tokens by which the aggregation `constant` divides the summed loss of each sequence (L in
            Dr. GRPO). Other aggregations ignore it.
    """
    present_T = mask_T.double()
    if aggregation == "token_mean":
        return present_T / max(total_tokens, 1)
    weight_T = present_T / max(total_sequences, 1)
    if aggregation == "seq_mean_token_sum":
        return weight_T
    if aggregation == "constant":
        return weight_T / constant
    length_S = present_T.new_zeros(sequences).index_add(0, sequence_T, present_T)
    return weight_T / length_S.clamp(min=1)[sequence_T]
