"""RLOO (Ahmadian et al. 2024, arXiv 2402.14740): REINFORCE on whole responses, with the group's others as baseline.

It is an on-policy method without a ratio: data of an older version is not corrected, so an asynchronous run is refused.
Off policy, use `tis_reinforce` or `aipo` with advantage = "leave_one_out".
"""

from __future__ import annotations

from algorithms.base import Objective, ObjectiveOutput, PackedTokens


class Rloo(Objective, frozen=True):
    """max E[A log π_θ(response)] with A = R − mean of the group's other samples."""

    corrects_staleness = False
    advantage = "leave_one_out"
    aggregation = "seq_mean_token_sum"

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. No statistics."""
        return ObjectiveOutput(-tokens.advantage_T * tokens.logp_T, {})
