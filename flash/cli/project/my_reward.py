"""Reward: a number for each answer."""

from __future__ import annotations


def reward(answer: str, right: str) -> float:
    """Return 1 for the right word, else 0. Any finite number is allowed, such as the result of `places`."""
    return float(answer == right)


def places(answer: str, right: str) -> float:
    """Return the share of places that have the right letter. Missing and extra letters count as wrong."""
    matches = sum(one == other for one, other in zip(answer, right, strict=False))
    return matches / max(len(answer), len(right))
