"""Weights for the mismatch between the policy that sampled and the proximal policy; they compose with any objective.

All are of w = exp(proximal − behaviour), constant in the policy that is trained, so they multiply the loss without
changing what its gradient means. The quotient covers what differs between engine and trainer at equal weights, and how
far the proximal policy has moved since the token was sampled. Several corrections multiply. T = packed tokens.

The filters (`sequence_mask`, `geometric`) are 0 or 1 and go with every objective. A weight (`token_tis`, `icepop`) is
for an objective that has none, such as `rloo`: beside one that holds w in its formula, or in its ratio to the behaviour
policy, it would correct the same gap twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from algorithms.sequences import sequence_mean, sequence_sum

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.base import PackedTokens

Bound = Annotated[float, Meta(ge=0)]


class TokenTis(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="token_tis"
):
    """Truncated importance sampling (Yao et al. 2025): min(w, cap) of each token."""

    cap: Annotated[float, Meta(gt=0)] = 2.0
    """Largest weight."""

    def __call__(self, tokens: PackedTokens) -> Tensor:
        """[T], detached."""
        return _weight(tokens).clamp(max=self.cap)


class IcePop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="icepop"):
    """IcePop (Ring-1T, arXiv 2510.18855): w of each token where it lies in [low, high], else 0."""

    low: Bound = 0.5
    """Smallest weight that is used."""
    high: Bound = 5.0
    """Largest weight that is used."""

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def __call__(self, tokens: PackedTokens) -> Tensor:
        """[T], detached."""
        weight_T = _weight(tokens)
        return weight_T.where((weight_T >= self.low) & (weight_T <= self.high), 0.0)


class SequenceMask(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="sequence_mask"
):
    """1 for every token of a sequence whose w, the product over its unmasked tokens, lies in [low, high], else 0."""

    low: Bound = 0.1
    """Smallest product that is kept."""
    high: Bound = 10.0
    """Largest product that is kept."""

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def __call__(self, tokens: PackedTokens) -> Tensor:
        """[T], detached."""
        return _keep(tokens, sequence_sum(tokens, _log_weight(tokens)).exp(), self.low, self.high)


class Geometric(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="geometric"
):
    """1 for every token of a sequence whose geometric mean of w over unmasked tokens lies in [low, high], else 0."""

    low: Bound = 0.999
    """Smallest mean that is kept."""
    high: Bound = 1.001
    """Largest mean that is kept."""

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def __call__(self, tokens: PackedTokens) -> Tensor:
        """[T], detached."""
        return _keep(tokens, sequence_mean(tokens, _log_weight(tokens)).exp(), self.low, self.high)


Correction = TokenTis | IcePop | SequenceMask | Geometric
"""By `kind`."""


def _log_weight(tokens: PackedTokens) -> Tensor:
    return (tokens.proximal_T - tokens.behaviour_T).detach()


def _weight(tokens: PackedTokens) -> Tensor:
    return _log_weight(tokens).exp()


def _keep(tokens: PackedTokens, ratio_S: Tensor, low: float, high: float) -> Tensor:
    keep_S = (ratio_S >= low) & (ratio_S <= high)
    return keep_S[tokens.sequence_T].to(tokens.behaviour_T.dtype)


def _ordered(low: float, high: float) -> None:
    if low > high:
        raise ValueError(f"expected low ≤ high, got {low:g} and {high:g}")
