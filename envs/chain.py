"""ChainedSums: sums of two numbers over several turns. The result of each sum is the first operand of the next one.

The prompt of each turn is a bare problem in the form of `envs.arithmetic`, such as `46+57=`. The right result, cut to
its last `digits` digits, is the first operand of the next problem. A right answer earns 1 / `turns`. Options imitate
the faults that make real environments hard to schedule: steps take time, a share of the environments is slow, and in a
share one step never returns.

Held-out problems are for evaluation only. Held-out chains consist of held-out sums only, and training chains contain no
held-out sums. Tests and benchmarks of the scheduler use this environment; it needs no package beyond Flash's own.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator

import anyio
import msgspec

from envs.generated import in_held_out_part
from flash.environment import Info, SolvedExample, StepResult, is_held_out
from flash.errors import ConfigError, EnvError

MIN_DIGITS, MAX_DIGITS = 2, 18
"""Bounds of `digits`. With one digit, some numbers have no held-out sum. Longer operands no longer test arithmetic."""

MAX_TURNS = 1000
"""Largest number of sums in a chain."""

REMEMBERED_SEEDS = 1 << 16
"""Number of seeds whose instances are counted: far more than a process ever works on at the same time."""


class _Waits(msgspec.Struct, frozen=True):
    """Delays of one instance, that is, of one environment object."""

    seconds: list[float]
    """Seconds of each step."""
    hangs_at: int | None
    """Number of the step that never returns; None if all steps return."""


class ChainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Length of the chains, and faults of their environments.

    Raises:
        ConfigError: an option is invalid. The message names it, what was expected and what was given.
    """

    digits: int = 2
    """Number of digits of both operands. A result that becomes an operand keeps its leading zeros."""
    turns: int = 4
    """Number of sums in a chain."""
    end_at_error: bool = True
    """True if a wrong answer ends the episode. Otherwise the next prompt shows the right result."""
    latency_mean: float = 0.0
    """Mean duration of a step, in seconds."""
    latency_std: float = 0.0
    """Standard deviation of a step's duration, in seconds. The distribution is log-normal."""
    fail_slow: float = 0.0
    """Share of the instances in which each step takes `slow_factor` times as long."""
    slow_factor: float = 10.0
    """Factor of the duration of a slow instance's steps."""
    fail_stop: float = 0.0
    """Share of the instances in which one step never returns."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if not MIN_DIGITS <= self.digits <= MAX_DIGITS:
            raise ConfigError(
                f"digits must be a whole number from {MIN_DIGITS} to {MAX_DIGITS}, but is {self.digits!r}"
            )
        if not 1 <= self.turns <= MAX_TURNS:
            raise ConfigError(f"turns must be a whole number from 1 to {MAX_TURNS}, but is {self.turns!r}")
        for name, seconds in (("latency_mean", self.latency_mean), ("latency_std", self.latency_std)):
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"{name} must be a number of seconds from 0, but is {seconds!r}")
        if self.latency_std > 0 and self.latency_mean == 0:
            raise ConfigError(f"latency_std = {self.latency_std!r} needs a latency_mean above 0")
        for name, share in (("fail_slow", self.fail_slow), ("fail_stop", self.fail_stop)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{name} must be a share from 0 to 1, but is {share!r}")
        if not 1 <= self.slow_factor < math.inf:
            raise ConfigError(f"slow_factor must be a number from 1, but is {self.slow_factor!r}")


class ChainedSums:
    """Environment of one chain. The rollout node creates one for each episode, and calls `reset`, `step` and `close`.

    The problem follows from the seed. The delays follow from the seed and from the number of earlier instances of this
    seed in the process. So the members of a group share the problem but not the delays, and a retry gets new delays.
    """

    def __init__(self, options: ChainOptions) -> None:
        self._options = options
        self._chain: list[SolvedExample] = []
        """Sums of the episode with their results; empty before `reset`."""
        self._waits = _Waits([], None)
        """Delays of this instance; `reset` draws them."""
        self._turn = 0
        """Index of the sum that is answered next; the number of sums after the end."""

    async def reset(self, seed: int) -> tuple[str, Info]:
        """Show the first sum of this seed's chain, and draw the delays of a new instance of the seed."""
        self._chain = self._draw(random.Random(seed), is_held_out(seed))
        self._waits = self._draw_waits(random.Random(f"{seed} {next(_instances(seed))}"))
        self._turn = 0
        return self._chain[0].prompt, {}

    async def step(self, action: str) -> StepResult:
        """Compare the answer, without surrounding white space, with the right result, and show the next sum.

        Waits for the delay of this step first, or forever if this is the step that never returns; the caller's
        deadline then cancels it. Returns (observation, reward, terminated, truncated, info).

        Raises:
            EnvError: `reset` was not called before, or the episode has ended.
        """
        if self._turn >= len(self._chain):
            raise EnvError("step() was called before reset() or after the end")
        if self._turn == self._waits.hangs_at:
            await anyio.sleep_forever()
        await anyio.sleep(self._waits.seconds[self._turn])
        turns, right = self._options.turns, action.strip() == self._chain[self._turn].answer
        # A wrong answer ends the episode with the option `end_at_error`.
        self._turn = turns if self._options.end_at_error and not right else self._turn + 1
        done = self._turn == turns
        reward = float(right) / turns
        return "" if done else self._chain[self._turn].prompt, reward, done, False, {}

    async def close(self) -> None:
        """Do nothing: there is nothing to release, not even in a step that never returns."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` complete training chains, with which the run teaches a tiny model before the training."""
        rng = random.Random(seed)
        chains = [self._draw(rng, held_out=False) for _ in range(count)]
        return [SolvedExample(chain[0].prompt, chain[0].answer, tuple(chain[1:])) for chain in chains]

    def alphabet(self) -> str:
        """Return the digits, the plus sign and the equals sign. They become a tiny model's vocabulary."""
        return "0123456789=+"

    def _draw(self, rng: random.Random, held_out: bool) -> list[SolvedExample]:
        """Draw a training or a held-out chain. A second operand whose sum belongs to the other side is drawn again.

        This ends, because with `MIN_DIGITS` digits or more every first operand has sums of both sides.
        """
        digits = self._options.digits
        low, high = 10 ** (digits - 1), 10**digits
        left = rng.randrange(low, high)
        chain: list[SolvedExample] = []
        while len(chain) < self._options.turns:
            right = rng.randrange(low, high)
            prompt = f"{left:0{digits}d}+{right}="
            if in_held_out_part(prompt) == held_out:
                chain.append(SolvedExample(prompt, str(left + right)))
                left = (left + right) % high
        return chain

    def _draw_waits(self, rng: random.Random) -> _Waits:
        """Draw the delays of one instance.

        The first three numbers are drawn in each case, so that one option does not change the draws of the others.
        """
        options = self._options
        slow = rng.random() < options.fail_slow
        hangs = rng.random() < options.fail_stop
        hangs_at = rng.randrange(options.turns)
        factor = options.slow_factor if slow else 1.0
        seconds = [factor * _lognormal(rng, options.latency_mean, options.latency_std) for _ in range(options.turns)]
        return _Waits(seconds, hangs_at if hangs else None)


def _lognormal(rng: random.Random, mean: float, std: float) -> float:
    """Draw a log-normal number with this mean and standard deviation, in seconds. `mean` is above 0 if `std` is."""
    if std == 0:
        return mean
    # `lognormvariate` takes the mean and the deviation of the logarithm.
    variance = math.log1p((std / mean) ** 2)
    return rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


@functools.lru_cache(maxsize=REMEMBERED_SEEDS)
def _instances(seed: int) -> Iterator[int]:
    """Return the counter of a seed's earlier instances in this process. `next` gives 0 for the first instance."""
    return itertools.count()
