"""The `[simulate]` table: the hardware and the workload that a simulated run has, and the random numbers of a
simulation.

The defaults describe a 7B model on one 80 GB GPU per engine, in round numbers; `flash calibrate` fits them to a
measured run. Lengths and times are a `Distribution`: a number, a list of equally likely numbers, or a table such as
`{ kind = "lognormal", mean = 1000, deviation = 1500, high = 8192 }`. `sampler` makes of each an object that draws.

A draw is a pure function of a number in (0, 1), which `uniform` computes from integers that identify the draw. So equal
integers give equal draws in every process and on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import blake2b
from statistics import NormalDist
from typing import Annotated

import msgspec
from msgspec import Meta

from flash.config.section import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

RARE = 1e-6
"""Probability at which a draw counts as impossible: `upper` of a distribution without an upper limit is exceeded with
it, and the check of prompts takes the quantile of it as the shortest prompt."""
FORMER_DISTRIBUTION = (
    "a distribution is no text any more, but a number, a list of equally likely numbers, or a table such as "
    '{ kind = "lognormal", mean = 1000, deviation = 1500, low = 1, high = 8192 }'
)
"""Hint for a text such as `lognormal(1000, 1500)`, which earlier versions of Flash read."""

_NORMAL = NormalDist()
"""Normal distribution with mean 0 and deviation 1."""


def uniform(*key: int) -> float:
    """Return a pseudo-random number in (0, 1) that depends only on the key: integers that identify one draw.

    Callers pass the number to the `draw` of a distribution.
    """
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    # 52 bits plus one half: every such number is exact in a float, and neither 0 nor 1, whose quantiles are infinite.
    return ((int.from_bytes(digest, "little") >> 12) + 0.5) / (1 << 52)


# -- distributions ---------------------------------------------------------------------------------------------------


class Values(msgspec.Struct, frozen=True):
    """Numbers that are equally likely: the sampler of a number or a list of the configuration."""

    ordered: list[float]
    """The numbers, in ascending order, so that a larger `u` never gives a smaller draw."""

    def draw(self, u: float) -> float:
        """Return the quantile of u, a number in (0, 1)."""
        # Rounding may make the product as large as the length, if u is just below 1.
        return self.ordered[min(int(u * len(self.ordered)), len(self.ordered) - 1)]

    def expected(self) -> float:
        """Return the exact mean of the draws."""
        return sum(self.ordered) / len(self.ordered)

    def upper(self) -> float:
        """Return the largest value."""
        return self.ordered[-1]


class Uniform(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="uniform"):
    """All numbers between two limits are equally likely."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""

    def __post_init__(self) -> None:
        """Raise ValueError if the limits are in the wrong order. `flash.config.decode` makes it a problem of the
        key."""
        if self.low >= self.high:
            raise ValueError(f"expected low < high, got {self.low:g} and {self.high:g}")

    def draw(self, u: float) -> float:
        """Return the quantile of u, a number in (0, 1)."""
        return min(self.low + (self.high - self.low) * u, self.high)  # rounding may exceed `high`

    def expected(self) -> float:
        """Return the exact mean of the draws."""
        return self.low + (self.high - self.low) / 2  # (low + high) / 2 may overflow

    def upper(self) -> float:
        """Return the largest value."""
        return self.high


