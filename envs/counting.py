"""Counting: recite an alphabet backwards from a given sign, each sign with a running digit; one turn each.

The answer's length follows from the prompt and has a long tail, as lengths of reasoning do: `D4` asks for `C6B7A7`, a
prompt from further on for hundreds of signs. Every item follows from the one before it, so that a small model learns
long answers too: the next sign down, and the last digit plus the number of signs that are left.

The reward is the share of characters that are right, at their place, of the longer one of answer and solution. How
problems are divided into training and held-out ones is in `envs.generated`.
"""

from __future__ import annotations

import functools
import math
import random

import msgspec

from envs.generated import OneTurn, in_held_out_part
from flash.environment import SolvedExample
from flash.errors import ConfigError

MAX_LONGEST = 4000
"""Most signs: each is one token of the tiny model's vocabulary."""


class CountingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How long answers are.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """

    median: int = 12
    """Signs of a usual answer; each takes two characters."""
    longest: int = 240
    """Signs of the longest answer."""
    spread: float = 1.0
    """Standard deviation of the length's logarithm, before it is cut at `longest`."""

    def __post_init__(self) -> None:
        median, longest = self.median, self.longest
        if not 2 <= longest <= MAX_LONGEST:
            raise ConfigError(f"longest must be a whole number from 2 to {MAX_LONGEST}, but is {longest!r}")
        if not 1 <= median <= longest:
            raise ConfigError(f"median must be a whole number from 1 to longest = {longest}, but is {median!r}")
        if not 0 <= self.spread < math.inf:
            raise ConfigError(f"spread must be a number from 0, but is {self.spread!r}")


class Counting(OneTurn):
    """One problem: a sign to count down from."""

    def __init__(self, options: CountingOptions) -> None:
        self._options = options
        self._signs = _signs(options.longest + 1)

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """`count` training problems. Half are of any length: among the usual ones the last signs are hardly met."""
        rng = random.Random(seed)
        lengths = [None if index % 2 else rng.randint(1, self._options.longest) for index in range(count)]
        return [self._draw(rng, held_out=False, length=length) for length in lengths]

    def alphabet(self) -> str:
        """The signs and the digits."""
        return self._signs + "0123456789"

    def _draw(self, rng: random.Random, held_out: bool, length: int | None = None) -> SolvedExample:
        while True:
            left = length or self._length(rng)
            digit = rng.randrange(10)
            prompt = f"{self._signs[left]}{digit}"
            if in_held_out_part(prompt) == held_out:
                return SolvedExample(prompt, self._answer(left, digit))
            length = None

    def _reward(self, answer: str, solution: str) -> float:
        right = sum(ours == theirs for ours, theirs in zip(solution, answer, strict=False))
        return right / max(len(solution), len(answer))

    def _length(self, rng: random.Random) -> int:
        options = self._options
        drawn = options.median * math.exp(min(options.spread * rng.gauss(0, 1), math.log(MAX_LONGEST)))
        return max(1, min(options.longest, round(drawn)))

    def _answer(self, left: int, digit: int) -> str:
        items: list[str] = []
        while left > 0:
            left -= 1
            digit = (digit + left) % 10
            items.append(f"{self._signs[left]}{digit}")
        return "".join(items)


@functools.cache
def _signs(count: int) -> str:
    """The first letters of Unicode."""
    letters = (chr(code) for code in range(ord("A"), 0x10000) if chr(code).isalpha())
    return "".join(next(letters) for _ in range(count))
