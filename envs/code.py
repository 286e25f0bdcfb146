"""CodeEnv: write a program; tests in a sandbox decide.

Problems come from a data set, in several languages if it likes, or are made (`envs.linear`). The answer ends the
episode. The reward is 1 when all tests pass, or the share of those that do. A program that crashes, hangs, takes too
much memory or prints something else has failed a test; the metrics count how. A sandbox that fails is replaced and, if
that does not help, ends the episode with its error: never with a reward.

The environment must have its answers judged somewhere: see `envs.judging` for what a program may and may not do there,
and `envs.sandbox` for the sandboxes.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
from typing import Any, ClassVar, Literal

import anyio.to_thread
import msgspec

from envs.data.split import Prompt, Split, divide, read_prompt, show_prompt
from envs.data.tables import column_names, read_rows
from envs.judging.judge import SupplyOpener, shared_judge
from envs.judging.options import Language, Suite, bench_of, check_suite, languages_with, limits_of
from envs.linear import PROGRAMS, check_linear, draw_linear
from envs.sandbox.open import open_sandboxes
from flash.environment.interface import Info, SolvedExample, StepResult, is_held_out
from flash.errors import ConfigError, EnvError
from flash.types import Observation

CHECKED_ROWS = 100
"""Rows that are looked at before a run starts; the others when they are read."""
OPTIONAL = ("language", "timeout", "memory_mib")
"""Columns that a row may have."""


class _Source(msgspec.Struct, frozen=True):
    """Where rows come from and how they are divided: the key of the cache."""

    path: str
    prompt_column: str
    tests_column: str
    held_out_path: str | None
    held_out_fraction: float
    language: str


class _Problem(msgspec.Struct, frozen=True):
    prompt: Prompt
    suite: Suite


class CodeEnv:
    """One program to write.

    Options:
        path: a data set, as for `envs.dataset:DatasetEnv`. None: problems are made.
        prompt_column: holds text, or chat messages as a list of {role, content}.
        tests_column: holds the tests: a list of {stdin, stdout} or {program}, or that list as JSON text.
        held_out_path: another such data set for evaluation. None: a part of `path` is kept aside.
        held_out_fraction: the share of the distinct prompts that is kept aside then.
        language: of made problems, and of rows without a column `language`.
        languages: more languages, or others in the place of the known ones: see `envs.judging.options.Language`.
        largest: largest coefficient of made problems.
        tests: hidden tests of each made problem.
        reward: `all`, for passing all tests, or the `share` of tests that pass.
        limits: what a program may use: see `envs.judging.options.Limits`.
        sandboxes: where programs run: see `envs.judging.options.Bench`.
        system_prompt: comes before each prompt: as system message, or as text in front of plain text.
        template: `chat` sends a text prompt as user message through the model's chat template, `plain` as it is.
            Made problems are always plain.
    """

    supply: ClassVar[SupplyOpener] = staticmethod(open_sandboxes)
    """Opens the sandboxes of a node."""

    def __init__(
        self,
        path: str | None = None,
        prompt_column: str = "prompt",
        tests_column: str = "tests",
        held_out_path: str | None = None,
        held_out_fraction: float = 0.05,
        language: str = "bash",
        languages: dict[str, Any] = {},  # noqa: B006
        largest: int = 9,
        tests: int = 3,
        reward: Literal["all", "share"] = "all",
        limits: dict[str, Any] = {},  # noqa: B006
        sandboxes: dict[str, Any] = {},  # noqa: B006
        system_prompt: str | None = None,
        template: Literal["chat", "plain"] = "chat",
    ) -> None:
        self._source = (
            None
            if path is None
            else _Source(path, prompt_column, tests_column, held_out_path, held_out_fraction, language)
        )
        self._language = language
        self._languages = languages_with(languages)
        self._known = tuple(self._languages.items())
        self._largest = largest
        self._tests = tests
        self._every = reward == "share"
        self._limits = limits_of(limits)
        self._bench = bench_of(sandboxes)
        self._system_prompt = system_prompt
        self._template = template
        self._suite: Suite | None = None

    @classmethod
    def check(
        cls,
        path: str | None = None,
        prompt_column: str = "prompt",
        tests_column: str = "tests",
        held_out_path: str | None = None,
        held_out_fraction: float = 0.05,
        language: str = "bash",
        languages: dict[str, Any] = {},  # noqa: B006
        largest: int = 9,
        tests: int = 3,
        reward: str = "all",
        limits: dict[str, Any] = {},  # noqa: B006
        sandboxes: dict[str, Any] = {},  # noqa: B006
        system_prompt: str | None = None,
        template: str = "chat",
    ) -> None:
        """Look at options, files, columns and the first rows; start no sandbox.

        Raises:
            ConfigError: naming what is wrong and what was expected.
        """
        known = languages_with(languages)
        if language not in known:
            raise ConfigError(f"there is no language {language!r}, only {', '.join(known)}")
        limits_of(limits)
        bench_of(sandboxes)
        if path is None:
            if held_out_path is not None:
                raise ConfigError("held_out_path needs a path: made problems are divided by themselves")
            check_linear(language, largest, tests)
            return
        if held_out_path is None and not 0 < held_out_fraction < 1:
            raise ConfigError(f"held_out_fraction must lie between 0 and 1, but is {held_out_fraction!r}")
        source = _Source(path, prompt_column, tests_column, held_out_path, held_out_fraction, language)
        for place in [path, held_out_path]:
            if place is not None:
                column_names(place, needed=[prompt_column, tests_column])
                for index, row in enumerate(itertools.islice(read_rows(place), CHECKED_ROWS)):
                    _problem(row, source, known, f"{place}, row {index}")

    @classmethod
    async def prepare(cls, **options: Any) -> None:
        """Open the sandboxes and start one of each language, so that what is missing is missed before a run begins.

        Raises:
            ConfigError: there is no engine, a package, a token or a row is missing.
            SandboxError: the engine or the service does not answer, or an image does not start.
        """
        env = cls(**options)
        judge = await shared_judge(env._bench, cls.supply)
        for name in await anyio.to_thread.run_sync(env._used_languages, abandon_on_cancel=True):
            await judge.try_out(env._languages[name], env._limits)

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the problem of this seed."""
        if self._source is None:
            problem, template = self._made(seed), "plain"
        else:
            # A thread, because the first episode of a process reads files, and the first of an epoch shuffles.
            rows = await anyio.to_thread.run_sync(_rows, self._source, self._known, abandon_on_cancel=True)
            problem, template = rows.of_seed(seed), self._template
        self._suite = problem.suite
        return show_prompt(problem.prompt, self._system_prompt, template), {"language": problem.suite.language}

    async def step(self, action: str) -> StepResult:
        """Judge the program; the episode ends."""
        if self._suite is None:
            raise EnvError("step() was called before reset()")
        judge = await shared_judge(self._bench, type(self).supply)
        verdict = await judge.judge(action, self._suite, self._languages, self._limits, every=self._every)
        reward = verdict.share if self._every else float(verdict.passed == verdict.total)
        info = {**msgspec.structs.asdict(verdict), "metrics": verdict.metrics(), "note": verdict.note()}
        return "", reward, True, False, info

    async def close(self) -> None:
        """Nothing is held: sandboxes are the node's, and given back within a step."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """`count` made training problems with right programs, drawn with replacement.

        Raises:
            ConfigError: the problems are a data set's, which has none.
        """
        if self._source is not None:
            raise ConfigError("a data set of programs has no solved examples: set model.path to an existing model")
        rng = random.Random(seed)
        return [draw_linear(rng, self._largest, held_out=False).solved(self._language) for _ in range(count)]

    def alphabet(self) -> str:
        """Every character of made problems and their programs."""
        return "".join(dict.fromkeys(f"0123456789= :{PROGRAMS[self._language]}*x+y".replace("{}", "")))

    def _made(self, seed: int) -> _Problem:
        rng = random.Random(seed)
        made = draw_linear(rng, self._largest, held_out=is_held_out(seed))
        return _Problem(made.prompt, Suite(tests=made.cases(self._tests, rng), language=self._language))

    def _used_languages(self) -> list[str]:
        if self._source is None:
            return [self._language]
        rows = _rows(self._source, self._known)
        return sorted({row.suite.language for row in [*rows.train, *rows.held_out]})


_reading = threading.Lock()
"""Episodes that start together would otherwise all read the files."""


def _rows(source: _Source, languages: tuple[tuple[str, Language], ...]) -> Split[_Problem]:
    with _reading:
        return _load(source, languages)


@functools.lru_cache(maxsize=4)
def _load(source: _Source, languages: tuple[tuple[str, Language], ...]) -> Split[_Problem]:
    """Read, check and divide."""
    known = dict(languages)
    held_out = None if source.held_out_path is None else _read(source.held_out_path, source, known)
    return divide(_read(source.path, source, known), held_out, source.held_out_fraction, source.path)


def _read(path: str, source: _Source, languages: dict[str, Language]) -> list[_Problem]:
    return [_problem(row, source, languages, f"{path}, row {index}") for index, row in enumerate(read_rows(path))]


def _problem(row: dict[str, Any], source: _Source, languages: dict[str, Language], place: str) -> _Problem:
    """A row as a problem.

    Raises:
        ConfigError: a value is missing or of another form.
    """
    for name in (source.prompt_column, source.tests_column):
        if name not in row:
            raise ConfigError(f"{place} has no {name!r}, only {', '.join(map(repr, row))}")
    tests = row[source.tests_column]
    own = {name: row[name] for name in OPTIONAL if row.get(name) is not None}
    try:
        if isinstance(tests, str):
            tests = msgspec.json.decode(tests)
        # Tables of columns (Parquet) hold None where a test has no such field.
        tests = [{name: value for name, value in test.items() if value is not None} for test in tests]
        suite = msgspec.convert({"language": source.language, **own, "tests": tests}, Suite)
    except (msgspec.MsgspecError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{place}: {source.tests_column!r} must list tests with `stdout` (and `stdin`) or `program`: {error}"
        ) from None
    try:
        check_suite(suite, languages)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    return _Problem(read_prompt(row[source.prompt_column], place), suite)
