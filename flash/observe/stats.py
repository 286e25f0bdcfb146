"""Means and best-of-k of evaluations, with confidence intervals. Pure functions.

The hub uses them for the rows of evaluations; `flash eval`, `flash compare` and benchmarks use them for their results.
An evaluation has rewards of *answers* to *problems*, often of several answers to each problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_Z = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""Student's t, 97.5 % quantile, for 1 to 9 degrees of freedom. From 10 on, a series is exact enough."""


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval, from `low` to `high`."""

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
    """Number of answers of which the best one counts."""
    interval: Interval


def best_of(values: Sequence[float], k: int) -> float:
    """Return the unbiased estimate of the best of k answers to one problem, from the rewards of n ≥ k answers to it.

    It is the mean of the best reward over all choices of k of the n answers.
    For 0/1 values, of which c are 1, it is pass@k = 1 − C(n − c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large
    Language Models Trained on Code", equation 1).
    """
    n = len(values)
    assert 1 <= k <= n, "k of n answers"
    # From the greatest value down: `weight` is the share of the choices whose best value is `value`, and `below` the
    # number of values after it.
    best, weight = 0.0, k / n
    for below, value in zip(range(n - 1, -1, -1), sorted(values, reverse=True), strict=True):
        best += weight * value
        weight *= (below - k + 1) / below if below else 0.0
    # The weights add up to 1 only up to rounding, and the interval of equal values depends on their exact equality.
    return min(max(best, min(values)), max(values))


def best_of_each(answers: Sequence[Sequence[float]]) -> list[BestOf]:
    """Return `best_of` with intervals, for k = 1, 2, 4, … and the largest number of answers to a problem.

    `answers` has the rewards of each problem's answers; without any answer the result is empty. Each k is a mean over
    the problems with at least k answers. If all rewards are 0 or 1, all intervals are Wilson's, and that of k = 1 is
    `mean_interval` of the single answers.
    """
    most = max(map(len, answers), default=0)
    binary = all(value in (0, 1) for values in answers for value in values)
    found: list[BestOf] = []
    powers = {1 << power for power in range(most.bit_length())}
    for k in sorted((powers | {most}) - {0}):
        enough = [values for values in answers if len(values) >= k]
        mean, variance = _clustered_mean([best_of(values, k) for values in enough], range(len(enough)))
        # k answers give one estimate, so there are at most this many estimates that share no answer.
        separate = sum(map(len, enough)) // k
        if binary:
            interval = _wilson(mean, _effective_size(mean, variance, problems=len(enough), most=separate))
        else:
            interval = _students_t(mean, variance, len(enough))
        found.append(BestOf(k, interval))
    return found


def mean_interval(values: Sequence[float], problems: Sequence[int] | None = None, *, binary: bool = False) -> Interval:
    """Return the mean of `values` with its 95 % confidence interval.

    The interval is Student's t over problems, and infinite for one problem. With `binary` it is Wilson's score interval
    (Wilson 1927), with the effective sample size under clustering (Korn & Graubard 1998). Without values, mean and
    interval are NaN.

    Args:
        values: rewards of single answers, or one number for each independent case, such as a run.
        problems: `problems[i]` is the problem that `values[i]` answers. Answers to one problem depend on each other, so
            the interval is that of a cluster sample. If it is None, each value has its own problem.
        binary: True if `values` are outcomes of single answers, each 0 or 1. Means must not set it, even if all are 1.
    """
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    problems = range(len(values)) if problems is None else problems
    mean, variance = _clustered_mean(values, problems)
    count = len(set(problems))
    if binary:
        return _wilson(mean, _effective_size(mean, variance, problems=count, most=len(values)))
    return _students_t(mean, variance, count)


def _clustered_mean(values: Sequence[float], problems: Sequence[int]) -> tuple[float, float]:
    """Return the mean of `values` and the variance of this mean, which is infinite for a single problem.

    `problems[i]` is the problem that `values[i]` belongs to. The variance is that of a mean over clusters of unequal
    size (linearised ratio estimator); a problem is a cluster.
    """
    n = len(values)
    assert len(problems) == n, "one problem per value"
    mean = math.fsum(values) / n
    residuals: dict[int, float] = {}
    """Sum of the residuals of each problem."""
    for problem, value in zip(problems, values, strict=True):
        residuals[problem] = residuals.get(problem, 0.0) + value - mean
    count = len(residuals)
    if count == 1:
        return mean, math.inf
    squares = math.fsum(residual * residual for residual in residuals.values())
    return mean, squares / (n * n) * count / (count - 1)


def _effective_size(p: float, variance: float, *, problems: int, most: int) -> float:
    """Return the number of independent 0/1 samples whose mean p would have this variance.

    It lies between the number of problems and `most`, the number of samples. If all values agree, their variance is 0
    and does not show how strongly the answers to one problem depend on each other. Each problem then counts once.
    """
    if problems == most:
        return most
    if p in (0, 1):
        return problems
    return max(problems, min(most, p * (1 - p) / variance)) if variance > 0 else most


def _wilson(p: float, n: float) -> Interval:
    """Return Wilson's score interval of a share p among n samples. n need not be whole."""
    centre = (p + _Z * _Z / (2 * n)) / (1 + _Z * _Z / n)
    half = _Z / (1 + _Z * _Z / n) * math.sqrt(p * (1 - p) / n + _Z * _Z / (4 * n * n))
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def _students_t(mean: float, variance: float, problems: int) -> Interval:
    """Return Student's t interval of a mean with this variance, over a number of independent problems."""
    half = _t_quantile(problems - 1) * math.sqrt(variance) if problems > 1 else math.inf
    return Interval(mean, mean - half, mean + half)


def _t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with this number of degrees of freedom.

    Above the table `_T` it is the series of Abramowitz & Stegun 26.7.5, with an error below 1e-3.
    """
    if degrees <= len(_T):
        return _T[degrees - 1]
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384
    return _Z + first / degrees + second / degrees**2 + third / degrees**3
