"""Generated programming problems: write a program for a linear function of which three values are given.

The prompt `00=3 10=5 01=4:` asks for a program that reads x and y and prints f(x,y), where f(0,0) is 3, f(1,0) is 5 and
f(0,1) is 4. Any program that prints 2x+y+3 is right. The tests use other, larger inputs. `envs.generated` describes how
problems are divided into training and held-out ones.
"""

from __future__ import annotations

import random

import msgspec

from envs.generated import in_held_out_part
from envs.judging.options import SuiteCase
from flash.environment import SolvedExample
from flash.errors import ConfigError

PROGRAMS = {"bash": "read x y;echo $(({}))", "python": "x,y=map(int,input().split());print({})"}
"""For each language, a right program with a placeholder for the expression."""

MOST = 99
"""Largest value of x and y in tests."""


class Linear(msgspec.Struct, frozen=True):
    """The function x·X + y·Y + one, which a program must compute."""

    x: int
    y: int
    one: int

    @property
    def prompt(self) -> str:
        """Prompt with three values of the function: `00=3 10=5 01=4:`."""
        return f"00={self.one} 10={self.x + self.one} 01={self.y + self.one}:"

    def solved(self, language: str) -> SolvedExample:
        """Return the prompt with a right program."""
        return SolvedExample(self.prompt, PROGRAMS[language].format(f"{self.x}*x+{self.y}*y+{self.one}"))

    def cases(self, count: int, rng: random.Random) -> list[SuiteCase]:
        """Draw hidden tests: inputs with their outputs."""
        drawn = [(rng.randint(2, MOST), rng.randint(2, MOST)) for _ in range(count)]
        return [SuiteCase(stdin=f"{x} {y}\n", stdout=str(self.x * x + self.y * y + self.one)) for x, y in drawn]


def check_linear(language: str, largest: int, tests: int) -> None:
    """Check the options of generated problems.

    Raises:
        ConfigError: an option is out of range. The message names it.
    """
    if language not in PROGRAMS:
        raise ConfigError(f"problems are made for {' and '.join(PROGRAMS)}, not for {language!r}; give a `path`")
    if not 1 <= largest <= 999:
        raise ConfigError(f"largest must be a whole number from 1 to 999, but is {largest!r}")
    if not 1 <= tests <= 100:
        raise ConfigError(f"tests must be a whole number from 1 to 100, but is {tests!r}")


def draw_linear(rng: random.Random, largest: int, *, held_out: bool) -> Linear:
    """Draw a training or a held-out problem with coefficients from 0 to `largest`."""
    while True:
        problem = Linear(*(rng.randint(0, largest) for _ in range(3)))
        if in_held_out_part(problem.prompt) == held_out:
            return problem
