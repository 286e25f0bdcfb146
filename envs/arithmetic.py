"""Arithmetic: sums, differences and products of numbers with a fixed count of digits, one turn each.

The prompt is the bare problem, `12+34=`; the reward is 1.0 for exactly the right number and 0.0 for anything else.
The problems themselves, not only the seeds, are divided: a stable hash of the prompt puts about one in ten on the
held-out side, in every process and every run.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable
from typing import Final

import msgspec

from flash.environment import Info, SolvedExample, StepResult, is_held_out
from flash.errors import ConfigError, EnvError

OPERATORS: Final[dict[str, Callable[[int, int], int]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}

HELD_OUT_ONE_IN = 10
"""One problem in so many is held out: about 800 of the two-digit sums, enough for an evaluation."""

MAX_DIGITS = 18
"""Longest operand; longer ones are no longer about arithmetic."""


class ArithmeticOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How difficult problems are.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """

    digits: int = 2
    """Of both operands, without leading zeros."""
    operators: str = "+"
    """Those to draw from, a subset of `+-*`."""

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= MAX_DIGITS:
            raise ConfigError(f"digits must be a whole number from 1 to {MAX_DIGITS}, but is {self.digits!r}")
        drawn = set(self.operators)
        if not drawn or len(drawn) != len(self.operators) or not drawn <= OPERATORS.keys():
            known = "".join(OPERATORS)
            raise ConfigError(f"operators must be one or more of {known}, each once, but is {self.operators!r}")


class Arithmetic:
    """One problem of a chosen difficulty."""

    def __init__(self, options: ArithmeticOptions) -> None:
        self._low = 10 ** (options.digits - 1) if options.digits > 1 else 0
        self._high = 10**options.digits
        self._operators = options.operators
        self._solution: str | None = None

    async def reset(self, seed: int) -> tuple[str, Info]:
        """Show the problem of this seed."""
        problem = self._draw(random.Random(seed), is_held_out(seed))
        self._solution = problem.answer
        return problem.prompt, {}

    async def step(self, action: str) -> StepResult:
        """Compare the answer, without surrounding white space, with the right number; the episode ends."""
        if self._solution is None:
            raise EnvError("step() was called before reset()")
        return "", float(action.strip() == self._solution), True, False, {}

    async def close(self) -> None:
        """Nothing to release."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """`count` training problems with their answers, drawn with replacement."""
        rng = random.Random(seed)
        return [self._draw(rng, held_out=False) for _ in range(count)]

    def alphabet(self) -> str:
        """Digits, the equals sign and the operators; a negative answer takes its sign from the minus operator."""
        return "0123456789=" + self._operators

    def _draw(self, rng: random.Random, held_out: bool) -> SolvedExample:
        while True:
            left, right = rng.randrange(self._low, self._high), rng.randrange(self._low, self._high)
            symbol = rng.choice(self._operators)
            prompt = f"{left}{symbol}{right}="
            if in_held_out_part(prompt) == held_out:
                return SolvedExample(prompt, str(OPERATORS[symbol](left, right)))


def in_held_out_part(prompt: str) -> bool:
    """Which side of the division a problem is on: the same in every process, for every seed."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0
