"""Ages of tokens, in policy versions. All arithmetic with ages is here.

The age of a token is the version that the trainer holds minus the version of the policy that sampled the token. α is
`train.async_ratio`, the asynchronous ratio. A sample begins at most ⌈α⌉ versions before the step that should train it.
The step that trains version n uses tokens of the versions n − A … n, where A is `train.max_token_age`, or 4·⌈α⌉ if that
is None. Ages are whole numbers: with α = 0.5, a sample that begins half a step early is one version old.

The hub, the trainer and the simulator use the same functions, so that they agree on which token is too old.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

Versions = TypeVar("Versions", int, npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float64])

SLACK = 1e-9
"""Tolerance of comparisons with α, or with α times a batch size. Such a product may be a whole number that a float does
not hold exactly, and would then be rounded up or down by one."""

MAX_AGE_WINDOWS = 4
"""Largest age of a trained token if `train.max_token_age` is None, in windows of ⌈α⌉ versions. An answer that is
sampled during up to so many windows is trained whole. With a limit of one window, the early tokens of each answer that
takes longer are left out of the loss, which costs accuracy (docs/figures.md)."""


def window(async_ratio: float) -> int:
    """Return ⌈α⌉: the number of versions by which a sample may begin before the step that should train it."""
    return math.ceil(async_ratio - SLACK)


def max_age(async_ratio: float, max_token_age: int | None) -> int:
    """Return the largest age of a trained token, in versions: `max_token_age`, or 4·⌈α⌉ if `max_token_age` is None."""
    return MAX_AGE_WINDOWS * window(async_ratio) if max_token_age is None else max_token_age


def age_of(version: Versions, step: int) -> Versions:
    """Return the age of tokens of a version, or of each of several versions, in the step that trains version `step`."""
    return step - version


@overload
def young_enough(version: int, min_version: int) -> bool: ...
@overload
def young_enough(version: npt.NDArray[Any], min_version: int) -> npt.NDArray[np.bool_]: ...
def young_enough(version: Any, min_version: int) -> Any:
    """Return True if tokens of a version are trained. `min_version` is the oldest version whose tokens the step trains.

    For an array of versions, returns an array of bool of the same shape.
    """
    return version >= min_version


def version_of(age: int, step: int) -> int:
    """Return the version of tokens that have this age in the step that trains version `step`."""
    return step - age


def last_step(version: int, oldest: int) -> int:
    """Return the last step that can train tokens of a version: the step in which they have the age `oldest`."""
    return version + oldest
