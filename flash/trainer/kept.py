"""Kept sets of action tokens, as arrays for the trainer; no torch.

A *kept set* has the tokens that settings such as top_k, or a grammar, left in the distribution from which a token was
sampled. `flash.trainer.packing` reads the sets of each sequence with `kept_tokens` and joins those of a micro-batch.
`flash.trainer.model.logprobs` normalises over them.

Shape legend: T = action tokens, N = tokens of all kept sets that are lists, K = kept sets that are masks, B = bytes of
a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flash.branches import Int64Array
from flash.errors import ContractError
from flash.sampling import FIRST_MASK
from flash.types import Trajectory

Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class KeptTokens:
    """The kept sets of some action tokens: the candidates from which each was sampled, and the changes of their logits.

    The trainer needs them to compute a token's log-prob under the distribution that the engine sampled from.
    """

    token_N: Int64Array
    """Token ids of all kept sets that are lists. Each list begins with the token that was sampled."""
    count_T: Int64Array
    """Length of each token's list. 0 if the token has a mask, or was sampled from the whole vocabulary."""
    bias_N: Float64Array
    """Number that is added to the logit of each candidate: a setting of the run."""
    penalty_N: Float64Array
    """Repetition penalty of each candidate: after the bias, a positive logit is divided by it and a negative logit is
    multiplied by it. 1 for a token that the context does not contain."""
    mask_T: Int64Array
    """Index of the mask that is each token's kept set; -1 for a token whose set is in `token_N`, or that has none."""
    mask_KB: UInt8Array
    """Large kept sets as bits, of which each byte has eight: bit i is 1 if the set contains token i. The logits of its
    tokens are unchanged."""

    def select(self, keep_T: BoolArray) -> KeptTokens:
        """Return the kept sets of the action tokens where `keep_T` is True."""
        keep_N = np.repeat(keep_T, self.count_T)
        listed = (self.token_N[keep_N], self.count_T[keep_T], self.bias_N[keep_N], self.penalty_N[keep_N])
        return KeptTokens(*listed, mask_T=self.mask_T[keep_T], mask_KB=self.mask_KB)


def no_kept_sets(tokens: int) -> KeptTokens:
    """Return the kept sets of `tokens` action tokens that were all sampled from the whole vocabulary."""
    listed = (np.zeros(0, np.int64), np.zeros(tokens, np.int64), np.zeros(0), np.zeros(0))
    return KeptTokens(*listed, mask_T=np.full(tokens, -1), mask_KB=np.zeros((0, 0), np.uint8))


def join_kept_tokens(parts: Sequence[KeptTokens]) -> KeptTokens:
    """Join the kept sets of the sequences of a micro-batch, of which there is at least one.

    All masks must have the same length in bytes, which holds for tokens of one vocabulary.
    """
    # Number of masks before each sequence's own, by which the indices of its masks rise.
    before = np.cumsum([0, *(len(part.mask_KB) for part in parts)])
    mask_T = [np.where(part.mask_T < 0, -1, part.mask_T + at) for part, at in zip(parts, before[:-1], strict=True)]
    masks = [part.mask_KB for part in parts if len(part.mask_KB)]
    return KeptTokens(
        token_N=np.concatenate([part.token_N for part in parts]),
        count_T=np.concatenate([part.count_T for part in parts]),
        bias_N=np.concatenate([part.bias_N for part in parts]),
        penalty_N=np.concatenate([part.penalty_N for part in parts]),
        mask_T=np.concatenate(mask_T),
        mask_KB=np.concatenate(masks) if masks else np.zeros((0, 0), np.uint8),
    )


def kept_tokens(trajectory: Trajectory, positions: Int64Array) -> KeptTokens:
    """Return the kept sets of one sequence's action tokens, which are at `positions` in the sequence.

    Each list has the sampled token first, and then the candidates that the engine reported. A trajectory whose settings
    leave no token out, and that has no sets, gets `no_kept_sets`.

    Raises:
        ContractError: the tokens were sampled from kept sets, and the trajectory has none or malformed ones. The error
            message begins with a verb, so that the caller can put the name of the sample before it.
    """
    sampling, tokens = trajectory.task.sampling, trajectory.tokens().astype(np.int64)
    if trajectory.kept is None and not sampling.has_kept_sets:
        return no_kept_sets(len(positions))
    fault = "there are no kept sets" if trajectory.kept is None else trajectory.kept.fault(len(positions))
    if trajectory.kept is None or fault is not None:
        limit = f"top_k = {sampling.top_k}" if sampling.has_kept_sets else "a grammar"
        raise ContractError(
            f"was sampled with {limit}, and the sets that its tokens were sampled from are not known: {fault}"
        )
    # `counts` has a number per action token: the length of its list without the sampled token, −1 for the whole
    # vocabulary, or FIRST_MASK − i if the set is mask i.
    candidates, counts = trajectory.kept.numbers()
    target_T = tokens[positions]
    mask_T = np.where(counts <= FIRST_MASK, FIRST_MASK - counts.astype(np.int64), -1)
    masks = trajectory.kept.masks
    mask_KB = np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), len(masks[0]) if masks else 0)
    # Put the sampled token before the candidates of its set, if the set is a list of tokens.
    listed_T = counts >= 0
    starts = np.cumsum(counts.clip(0), dtype=np.int64) - counts
    token_N = np.insert(candidates.astype(np.int64), starts[listed_T], target_T[listed_T])
    count_T = np.where(listed_T, counts.astype(np.int64) + 1, 0)

    bias_N, penalty_N = np.zeros(len(token_N)), np.ones(len(token_N))
    if sampling.logit_bias:
        # If a token has several biases, `dict` keeps the last one, as engines do.
        biased, bias = map(np.array, zip(*sorted(dict(sampling.logit_bias).items()), strict=True))
        at_N = np.searchsorted(biased, token_N).clip(max=len(biased) - 1)
        bias_N = np.where(biased[at_N] == token_N, bias[at_N], 0.0)
    if sampling.repetition_penalty != 1:
        # A penalty applies to tokens that occur before the sampled position. By token id, `first_position` is the first
        # position with this token, or the length of the sequence if there is none.
        first_position = np.full(max(tokens.max(), token_N.max(initial=0)) + 1, len(tokens))
        present, at = np.unique(tokens, return_index=True)
        first_position[present] = at
        penalty_N[first_position[token_N] < np.repeat(positions, count_T)] = sampling.repetition_penalty
    return KeptTokens(token_N, count_T, bias_N, penalty_N, mask_T, mask_KB)
