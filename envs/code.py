"""CodeEnv: the policy writes a program, and tests in a sandbox judge it.

Problems are rows of a data set, also in several languages, or are generated (`Linear`). One answer ends the episode.
The reward is 1 if all tests pass, or the share of the tests that pass. A program fails a test if it crashes, hangs,
uses too much memory or prints something else; the metrics count each kind of failure. A sandbox that fails is replaced,
a few times. If every sandbox fails, the episode ends with the sandbox's error and without a reward, unless the program
itself ended its sandboxes.

`envs.judging.tests` describes what a program may do while it is judged, and `envs.sandbox` describes the sandboxes.
Problems are divided into training and held-out ones; held-out problems are for evaluation only.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
from typing import Any, ClassVar, Literal

import anyio.to_thread
import msgspec

from envs.data.split import KEPT, Prompt, Split, SplitOptions, divide, show_prompt
from envs.generated import in_held_out_part
from envs.judging.judge import SandboxOpener, shared_judge
from envs.judging.options import (
    JudgePool,
    JudgingLimits,
    Language,
    Suite,
    SuiteCase,
    check_suite,
    judge_pool_of,
    languages_with,
    limits_of,
)
from envs.sandbox.open import open_sandboxes
from flash.data.shapes import PROMPTS, find_column, prompt_of
from flash.data.tables import Row, column_names, read_rows, value_of
from flash.environment import Info, SolvedExample, StepResult, is_held_out
from flash.errors import ConfigError, EnvError
from flash.types import Observation

CHECKED_ROWS = 100
"""Number of rows that are checked before a run starts. The other rows are checked when they are read."""
OPTIONAL = {field.name: field.type for field in msgspec.structs.fields(Suite) if field.name != "tests"}
"""Types of the optional columns: `language`, `timeout` and `memory_mib`, which replace the options' for one row."""

PROGRAMS = {"bash": "read x y;echo $(({}))", "python": "x,y=map(int,input().split());print({})"}
"""For each language, a right program with a placeholder for the expression."""

MOST_INPUT = 99
"""Largest value of x and y in tests."""


class CodeOptions(SplitOptions, frozen=True, kw_only=True, dict=True):
    """The problems, and how programs are judged. Tables among the options are parsed once for all episodes.

    Raises:
        ConfigError: an option or a file is invalid. The message names the fault and what was expected.
    """

    path: str | None = None
    """Data set, as for `envs.dataset:DatasetEnv`. None: problems are generated; they are always plain text."""
    tests_column: str = "tests"
    """Column with the tests: a list of {stdin, stdout}, {call, args, returns} or {program}, also as JSON text."""
    test_programs: bool = False
    """Allow tests of the form {program}. A program that is written to deceive such a test can pass it."""
    language: str = "bash"
    """Language of generated problems, and of rows without a column `language`."""
    languages: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further languages, or replacements of the known ones: see `envs.judging.options.Language`."""
    largest: int = 9
    """Largest coefficient of generated problems."""
    tests: int = 3
    """Number of hidden tests of each generated problem."""
    reward: Literal["all", "share"] = "all"
    """`all`: 1 if all tests pass, else 0. `share`: the share of the tests that pass."""
    limits: dict[str, Any] = msgspec.field(default_factory=dict)
    """Limits of a program: see `envs.judging.options.JudgingLimits`."""
    sandboxes: dict[str, Any] = msgspec.field(default_factory=dict)
    """Sandboxes in which programs run: see `envs.judging.options.JudgePool`."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if self.language not in self.known_languages:
            raise ConfigError(f"there is no language {self.language!r}, only {', '.join(self.known_languages)}")
        _ = self.program_limits, self.judge_pool  # Parsed now, so that their faults are found here.
        if self.path is not None:
            super().__post_init__()
        elif self.held_out_path is not None:
            raise ConfigError("held_out_path needs a path: made problems are divided by themselves")
        else:
            check_linear(self.language, self.largest, self.tests)

    @functools.cached_property
    def known_languages(self) -> dict[str, Language]:
        """The languages that ship with Flash, and the languages of the option `languages`, by name."""
        return languages_with(self.languages)

    @functools.cached_property
    def program_limits(self) -> JudgingLimits:
        """The default limits, with `limits` applied."""
        return limits_of(self.limits)

    @functools.cached_property
    def judge_pool(self) -> JudgePool:
        """The default sandboxes, with `sandboxes` applied."""
        return judge_pool_of(self.sandboxes)


