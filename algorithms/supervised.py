"""Supervised fine-tuning: the negative log-likelihood of given answers, without advantages or ratios."""

from __future__ import annotations

from algorithms.base import Objective, ObjectiveOutput, PackedTokens


class Supervised(Objective, frozen=True):
    """min E[− log π_θ], the mean over all tokens of answers."""

    corrects_staleness = False
    aggregation = "token_mean"

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        """Per-token loss. Statistics: `nll`, the same."""
        return ObjectiveOutput(-tokens.logp_T, {"nll": -tokens.logp_T.detach()})
