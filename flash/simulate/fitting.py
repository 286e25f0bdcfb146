"""Arithmetic of the calibration: least squares without negative constants, and distributions of measured values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from flash.observe.timeline import Floats

VALUES = 32
"""Most values that a fitted distribution lists."""


def spread_of(values: Sequence[float], *, whole: bool = False) -> float | list[float]:
    """Return a distribution (`flash.config.simulate.Distribution`) of at most VALUES equally likely values with the
    mean of the measured ones.

    Each value is the mean of an equal part of the sorted measured values. If `whole` is True, values are rounded, and
    the rounding error of each is added to the next one, so that the mean is preserved.
    """
    parts = np.array_split(np.sort(np.array(values, dtype=np.float64)), min(VALUES, len(values)))
    means = [float(part.mean()) for part in parts]
    if whole:
        rounded: list[float] = []
        owed = 0.0
        for mean in means:
            rounded.append(float(round(mean + owed)))
            owed += mean - rounded[-1]
        means = rounded
    shown = [float(f"{mean:.6g}") for mean in means]  # six digits are enough, and keep the file readable
    return shown[0] if len(set(means)) == 1 else shown


def nonnegative_fit(columns: Floats, target: Floats) -> tuple[Floats, Floats]:
    """Solve least squares without negative constants. Returns the constants and the residuals.

    It tries every subset of the columns, so there must be few of them.
    """
    count = columns.shape[1]
    best = np.zeros(count), target
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part = columns[:, chosen]
            scale = np.maximum(np.abs(part).max(axis=0), 1e-300)
            solved = np.linalg.lstsq(part / scale, target, rcond=None)[0] / scale
            if (solved < 0).any():
                continue
            constants = np.zeros(count)
            constants[list(chosen)] = solved
            left = target - columns @ constants
            if (left**2).sum() < (best[1] ** 2).sum() * (1 - 1e-9):
                best = constants, left
    return best


def relative(left: Floats, values: Floats) -> float:
    """Return the root mean square of the residuals `left`, relative to the mean absolute value of `values`."""
    mean = float(np.abs(values).mean())
    return float(np.sqrt((left**2).mean())) / mean if mean else 0.0


def slope_error(x: Floats, left: Floats) -> float:
    """Return the standard error of the slope of a fitted line with residuals `left`; infinity if it is undefined."""
    spread = float(((x - x.mean()) ** 2).sum())
    if spread == 0 or len(x) < 3:
        return float("inf")
    return float(np.sqrt((left**2).sum() / (len(x) - 2) / spread))