class _Source(msgspec.Struct, frozen=True):
    """Key of the rows that a process has read: the fields of `CodeOptions` that decide which rows there are.

    Environments that differ in other options share the rows. None means the same as in the options.
    """

    path: str
    prompt_column: str | None
    tests_column: str
    held_out_path: str | None
    held_out_fraction: float
    language: str
    test_programs: bool


class _Problem(msgspec.Struct, frozen=True):
    """A problem: the prompt that is shown, and the tests that judge the program."""

    prompt: Prompt
    """Text, or the messages of a chat."""
    suite: Suite
    """Tests that judge the program, and its language."""


class CodeEnv:
    """Environment of one program to write. The rollout node makes one object for each episode."""

    opener: ClassVar[SandboxOpener] = staticmethod(open_sandboxes)
    """Function that opens the sandboxes of a node."""

    def __init__(self, options: CodeOptions) -> None:
        self._options = options
        self._suite: Suite | None = None
        """Tests of the episode's problem; None before `reset`."""

    @classmethod
    def check(cls, options: CodeOptions) -> None:
        """Check the files, the columns and the first rows; start no sandbox.

        The process that reads the configuration calls this.

        Raises:
            ConfigError: an option or a file is invalid. The message names the fault and what was expected.
        """
        source = _source(options)
        if source is None:
            return
        for place in (source.path, source.held_out_path):
            if place is not None:
                column = _prompt_column(place, source)
                for row in itertools.islice(read_rows(place), CHECKED_ROWS):
                    _problem(row, column, source, options.known_languages)

    @classmethod
    async def prepare(cls, options: CodeOptions) -> None:
        """Open the sandboxes and start one for each language, so that missing parts are found before the run begins.

        Each node calls this once, before its engines start.

        Raises:
            ConfigError: there is no engine, or a package, a token or a value of a row is missing.
            SandboxError: the engine or the service does not answer, or an image does not start.
        """
        judge = await shared_judge(options.judge_pool, cls.opener)
        for name in await anyio.to_thread.run_sync(_used_languages, options, abandon_on_cancel=True):
            await judge.try_out(options.known_languages[name], options.program_limits)

    @classmethod
    def held_out_problems(cls, options: CodeOptions) -> int | None:
        """Return the number of held-out rows; None if problems are generated. An evaluation shows each of them once.

        The first call of a process reads the rows. Raises ConfigError if a row is invalid.
        """
        source = _source(options)
        return None if source is None else len(_rows(source, options).held_out)

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Return the prompt of this seed's problem, and its language in the info.

        Raises:
            ConfigError: a row is invalid, in the first episode of a process, which reads the rows.
        """
        options, source = self._options, _source(self._options)
        if source is None:
            problem, template = self._generated(seed), "plain"
        else:
            # A thread, because the first episode of a process reads files, and the first of an epoch shuffles.
            rows = await anyio.to_thread.run_sync(_rows, source, options, abandon_on_cancel=True)
            problem, template = rows.of_seed(seed), options.template
        self._suite = problem.suite
        return show_prompt(problem.prompt, options.system_prompt, template), {"language": problem.suite.language}

    async def step(self, action: str) -> StepResult:
        """Judge the program; the episode ends. Returns (observation, reward, terminated, truncated, info).

        Raises:
            EnvError: `reset` was not called before.
            SandboxError: every sandbox failed, and not because of the program, or none was free in time.
        """
        if self._suite is None:
            raise EnvError("step() was called before reset()")
        # For the reward `all`, the first test that fails decides, so the tests after it need not run.
        options, every = self._options, self._options.reward == "share"
        judge = await shared_judge(options.judge_pool, type(self).opener)
        verdict = await judge.judge(action, self._suite, options.known_languages, options.program_limits, every=every)
        reward = verdict.share if every else float(verdict.passed == verdict.total)
        info = {**msgspec.structs.asdict(verdict), "metrics": verdict.metrics(), "note": verdict.note()}
        return "", reward, True, False, info

    async def close(self) -> None:
        """Do nothing: the sandboxes belong to the node, and a step returns its sandbox before it ends."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` generated training problems with right programs, drawn with replacement.

        The run teaches a tiny model with them before the training.

        Raises:
            ConfigError: the problems come from a data set, which has no solved examples.
        """
        if self._options.path is not None:
            raise ConfigError("a data set of programs has no solved examples: set model.path to an existing model")
        rng, options = random.Random(seed), self._options
        return [draw_linear(rng, options.largest, held_out=False).solved(options.language) for _ in range(count)]

    def alphabet(self) -> str:
        """Return every character of generated problems and their programs. They become a tiny model's vocabulary."""
        return "".join(dict.fromkeys(f"0123456789= :{PROGRAMS[self._options.language]}*x+y".replace("{}", "")))

    def _generated(self, seed: int) -> _Problem:
        """Return the generated problem of a seed, with its hidden tests."""
        rng, options = random.Random(seed), self._options
        made = draw_linear(rng, options.largest, held_out=is_held_out(seed))
        return _Problem(made.prompt, Suite(tests=made.cases(options.tests, rng), language=options.language))


