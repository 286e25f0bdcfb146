"""Programs judged by tests in sandboxes: languages, tests, and the verdict on a program.

Two kinds of tests. *Input and output*: the program runs with an input, and what it printed is compared here, outside of
the sandbox, so that the expected output is never where the program could find it. *Test programs*: code of the same
language that loads the program and checks it. They pass when they reach their end: a text drawn for each run, which is
in no file, argument or variable, must be their last line, and the exit code 0; so neither an early exit nor a printed
"passed" counts. But such a test shares its process with the program, and a program written to deceive it could find
that text. Prefer inputs and outputs where programs are rewarded.

Law: a verdict is about the program. Whatever goes wrong with a sandbox is an error of `flash.errors.SandboxError`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, Literal, get_args

import anyio
import msgspec
from msgspec import Meta

from envs.sandbox.api import Result, SandboxLike, Spec
from envs.sandbox.pool.stock import Stock, open_stock
from envs.sandbox.pool.supply import Source, Supply, check_source, open_supply
from envs.shared import run_name, shared
from flash.errors import (
    ConfigError,
    SandboxBusyError,
    SandboxError,
    SandboxFileError,
    SandboxLimitError,
    SandboxRefusedError,
)
from flash.imports import check_options

Cause = Literal["passed", "no program", "compile", "wrong output", "too much output", "crash", "timeout", "memory"]
"""How the first test that failed did; `compile`: there was nothing to test."""

SHOWN = 500
"""Characters of a program's output in a verdict."""
PAUSE_S = 0.5
"""Before another sandbox is tried; twice as long each time."""
MARK = "{mark}"
"""Stands in `Language.test_end` for the text drawn for a run."""

_NO_NAME = re.compile(r"[^A-Za-z0-9._:/-]")
"""What an owner of sandboxes may not be called."""

_Words = Annotated[tuple[str, ...], Meta(min_length=1)]
_Seconds = Annotated[float, Meta(gt=0)]


