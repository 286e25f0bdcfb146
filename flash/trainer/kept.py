"""What action tokens were drawn from, where that was not all tokens: ids, and what was done to their logits.

Nothing of it needs the policy: biases are the run's, and which tokens a context has is known. Tokens that were drawn
from all have no part in the arrays.

Shape legend: T = action tokens, N = the tokens that each was drawn from, one set after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flash.errors import ContractError
from flash.types import Trajectory

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class KeptTokens:
    """Of some action tokens."""

    token_N: Int64Array
    """Of each its kept set, itself first."""
    count_T: Int64Array
    """Size of each set; 0: it was drawn from all tokens."""
    bias_N: Float64Array
    """Added to the logit of each."""
    penalty_N: Float64Array
    """Then it is divided by this where it is positive, and multiplied where not: 1 for tokens that are new."""

    def only(self, keep_T: BoolArray) -> KeptTokens:
        """Those of some of the action tokens."""
        keep_N = np.repeat(keep_T, self.count_T)
        return KeptTokens(self.token_N[keep_N], self.count_T[keep_T], self.bias_N[keep_N], self.penalty_N[keep_N])


def drawn_from_all(tokens: int) -> KeptTokens:
    """Of so many action tokens, nothing."""
    return KeptTokens(np.zeros(0, np.int64), np.zeros(tokens, np.int64), np.zeros(0), np.zeros(0))


NOTHING_KEPT = drawn_from_all(1)
"""Of one action token."""


def all_kept(parts: Sequence[KeptTokens]) -> KeptTokens:
    """Those of several sequences, one behind the other."""
    columns = zip(*((part.token_N, part.count_T, part.bias_N, part.penalty_N) for part in parts), strict=True)
    return KeptTokens(*map(np.concatenate, columns))


def kept_tokens(trajectory: Trajectory, positions: Int64Array) -> KeptTokens:
    """What the action tokens of one sequence were drawn from; `positions` are theirs.

    Raises:
        ContractError: the trajectory does not say so, though it had to.
    """
    sampling, tokens = trajectory.task.sampling, trajectory.tokens().astype(np.int64)
    if not sampling.keeps:
        return drawn_from_all(len(positions))
    fault = "there are no kept sets" if trajectory.kept is None else trajectory.kept.fault(len(positions))
    if trajectory.kept is None or fault is not None:
        raise ContractError(f"was drawn with top_k = {sampling.top_k}, and from which tokens is not said: {fault}")
    others, counts = trajectory.kept.numbers()
    starts = np.cumsum(counts, dtype=np.int64) - counts
    token_N = np.insert(others.astype(np.int64), starts, tokens[positions])
    count_T = counts.astype(np.int64) + 1

    bias_N, penalty_N = np.zeros(len(token_N)), np.ones(len(token_N))
    if sampling.logit_bias:
        # As engines take them: of several of one token the last.
        known, bias = map(np.array, zip(*sorted(dict(sampling.logit_bias).items()), strict=True))
        at_N = np.searchsorted(known, token_N).clip(max=len(known) - 1)
        bias_N = np.where(known[at_N] == token_N, bias[at_N], 0.0)
    if sampling.repetition_penalty != 1:
        first = np.full(max(tokens.max(), token_N.max(initial=0)) + 1, len(tokens))
        known, at = np.unique(tokens, return_index=True)
        first[known] = at
        penalty_N[first[token_N] < np.repeat(positions, count_T)] = sampling.repetition_penalty
    return KeptTokens(token_N, count_T, bias_N, penalty_N)
