"""Two environments with the same kind of task: digits of which each follows from the digits before it.

`LaggedSums`: the prompt is a few digits, such as `4709`. The answer continues them. Each digit is the last digit of a
sum: the digit before it, plus the digit as many places back as the prompt is long. The answer to `4709` begins with
`3009`. The reward is 1.0 if the whole answer is right, else 0.0. All answers have the same length.

`CountedSums`: as in `envs.counting`, the answer recites an alphabet backwards from the sign in the prompt, so the
lengths of answers have a long tail. Each sign has a digit behind it, the last digit of the sum of the two digits before
it. The prompt `D12` asks for `C3B5A8`. The reward is that of `envs.counting`, the share of right characters.

`envs.generated` divides the problems into training ones and held-out ones, which are for evaluation only.
"""

from __future__ import annotations

import random

import msgspec

from envs.counting import Counting
from envs.generated import OneTurn, in_held_out_part
from flash.environment import SolvedExample


class LaggedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of prompts and answers."""

    lag: int = 4
    """Digits of the prompt. With fewer than 3 there are hardly any held-out problems."""
    length: int = 15
    """Digits of the answer, which has one token more, the end of text."""


class LaggedSums(OneTurn):
    """Environment with one problem: a few digits that the answer continues."""

    def __init__(self, options: LaggedOptions) -> None:
        self._lag = options.lag
        self._length = options.length

    def alphabet(self) -> str:
        """Return the ten digits; prompts and answers contain nothing else."""
        return "0123456789"

    def _draw(self, rng: random.Random, held_out: bool) -> SolvedExample:
        """Draw a problem of the training part, or of the held-out part, and solve it."""
        while True:
            digits = [rng.randrange(10) for _ in range(self._lag)]
            prompt = "".join(map(str, digits))
            if in_held_out_part(prompt) == held_out:
                break
        for _ in range(self._length):
            digits.append((digits[-1] + digits[-self._lag]) % 10)
        return SolvedExample(prompt, "".join(map(str, digits[self._lag :])))

    def _reward(self, answer: str, solution: str) -> float:
        """Return 1.0 if the whole answer is right, else 0.0."""
        return float(answer == solution)


class CountedSums(Counting):
    """Environment with one problem: a sign to count down from; the options are those of `Counting`."""

    def _draw(self, rng: random.Random, held_out: bool, length: int | None = None) -> SolvedExample:
        """Draw a problem of the training part, or of the held-out part, and solve it.

        `length` is the number of signs of the answer; None: it is drawn, too.
        """
        while True:
            left = length or self._length(rng)  # signs that are still to be recited
            before, last = rng.randrange(10), rng.randrange(10)
            prompt = f"{self._signs[left]}{before}{last}"
            if in_held_out_part(prompt) == held_out:
                break
        items: list[str] = []
        while left > 0:
            left -= 1
            before, last = last, (before + last) % 10
            items.append(f"{self._signs[left]}{last}")
        return SolvedExample(prompt, "".join(items))
