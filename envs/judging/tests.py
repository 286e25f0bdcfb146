"""The tests of a suite, run on one program in one clean sandbox, and the verdict.

Three kinds of tests. *Input and output*: the program runs with an input, and what it printed is compared here, outside
of the sandbox, so that the expected output is never where the program could find it. *Calls*: the same with a function
of the program and what it returned (`envs.judging.calls`). *Test programs*: code of the same language that loads the
program and checks it. They pass when they reach their end: a text drawn for each run must be their last line, and the
exit code 0; so neither an early exit nor a printed "passed" counts. But such a test shares its process with the
program, and a program written to deceive it passes: in Python, five lines that walk to the outermost frame find that
text among its code's constants. So they are refused unless an environment or a verifier allows them.

Law: a verdict is about the program. Whatever goes wrong with a sandbox is an error of `flash.errors.SandboxError`; one
that was lost while a test ran may be the program's doing, and its error says so. A program that was kept from a CPU
until its time was over has no verdict either.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal, get_args

import anyio.to_thread
import msgspec

from envs.judging.calls import printed_this, provided_names, question, returned_this
from envs.judging.options import MARK, JudgingLimits, Language, Suite, SuiteCase
from envs.judging.programs import Found, question_of
from envs.sandbox.api import Result
from envs.sandbox.sandbox import Sandbox
from flash.errors import SandboxFileError, SandboxLimitError, SandboxLostError, SandboxTimeoutError

Cause = Literal[
    "passed", "no program", "compile", "wrong output", "too much output", "crash", "timeout", "memory", "sandbox lost"
]
"""How the first test that failed did; `compile`: there was nothing to test; `sandbox lost`: see the judge."""

PATIENCE = 30.0
"""Times its timeout that a command may take on the clock, as long as other processes keep it from a CPU."""

LONG = 1 << 14
"""Bytes of output that are compared on the event loop; a megabyte of numbers takes a second, and goes to a thread."""

SHOWN = 500
"""Characters of a program's output in a verdict."""


class LostInTestError(SandboxLostError):
    """A sandbox was lost while a test ran, after `passed` others had passed."""

    def __init__(self, message: str, passed: int) -> None:
        super().__init__(message)
        self.passed = passed


class CaseOutcome(msgspec.Struct, frozen=True):
    """How one test ended."""

    cause: Cause
    detail: str = ""
    """What it showed."""
    seconds: float = 0.0
    """Time that it took, without the time in which it was kept from a CPU."""

    @property
    def passed(self) -> bool:
        return self.cause == "passed"


class SuiteVerdict(msgspec.Struct, frozen=True):
    """How a program did in a suite."""

    passed: int
    total: int
    cause: Cause
    detail: str = ""
    """What the first test that failed saw, for people."""

    @property
    def share(self) -> float:
        """Of the tests, those that passed."""
        return self.passed / self.total

    def metrics(self) -> dict[str, float]:
        """The share, and for each way to fail whether it was the one."""
        ways = (cause for cause in get_args(Cause) if cause != "passed")
        return {"tests_passed": self.share} | {cause.replace(" ", "_"): float(cause == self.cause) for cause in ways}

    def note(self) -> str:
        """One text of cause and detail."""
        return f"{self.cause}: {self.detail}" if self.detail else self.cause


async def choose_program(
    sandbox: Sandbox, found: Found, language: Language, suite: Suite, limits: JudgingLimits
) -> str:
    """Return the program to grade among the blocks of an answer; empty if there is none.

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
    result = await _run(sandbox, language.choose, limits.timeout, asked)
    if not result.ok or result.stdout_truncated:
        return first  # The parser did not come to an end with these texts.
    return msgspec.json.decode(result.stdout, type=str)


async def run_tests(
    sandbox: Sandbox, program: str, language: Language, suite: Suite, limits: JudgingLimits, *, every: bool
) -> SuiteVerdict:
    """Judge a program in a clean sandbox; with `every`, all tests run, otherwise none after the first that fails.

    Raises:
        SandboxError: the sandbox failed.
    """
    total = len(suite.tests)
    if not program.strip():
        return SuiteVerdict(0, total, "no program")
    # Read-only against its own slips; what matters is that nothing in the sandbox decides about a test.
    await sandbox.write(language.file, program.encode("utf-8", "replace") + b"\n", mode=0o444)
    if language.compile is not None:
        built = await _run(sandbox, language.compile, 3 * limits.timeout)
        if not built.ok:
            return SuiteVerdict(0, total, "compile", _shown(built.stderr or built.stdout))
    outcomes = await run_cases(sandbox, language, suite.tests, limits, every=every)
    return verdict_of(outcomes, total)


async def run_cases(
    sandbox: Sandbox, language: Language, cases: Sequence[SuiteCase], limits: JudgingLimits, *, every: bool
) -> list[CaseOutcome]:
    """Run tests in order on what is in the sandbox: with `every`, until the time is used up, else until one fails.

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
            # It could run a program, until this one had run: no process or folder is left for another.
            outcome = CaseOutcome("crash", str(error))
        except SandboxLostError as error:
            raise LostInTestError(str(error), sum(one.passed for one in outcomes)) from error
        outcomes.append(outcome)
        used += outcome.seconds
        if not (every or outcome.passed):
            break
    return outcomes


def verdict_of(outcomes: Sequence[CaseOutcome], total: int) -> SuiteVerdict:
    """One verdict of the tests that ran, of `total`: those that did not have failed."""
    first = next((one for one in outcomes if not one.passed), CaseOutcome("passed"))
    return SuiteVerdict(sum(one.passed for one in outcomes), total, first.cause, first.detail)


async def _run_test(sandbox: Sandbox, language: Language, case: SuiteCase, timeout: float) -> CaseOutcome:
    if case.program is not None:
        assert language.test is not None
        mark = secrets.token_hex(16)
        source = f"{case.program}\n{language.test_end.replace(MARK, mark)}\n"
        result = await _run(sandbox, language.test, timeout, source.encode("utf-8", "replace"))
        right = result.stdout.rstrip().rpartition(b"\n")[2] == mark.encode()
    elif case.call is not None:
        assert language.call is not None
        result = await _run(sandbox, language.call, timeout, question(case.call, case.args))
        right = returned_this(result.stdout, case.returns)
    else:
        result = await _run(sandbox, language.run, timeout, case.stdin.encode("utf-8", "replace"))
        expected = case.stdout or ""
        if len(result.stdout) > LONG:
            right = await anyio.to_thread.run_sync(printed_this, result.stdout, expected, abandon_on_cancel=True)
        else:
            right = printed_this(result.stdout, expected)
    return CaseOutcome(*_cause(result, right), result.wall_s - result.waited_s)


async def _run(sandbox: Sandbox, command: Sequence[str], timeout: float, stdin: bytes = b"") -> Result:
    """Run a command for `timeout` seconds, not counting those in which its neighbours kept it from a CPU.

    Raises:
        SandboxTimeoutError: it was killed although it had not had that time.
        SandboxError: the sandbox failed.
    """
    patience = PATIENCE * timeout
    result = await sandbox.run(command, timeout=timeout, patience=patience, stdin=stdin)
    if result.timed_out and result.waited_s > patience - timeout:
        raise SandboxTimeoutError(
            f"of {result.wall_s:.1f} s a program waited {result.waited_s:.1f} s for a CPU: this machine is too busy to "
            "judge it"
        )
    return result


def _cause(result: Result, right: bool) -> tuple[Cause, str]:
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
    text = output.decode("utf-8", "replace").strip()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
