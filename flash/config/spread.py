"""Spread: a distribution written as text, and the random numbers that draw from it.

A spread is an inverse CDF, so a draw is a pure function of a number in (0, 1). `uniform` computes that number from
integers that identify the draw. Equal integers give equal draws in every process and on every machine.

`normal`, `lognormal` and `exponential` are given by their mean and standard deviation before limits are applied. A draw
below `low` is set to `low`, and a draw above `high` to `high`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from hashlib import blake2b
from statistics import NormalDist

import msgspec

from flash.config.decode import LONGEST_VALUE
from flash.errors import ConfigError

RARE = 1e-6
"""Probability that a draw exceeds `upper` if a spread has no upper limit."""
FORMS = (
    "constant(300)",
    "normal(10, 3)",
    "lognormal(1000, 1500, high=8192)",
    "exponential(5)",
    "uniform(5, 15)",
    "values(1, 2, 40)",
)
"""Example of each form, for error messages."""

_NORMAL = NormalDist()


def uniform(*key: int) -> float:
    """Return a pseudo-random number in (0, 1) that depends only on the key."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> 12) + 0.5) / (1 << 52)


class _Shape(msgspec.Struct, frozen=True):
    """Distribution before limits are applied, as the three functions that draws and means need."""

    quantile: Callable[[float], float]
    cdf: Callable[[float], float]
    below: Callable[[float], float]
    """E[X; X ≤ x]: the part of the mean from values at or below x."""


class Spread:
    """Distribution of lengths or seconds, limited to [low, high]."""

    def __init__(self, text: str, shape: _Shape, low: float, high: float) -> None:
        self._text = text
        self._shape = shape
        self._low = low
        self._high = high

    def __repr__(self) -> str:
        return self._text

    def draw(self, u: float) -> float:
        """Return the quantile of u, a number in (0, 1)."""
        return min(max(self._shape.quantile(u), self._low), self._high)

    def mean(self) -> float:
        """Return the exact mean of the draws, limits included."""
        low, high, shape = self._low, self._high, self._shape
        above = high * (1 - shape.cdf(high)) if math.isfinite(high) else 0.0
        under = low * shape.cdf(low) if math.isfinite(low) else 0.0
        return under + shape.below(high) - shape.below(low) + above

    def upper(self) -> float:
        """Return the largest possible value; without an upper limit, the value that one draw in a million exceeds."""
        return self.draw(1 - RARE) if math.isinf(self._high) else self._high


def parse_spread(text: str) -> Spread:
    """Return the distribution that a text such as `lognormal(1000, 1500, high=8192)` describes.

    Raises:
        ConfigError: the text has another form, or its numbers describe no distribution.
    """
    name, numbers, cuts = _read(text)
    match name, numbers:
        case "constant", [value]:
            return _listed(text, [value], cuts)
        case "values", [_, *_]:
            return _listed(text, numbers, cuts)
        case "uniform", [start, stop] if start < stop:
            return _cut(text, _between(start, stop), cuts, start, stop)
        case "exponential", [mean] if mean > 0:
            return _cut(text, _exponential(mean), cuts, 0.0, math.inf)
        case "normal", [mean, deviation] if deviation > 0:
            return _cut(text, _normal(mean, deviation), cuts, 0.0, math.inf)
        case "lognormal", [mean, deviation] if mean > 0 and deviation > 0:
            return _cut(text, _lognormal(mean, deviation), cuts, 0.0, math.inf)
        case _:
            raise _refused(text, "its numbers name no distribution")


def _read(text: str) -> tuple[str, list[float], dict[str, float]]:
    """Parse `name(1, 2, high=3)` into its name, its numbers and its limits."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the text is malformed or nested too deeply
        raise _refused(text, "it cannot be read") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _refused(text, "it is not of the form name(number, …)")
    named = {keyword.arg: _number(text, keyword.value) for keyword in call.keywords if keyword.arg is not None}
    if unknown := sorted(named.keys() - {"low", "high"}):
        raise _refused(text, f"{unknown[0]!r} is neither low nor high")
    return call.func.id, [_number(text, argument) for argument in call.args], named


def _number(text: str, node: ast.expr) -> float:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _refused(text, f"{ast.unparse(node)} is not a number")
    return float(value)


def _refused(text: str, why: str) -> ConfigError:
    shown = text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"
    return ConfigError(f"{shown!r} is not a distribution: {why}; write one like {', '.join(FORMS)}")


def _cut(text: str, shape: _Shape, cuts: dict[str, float], low: float, high: float) -> Spread:
    low, high = cuts.get("low", low), cuts.get("high", high)
    if low > high:
        raise _refused(text, f"low = {low:g} is above high = {high:g}")
    return Spread(text, shape, low, high)


def _listed(text: str, numbers: list[float], cuts: dict[str, float]) -> Spread:
    """Return a distribution in which each of the numbers is equally likely."""
    values, count = sorted(numbers), len(numbers)
    if cuts:
        raise _refused(text, "only distributions without listed values can be cut")
    shape = _Shape(
        quantile=lambda u: values[min(int(u * count), count - 1)],
        cdf=lambda x: sum(value <= x for value in values) / count,
        below=lambda x: sum(value for value in values if value <= x) / count,
    )
    return Spread(text, shape, -math.inf, values[-1])


def _between(start: float, stop: float) -> _Shape:
    width = stop - start

    def share(x: float) -> float:
        return min(max((x - start) / width, 0.0), 1.0)

    return _Shape(
        quantile=lambda u: start + width * u,
        cdf=share,
        below=lambda x: share(x) * (start + width * share(x) / 2),
    )


def _exponential(mean: float) -> _Shape:
    def below(x: float) -> float:
        if math.isinf(x):
            return mean
        return 0.0 if x <= 0 else mean - (mean + x) * math.exp(-x / mean)

    return _Shape(
        quantile=lambda u: -mean * math.log1p(-u),
        cdf=lambda x: 0.0 if x <= 0 else -math.expm1(-x / mean),
        below=below,
    )


def _normal(mean: float, deviation: float) -> _Shape:
    def below(x: float) -> float:
        if math.isinf(x):
            return mean
        z = (x - mean) / deviation
        return mean * _NORMAL.cdf(z) - deviation * _NORMAL.pdf(z)

    return _Shape(
        quantile=lambda u: mean + deviation * _NORMAL.inv_cdf(u),
        cdf=lambda x: _NORMAL.cdf((x - mean) / deviation),
        below=below,
    )


def _lognormal(mean: float, deviation: float) -> _Shape:
    variance = math.log1p((deviation / mean) ** 2)
    sigma, mu = math.sqrt(variance), math.log(mean) - variance / 2

    def z(x: float) -> float:
        return (math.log(x) - mu) / sigma

    return _Shape(
        quantile=lambda u: math.exp(mu + sigma * _NORMAL.inv_cdf(u)),
        cdf=lambda x: 0.0 if x <= 0 else _NORMAL.cdf(z(x)) if math.isfinite(x) else 1.0,
        below=lambda x: 0.0 if x <= 0 else mean * _NORMAL.cdf(z(x) - sigma) if math.isfinite(x) else mean,
    )
