"""Counting: list an alphabet backwards from a given letter, each letter followed by a running digit. One turn.

The length of the answer follows from the prompt and has a long tail, like the lengths of reasoning: `D4` asks for
`C6B7A7`, and a prompt with a later letter asks for hundreds of letters. Each item follows from the previous one, so
that a small model can learn long answers too: the letter is the preceding one of the alphabet, and the digit is the
previous digit plus the number of letters that are left, modulo 10.

The reward is the number of characters that are right at their position, divided by the length of the longer of answer
and solution. `envs.generated` describes how problems are divided into training and held-out ones, which are for
evaluation only.
"""

from __future__ import annotations

import functools
import math
import random

import msgspec

from envs.generated import OneTurn, in_held_out_part
from flash.environment import HELD_OUT, SolvedExample, is_held_out
from flash.errors import ConfigError

MAX_LONGEST = 4000
"""Upper bound of `longest`, in letters. Each letter is one token of the tiny model's vocabulary."""

MOST_DRAWS = 2000
"""Most problems drawn to get one of the side that is needed. All problems of a single length may be on one side."""


class CountingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of the answers.

    Raises:
        ConfigError: an option is invalid. The message names it, what was expected and what was given.
    """

    median: int = 12
    """Median length of an answer, in letters; each letter takes two characters."""
    longest: int = 240
    """Length of the longest answer, in letters."""
    spread: float = 1.0
    """Standard deviation of the logarithm of the length, before the length is cut at `longest`."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        median, longest = self.median, self.longest
        if not 2 <= longest <= MAX_LONGEST:
            raise ConfigError(f"longest must be a whole number from 2 to {MAX_LONGEST}, but is {longest!r}")
        if not 1 <= median <= longest:
            raise ConfigError(f"median must be a whole number from 1 to longest = {longest}, but is {median!r}")
        if not 0 <= self.spread < math.inf:
            raise ConfigError(f"spread must be a number from 0, but is {self.spread!r}")


class Counting(OneTurn):
    """Environment of one problem: a letter to count down from. The rollout node makes one object for each episode."""

    def __init__(self, options: CountingOptions) -> None:
        self._options = options
        self._signs = _signs(options.longest + 1)
        """Alphabet of the problems, in order."""

    @classmethod
    def check(cls, options: CountingOptions) -> None:
        """Draw a training and a held-out problem, so that too narrow lengths are refused before the run.

        The process that reads the configuration calls this.

        Raises:
            ConfigError: hardly any problem is on one of the two sides.
        """
        for seed in (0, HELD_OUT):
            cls(options)._draw(random.Random(seed), is_held_out(seed))

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` training problems with answers to teach a small model, half with uniformly drawn lengths."""
        # Usual lengths alone would hardly ever show the last letters of the alphabet.
        rng = random.Random(seed)
        lengths = [None if index % 2 else rng.randint(1, self._options.longest) for index in range(count)]
        return [self._draw(rng, held_out=False, length=length) for length in lengths]

    def alphabet(self) -> str:
        """Return the letters and the digits. They become a tiny model's vocabulary."""
        return self._signs + "0123456789"

    def _draw(self, rng: random.Random, held_out: bool, length: int | None = None) -> SolvedExample:
        """Draw a training or a held-out problem. A given length is tried once, then lengths are drawn.

        Raises ConfigError if none of `MOST_DRAWS` problems is on the right side.
        """
        for _ in range(MOST_DRAWS):
            left = length or self._length(rng)
            digit = rng.randrange(10)
            prompt = f"{self._signs[left]}{digit}"
            if in_held_out_part(prompt) == held_out:
                return SolvedExample(prompt, self._answer(left, digit))
            length = None
        raise ConfigError(
            f"none of {MOST_DRAWS} problems that were drawn is a {'held-out' if held_out else 'training'} one: "
            "give another median, or a larger spread"
        )

    def _reward(self, answer: str, solution: str) -> float:
        """Return the share of the longer text, answer or solution, that is right at its position."""
        right = sum(ours == theirs for ours, theirs in zip(solution, answer, strict=False))
        return right / max(len(solution), len(answer))

    def _length(self, rng: random.Random) -> int:
        """Draw the length of an answer, in letters, from a log-normal distribution that is cut at 1 and `longest`."""
        options = self._options
        # The exponent is bounded before `exp`, which would overflow for a large spread.
        drawn = options.median * math.exp(min(options.spread * rng.gauss(0, 1), math.log(MAX_LONGEST)))
        return max(1, min(options.longest, round(drawn)))

    def _answer(self, left: int, digit: int) -> str:
        """Return the right answer to a prompt with this digit; the answer has `left` letters."""
        items: list[str] = []
        while left > 0:
            left -= 1
            digit = (digit + left) % 10
            items.append(f"{self._signs[left]}{digit}")
        return "".join(items)


@functools.cache
def _signs(count: int) -> str:
    """Return the first `count` letters of Unicode, from `A` on: `A` to `Z`, `a` to `z`, and then other alphabets."""
    letters = (chr(code) for code in range(ord("A"), 0x10000) if chr(code).isalpha())
    return "".join(next(letters) for _ in range(count))
