"""Ages: by how many versions the policy of a token is behind the one that trains it. They are counted here alone.

With α = async ratio, the step that trains version n uses tokens of the versions n − ⌈α⌉ … n, or of older ones up to a
bound that is given for tokens. Ages are whole numbers: a sample that α admits one version early is one version old,
whatever the fraction.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

Versions = TypeVar("Versions", int, npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float64])

SLACK = 1e-9
"""Keeps comparisons true where α, or α times a batch, is a whole number that floats cannot hold."""


def window(async_ratio: float) -> int:
    """⌈α⌉: how many versions before its step a sample may begin by admission alone."""
    return math.ceil(async_ratio - SLACK)


def max_age(async_ratio: float, bound: int | None) -> int:
    """The most versions that a trained token may be old: ⌈α⌉, or the bound that is given for tokens."""
    return window(async_ratio) if bound is None else bound


def age_of(version: Versions, step: int) -> Versions:
    """The age of tokens of a version, or of each of several, in the step that trains version `step`."""
    return step - version


@overload
def recent(version: int, min_version: int) -> bool: ...
@overload
def recent(version: npt.NDArray[Any], min_version: int) -> npt.NDArray[np.bool_]: ...
def recent(version: Any, min_version: int) -> Any:
    """Whether tokens of a version, or of each of several, are trained where `min_version` is the oldest that is."""
    return version >= min_version


def version_of(age: int, step: int) -> int:
    """The version of the tokens that have this age in the step that trains version `step`."""
    return step - age


def last_step(version: int, oldest: int) -> int:
    """The last step in which tokens of a version are no older than `oldest`."""
    return version + oldest
