"""How per-token losses become one number, exactly, however a batch is cut into micro-batches and ranks.

`token_weights` gives the weight of each token, so that the loss of the batch is the plain sum of weight · loss over all
micro-batches of all ranks. The denominators are those of the whole batch; a sequence is never cut.

Which tokens count: those of the mask. A correction that rejects takes a sequence out of it, and so out of the
denominators (`algorithms.corrections`). A token that an objective or a weight gives 0 stays in: a cap that masks
(`decoupled_ppo`, as in AReaL), `icepop` and `m2po` are sums over all tokens by their formulas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from algorithms.base import Aggregation

if TYPE_CHECKING:
    from torch import Tensor


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
    """float64 [T]: the weight of each token's loss; 0 where `mask_T` is False.

    `sequences` is the count of sequences in this micro-batch; `total_tokens` (unmasked tokens) and `total_sequences`
    (sequences with an unmasked token) are counts over the whole batch; `constant` is Dr. GRPO's L, in tokens. Per
    token, with n_s unmasked tokens in its sequence:

        token_mean             1 / total_tokens
        seq_mean_token_mean    1 / (n_s · total_sequences)
        seq_mean_token_sum     1 / total_sequences
        constant               1 / (constant · total_sequences)
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
