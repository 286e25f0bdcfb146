"""Weights by age: how much less an old sample counts. B = samples of the whole batch.

The age of a sample is the trainer's version less the oldest version among its tokens. Weights have mean 1 over the
batch, so that they shift the gradient between samples and leave its scale to the learning rate; a batch of equal ages
is unchanged.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

FloatArray = npt.NDArray[np.float64]


class NoStaleness(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="none"):
    """Every sample counts alike."""

    def weights(self, age_B: FloatArray, async_ratio: float) -> FloatArray:
        """float64 [B]: 1."""
        return np.ones_like(_checked(age_B))


class ExponentialStaleness(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="exponential"
):
    """g = decay^age."""

    decay: Annotated[float, Meta(gt=0, le=1)]
    """Weight kept per version."""

    def weights(self, age_B: FloatArray, async_ratio: float) -> FloatArray:
        """float64 [B]: g over its batch mean.

        Ages are counted from the youngest sample: the same ratios, and old batches do not underflow to zero.

        Raises:
            ValueError: an age is negative or not finite.
        """
        age_B = _checked(age_B)
        return _mean_one(np.exp((age_B - age_B.min(initial=math.inf)) * math.log(self.decay)))


class LinearStaleness(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="linear"
):
    """g = max(0, 1 − age / (α + 1)), α the asynchronous ratio or the bound above it; above 0 inside the contract."""

    def weights(self, age_B: FloatArray, async_ratio: float) -> FloatArray:
        """float64 [B]: g over its batch mean; all 1 where every sample is too old to have a g above 0.

        Only samples with tokens outside of the age contract, which are masked, can be that old.

        Raises:
            ValueError: an age is negative or not finite.
        """
        return _mean_one(np.maximum(0.0, 1 - _checked(age_B) / (async_ratio + 1)))


Staleness = NoStaleness | ExponentialStaleness | LinearStaleness
"""By `kind`."""


def _checked(age_B: FloatArray) -> FloatArray:
    age_B = np.asarray(age_B, dtype=np.float64)
    if not ((age_B >= 0) & np.isfinite(age_B)).all():
        raise ValueError(f"ages run from {age_B.min()} to {age_B.max()}; expected finite numbers of at least 0")
    return age_B


def _mean_one(weight_B: FloatArray) -> FloatArray:
    if not weight_B.any():
        return np.ones_like(weight_B)
    weight_B = weight_B / weight_B.max()  # equal weights become exactly 1
    return weight_B / weight_B.mean()
