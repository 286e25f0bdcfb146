"""Countdown: combine given numbers with + - * / to reach a target. Each number is used at most once. One turn.

The prompt `3 7 8 12 47:` asks for an expression such as `7*8-12+3`. The last line of the answer is judged, or the last
line inside its last `<answer>…</answer>`; the text before it counts as thinking. A parser evaluates the expression in
rational arithmetic, and no part of an answer is executed as code. The reward is 1 if the value is exactly the target
and 0 for anything else; the note says what is wrong.

Problems are divided into training and held-out ones, which are for evaluation only, by their target and their numbers
in any order.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from fractions import Fraction
from typing import Final, Literal

import msgspec

from envs.generated import in_held_out_part
from flash.environment import HELD_OUT, Info, SolvedExample, StepResult, is_held_out
from flash.errors import ConfigError, EnvError
from flash.types import Message, Observation

LEVELS: Final = {"+": 1, "-": 1, "*": 2, "/": 2}
"""Precedence of each operator, its *level*; a higher one binds more tightly."""

SPELLED: Final = str.maketrans("×·÷−–[]{}", "**/--()()")
"""Alternative characters that people and models write for operators and parentheses."""

MOST_CHARACTERS = 200
"""Largest number of characters of an expression. This limit also bounds how deep parentheses nest."""

MOST_NUMBERS, LARGEST_NUMBER, HIGHEST = 8, 9999, 1_000_000
"""Largest values of the options `numbers`, `largest` and `highest`."""

MOST_DRAWS = 20_000
"""Number of problems that are drawn before the options are refused as too narrow."""


class CountdownOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Difficulty and form of the problems.

    Raises:
        ConfigError: an option is invalid. The message names it, what was expected and what was given.
    """

    numbers: int = 4
    """Number of given numbers."""
    largest: int = 25
    """Upper bound of the given numbers, which are drawn from 1 to `largest`."""
    lowest: int = 10
    """Smallest target."""
    highest: int = 100
    """Largest target."""
    operators: str = "+-*/"
    """Operators of the known solution, a subset of `+-*/`. An answer may use all four."""
    template: Literal["plain", "chat"] = "plain"
    """Form of the prompt. `plain`: `3 7 8 12 47:`, for tiny and base models. `chat`: a message in words."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if not 2 <= self.numbers <= MOST_NUMBERS:
            raise ConfigError(f"numbers must be a whole number from 2 to {MOST_NUMBERS}, but is {self.numbers!r}")
        if not 3 <= self.largest <= LARGEST_NUMBER:
            raise ConfigError(f"largest must be a whole number from 3 to {LARGEST_NUMBER}, but is {self.largest!r}")
        if not 1 <= self.lowest <= self.highest <= HIGHEST:
            raise ConfigError(
                f"lowest = {self.lowest!r} and highest = {self.highest!r} must be whole numbers in this order, from 1 "
                f"to {HIGHEST}"
            )
        drawn = set(self.operators)
        if not drawn or len(drawn) != len(self.operators) or not drawn <= LEVELS.keys():
            raise ConfigError(f"operators must be one or more of {''.join(LEVELS)}, each once, not {self.operators!r}")


class CountdownProblem(msgspec.Struct, frozen=True):
    """A problem and its known solution."""

    numbers: tuple[int, ...]
    """Given numbers, in the order of the prompt."""
    target: int
    """Number to reach."""
    steps: tuple[str, ...]
    """Steps of the solution, such as `7*8=56`."""
    expression: str
    """All steps as one expression."""

    @property
    def prompt(self) -> str:
        """The problem in the plain form."""
        return f"{' '.join(map(str, self.numbers))} {self.target}:"

    @property
    def key(self) -> str:
        """Text by which problems are divided: the sorted numbers and the target."""
        return f"{sorted(self.numbers)} {self.target}"

    @property
    def solution(self) -> str:
        """The steps, one per line, and then the expression."""
        return "\n".join([*self.steps, self.expression])


class Countdown:
    """Environment of one problem. The rollout node makes one object for each episode."""

    def __init__(self, options: CountdownOptions) -> None:
        self._options = options
        self._problem: CountdownProblem | None = None
        """Problem of the episode; None before `reset`."""

    @classmethod
    def check(cls, options: CountdownOptions) -> None:
        """Draw one training and one held-out problem, so that most of the too narrow options are refused before the
        run.

        The process that reads the configuration calls this.

        Raises:
            ConfigError: the numbers hardly ever reach a target in the range.
        """
        for seed in (0, HELD_OUT):
            draw(random.Random(seed), options, held_out=is_held_out(seed))

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the problem of this seed.

        Raises:
            ConfigError: no problem fits the options. `check` draws for two seeds only, so another seed may fail.
        """
        self._problem = draw(random.Random(seed), self._options, held_out=is_held_out(seed))
        text = self._text(self._problem)
        # Messages pass through the model's chat template; a plain text does not.
        return text if self._options.template == "plain" else [Message("user", text)], {}

    async def step(self, action: str) -> StepResult:
        """Judge the expression; the episode ends. Returns (observation, reward, terminated, truncated, info).

        Raises EnvError if `reset` was not called before.
        """
        if self._problem is None:
            raise EnvError("step() was called before reset()")
        wrong = what_is_wrong(action, self._problem.numbers, self._problem.target)
        return "", float(not wrong), True, False, {"note": wrong}

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` training problems with their solutions, step by step.

        The run teaches a tiny model with them before the training.
        """
        rng = random.Random(seed)
        problems = [draw(rng, self._options, held_out=False) for _ in range(count)]
        return [SolvedExample(self._text(problem), problem.solution) for problem in problems]

    def alphabet(self) -> str:
        """Return the characters of prompts and solutions, which become the tiny model's vocabulary."""
        signs = "0123456789 :\n=()+-*/"
        told = _chat_text((1, 2), 3) if self._options.template == "chat" else ""
        return "".join(dict.fromkeys(signs + told))

    def _text(self, problem: CountdownProblem) -> str:
        """Return the prompt of a problem in the form of the option `template`."""
        if self._options.template == "plain":
            return problem.prompt
        return _chat_text(problem.numbers, problem.target)


def _chat_text(numbers: tuple[int, ...], target: int) -> str:
    """Return the text of a problem for a chat: the option `template` is `chat`."""
    return (
        f"Reach {target} with the numbers {', '.join(map(str, numbers))}: use each at most once, with + - * / and "
        "parentheses. Think as long as you like; then write the expression alone on the last line.\n"
    )


def draw(rng: random.Random, options: CountdownOptions, *, held_out: bool) -> CountdownProblem:
    """Draw a training problem, or a held-out one if `held_out` is True. The same state of `rng` gives the same problem.

    Raises:
        ConfigError: no problem was found in `MOST_DRAWS` attempts.
    """
    for _ in range(MOST_DRAWS):
        problem = _combined(rng, [rng.randint(1, options.largest) for _ in range(options.numbers)], options)
        if problem is not None and in_held_out_part(problem.key) == held_out:
            return problem
    raise ConfigError(
        f"{options.numbers} numbers from 1 to {options.largest} hardly ever reach one from {options.lowest} to "
        f"{options.highest} with {options.operators}: give another range"
    )


def _combined(rng: random.Random, numbers: list[int], options: CountdownOptions) -> CountdownProblem | None:
    """Combine two random numbers at a time until one is left, which is the target of the problem. `draw` calls it.

    Returns None if a result is not a positive integer, or if the target is out of range or is one of the given numbers.
    """
    # For each number that is left: its value, its expression, and the level of the operator that joins the expression.
    # Level 3 is a bare number, which never needs parentheses.
    left = [(number, str(number), 3) for number in numbers]
    steps: list[str] = []
    while len(left) > 1:
        rng.shuffle(left)
        (first, said, level), (second, also_said, also_level) = left.pop(), left.pop()
        sign = rng.choice(options.operators)
        value = _value(sign, Fraction(first), Fraction(second))
        if value is None or value.denominator != 1 or value < 1:
            return None
        here = LEVELS[sign]
        before = f"({said})" if level < here else said
        after = f"({also_said})" if also_level < here or (also_level == here and sign in "-/") else also_said
        steps.append(f"{first}{sign}{second}={value}")
        left.append((int(value), f"{before}{sign}{after}", here))
    ((target, expression, _),) = left
    if not options.lowest <= target <= options.highest or target in numbers:
        return None
    return CountdownProblem(tuple(numbers), target, tuple(steps), expression)


def _value(sign: str, left: Fraction, right: Fraction) -> Fraction | None:
    """Apply an operator, a key of `LEVELS`, to two numbers. Returns None for a division by 0."""
    if sign == "/":
        return left / right if right else None
    return left + right if sign == "+" else left - right if sign == "-" else left * right


# -- judging ---------------------------------------------------------------------------------------------------------


def what_is_wrong(answer: str, numbers: tuple[int, ...], target: int) -> str:
    """Return the reason why an answer does not reach the target; empty if it does. `step` calls it.

    `numbers` are the given numbers. The expression may be followed by `=` and the target.
    """
    said = _last_line(answer)
    expression, equals, result = said.partition("=")
    if equals and result.strip() != str(target):
        return f"{said!r} does not end in {target}"
    try:
        value, used = _Parser(expression).parse()
    except ValueError as error:
        return f"{said!r}: {error}"
    excess = Counter(used) - Counter(numbers)
    if excess:
        return f"{said!r} uses {', '.join(map(str, excess))} more often than it is given"
    return "" if value == target else f"{said!r} is {value}, not {target}"


def _last_line(answer: str) -> str:
    """Return the last line of an answer that is not blank, or of its last `<answer>…</answer>`; empty if there is none.

    An `<answer>` that is not closed takes the rest of the text. Operators and brackets in the spellings of `SPELLED`
    are replaced by plain ones. One character more than `MOST_CHARACTERS` is kept, so that the parser refuses a longer
    line.
    """
    marked = answer.rpartition("<answer>")[2].partition("</answer>")[0] if "<answer>" in answer else answer
    return marked.strip().rpartition("\n")[2].translate(SPELLED).strip()[: MOST_CHARACTERS + 1]


class _Parser:
    """Parser of one expression. Make it, then call `parse` once.

    Recursive descent over `sum = product (± product)*`, `product = atom (×÷ atom)*`, `atom = number | ( sum )`.
    """

    def __init__(self, text: str) -> None:
        """Split a text into tokens. Raises ValueError if it is too long or has other characters."""
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"it is longer than {MOST_CHARACTERS} characters")
        strange = re.search(r"[^0-9+\-*/()\s]", text)
        if strange:
            raise ValueError(f"{strange.group()!r} belongs to no expression")
        self._tokens = re.findall(r"[0-9]+|\S", text)
        """Numbers, operators and parentheses that are not parsed yet."""
        self._used: list[int] = []
        """Numbers of the expression, in order."""

    def parse(self) -> tuple[Fraction, list[int]]:
        """Return the value of the expression, and the numbers that it uses.

        Raises:
            ValueError: the text is not an expression, or it divides by 0.
        """
        self._tokens.reverse()  # So that `pop` takes the next token.
        value = self._joined(1)
        if self._tokens:
            raise ValueError(f"{self._tokens[-1]!r} is not expected there")
        return value, self._used

    def _joined(self, level: int) -> Fraction:
        """Parse operands joined by operators of one level (1 for sums, 2 for products), and return their value.

        Raises ValueError if the text is not an expression, or divides by 0.
        """
        value = self._joined(2) if level == 1 else self._atom()
        while self._tokens and LEVELS.get(self._tokens[-1]) == level:
            sign = self._tokens.pop()
            joined = _value(sign, value, self._joined(2) if level == 1 else self._atom())
            if joined is None:
                raise ValueError("it divides by 0")
            value = joined
        return value

    def _atom(self) -> Fraction:
        """Parse a number, or a sum in parentheses, and return its value. Raises ValueError at anything else."""
        token = self._tokens.pop() if self._tokens else "the end"
        if token == "(":
            value = self._joined(1)
            if not self._tokens or self._tokens.pop() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        if not token.isdecimal():  # also an operator: numbers have no sign
            raise ValueError(f"{token} stands where a number is expected")
        self._used.append(int(token))
        return Fraction(self._used[-1])