class Language(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How programs of a language are run."""

    image: str
    """Of the sandbox."""
    file: str
    """What the program's file is called, in the working directory."""
    run: _Words
    """Runs it."""
    compile: _Words | None = None
    """Runs once before all tests."""
    test: _Words | None = None
    """Runs a test program that it reads from its input; without it the language has no test programs."""
    test_end: str = ""
    """Last line of each test program: prints `{mark}`."""
    fences: tuple[str, ...] = ()
    """Names of fenced blocks that hold the language, beside its own."""


LANGUAGES: dict[str, Language] = {
    "python": Language(
        image="flash-sandbox-python",
        file="main.py",
        run=("python3", "main.py"),
        test=("python3", "-"),
        test_end='print("{mark}")',
        fences=("py", "python3"),
    ),
    "bash": Language(
        image="flash-sandbox-python",
        file="main.sh",
        run=("bash", "main.sh"),
        test=("bash", "-s"),
        test_end="echo {mark}",
        fences=("sh", "shell"),
    ),
    "c": Language(
        image="flash-sandbox-c",
        file="main.c",
        compile=("tcc", "-o", "main", "main.c", "-lm"),
        run=("./main",),
    ),
}
"""Those that are known without being configured. The images are made by `python -m envs.sandbox.images`."""


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An input with the output that it must give, or a test program."""

    stdin: str = ""
    stdout: str | None = None
    """What must be printed; white space at the ends of lines and at the end does not count."""
    program: str | None = None

    def __post_init__(self) -> None:
        if (self.stdout is None) == (self.program is None) or (self.program is not None and self.stdin):
            raise ValueError("a test has either `stdout`, with or without `stdin`, or `program`")


class Suite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What judges a program."""

    tests: Annotated[list[Case], Meta(min_length=1)]
    language: str
    timeout: _Seconds | None = None
    """Seconds for each test, where it is not the usual."""
    memory_mib: Annotated[int, Meta(ge=16)] | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a program may use."""

    timeout: _Seconds = 5.0
    """Seconds for one test, on the clock on the wall; three times that for compiling."""
    total: _Seconds = 30.0
    """Seconds for all tests of one answer; those that are left then have failed."""
    memory_mib: Annotated[int, Meta(ge=16)] = 256
    pids: Annotated[int, Meta(ge=8)] = 64
    cpus: _Seconds = 1.0


class Bench(Source, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sandboxes that programs are judged in. Environments of a node with the same ones share them."""

    parallel: Annotated[int, Meta(ge=1, le=10_000)] = 8
    """Sandboxes at once on each node."""
    reuse: bool = True
    """Use a sandbox again when it is proven clean; otherwise each answer gets a new one."""
    wait: _Seconds = 60.0
    """Seconds to wait for a sandbox."""
    attempts: Annotated[int, Meta(ge=1, le=10)] = 3
    """How often an answer is judged when its sandbox fails, before its episode fails."""


class Verdict(msgspec.Struct, frozen=True):
    """What was found."""

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


def languages_with(own: Mapping[str, Any]) -> dict[str, Language]:
    """The known languages, with one's own tables added or in their place.

    Raises:
        ConfigError: naming what is wrong.
    """
    return {**LANGUAGES, **{name: _language(name, table) for name, table in own.items()}}


def _language(name: str, table: Mapping[str, Any]) -> Language:
    language = Language(**check_options(Language, table, f"languages.{name}"))
    if language.test is not None and MARK not in language.test_end:
        raise ConfigError(f"languages.{name}.test_end must print {MARK}, but is {language.test_end!r}")
    if "/" in language.file or not language.file:
        raise ConfigError(f"languages.{name}.file must be a file's name, but is {language.file!r}")
    return language


def limits_of(table: Mapping[str, Any]) -> Limits:
    """The limits with these changes. Raises ConfigError."""
    return Limits(**check_options(Limits, table, "limits"))


def bench_of(table: Mapping[str, Any]) -> Bench:
    """Where programs run, with these changes. Raises ConfigError."""
    bench = Bench(**check_options(Bench, table, "sandboxes"))
    try:
        check_source(bench)
    except ConfigError as error:
        raise ConfigError(f"sandboxes: {error}") from error
    return bench


def check_suite(suite: Suite, languages: Mapping[str, Language]) -> None:
    """Refuse tests that nothing could run.

    Raises:
        ConfigError: the language is unknown, or has no test programs.
    """
    language = languages.get(suite.language)
    if language is None:
        raise ConfigError(f"there is no language {suite.language!r}, only {', '.join(languages)}")
    if language.test is None and any(case.program is not None for case in suite.tests):
        raise ConfigError(f"{suite.language} has no test programs: give it `test` and `test_end`, or use stdout")


def find_program(answer: str, names: tuple[str, ...]) -> str:
    """The last fenced block named by one of `names`, or by none; without such a block the whole answer.

    A block that is still open at the end counts: an answer may end with its program.
    """
    found: str | None = None
    block: list[str] = []
    fence = ""
    wanted = False
    for line in answer.splitlines(keepends=True):
        bare = line.strip()
        mark = bare[: len(bare) - len(bare.lstrip("`~"))]
        if fence:
            if mark and bare == mark and mark.startswith(fence):
                found = "".join(block) if wanted else found
                fence = ""
            else:
                block.append(line)
        elif len(mark) >= 3 and len(set(mark)) == 1:
            name = bare[len(mark) :].strip().partition(" ")[0]
            fence, block, wanted = mark, [], not name or name.lower() in {each.lower() for each in names}
    if fence and wanted:
        found = "".join(block)
    return (answer if found is None else found).strip("\n")


async def run_tests(
    box: SandboxLike, program: str, language: Language, suite: Suite, limits: Limits, *, every: bool
) -> Verdict:
    """Judge a program in a clean sandbox; with `every`, all tests run, otherwise none after the first that fails.

    Raises:
        SandboxError: the sandbox failed.
    """
    total, passed = len(suite.tests), 0
    cause: Cause = "passed"
    detail = ""
    if not program.strip():
        return Verdict(0, total, "no program")
    # Read-only against its own slips; what matters is that nothing in the sandbox decides about a test.
    await box.write(language.file, program.encode("utf-8", "replace") + b"\n", mode=0o444)
    if language.compile is not None:
        built = await box.run(language.compile, timeout=3 * limits.timeout)
        if not built.ok:
            return Verdict(0, total, "compile", _shown(built.stderr or built.stdout))
    used, began = 0.0, False
    for case in suite.tests:
        left = limits.total - used
        if left <= 0:
            return Verdict(passed, total, cause if cause != "passed" else "timeout", detail)
        try:
            found, why, seconds = await _run_test(box, language, case, min(limits.timeout, left))
        except (SandboxLimitError, SandboxFileError) as error:
            if not began:
                raise
            # It could run a program, until this one had run: no process or folder is left for another.
            found, why, seconds = "crash", str(error), 0.0
        began, used = True, used + seconds
        passed += found == "passed"
        if found != "passed" and cause == "passed":
            cause, detail = found, why
            if not every:
                break
    return Verdict(passed, total, cause, detail)


async def _run_test(box: SandboxLike, language: Language, case: Case, timeout: float) -> tuple[Cause, str, float]:
    """How one test ended, what it showed, and its seconds."""
    if case.program is not None:
        assert language.test is not None
        mark = secrets.token_hex(16)
        source = f"{case.program}\n{language.test_end.replace(MARK, mark)}\n"
        result = await box.run(language.test, timeout=timeout, stdin=source.encode("utf-8", "replace"))
        right = _lines(result.stdout)[-1:] == [mark]
    else:
        result = await box.run(language.run, timeout=timeout, stdin=case.stdin.encode("utf-8", "replace"))
        right = _lines(result.stdout) == _lines((case.stdout or "").encode("utf-8", "replace"))
    return *_cause(result, right), result.wall_s


def _cause(result: Result, right: bool) -> tuple[Cause, str]:
    if result.timed_out:
        return "timeout", f"after {result.wall_s:.1f} s"
    if result.oom_killed:
        return "memory", ""
    if not result.ok:
        ending = result.signal or f"exit code {result.exit_code}"
        return "crash", f"{ending}: {_shown(result.stderr or result.stdout)}"
    if result.stdout_truncated:
        return "too much output", ""
    return ("passed", "") if right else ("wrong output", _shown(result.stdout))


def _lines(output: bytes) -> list[str]:
    """Without white space at the end, of each line and of the whole."""
    return [line.rstrip() for line in output.decode("utf-8", "replace").rstrip().split("\n")]


def _shown(output: bytes) -> str:
    text = output.decode("utf-8", "replace").strip()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"


class Judge:
    """Judges programs in the sandboxes of a stock. Shared by all episodes of a node: see `shared_judge`."""

    def __init__(self, stock: Stock, bench: Bench) -> None:
        self.stock = stock
        self._bench = bench
        self._usable: set[Language] = set()

    async def judge(
        self, answer: str, suite: Suite, languages: Mapping[str, Language], limits: Limits, *, every: bool
    ) -> Verdict:
        """The verdict on the program in an answer. A sandbox that fails is replaced, a few times.

        Raises:
            SandboxError: every attempt failed, or there was no room.
        """
        language = languages[suite.language]
        program = find_program(answer, (suite.language, *language.fences))
        limits = msgspec.structs.replace(
            limits,
            timeout=suite.timeout or limits.timeout,
            memory_mib=suite.memory_mib or limits.memory_mib,
        )
        spec = spec_of(language, limits)
        for attempt in range(self._bench.attempts):
            try:
                async with self.stock.borrow(spec, self._bench.wait) as box:
                    await self._look_for(language, box)
                    return await run_tests(box, program, language, suite, limits, every=every)
            except (SandboxBusyError, SandboxRefusedError):
                raise
            except SandboxError:
                if attempt + 1 == self._bench.attempts:
                    raise
            await anyio.sleep(PAUSE_S * 2**attempt)
        raise AssertionError("at least one attempt")

    async def try_out(self, language: Language, limits: Limits) -> None:
        """Start one sandbox of a language.

        Raises:
            SandboxError: it cannot be made, or its image lacks what the language needs.
        """
        async with self.stock.borrow(spec_of(language, limits), self._bench.wait) as box:
            await self._look_for(language, box)

    async def _look_for(self, language: Language, box: SandboxLike) -> None:
        """Refuse an image without the language, which would make every program crash."""
        if language in self._usable:
            return
        for words in (language.compile, language.run, language.test):
            # What begins with a dot is what compiling leaves.
            if words is not None and not words[0].startswith("."):
                found = await box.run(["/bin/sh", "-c", 'command -v "$1"', "sh", words[0]], timeout=10)
                if not found.ok:
                    raise SandboxRefusedError(f"the image {language.image} has no `{words[0]}`; use another one")
        self._usable.add(language)


def spec_of(language: Language, limits: Limits) -> Spec:
    """The sandbox for programs of a language."""
    return Spec(image=language.image, memory_mib=limits.memory_mib, pids=limits.pids, cpus=limits.cpus)


SupplyOpener = Callable[[Source, str], AbstractAsyncContextManager[Supply]]


async def shared_judge(bench: Bench, opener: SupplyOpener = open_supply) -> Judge:
    """This node's judge with these sandboxes. Its pool is opened by the first who asks and closed with the node.

    Raises:
        ConfigError: there is no engine, a package or a token is missing.
        SandboxError: the engine or the service does not answer.
    """

    @asynccontextmanager
    async def open_judge() -> AsyncGenerator[Judge]:
        owner = _NO_NAME.sub("-", run_name())[:64]
        async with (
            opener(bench, owner) as supply,
            open_stock(supply, owner=owner, most=bench.parallel, reuse=bench.reuse) as stock,
        ):
            yield Judge(stock, bench)

    return await shared((bench, opener), open_judge)
