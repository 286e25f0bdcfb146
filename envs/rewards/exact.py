"""Exact match: the cheapest verifier."""

from __future__ import annotations

from envs.rewards.verifier import inline


@inline
def exact_match(completion: str, answer: str) -> float:
    """1.0 when both texts are equal, any run of white space counting as one blank and none at the ends; else 0.0."""
    return float(completion.split() == answer.split())