def _source(options: CodeOptions) -> _Source | None:
    """Return the options that decide which rows there are; None if problems are generated."""
    return None if options.path is None else msgspec.convert(options, _Source, from_attributes=True)


def _used_languages(options: CodeOptions) -> list[str]:
    """Return the names of the languages that the problems use. Blocks, and may read all rows."""
    source = _source(options)
    if source is None:
        return [options.language]
    rows = _rows(source, options)
    return sorted({row.suite.language for row in [*rows.train, *rows.held_out]})


_reading = threading.Lock()
"""Lock around reading. Without it, episodes that start together would all read the files."""


def _rows(source: _Source, options: CodeOptions) -> Split[_Problem]:
    """Return all problems of the data set. The first call of a process reads them; it takes long and blocks.

    Raises:
        ConfigError: a row is invalid, or a side of the division would be empty.
    """
    with _reading:
        return _load(source, tuple(options.known_languages.items()))


@functools.lru_cache(maxsize=KEPT)
def _load(source: _Source, languages: tuple[tuple[str, Language], ...]) -> Split[_Problem]:
    """Read, check and divide the rows. `_rows` calls it with its lock held.

    `languages` has the known languages with their names, in a form that can be a cache key.

    Raises:
        ConfigError: a row is invalid, or a side of the division would be empty.
    """
    known = dict(languages)
    held_out = None if source.held_out_path is None else _read(source.held_out_path, source, known)
    return divide(_read(source.path, source, known), held_out, source.held_out_fraction, source.path)


def _read(path: str, source: _Source, languages: dict[str, Language]) -> list[_Problem]:
    """Read all rows of a table as problems. Raises ConfigError at the first invalid row."""
    column = _prompt_column(path, source)
    return [_problem(row, column, source, languages) for row in read_rows(path)]


def _prompt_column(path: str, source: _Source) -> str:
    """Return the name of the prompt column. Raises ConfigError if it or the column with the tests is missing."""
    names = column_names(path, needed=[source.tests_column])
    return find_column(names, source.prompt_column, PROMPTS, "prompt_column", path)


