"""Options of judging: languages, suites of tests, limits, and the judge pool.

A suite is the list of tests of one problem. `envs.judging.tests` runs a suite on a program in one sandbox.
`envs.judging.judge` provides the sandbox. Environments parse these options from their tables in the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from envs.judging.calls import CALL_PYTHON
from envs.judging.programs import CHOOSER
from envs.sandbox.api import MAX_TIMEOUT_S, Spec
from envs.sandbox.open import Location, check_location
from flash.config.objects import check_options
from flash.errors import ConfigError

MARK = "{mark}"
"""Placeholder in `Language.test_end` for a random text that is drawn for each run."""

_Words = Annotated[tuple[str, ...], Meta(min_length=1)]
"""A command as a program and its arguments."""
_Seconds = Annotated[float, Meta(gt=0)]
"""A positive number of seconds."""
COMPILE_FACTOR = 3
"""Time for compiling, in multiples of the timeout of a test."""
_TestSeconds = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S / COMPILE_FACTOR)]
"""Timeout of a test. A sandbox would refuse a longer one for each answer, and compiling takes a multiple of it."""


class Language(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Commands that run programs of one language. Each command is a tuple of words."""

    image: str
    """Image of the sandbox."""
    file: str
    """Name of the program's file in the working directory."""
    run: _Words
    """Command that runs the program."""
    compile: _Words | None = None
    """Command that compiles the program, once before all tests."""
    call: _Words | None = None
    """Command that calls a function of the program, like `envs.judging.calls.CALL_PYTHON`. None: no calls."""
    test: _Words | None = None
    """Command that runs a test program from standard input. None: the language has no test programs."""
    test_end: str = ""
    """Last line of each test program. It must print `{mark}`."""
    fences: tuple[str, ...] = ()
    """Names of fenced blocks for this language, besides its own. Versions are ignored: `python3.11` is `python`."""
    choose: _Words | None = None
    """Command that chooses the program in an answer, like `envs.judging.chooser`. None: the most likely block."""


LANGUAGES: dict[str, Language] = {
    "python": Language(
        image="flash-sandbox-python",
        file="main.py",
        # Contests ask for numbers with more digits than Python converts to text by default. Versions without this limit
        # ignore the option.
        run=("python3", "-X", "int_max_str_digits=0", "main.py"),
        call=("python3", "-X", "int_max_str_digits=0", "-c", CALL_PYTHON),
        test=("python3", "-"),
        test_end='print("{mark}")',
        fences=("py", "pypy", "ipython"),
        choose=("python3", "-c", CHOOSER),
    ),
    "bash": Language(
        image="flash-sandbox-python",
        file="main.sh",
        run=("bash", "main.sh"),
        # The test is read completely before it runs. Otherwise the program would share the test's input and could read
        # the rest of it.
        test=("bash", "-c", 'IFS= read -r -d "" test; exec </dev/null; eval "unset test; $test"'),
        test_end="echo {mark}",
        fences=("sh", "shell", "zsh"),
        choose=("python3", "-c", CHOOSER, "bash", "-n"),
    ),
    "c": Language(
        image="flash-sandbox-c",
        file="main.c",
        compile=("tcc", "-o", "main", "main.c", "-lm"),
        run=("./main",),
        choose=("python3", "-c", CHOOSER, "tcc", "-c", "-o", "/dev/null", "-"),
    ),
}
"""Languages that need no configuration. `python -m envs.sandbox.images` builds their images."""


class SuiteCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Test of a program: an input and its expected output, a call and its expected result, or a test program."""

    stdin: str = ""
    """Standard input of the program."""
    stdout: str | None = None
    """Expected output. White space at the ends of lines and empty lines at both ends do not count. In a line that has a
    number with a fraction, or that consists only of numbers, the numbers are compared with a tolerance of 1e-5."""
    call: str | None = None
    """Function of the program, or method of a class that is made without arguments: `add`, `Solution.add`."""
    args: list[Any] = []
    """Arguments of the call, as JSON values."""
    returns: Any = None
    """Expected result of the call, as JSON: tuples are lists. Numbers with a fraction may differ by 1e-5."""
    program: str | None = None
    """Source of a test program, which loads the answer's program and checks it."""

    def __post_init__(self) -> None:
        """Refuse a test of the wrong form with a ValueError. msgspec calls this whenever the struct is made."""
        kinds = [self.stdout is not None, self.call is not None, self.program is not None]
        called = bool(self.args) or self.returns is not None
        if sum(kinds) != 1 or (self.stdin and self.stdout is None) or (called and self.call is None):
            raise ValueError(
                "a test has either `stdout`, with or without `stdin`, or `call` with `args` and `returns`, or `program`"
            )


