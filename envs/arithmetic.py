"""Arithmetic: sums, differences and products of numbers with a fixed number of digits. Each episode has one turn.

The prompt is the bare problem, such as `12+34=`, or a question for chat models. The reward is 1.0 for the right number
and 0.0 for anything else. `envs.generated` describes how problems are divided into training and held-out ones, which
are for evaluation only.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from envs.generated import OneTurn, in_held_out_part
from flash.environment import SolvedExample
from flash.errors import ConfigError
from flash.types import Message, Observation

OPERATORS: Final[dict[str, Callable[[int, int], int]]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
"""Operators that the option `operators` may name."""

QUESTION = "What is {}? Reply with only the number."
"""Prompt for a chat model, with a placeholder for the problem."""

NUMBER = re.compile(r"-?\d+")
"""Pattern of an integer in an answer."""

MAX_DIGITS = 18
"""Largest number of digits of an operand. Longer operands no longer test arithmetic."""


class ArithmeticOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Difficulty and form of the problems.

    Raises:
        ConfigError: an option is invalid. The message names it, what was expected and what was given.
    """

    digits: int = 2
    """Number of digits of both operands, without leading zeros."""
    operators: str = "+"
    """Operators to draw from, a subset of `+-*`."""
    template: Literal["plain", "chat"] = "plain"
    """Form of the prompt. `plain`: the bare problem, and the answer must be the number alone. `chat`: a question in a
    message, and the last number of the answer counts."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if not 1 <= self.digits <= MAX_DIGITS:
            raise ConfigError(f"digits must be a whole number from 1 to {MAX_DIGITS}, but is {self.digits!r}")
        drawn = set(self.operators)
        if not drawn or len(drawn) != len(self.operators) or not drawn <= OPERATORS.keys():
            known = "".join(OPERATORS)
            raise ConfigError(f"operators must be one or more of {known}, each once, but is {self.operators!r}")


class Arithmetic(OneTurn):
    """Environment of one arithmetic problem. The rollout node makes one object for each episode."""

    def __init__(self, options: ArithmeticOptions) -> None:
        self._low = 10 ** (options.digits - 1) if options.digits > 1 else 0
        """Smallest operand."""
        self._high = 10**options.digits
        """Upper bound of the operands, which no operand reaches."""
        self._operators = options.operators
        """Operators to draw from, as one text."""
        self._chat = options.template == "chat"
        """True if problems are questions for a chat model."""

    def alphabet(self) -> str:
        """Return the digits, the equals sign and the operators. A negative answer starts with the minus operator."""
        return "0123456789=" + self._operators

    def _draw(self, rng: random.Random, held_out: bool) -> SolvedExample:
        """Draw problems until one is on the training or the held-out side."""
        while True:
            left, right = rng.randrange(self._low, self._high), rng.randrange(self._low, self._high)
            symbol = rng.choice(self._operators)
            prompt = f"{left}{symbol}{right}="
            if in_held_out_part(prompt) == held_out:
                return SolvedExample(prompt, str(OPERATORS[symbol](left, right)))

    def _shown(self, prompt: str) -> Observation:
        """Return a problem as text, or as a question in a message for chat models."""
        return [Message("user", as_question(prompt))] if self._chat else prompt

    def _reward(self, answer: str, solution: str) -> float:
        """Return 1 for the right number, else 0. With `chat`, text may surround the number."""
        number = last_number(answer) if self._chat else answer.strip()
        return float(number == solution)


def as_question(problem: str) -> str:
    """Return a problem as a question: `12-34=` becomes `What is 12 - 34? Reply with only the number.`"""
    return QUESTION.format(re.sub(r"\D", r" \g<0> ", problem.rstrip("=")))


def last_number(answer: str) -> str | None:
    """Return the last integer of an answer, without thousands separators; None if there is none.

    A minus between two numbers is an operator and no sign: the last integer of `5-3` is 3.
    """
    numbers = NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}\b)|(?<=\d)\s*-(?=\s*\d)", _apart, answer))
    return numbers[-1] if numbers else None


def _apart(sign: re.Match[str]) -> str:
    """Return the replacement of a matched sign: nothing for a thousands separator, a blank for a minus operator."""
    return "" if sign.group().endswith(",") else " "
