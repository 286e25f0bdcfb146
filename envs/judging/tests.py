"""Run the tests of a suite on one program in one clean sandbox, and form the verdict. `envs.judging.judge` calls it.

A suite is the list of tests of one problem. There are three kinds of tests:

- *Input and output*: the program gets an input, and its output is compared here, outside of the sandbox. So the program
  cannot find the expected output.
- *Calls*: a function of the program is called, and its result is compared here (`envs.judging.calls`).
- *Test programs*: code of the same language loads the program and checks it. The test passes if it reaches its end: its
  last line must be a random text drawn for the run, and the exit code 0. So neither an early exit nor a printed
  "passed" counts. But the test shares its process with the program, and a program written to deceive it passes: in
  Python, five lines can walk to the outermost frame and find the text among the constants of its code. So test programs
  are refused unless an environment or a verifier allows them.

Law: a verdict is about the program. A fault of a sandbox is an error of `flash.errors.SandboxError`. If a sandbox was
lost while a test ran, the program may be the cause; the error is then a `LostInTestError`. A program that had no CPU
until its time was over gets no verdict either.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import anyio.to_thread
import msgspec

from envs.judging.calls import printed_this, provided_names, question, returned_this
from envs.judging.options import COMPILE_FACTOR, MARK, JudgingLimits, Language, Suite, SuiteCase
from envs.judging.programs import Found, question_of
from envs.sandbox.api import MAX_TIMEOUT_S, Result
from envs.sandbox.sandbox import Sandbox
from flash.errors import SandboxFileError, SandboxLimitError, SandboxLostError, SandboxTimeoutError

Cause = Literal[
    "passed", "no program", "compile", "wrong output", "too much output", "crash", "timeout", "memory", "sandbox lost"
]
"""Result of the first test that failed; `passed` if none did. `compile`: the program did not compile. `sandbox lost`:
the program ended its sandboxes, see `envs.judging.judge`."""

PATIENCE = 30.0
"""Longest wall-clock time of a command, in multiples of its timeout, while other processes keep it from a CPU."""

LONG = 1 << 14
"""Largest output, in bytes, that is compared on the event loop. Longer ones are compared in a thread: a megabyte of
numbers takes a second."""

SHOWN = 500
"""Number of characters of a program's output in a verdict."""


class LostInTestError(SandboxLostError):
    """Error: a sandbox was lost while a test ran. The program may be the cause, which `Judge.try_in` decides."""

    def __init__(self, message: str, passed: int) -> None:
        super().__init__(message)
        self.passed = passed
        """Number of tests that had passed before."""


class CaseOutcome(msgspec.Struct, frozen=True):
    """Result of one test."""

    cause: Cause
    """Reason of the result: `passed`, or the kind of the failure."""
    detail: str = ""
    """Output or error of the program."""
    seconds: float = 0.0
    """Duration without the time in which the program was kept from a CPU."""

    @property
    def passed(self) -> bool:
        """True if the program passed the test."""
        return self.cause == "passed"


class SuiteVerdict(msgspec.Struct, frozen=True):
    """Result of a program in a suite."""

    passed: int
    """Number of tests that passed."""
    total: int
    """Number of tests, also those that did not run."""
    cause: Cause
    """Result of the first test that failed."""
    detail: str = ""
    """Output or error of the first test that failed, for users."""

    @property
    def share(self) -> float:
        """Share of the tests that passed."""
        return self.passed / self.total

    def metrics(self) -> dict[str, float]:
        """Return the share of passed tests, and for each cause of failure 1.0 if it is the suite's, else 0.0."""
        ways = (cause for cause in get_args(Cause) if cause != "passed")
        return {"tests_passed": self.share} | {cause.replace(" ", "_"): float(cause == self.cause) for cause in ways}

    def note(self) -> str:
        """Return the cause and the detail as one text."""
        return f"{self.cause}: {self.detail}" if self.detail else self.cause


async def choose_program(
    sandbox: Sandbox, found: Found, language: Language, suite: Suite, limits: JudgingLimits
) -> str:
    """Return the program to grade, chosen from the blocks of an answer; empty if there is none.

    Unless the first text is surely the program, the language's chooser decides in the sandbox, before `run_tests`. It
    may also repair a text that was typeset or indented, or cut a program out of prose. If the chooser fails, the first
    text is returned.

    `found`: blocks of the answer. `suite`: tests, by which the chooser ranks the texts. `limits.timeout`: seconds that
    the chooser may take.

    Raises:
        SandboxError: the sandbox failed.
    """
    if not found.blocks:
        return ""
    first = found.blocks[0][0]
    if found.certain or language.choose is None:
        return first
    calls = sorted({case.call for case in suite.tests if case.call is not None})
    prints = any(case.stdout for case in suite.tests)
    reads = any(case.stdin for case in suite.tests)
    asked = question_of(found, calls, provided_names() if calls else [], prints=prints, reads=reads)
    result = await run_fairly(sandbox, language.choose, limits.timeout, asked)
    if not result.ok or result.stdout_truncated:
        return first  # the chooser failed on these texts or ran out of time, which is no fault of the sandbox
    # msgspec would refuse a lone surrogate, which an answer may contain.
    return json.loads(result.stdout)


