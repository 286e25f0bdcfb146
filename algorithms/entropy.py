"""A coefficient of the entropy bonus that holds the policy's entropy at a target (Skywork-OR1, arXiv 2505.22312).

    c_{k+1} = c_k + step where H_k < nats, max(0, c_k − step) where H_k > nats
    bonus of step k + 1 = c_{k+1} where H_k ≤ nats, else 0

H_k is the mean entropy of the tokens of step k, so that a step knows that of the one before it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class EntropyTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steers `algorithm.entropy_bonus`, which is where it begins."""

    nats: Annotated[float, Meta(gt=0)]
    """Mean entropy of a token to hold."""
    step: Annotated[float, Meta(gt=0, le=1)] = 0.005
    """By which the coefficient moves with each step of the trainer."""

    def moved(self, coefficient: float, entropy: float) -> float:
        """The coefficient after a step of this entropy."""
        if entropy == self.nats:
            return coefficient
        return coefficient + self.step if entropy < self.nats else max(0.0, coefficient - self.step)

    def bonus(self, coefficient: float, entropy: float) -> float:
        """What of it counts in the next step."""
        return coefficient if entropy <= self.nats else 0.0
