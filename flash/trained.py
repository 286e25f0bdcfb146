"""What training found at the single tokens of a sample: told by the trainer ranks, kept with the readable samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from enum import IntEnum

import msgspec


class TokenUse(IntEnum):
    """What became of an action token in the loss."""

    TRAINED = 0
    CLIPPED = 1
    """The objective took its gradient away, or cut it, in the first pass over its minibatch."""
    REJECTED = 2
    """A correction left it out of the loss, or weighs it with 0."""
    TOO_OLD = 3
    """A policy older than `min_version` sampled it."""


class TrainedSample(msgspec.Struct, frozen=True, gc=False):
    """One sample's action tokens in the order of `Trajectory.logprobs`, little-endian.

    Of a token that is too old there is no advantage, and of a branch without a token to train nothing at all: NaN.
    """

    index: int
    """Its place in the batch."""
    logprobs: bytes
    """float32: under the policy before the step, at the sampling temperature."""
    entropies: bytes
    """float32: of that policy's distribution, in nats."""
    advantages: bytes
    """float32: as the objective was given them."""
    uses: bytes
    """uint8: a `TokenUse` each."""


def shown_places(trained: Iterable[bool], count: int) -> list[int]:
    """Which samples of a batch a run shows: the first `count` that have a token to train."""
    return list(itertools.islice((place for place, some in enumerate(trained) if some), count))