async def run_tests(
    sandbox: Sandbox, program: str, language: Language, suite: Suite, limits: JudgingLimits, *, every: bool
) -> SuiteVerdict:
    """Write a program into a clean sandbox, compile it, run the tests, and return the verdict.

    With `every`, all tests run; otherwise none after the first that fails.

    Raises:
        SandboxError: the sandbox failed.
    """
    total = len(suite.tests)
    if not program.strip():
        return SuiteVerdict(0, total, "no program")
    # Read-only, so that the program does not overwrite itself by mistake. The verdict does not depend on it, because
    # nothing in the sandbox decides about a test.
    await sandbox.write(language.file, program.encode("utf-8", "replace") + b"\n", mode=0o444)
    if language.compile is not None:
        built = await run_fairly(sandbox, language.compile, COMPILE_FACTOR * limits.timeout)
        if not built.ok:
            return SuiteVerdict(0, total, "compile", _shown(built.stderr or built.stdout))
    outcomes = await run_cases(sandbox, language, suite.tests, limits, every=every)
    return verdict_of(outcomes, total)


async def run_cases(
    sandbox: Sandbox, language: Language, cases: Sequence[SuiteCase], limits: JudgingLimits, *, every: bool
) -> list[CaseOutcome]:
    """Run tests in order on the program in the sandbox, until the time is used up or, without `every`, one fails.

    Returns one outcome for each test that ran, and one with the cause `timeout` for the first test for which nothing of
    the `limits.total` seconds was left.

    Raises:
        LostInTestError: the sandbox was lost while a test ran.
        SandboxError: the sandbox failed.
    """
    outcomes: list[CaseOutcome] = []
    used = 0.0
    for case in cases:
        left = limits.total - used
        if left <= 0:
            outcomes.append(CaseOutcome("timeout"))
            break
        try:
            outcome = await _run_test(sandbox, language, case, min(limits.timeout, left))
        except (SandboxLimitError, SandboxFileError) as error:
            if not outcomes:
                raise
            # The sandbox could run an earlier test, so this program has used up its processes or its disk.
            outcome = CaseOutcome("crash", str(error))
        except SandboxLostError as error:
            raise LostInTestError(str(error), sum(one.passed for one in outcomes)) from error
        outcomes.append(outcome)
        used += outcome.seconds
        if not (every or outcome.passed):
            break
    return outcomes


def verdict_of(outcomes: Sequence[CaseOutcome], total: int) -> SuiteVerdict:
    """Combine the outcomes of tests into one verdict. Tests of the `total` that did not run count as failed."""
    first = next((one for one in outcomes if not one.passed), CaseOutcome("passed"))
    return SuiteVerdict(sum(one.passed for one in outcomes), total, first.cause, first.detail)


async def _run_test(sandbox: Sandbox, language: Language, case: SuiteCase, timeout: float) -> CaseOutcome:
    """Run one test in the sandbox for at most `timeout` seconds, and compare its result here.

    `check_suite` has made sure that the language has commands for calls and test programs if the suite has any. Raises
    the errors of `run_fairly`.
    """
    if case.program is not None:
        assert language.test is not None
        mark = secrets.token_hex(16)
        source = f"{case.program}\n{language.test_end.replace(MARK, mark)}\n"
        result = await run_fairly(sandbox, language.test, timeout, source.encode("utf-8", "replace"))
        right = result.stdout.rstrip().rpartition(b"\n")[2] == mark.encode()
    elif case.call is not None:
        assert language.call is not None
        result = await run_fairly(sandbox, language.call, timeout, question(case.call, case.args))
        right = returned_this(result.stdout, case.returns)
    else:
        result = await run_fairly(sandbox, language.run, timeout, case.stdin.encode("utf-8", "replace"))
        expected = case.stdout or ""
        if len(result.stdout) > LONG:
            right = await anyio.to_thread.run_sync(printed_this, result.stdout, expected, abandon_on_cancel=True)
        else:
            right = printed_this(result.stdout, expected)
    return CaseOutcome(*_cause(result, right), result.wall_s - result.waited_s)


async def run_fairly(
    sandbox: Sandbox,
    command: Sequence[str],
    timeout: float,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
) -> Result:
    """Run a command for `timeout` seconds, without the time in which other processes kept it from a CPU.

    `stdin` is its input, and `env` has variables in addition to the sandbox's own.

    Raises:
        SandboxTimeoutError: the command was killed before it had used that time.
        SandboxError: the sandbox failed.
    """
    patience = min(PATIENCE * timeout, MAX_TIMEOUT_S)  # a sandbox refuses a longer time
    result = await sandbox.run(command, timeout=timeout, patience=patience, stdin=stdin, env=env)
    # It was killed after `patience` seconds on the clock, and not after `timeout` seconds of its own.
    if result.timed_out and result.waited_s > patience - timeout:
        raise SandboxTimeoutError(
            f"of {result.wall_s:.1f} s a program waited {result.waited_s:.1f} s for a CPU: this machine is too busy to "
            "judge it"
        )
    return result


def _cause(result: Result, right: bool) -> tuple[Cause, str]:
    """Return the first two fields of a `CaseOutcome`: cause and detail. `right`: the output is the expected one.

    A kind of failure hides the later ones: a program that crashes after the right output has crashed.
    """
    if result.timed_out:
        return "timeout", f"after {result.wall_s - result.waited_s:.1f} s"
    if result.oom_killed:
        return "memory", ""
    if not result.ok:
        ending = result.signal or f"exit code {result.exit_code}"
        return "crash", f"{ending}: {_shown(result.stderr or result.stdout)}"
    if result.stdout_truncated:
        return "too much output", ""
    return ("passed", "") if right else ("wrong output", _shown(result.stdout))


def _shown(output: bytes) -> str:
    """Return the beginning of a program's output as text, for a verdict."""
    text = output.decode("utf-8", "replace").strip()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
