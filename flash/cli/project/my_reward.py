"""The reward: a number for each answer."""

from __future__ import annotations


def reward(answer: str, right: str) -> float:
    """1 for the right word, else 0. Any finite number would do, such as the share of `places`."""
    return float(answer == right)


def places(answer: str, right: str) -> float:
    """The share of places that have the right letter; letters too many or too few are wrong ones."""
    matches = sum(one == other for one, other in zip(answer, right, strict=False))
    return matches / max(len(answer), len(right))
