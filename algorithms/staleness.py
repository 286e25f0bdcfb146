"""Two ways to reduce the effect of old data: weights of samples, and a learning rate that depends on the lag.

Version n is the weights after n training steps. The *age* of a sample is the trainer's version minus the oldest version
among its trained tokens. The largest allowed age A is the age limit of the batch: `train.max_token_age`, or its default
4·⌈α⌉, where α is `train.async_ratio`.

Weights by age: `flash.trainer.plan` calls `weights` of the configured class once per batch, for the samples that have a
trained token. The weight of a sample multiplies the loss of each of its tokens. Weights have mean 1 over these samples.
So they change the influence of samples relative to each other, and leave the scale of the gradient to the learning
rate. If all samples have the same age, nothing changes.

Learning rate by lag: `flash.trainer.lag.LagLimiter` calls `Lag.scale` before each update. The rate is reduced by
how far the policy has moved away from the policies that sampled.

Shape legend: B = samples of the batch that have a trained token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

FloatArray = npt.NDArray[np.float64]


class NoStaleness(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="none"):
    """Equal weights for all samples: the age has no effect."""

    def weights(self, age_B: FloatArray, max_age: int) -> FloatArray:
        """Return float64 [B]: 1 for each sample. `age_B` has the ages in versions; `max_age` is not used.

        Raises:
            ValueError: an age is negative or not finite.
        """
        return np.ones_like(_checked(age_B))


class ExponentialStaleness(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="exponential"
):
    """Weight g = decay^age, before it is divided by the mean over the batch."""

    decay: Annotated[float, Meta(gt=0, le=1)]
    """Factor of the weight per version of age."""

    def weights(self, age_B: FloatArray, max_age: int) -> FloatArray:
        """Return float64 [B]: g divided by its mean over the batch. `age_B` has the ages in versions.

        `max_age` is not used, because g needs no largest age.

        Raises:
            ValueError: an age is negative or not finite.
        """
        age_B = _checked(age_B)
        # Ages are counted from the youngest sample. This does not change the ratios of the weights, and the weights of
        # a batch of old samples do not underflow to 0.
        return _with_mean_one(np.exp((age_B - age_B.min(initial=math.inf)) * math.log(self.decay)))


class LinearStaleness(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="linear"
):
    """Weight g = max(0, 1 − age / (A + 1)), before it is divided by the mean over the batch.

    A is the largest allowed age: `train.max_token_age`, or its default 4·⌈α⌉, where α is `train.async_ratio`. So g is
    above 0 for every sample whose age is allowed.
    """

    def weights(self, age_B: FloatArray, max_age: int) -> FloatArray:
        """Return float64 [B]: g divided by its mean over the batch; all 1 if no sample has a g above 0.

        `age_B` has the ages in versions, and `max_age` is A. The trainer passes only ages that are allowed, so only for
        other callers can g reach 0.

        Raises:
            ValueError: an age is negative or not finite.
        """
        return _with_mean_one(np.maximum(0.0, 1 - _checked(age_B) / (max_age + 1)))


Staleness = NoStaleness | ExponentialStaleness | LinearStaleness
"""Weights by age; the field `kind` selects the class."""


def _checked(age_B: FloatArray) -> FloatArray:
    """Return the ages as float64.

    Raises:
        ValueError: an age is negative or not finite.
    """
    age_B = np.asarray(age_B, dtype=np.float64)
    if not ((age_B >= 0) & np.isfinite(age_B)).all():
        raise ValueError(f"ages run from {age_B.min()} to {age_B.max()}; expected finite numbers of at least 0")
    return age_B


def _with_mean_one(weight_B: FloatArray) -> FloatArray:
    """Return the weights divided by their mean; all 1 if all are 0, since they cannot be scaled to mean 1."""
    if not weight_B.any():
        return np.ones_like(weight_B)
    # Divide by the largest weight first, so that equal weights become exactly 1.
    weight_B = weight_B / weight_B.max()
    return weight_B / weight_B.mean()


class Lag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limit of the distance between the policy and the policies that sampled, kept by lowering the learning rate.

    *Lag* is the time, in versions, between the sampling of a token and the update that trains on it. Before each
    update, the distance is measured on the tokens of that update:

        distance² = mean over the trained tokens of (log π_θ − log π_behaviour)², minus the same mean over tokens that
                    the current weights sampled
        rate ≤ past rate · √(budget / distance²), at most the scheduled rate
    """

    budget: Annotated[float, Meta(gt=0, le=100)] = 0.04
    """Largest distance² of an update. 0.04 is about (log r)² for a ratio r of 0.8 or 1.2, the
    usual bounds of a clip."""

    # Why: a step changes the policy, but data that the changed policy has sampled arrives only after the lag. Until
    # then, every step moves the policy as if the steps before it had not been made.
    #
    # Derivation: for a token, let a be its lag in versions, where the earlier updates of the same step count as
    # fractions of a version. Let R be the sum of the rates applied over that time, where the rate of a version is the
    # mean of its updates. To first order in the weights, with updates that agree in their direction, log r = R · g,
    # where g is the change of the token's log-prob per version at a rate of 1. Then distance² = g² · mean R². If all
    # these updates had had one rate, the distance² of a batch with the same lags would be g² · rate² · mean a². Setting
    # this equal to the budget gives the rule, with past rate = √(mean R² / mean a²): the mean of the applied rates,
    # weighted by the lags. Earlier reductions of the rate are thereby taken out of the measurement. So the distance
    # settles at the budget, and not between the budget and the distance that it would reach without a limit.
    #
    # The disagreement of engine and trainer at equal weights is subtracted, because the rate does not cause it. If it
    # counted as distance, a smaller rate would not bring the distance below the budget: the rate would fall further and
    # never rise again.
    #
    # Lower bound: after a synchronous update, the policy differs from the policy that sampled by one whole update. At
    # the scheduled rate over 1 + √(mean a²), a lag of a and the update after it move the policy no further than one
    # whole update. So a first update on tokens of the current version always has its whole rate.
    def scale(
        self, rate: float, square: float, counts: Sequence[float], lags: Sequence[float], moved: Sequence[float]
    ) -> float:
        """Return the factor of the scheduled `rate`, from 1 / (1 + √(mean a²)) to 1.

        The factor is 1 if no update has moved the policy since the tokens were sampled, if `square` is not a positive
        finite number, or if the rate is 0.

        Args:
            rate: the scheduled learning rate of the update.
            square: sum of (log π − log π_behaviour)² over the trained tokens of the update, minus the same sum for the
                disagreement of engine and trainer at equal weights.
            counts: number of trained tokens of each age from 0. The age of a token is the version that is trained minus
                the version that sampled the token.
            lags: for each of these ages, the lag a in versions.
            moved: for each of these ages, R: the sum of the learning rates applied since the tokens were sampled.
        """
        tokens = sum(counts)
        lag_square = sum(count * lag**2 for count, lag in zip(counts, lags, strict=True))
        moved_square = sum(count * rates**2 for count, rates in zip(counts, moved, strict=True))
        if not (rate > 0 and lag_square > 0 and moved_square > 0 and square > 0 and math.isfinite(square)):
            return 1.0
        # past rate · √(budget / distance²), as a share of the scheduled rate.
        held = math.sqrt(self.budget * tokens / square * moved_square / lag_square) / rate
        return min(1.0, max(held, 1 / (1 + math.sqrt(lag_square / tokens))))