def _problem(row: Row, column: str, source: _Source, languages: dict[str, Language]) -> _Problem:
    """Convert a row to a problem. `column` is the name of the prompt column, and `languages` are the known ones.

    Raises:
        ConfigError: a value is missing or has the wrong form, or the row's language is unknown.
    """
    prompt, tests = prompt_of(row, column), value_of(row, source.tests_column)
    own: dict[str, Any] = {}  # the row's own values of optional columns, by name
    for name, kind in OPTIONAL.items():
        value = row.values.get(name)
        if value is None or value == "":  # a CSV has an empty cell for a row without its own value
            continue
        try:
            own[name] = msgspec.convert(value, kind, strict=False)  # not strict: all cells of a CSV are text
        except msgspec.ValidationError as error:
            raise ConfigError(f"{row.place}: {name!r} is {value!r:.80}: {error}") from None
    try:
        if isinstance(tests, str):
            tests = msgspec.json.decode(tests)
        # JSON may have null for a field that a test does not have.
        tests = [{name: value for name, value in test.items() if value is not None} for test in tests]
        suite = msgspec.convert({"language": source.language, **own, "tests": tests}, Suite)
    except (msgspec.MsgspecError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{row.place}: {source.tests_column!r} must list tests with `stdout` (and `stdin`), with `call`, `args` "
            f"and `returns`, or with `program`: {error}"
        ) from None
    try:
        check_suite(suite, languages, test_programs=source.test_programs)
    except ConfigError as error:
        raise ConfigError(f"{row.place}: {error}") from None
    return _Problem(prompt, suite)


# -- generated problems ----------------------------------------------------------------------------------------------


class Linear(msgspec.Struct, frozen=True):
    """Generated problem: a program must read X and Y and print x·X + y·Y + one. The prompt gives three of the values.

    For example, `00=3 10=5 01=4:` says that f(0,0) is 3, f(1,0) is 5 and f(0,1) is 4, so any program that prints 2X+Y+3
    is right. The tests use other, larger inputs. `envs.generated` describes how problems are divided into training and
    held-out ones.
    """

    x: int
    """Coefficient of X."""
    y: int
    """Coefficient of Y."""
    one: int
    """Constant term."""

    @property
    def prompt(self) -> str:
        """Prompt with three values of the function: `00=3 10=5 01=4:`."""
        return f"00={self.one} 10={self.x + self.one} 01={self.y + self.one}:"

    def solved(self, language: str) -> SolvedExample:
        """Return the prompt with a right program in `language`, a key of `PROGRAMS`."""
        return SolvedExample(self.prompt, PROGRAMS[language].format(f"{self.x}*x+{self.y}*y+{self.one}"))

    def cases(self, count: int, rng: random.Random) -> list[SuiteCase]:
        """Draw `count` hidden tests: inputs with their outputs. Inputs are above 1: the prompt shows 0 and 1."""
        drawn = [(rng.randint(2, MOST_INPUT), rng.randint(2, MOST_INPUT)) for _ in range(count)]
        return [SuiteCase(stdin=f"{x} {y}\n", stdout=str(self.x * x + self.y * y + self.one)) for x, y in drawn]


def check_linear(language: str, largest: int, tests: int) -> None:
    """Check the options of generated problems.

    Raises:
        ConfigError: an option is out of range. The message names it.
    """
    if language not in PROGRAMS:
        raise ConfigError(f"problems are made for {' and '.join(PROGRAMS)}, not for {language!r}; give a `path`")
    if not 2 <= largest <= 999:  # With 1 no problem is held out.
        raise ConfigError(f"largest must be a whole number from 2 to 999, but is {largest!r}")
    if not 1 <= tests <= 100:
        raise ConfigError(f"tests must be a whole number from 1 to 100, but is {tests!r}")


def draw_linear(rng: random.Random, largest: int, *, held_out: bool) -> Linear:
    """Draw a training or a held-out problem with coefficients from 0 to `largest`, which `check_linear` has checked.

    Draws until a problem is on the side that is needed; about one in ten is held out.
    """
    while True:
        problem = Linear(*(rng.randint(0, largest) for _ in range(3)))
        if in_held_out_part(problem.prompt) == held_out:
            return problem
