"""Weights for the mismatch between the policy that sampled and the proximal policy; they compose with any objective.

All are of w = exp(proximal − behaviour), constant in the policy that is trained, so they multiply the loss without
changing what its gradient means. The quotient covers what differs between engine and trainer at equal weights, and how
far the proximal policy has moved since the token was sampled. Several corrections multiply. T = packed tokens.

The filters (`sequence_mask`, `geometric`) are 0 or 1 and go with every objective. They reject: the mean is over the
sequences that were accepted, E[… | accepted], as if the others had not been sampled (verl's rollout correction, where
they leave the response mask; THUDM/slime#657). A weight (`token_tis`, `icepop`) stays inside the mean over all tokens,
also where it is 0: its formula is Σ w(…) / Σ |y|. It is for an objective that has none, such as `rloo`: beside one that
holds w in its formula, or in its ratio to the behaviour policy, it would correct the same gap twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

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

    rejects: ClassVar[bool] = False

    cap: Annotated[float, Meta(gt=0)] = 2.0
    """Largest weight."""

    def __call__(self, tokens: PackedTokens) -> Tensor:
        """[T], detached."""
        return _weight(tokens).clamp(max=self.cap)


class IcePop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="icepop"):
    """IcePop (Ring-1T, arXiv 2510.18855): w of each token where it lies in [low, high], else 0.

    The tokens with 0 stay in the denominator: J = 1 / Σ |y| · Σ M(w) A (INTELLECT-3, arXiv 2512.16144, eq. 1).
    """

    rejects: ClassVar[bool] = False

    low: Bound = 0.5
    """Smallest used weight."""
    high: Bound = 5.0
    """Largest used weight."""

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def __call__(self, tokens: PackedTokens) -> Tensor:
        """[T], detached."""
        weight_T = _weight(tokens)
        return weight_T.where((weight_T >= self.low) & (weight_T <= self.high), 0.0)


class SequenceMask(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="sequence_mask"
):
    """1 for every token of a sequence whose w, the product over its unmasked tokens, lies in [low, high], else 0.

    Rejection by the sequence's ratio: E[… | low ≤ Π w ≤ high] (Liu, Li et al. 2025, "When Speed Kills Stability";
    verl's rollout_rs = "sequence").
    """

    rejects: ClassVar[bool] = True

    low: Bound = 0.1
    """Smallest kept product."""
    high: Bound = 10.0
    """Largest kept product."""

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def __call__(self, tokens: PackedTokens) -> Tensor:
        """[T], detached."""
        return _keep(tokens, sequence_sum(tokens, _log_weight(tokens)).exp(), self.low, self.high)


class Geometric(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="geometric"
):
    """1 for every token of a sequence whose geometric mean of w over unmasked tokens lies in [low, high], else 0.

    Rejection by the ratio per token: E[… | low ≤ (Π w)^(1/n) ≤ high] (verl's rollout_rs = "geometric").
    """

    rejects: ClassVar[bool] = True

    low: Bound = 0.999
    """Smallest kept mean."""
    high: Bound = 1.001
    """Largest kept mean."""

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def __call__(self, tokens: PackedTokens) -> Tensor:
        """[T], detached."""
        return _keep(tokens, sequence_mean(tokens, _log_weight(tokens)).exp(), self.low, self.high)


Correction = TokenTis | IcePop | SequenceMask | Geometric
"""By `kind`. `rejects`: whether a token with weight 0 leaves the denominators of the aggregation, too."""


class Corrected(NamedTuple):
    """What several corrections say together; [T], detached."""

    weight_T: Tensor
    """Their product."""
    keep_T: Tensor
    """bool: no correction rejects the token. Whole sequences are rejected, never parts of one."""


def correct(corrections: Iterable[Correction], tokens: PackedTokens) -> Corrected:
    """All corrections of these tokens."""
    weight_T = tokens.behaviour_T.new_ones(tokens.behaviour_T.shape)
    keep_T = weight_T > 0
    for correction in corrections:
        factor_T = correction(tokens)
        weight_T = weight_T * factor_T
        if correction.rejects:
            keep_T = keep_T & (factor_T > 0)
    return Corrected(weight_T, keep_T)


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