class Limited(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of distributions whose draws are moved into limits: a draw below `low` is set to `low`, and a draw
    above `high` to `high`.

    A subclass has the parameters and the formulas of the distribution without limits: `quantile`, `cdf` and
    `mean_below`. The methods of this class apply the limits.
    """

    low: float = 0.0
    """Smallest value; smaller draws are set to it."""
    high: float | None = None
    """Largest value; larger draws are set to it. None: no limit."""

    def __post_init__(self) -> None:
        """Raise ValueError if the limits are in the wrong order. `flash.config.decode` makes it a problem of the
        key."""
        if self.high is not None and self.low > self.high:
            raise ValueError(f"expected low ≤ high, got {self.low:g} and {self.high:g}")

    def draw(self, u: float) -> float:
        """Return the quantile of u, a number in (0, 1), within the limits."""
        value = max(self.quantile(u), self.low)
        return value if self.high is None else min(value, self.high)

    def expected(self) -> float:
        """Return the exact mean of the draws, limits included."""
        # Draws below `low` and above `high` count as these limits; the others contribute their part of the mean.
        high = math.inf if self.high is None else self.high
        above = 0.0 if self.high is None else self.high * (1 - self.cdf(self.high))
        return self.low * self.cdf(self.low) + self.mean_below(high) - self.mean_below(self.low) + above

    def upper(self) -> float:
        """Return the largest possible value; without an upper limit, the value that one draw in a million exceeds."""
        return self.draw(1 - RARE) if self.high is None else self.high

    def quantile(self, u: float) -> float:
        """Return the value that a draw without limits is below with probability u."""
        raise NotImplementedError

    def cdf(self, x: float) -> float:
        """Return the probability that a draw without limits is at most x."""
        raise NotImplementedError

    def mean_below(self, x: float) -> float:
        """Return E[X; X ≤ x]: the part of the mean of a draw without limits that values of at most x contribute.
        Infinite x: the whole mean."""
        raise NotImplementedError


class Normal(Limited, frozen=True, kw_only=True, tag_field="kind", tag="normal"):
    """Normal distribution, within limits."""

    mean: float
    """Mean before the limits."""
    deviation: PositiveFloat
    """Standard deviation before the limits."""

    def quantile(self, u: float) -> float:
        """Return the value that a draw without limits is below with probability u."""
        return self.mean + self.deviation * _NORMAL.inv_cdf(u)

    def cdf(self, x: float) -> float:
        """Return the probability that a draw without limits is at most x."""
        return _NORMAL.cdf((x - self.mean) / self.deviation)

    def mean_below(self, x: float) -> float:
        """Return E[X; X ≤ x] without limits, the integral of x·density from −∞ to x. Infinite x: the mean."""
        if math.isinf(x):
            return self.mean
        z = (x - self.mean) / self.deviation
        return self.mean * _NORMAL.cdf(z) - self.deviation * _NORMAL.pdf(z)


class Lognormal(Limited, frozen=True, kw_only=True, tag_field="kind", tag="lognormal"):
    """Log-normal distribution, within limits."""

    mean: PositiveFloat
    """Mean before the limits."""
    deviation: PositiveFloat
    """Standard deviation before the limits."""

    def __post_init__(self) -> None:
        """Raise ValueError if the limits are in the wrong order, or mean and deviation too far apart."""
        super().__post_init__()
        # With other ratios the formulas below divide by 0 or overflow.
        if not 1e-6 <= self.deviation / self.mean <= 1e6:
            raise ValueError(
                f"expected a deviation from 1e-06 to 1e+06 times the mean, got {self.deviation:g} and {self.mean:g}"
            )

    def quantile(self, u: float) -> float:
        """Return the value that a draw without limits is below with probability u."""
        mu, sigma = self._mu_and_sigma()
        return math.exp(mu + sigma * _NORMAL.inv_cdf(u))

    def cdf(self, x: float) -> float:
        """Return the probability that a draw without limits is at most x."""
        mu, sigma = self._mu_and_sigma()
        if x <= 0:  # draws are above 0
            return 0.0
        return _NORMAL.cdf((math.log(x) - mu) / sigma) if math.isfinite(x) else 1.0

    def mean_below(self, x: float) -> float:
        """Return E[X; X ≤ x] without limits, the integral of x·density from 0 to x. Infinite x: the mean."""
        mu, sigma = self._mu_and_sigma()
        if math.isinf(x):
            return self.mean
        return 0.0 if x <= 0 else self.mean * _NORMAL.cdf((math.log(x) - mu) / sigma - sigma)

    def _mu_and_sigma(self) -> tuple[float, float]:
        """Return mean and standard deviation of the logarithm of a draw without limits. The logarithm is normally
        distributed; `mean` and `deviation` are those of the draw itself."""
        variance = math.log1p((self.deviation / self.mean) ** 2)
        return math.log(self.mean) - variance / 2, math.sqrt(variance)


Distribution = float | Annotated[list[float], Meta(min_length=1)] | Lognormal | Normal | Uniform
"""Value of a length or a time in the configuration: a number, a list of equally likely numbers, or a table."""
Sampler = Values | Lognormal | Normal | Uniform
"""Object that draws from a distribution. `draw` takes a number in (0, 1)."""


def sampler(distribution: Distribution) -> Sampler:
    """Return the object that draws from a distribution of the configuration.

    Simulations call this for each length and time; checks call it for the bounds of the draws.
    """
    match distribution:
        case list():
            return Values(sorted(distribution))
        case float() | int():
            return Values([distribution])
        case _:
            return distribution


def stated(distribution: Distribution) -> Iterator[tuple[str, float]]:
    """Yield the numbers that state the values of a distribution, defaults included, each with its place.

    `flash.config.check` refuses numbers that are no possible time, length or probability. A place completes the key in
    its error message: empty for a single number, `[1]` in a list, `.low`, `.mean` or `.high` in a table.
    """
    match distribution:
        case list():
            yield from ((f"[{place}]", value) for place, value in enumerate(distribution))
        case float() | int():
            yield "", distribution
        case _:
            # A table has some of these fields. Its deviation is no value of the distribution.
            for name in ("low", "mean", "high"):
                if (value := getattr(distribution, name, None)) is not None:
                    yield f".{name}", value


# -- the table -------------------------------------------------------------------------------------------------------


class SimulateConfig(Section, frozen=True):
    """Simulated [hardware and workload](simulator.md); only `flash simulate` uses this table. Lengths and times are
    distributions: a number, a list of equally likely numbers, or a table such as `{ kind = "normal", mean = 10,
    deviation = 3 }`."""

    gpus: Positive = 16
    """Number of GPUs, of engines and trainers together."""
    rollout_gpus: Positive = 8
    """Number of GPUs that run engines, `engine.tensor_parallel` each; the others train. The engines are divided evenly
    among `cluster.nodes` nodes. The times below are those of a whole engine."""
    step_s: NonNegativeFloat = 0.012
    """Fixed part of the time of a decoding step, in seconds."""
    sequence_s: NonNegativeFloat = 0.00006
    """Additional seconds of a decoding step per running sequence."""
    context_s: NonNegativeFloat = 2e-8
    """Additional seconds of a decoding step per token of context."""
    prefill_s: NonNegativeFloat = 0.00004
    """Additional seconds of a decoding step per prompt token that is not in the cache."""
    kv_tokens: NonNegative = 0
    """Size of an engine's KV cache, in tokens. 0: unlimited."""
    swap_s: NonNegativeFloat = 0.5
    """Seconds that an engine needs to load a version."""
    train_token_s: NonNegativeFloat = 0.0001
    """Seconds of one GPU per token of a batch, prompts included."""
    train_step_s: NonNegativeFloat = 1.0
    """Fixed part of the time of a training step, in seconds."""
    prompt_tokens: Distribution = 300.0
    """Length of the first observation, in tokens."""
    response_tokens: Distribution = Lognormal(mean=1000.0, deviation=1200.0, low=1.0, high=8192.0)
    """Length of one response, in tokens."""
    length_correlation: Fraction = 0.0
    """Correlation between the lengths of responses to the same prompt. 0: independent. 1: equal."""
    observation_tokens: Distribution = 50.0
    """Length of each later observation, in tokens."""
    turns: Distribution = 1.0
    """Number of responses of an episode."""
    reset_s: Distribution = 0.0
    """Seconds that the reset of an environment takes."""
    env_s: Distribution = 0.0
    """Seconds that a step of an environment takes."""
    reward_s: Distribution = 0.0
    """Seconds that the reward takes, after the last step."""
    fail_slow: Fraction = 0.0
    """Share of environments that are slow."""
    fail_slow_factor: PositiveFloat = 10.0
    """Factor by which slow environments take longer."""
    fail_stop: Fraction = 0.0
    """Share of environments that never answer one of their steps."""
    success: Distribution = 0.5
    """Probability of the reward 1, drawn once per prompt."""
