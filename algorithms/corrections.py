"""Weights and filters for the mismatch between the policy that sampled and the proximal policy.

All corrections are functions of w = exp(proximal − behaviour), the ratio of a token's probabilities under the proximal
policy (`algorithms.base.Proximal`) and under the policy that sampled the token. w does not depend on the policy that is
trained, so it multiplies the loss without changing the meaning of the gradient. w covers the difference between engine
and trainer at equal weights, and the distance that the proximal policy has moved since the token was sampled. The
factors of several corrections are multiplied. `flash.trainer.objective.apply_corrections` calls `correct` for each
micro-batch.

Filters (`sequence_mask`, `geometric`) have the factors 0 and 1 and can be used with every objective. A filter *accepts*
or *rejects* whole sequences: the mean is over the accepted sequences, E[… | accepted], as if the rejected sequences had
not been sampled (in verl's rollout correction, rejected sequences leave the response mask; THUDM/slime#657). So the
tokens of a rejected sequence are *masked* (have no part in the loss) in addition to the tokens that were masked before.

Weights (`token_tis`, `icepop`) keep every token in the mean, even tokens with weight 0: the formula is Σ w(…) / Σ |y|,
where |y| is the number of tokens of a response. Use a weight with an objective without w, such as `rloo`. With an
objective that has w in its formula, or in its ratio to the behaviour policy, a weight would correct the same difference
twice.

Shape legend: T = action tokens of a micro-batch, S = its sequences.
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
"""Bound of w, or of a product or mean of w."""


class TokenTis(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="token_tis"
):
    """Truncated importance sampling (Yao et al. 2025): the weight min(w, cap) for each token."""

    rejects: ClassVar[bool] = False  # a token with a small weight still counts in the denominators of the loss

    cap: Annotated[float, Meta(gt=0)] = 2.0
    """Largest weight."""

    def __call__(self, tokens: PackedTokens) -> Tensor:
        """Return the factor of each token, [T], detached."""
        return _weight(tokens).clamp(max=self.cap)


class IcePop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="icepop"):
    """IcePop (Ring-1T, arXiv 2510.18855): the weight w for each token where w lies in [low, high], else 0.

    Tokens with weight 0 stay in the denominator: J = 1 / Σ |y| · Σ M(w) A (INTELLECT-3, arXiv 2512.16144, eq. 1).
    """

    rejects: ClassVar[bool] = False  # a token with weight 0 still counts in the denominators of the loss

    low: Bound = 0.5
    """Smallest weight that is used."""
    high: Bound = 5.0
    """Largest weight that is used."""

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def __call__(self, tokens: PackedTokens) -> Tensor:
        """Return the factor of each token, [T], detached."""
        weight_T = _weight(tokens)
        return weight_T.where((weight_T >= self.low) & (weight_T <= self.high), 0.0)


class SequenceMask(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="sequence_mask"
):
    """Filter by sequence: factor 1 if the product of w over the unmasked tokens lies in [low, high], else 0.

    Rejection by the ratio of the sequence: E[… | low ≤ Π w ≤ high] (Liu, Li et al. 2025, "When Speed Kills Stability";
    verl's rollout_rs = "sequence").
    """

    rejects: ClassVar[bool] = True  # a token with factor 0 leaves the denominators of the loss

    low: Bound = 0.1
    """Smallest product that is accepted."""
    high: Bound = 10.0
    """Largest product that is accepted."""

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def __call__(self, tokens: PackedTokens) -> Tensor:
        """Return the factor of each token, [T], detached."""
        return _accepted(tokens, sequence_sum(tokens, _log_weight(tokens)).exp(), self.low, self.high)


class Geometric(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="geometric"
):
    """Filter by sequence: factor 1 if the geometric mean of w over the unmasked tokens lies in [low, high], else 0.

    Rejection by the ratio per token: E[… | low ≤ (Π w)^(1/n) ≤ high], where n is the number of unmasked tokens of the
    sequence (verl's rollout_rs = "geometric"). Unlike bounds on the product, these bounds mean the same for sequences
    of all lengths.
    """

    rejects: ClassVar[bool] = True  # a token with factor 0 leaves the denominators of the loss

    low: Bound = 0.999
    """Smallest geometric mean that is accepted."""
    high: Bound = 1.001
    """Largest geometric mean that is accepted."""

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def __call__(self, tokens: PackedTokens) -> Tensor:
        """Return the factor of each token, [T], detached."""
        return _accepted(tokens, sequence_mean(tokens, _log_weight(tokens)).exp(), self.low, self.high)


Correction = TokenTis | IcePop | SequenceMask | Geometric
"""A correction; the field `kind` selects the class."""


class Corrected(NamedTuple):
    """Result of several corrections together; [T] each, detached."""

    weight_T: Tensor
    """Product of all factors."""
    accepted_T: Tensor
    """bool: True if every filter accepts the token. A sequence is always accepted or rejected as a whole. The trainer
    masks the other tokens."""


def correct(corrections: Iterable[Correction], tokens: PackedTokens) -> Corrected:
    """Return the product of the corrections' factors, and the tokens that every filter accepts.

    Every correction gets `tokens` with the mask of the micro-batch, before any correction. So the order of the
    corrections does not matter. Without corrections, all factors are 1 and all tokens are accepted.
    """
    weight_T = tokens.behaviour_T.new_ones(tokens.behaviour_T.shape)
    accepted_T = weight_T > 0
    for correction in corrections:
        factor_T = correction(tokens)
        weight_T = weight_T * factor_T
        if correction.rejects:
            accepted_T = accepted_T & (factor_T > 0)
    return Corrected(weight_T, accepted_T)


def _log_weight(tokens: PackedTokens) -> Tensor:
    """Return [T], detached: log w."""
    return (tokens.proximal_T - tokens.behaviour_T).detach()


def _weight(tokens: PackedTokens) -> Tensor:
    """Return [T], detached: w."""
    return _log_weight(tokens).exp()


def _accepted(tokens: PackedTokens, ratio_S: Tensor, low: float, high: float) -> Tensor:
    """Return [T]: 1 for each token of a sequence whose ratio lies in [low, high], else 0."""
    accepted_S = (ratio_S >= low) & (ratio_S <= high)
    return accepted_S[tokens.sequence_T].to(tokens.behaviour_T.dtype)


def _ordered(low: float, high: float) -> None:
    """Raise ValueError if the bounds are in the wrong order. msgspec reports it to the user with the key."""
    if low > high:
        raise ValueError(f"expected low ≤ high, got {low:g} and {high:g}")
