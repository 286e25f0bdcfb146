"""Certify the graders of Reasoning Gym. `python -m envs.grader_report [FAMILY…]` prints how each grades bad answers.

A family is a kind of problem of the package, and its grader is the function that scores answers. `envs.reasoning_gym`
uses a family only if its grader is certified, because the reward of training must not be won by a trick.

A family is refused in these cases: its grader rejects the answer that belongs to a problem; its grader gives full marks
to an empty, garbled, huge, hedging or echoed answer; its grader raises an error or does not end on such an answer; its
grader executes an answer as a program; its problems change from one call to the next. Certification searches for faults
and does not prove that there are none.

With `--write` instead of names, all families are certified, and the results replace the table that ships with Flash
(envs/grader_report.json).
"""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from enum import Enum, auto
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from envs.workers import TimeLimitError, in_worker, time_limit
from flash.errors import ConfigError, FlashError

PACKAGE = "reasoning-gym"
"""Name of the package, as pip knows it."""
TABLE = Path(__file__).with_suffix(".json")
"""File of the table that ships with Flash."""

PROBLEMS = 4
"""Number of problems of each family that are graded."""

GRADE_S = 5.0
"""Seconds that one grade may take."""

CERTIFY_S = 200.0
"""Seconds that the certification of one family may take."""

RAN: Final = "flash_answer_was_run"
"""Attribute of `builtins` that the program among the bad answers sets if it is executed."""

NOT_A_FAMILY = "composite"
"""Name of a family that only mixes other families."""


class Reaction(Enum):
    """Reaction of a grader to an answer."""

    FULL_MARKS = auto()
    """The grade is 1 or more."""
    PARTIAL_MARKS = auto()
    """The grade is between 0 and 1."""
    NO_MARKS = auto()
    """The grade is 0 or less."""
    ENDLESS = auto()
    """The grade took too long."""
    RAISED = auto()
    """The grader raised an error."""
    RAN = auto()
    """The grader executed the answer as a program."""


HARMLESS: Final = (Reaction.PARTIAL_MARKS, Reaction.NO_MARKS)
"""Acceptable reactions to a bad answer. Partial marks are acceptable because the environment does not count them."""

Entry = dict[str, Any]
"""A problem of the package, with its `question` and its `answer`."""

BAD_ANSWERS: Final[dict[str, Callable[[Entry], str]]] = {
    "an empty answer": lambda entry: "",
    "white space": lambda entry: " \n",
    "garbage": lambda entry: "xyzzy ### 17",
    "`None`": lambda entry: "None",
    "`yes`": lambda entry: "yes",
    "`1`": lambda entry: "1",
    "`nan`": lambda entry: "nan",
    "`inf`": lambda entry: "inf",
    "`[]`": lambda entry: "[]",
    "`{}`": lambda entry: "{}",
    "100 000 digits": lambda entry: "9" * 100_000,
    "100 000 parentheses": lambda entry: "(" * 100_000,
    "a power without end": lambda entry: "9**9**9**9",
    "the question": lambda entry: str(entry["question"]),
    "the answer among others": lambda entry: f"{entry['answer']} or not {entry['answer']} 0 1 2 3 yes no True False",
    "a program": lambda entry: f"__import__('builtins').__dict__.__setitem__({RAN!r}, True)",
}
"""Bad answers by their name in reports; each function makes the answer for a problem."""


class GraderReport(msgspec.Struct, frozen=True):
    """Result of testing the grader of one family."""

    family: str
    """Name of the family."""
    refused: list[str]
    """Reasons for which the grader is refused; empty if it is certified."""

    def sentence(self) -> str:
        """Return the refusal as a sentence for users."""
        return f"the grader of {self.family} is refused: {'; '.join(self.refused)}"


class Reports(msgspec.Struct, frozen=True):
    """The table of reports that ships with Flash."""

    version: str
    """Version of the package `reasoning-gym` whose graders were tested."""
    families: list[GraderReport]
    """Report of each family of the package."""


@functools.cache
def read_reports() -> Reports:
    """Return the table that ships with Flash. The first call reads it."""
    return msgspec.json.decode(TABLE.read_bytes(), type=Reports)


def library() -> Any:
    """Import the package. The import takes seconds and emits warnings, which are suppressed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("reasoning_gym")


def certify(
    family: str, settings: dict[str, Any], make: Callable[..., Any] | None = None, grade_s: float = GRADE_S
) -> GraderReport:
    """Test a family's grader with right and bad answers. Must run in a worker's main thread, as `time_limit` must.

    Args:
        family: name of the family.
        settings: settings of the family, which replace the defaults.
        make: function that makes the problems; None: the package's own.
        grade_s: seconds that one grade may take.

    Raises:
        ImportError: the package cannot be imported.
    """
    return GraderReport(family, _faults(make or library().create_dataset, family, settings, grade_s))


def _faults(make: Callable[..., Any], family: str, settings: dict[str, Any], grade_s: float) -> list[str]:
    """Return the faults of a family's grader as parts of a sentence, each with the names of the answers that show it.

    The list is empty if there are none. A family that makes no problems, or other ones each time, is not graded.
    """
    try:
        problems, again = (_problems(make, family, settings) for _ in range(2))
    except Exception as error:  # boundary to foreign code
        return [f"it makes no problems: {type(error).__name__}: {error}"[:200]]
    if [entry["question"] for _, entry in problems] != [entry["question"] for _, entry in again]:
        return ["its problems change from one call to the next"]
    faults: dict[str, dict[str, None]] = {}
    """Names of answers, in order and each once, by the grader's reaction to them."""
    for grader, entry in problems:
        reaction, text = _grade(grader, entry["answer"], entry, grade_s)
        if reaction is not Reaction.FULL_MARKS:
            faults.setdefault(text, {})["the answer that comes with a problem"] = None
        for name, make_bad_answer in BAD_ANSWERS.items():
            bad = make_bad_answer(entry)
            if same(bad, entry["answer"]):
                continue
            reaction, text = _grade(grader, bad, entry, grade_s)
            if reaction not in HARMLESS:
                faults.setdefault(text, {})[name] = None
    return [f"{text} on {', '.join(answers)}" for text, answers in faults.items()]


