"""Means and best-of-k of evaluations, with confidence intervals. Pure functions.

The hub uses them for the rows of evaluations, and `flash evaluate`, `flash compare` and benchmarks for their results.

Legend: n samples, G problems (clusters), p the mean of 0/1 values, z and t the 97.5 % quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_Z = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""Student's t, 97.5 % quantile, for 1 to 9 degrees of freedom; above, a series is exact enough."""


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def difference(one: Interval, other: Interval) -> Interval:
    """Return other − one for two independent means with their intervals.

    The limits are combined by the square-and-add method of Newcombe (1998, "Interval estimation for the difference
    between independent proportions", method 10), which holds for means too (Zou & Donner 2008).
    """
    mean = other.mean - one.mean
    down = math.hypot(other.mean - other.low, one.high - one.mean)
    up = math.hypot(other.high - other.mean, one.mean - one.low)
    return Interval(mean, mean - down, mean + up)


class BestOf(NamedTuple):
    """Best reward among k answers to a problem, in the mean over problems."""

    k: int
    interval: Interval


def best_of(values: Sequence[float], k: int) -> float:
    """Return the unbiased estimate of the best of k answers from n ≥ k answers: the mean over all choices of k of them.

    For 0/1 values, of which c are 1, it is pass@k = 1 − C(n − c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large
    Language Models Trained on Code", equation 1).
    """
    n = len(values)
    assert 1 <= k <= n, "k of n answers"
    best, weight = 0.0, k / n  # share of the choices whose best value is the greatest one
    for below, value in zip(range(n - 1, -1, -1), sorted(values, reverse=True), strict=True):
        best += weight * value
        weight *= (below - k + 1) / below if below else 0.0
    return best


def best_of_each(answers: Sequence[Sequence[float]]) -> list[BestOf]:
    """Return `best_of` for k = 1, 2, 4, … and the largest number of answers.

    Each k is a mean over the problems with at least k answers.
    """
    most = max(map(len, answers), default=0)
    binary = all(value in (0, 1) for values in answers for value in values)
    found: list[BestOf] = []
    for k in sorted({1 << power for power in range(most.bit_length())} | {most} - {0}):
        interval = mean_interval([best_of(values, k) for values in answers if len(values) >= k])
        if binary:
            interval = Interval(interval.mean, max(0.0, interval.low), min(1.0, interval.high))
        found.append(BestOf(k, interval))
    return found


def mean_interval(values: Sequence[float], problems: Sequence[int] | None = None) -> Interval:
    """Return the mean of `values` with its 95 % confidence interval.

    `problems[i]` is the problem that sample i answers. Answers to one problem are not independent, so the interval is
    that of a cluster sample. If `problems` is None, each value has its own problem.

    If all values are 0 or 1, the interval is Wilson's score interval (Wilson 1927), with the effective sample size
    under clustering (Korn & Graubard 1998). Otherwise it is Student's t over problems, and infinite for one problem.
    Without values, mean and interval are NaN.
    """
    n = len(values)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan)
    problems = range(n) if problems is None else problems
    assert len(problems) == n, "one problem per value"
    mean = math.fsum(values) / n
    residuals: dict[int, float] = {}
    for problem, value in zip(problems, values, strict=True):
        residuals[problem] = residuals.get(problem, 0.0) + value - mean
    clusters = len(residuals)
    variance = math.inf
    if clusters > 1:
        squares = math.fsum(residual * residual for residual in residuals.values())
        variance = squares / (n * n) * clusters / (clusters - 1)
    if all(value in (0, 1) for value in values):
        return _wilson(mean, _effective_size(mean, variance, n, clusters))
    half = _t_quantile(clusters - 1) * math.sqrt(variance) if clusters > 1 else math.inf
    return Interval(mean, mean - half, mean + half)


def _effective_size(p: float, variance: float, n: int, clusters: int) -> float:
    """Return the number of independent samples that would have this variance; between G and n.

    If all values agree, their variance is 0 and does not show the effect of clusters. Each problem then counts once.
    """
    if clusters == n:
        return n
    if p in (0, 1):
        return clusters
    return max(clusters, min(n, p * (1 - p) / variance)) if variance > 0 else n


def _wilson(p: float, n: float) -> Interval:
    """Return Wilson's score interval of a share p of n samples."""
    centre = (p + _Z * _Z / (2 * n)) / (1 + _Z * _Z / n)
    half = _Z / (1 + _Z * _Z / n) * math.sqrt(p * (1 - p) / n + _Z * _Z / (4 * n * n))
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def _t_quantile(degrees: int) -> float:
    """Return Student's t, 97.5 % quantile; above the table, Abramowitz & Stegun 26.7.5 with an error below 1e-3."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384
    return _Z + first / degrees + second / degrees**2 + third / degrees**3