class Suite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tests that judge a program."""

    tests: Annotated[list[SuiteCase], Meta(min_length=1)]
    """Tests, which run in this order."""
    language: str
    """Name of the program's language: a key of `LANGUAGES`, or of the option `languages`."""
    timeout: _TestSeconds | None = None
    """Seconds for each test. None: the timeout of `JudgingLimits`."""
    memory_mib: Annotated[int, Meta(ge=16)] | None = None
    """Memory in MiB. None: the memory of `JudgingLimits`."""


class JudgingLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a program."""

    timeout: _TestSeconds = 5.0
    """Seconds for one test; compiling may take three times as long. Time in which the program was ready to run but had
    no CPU does not count, up to a total of thirty times the timeout."""
    total: _Seconds = 30.0
    """Seconds for all tests of one answer, counted in the same way. Tests that have not run by then have failed."""
    memory_mib: Annotated[int, Meta(ge=16)] = 256
    """Memory of the sandbox, in MiB."""
    pids: Annotated[int, Meta(ge=8)] = 64
    """Number of processes and threads in the sandbox."""
    cpus: Annotated[float, Meta(gt=0)] = 1.0
    """Number of CPUs."""


class JudgePool(Location, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sandboxes in which programs are judged. Environments of a node with equal judge pools share one pool."""

    parallel: Annotated[int, Meta(ge=1, le=10_000)] = 8
    """Number of sandboxes in use at the same time on each node."""
    wait: _Seconds = 60.0
    """Seconds to wait for a free sandbox."""
    attempts: Annotated[int, Meta(ge=1, le=10)] = 3
    """Number of sandboxes that are tried for one answer before its episode fails."""


def languages_with(own: Mapping[str, Any]) -> dict[str, Language]:
    """Return the known languages, with the tables of `own` added. A table with a known name replaces that language.

    Raises:
        ConfigError: an option is invalid. The message names the fault.
    """
    return {**LANGUAGES, **{name: _language(name, table) for name, table in own.items()}}


def _language(name: str, table: Mapping[str, Any]) -> Language:
    """Return the language that a table `languages.NAME` of the configuration describes.

    Raises:
        ConfigError: the table is invalid. The message names the option.
    """
    language = Language(**check_options(Language, table, f"languages.{name}"))
    if language.test is not None and MARK not in language.test_end:
        raise ConfigError(f"languages.{name}.test_end must print {MARK}, but is {language.test_end!r}")
    if "/" in language.file or not language.file:
        raise ConfigError(f"languages.{name}.file must be a file's name, but is {language.file!r}")
    return language


def limits_of(table: Mapping[str, Any]) -> JudgingLimits:
    """Return the limits that a table `limits` describes.

    Raises:
        ConfigError: an option is invalid. The message names it.
    """
    return JudgingLimits(**check_options(JudgingLimits, table, "limits"))


def judge_pool_of(table: Mapping[str, Any]) -> JudgePool:
    """Return the judge pool that a table `sandboxes` describes.

    Raises:
        ConfigError: an option is invalid. The message names it.
    """
    if "reuse" in table:
        raise ConfigError("sandboxes.reuse was removed: each answer gets a new sandbox. Leave the option out")
    pool = JudgePool(**check_options(JudgePool, table, "sandboxes"))
    try:
        check_location(pool)
    except ConfigError as error:
        raise ConfigError(f"sandboxes: {error}") from error
    return pool


def check_suite(suite: Suite, languages: Mapping[str, Language], *, test_programs: bool) -> None:
    """Refuse tests that cannot run, and test programs unless they are allowed.

    Raises:
        ConfigError: the language is unknown or does not support such tests, or test programs are not allowed.
    """
    language = languages.get(suite.language)
    if language is None:
        raise ConfigError(f"there is no language {suite.language!r}, only {', '.join(languages)}")
    programs = any(case.program is not None for case in suite.tests)
    if programs and language.test is None:
        raise ConfigError(f"{suite.language} has no test programs: give it `test` and `test_end`, or use stdout")
    if programs and not test_programs:
        raise ConfigError(
            "a test `program` runs in one process with the answer, and an answer written to deceive passes it; use "
            "`call` with `args` and `returns`, or `stdin` and `stdout`, which are compared outside of the sandbox, or "
            "allow it with `test_programs = true`"
        )
    if language.call is None and any(case.call is not None for case in suite.tests):
        raise ConfigError(f"{suite.language} has no calls: give it `call`, or use stdout")


def spec_of(language: Language, limits: JudgingLimits) -> Spec:
    """Return the description of the sandbox for programs of a language."""
    return Spec(image=language.image, memory_mib=limits.memory_mib, pids=limits.pids, cpus=limits.cpus)