def _problems(make: Callable[..., Any], family: str, settings: dict[str, Any]) -> list[tuple[Any, Entry]]:
    """Return `PROBLEMS` different problems of a family: pairs of the data set that grades it, and the entry."""
    # The package draws problem `n` of a data set with the seed `seed + n`. Each data set has 64 problems, as those of
    # `envs.reasoning_gym`, so these data sets have no seed in common.
    made = [make(family, **settings, seed=64 * number, size=64) for number in range(PROBLEMS)]
    return [(grader, grader[number]) for number, grader in enumerate(made)]


def _grade(grader: Any, answer: object, entry: Entry, grade_s: float) -> tuple[Reaction, str]:
    """Return the grader's reaction to an answer, and its description as a part of a sentence.

    An answer that was executed counts as such, whatever the grader did afterwards: raise an error, hang, or give marks.
    """
    builtins.__dict__.pop(RAN, None)
    try:
        with time_limit(grade_s):
            marks = float(grader.score_answer(answer, entry))
    except TimeLimitError:
        reaction, text = Reaction.ENDLESS, f"does not end within {grade_s:g} s"
    except Exception as error:  # boundary to foreign code
        reaction, text = Reaction.RAISED, f"raises {type(error).__name__}"
    else:
        if marks >= 1:
            reaction, text = Reaction.FULL_MARKS, "gives full marks"
        elif marks > 0:
            reaction, text = Reaction.PARTIAL_MARKS, "gives less than full marks"
        else:
            reaction, text = Reaction.NO_MARKS, "gives nothing"
    if builtins.__dict__.pop(RAN, None):
        return Reaction.RAN, "runs it as a program"
    return reaction, text


def same(bad: str, answer: object) -> bool:
    """Return True if a bad answer happens to be the right one, so that full marks for it are no fault."""
    ours, theirs = bad.strip().casefold(), str(answer).strip().casefold()
    try:
        return ours == theirs or float(ours) == float(theirs)
    except ValueError:
        return False


async def certified(family: str, settings: dict[str, Any]) -> GraderReport:
    """Certify a family's grader in a worker process. A worker that dies or takes too long gives a refusal.

    `settings` are the settings of the family that replace the defaults.

    Raises:
        EnvError: the certification raised an error, for example because the package cannot be imported.
    """
    try:
        return await in_worker(CERTIFY_S, certify, family, settings)
    except TimeoutError:
        return GraderReport(family, [f"it was not done within {CERTIFY_S:g} s"])
    except anyio.BrokenWorkerProcess:
        return GraderReport(family, ["its process died"])


async def main(arguments: list[str]) -> None:
    """Certify the families named in `arguments`, or all of them, and print the results.

    If the only argument is `--write`, the results of all families replace the table that ships with Flash.

    Raises:
        ConfigError: an argument is no family, or `--write` was given together with names.
        EnvError: the package cannot be imported.
    """
    known = await in_worker(CERTIFY_S, families)  # in a worker, because the import takes seconds
    writes = "--write" in arguments
    names = [name for name in arguments if name != "--write"]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no family {unknown[0]!r}; expected --write, or any of {', '.join(known)}")
    if writes and names:
        raise ConfigError("--write makes the table of all families: give it without names")
    reports: list[GraderReport] = []
    for name in names or known:
        reports.append(await certified(name, {}))
        sys.stdout.write(f"{name}: {'; '.join(reports[-1].refused) or 'certified'}\n")
        sys.stdout.flush()
    refused = sum(bool(report.refused) for report in reports)
    sys.stdout.write(f"{len(reports)} families, {len(reports) - refused} certified, {refused} refused\n")
    if writes:
        table = msgspec.json.format(msgspec.json.encode(Reports(version(PACKAGE), reports)), indent=1)
        TABLE.write_bytes(table + b"\n")


def families() -> list[str]:
    """Return the names of all families of the package. Runs in a worker process."""
    library()
    return sorted(importlib.import_module("reasoning_gym.factory").DATASETS.keys() - {NOT_A_FAMILY})


if __name__ == "__main__":
    from envs import grader_report  # worker processes import the module by this name, not as `__main__`

    try:
        anyio.run(grader_report.main, sys.argv[1:])
    except FlashError as error:
        sys.exit(f"error: {error}")
