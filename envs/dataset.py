"""DatasetEnv: one question, one answer, one score, from a data set with a prompt and an answer column.

How rows are divided and dealt to seeds is in `envs.data.split`. They are read once per process.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import anyio.to_thread
import msgspec

from envs.data.split import Prompt, Split, SplitOptions, divide, read_prompt, show_prompt
from envs.data.tables import column_names, read_columns
from envs.rewards.verifier import load_verifier, verify
from flash.environment import Info, StepResult
from flash.errors import ConfigError, EnvError
from flash.types import Observation


class DatasetOptions(SplitOptions, frozen=True, kw_only=True):
    """Where rows come from and how answers are scored.

    Raises:
        ConfigError: a number that cannot be.
    """

    path: str
    """A JSONL or Parquet file, a folder of Parquet files, a folder written by `save_to_disk`, or a glob pattern."""
    answer_column: str = "answer"
    """Holds what the verifier compares with; numbers are taken as text."""
    verifier: str = "envs.rewards.exact:exact_match"
    """`module:function` of (completion, answer) -> float."""
    timeout: float = 30.0
    """Seconds the verifier may take."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, but is {self.timeout!r}")


class _Source(msgspec.Struct, frozen=True):
    """What of the options decides which rows there are: the key of the cache."""

    path: str
    prompt_column: str
    answer_column: str
    held_out_path: str | None
    held_out_fraction: float


class _Row(msgspec.Struct, frozen=True):
    prompt: Prompt
    answer: str


class DatasetEnv:
    """A row of a data set."""

    def __init__(self, options: DatasetOptions) -> None:
        self._options = options
        self._row: _Row | None = None

    @classmethod
    def check(cls, options: DatasetOptions) -> None:
        """Look at files, columns and the verifier; read no rows.

        Raises:
            ConfigError: naming what is missing and what is there instead.
        """
        for place in (options.path, options.held_out_path):
            if place is not None:
                column_names(place, needed=[options.prompt_column, options.answer_column])
        load_verifier(options.verifier)

    @classmethod
    def problem_of(cls, seed: int, options: DatasetOptions) -> str:
        """The place of the row."""
        return str(_rows(options).place(seed))

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the row of this seed."""
        # A thread, because the first episode of a process reads files and imports, and the first of an epoch shuffles.
        self._row = await anyio.to_thread.run_sync(self._prepare, seed, abandon_on_cancel=True)
        return show_prompt(self._row.prompt, self._options.system_prompt, self._options.template), {}

    async def step(self, action: str) -> StepResult:
        """Score the answer; the episode ends."""
        if self._row is None:
            raise EnvError("step() was called before reset()")
        reward = await verify(self._options.verifier, action, self._row.answer, self._options.timeout)
        return "", reward, True, False, {}

    async def close(self) -> None:
        """Nothing to release: the rows are the process's."""

    def _prepare(self, seed: int) -> _Row:
        load_verifier(self._options.verifier)
        return _rows(self._options).of_seed(seed)


_reading = threading.Lock()
"""Episodes that start together would otherwise all read the files."""


def _rows(options: DatasetOptions) -> Split[_Row]:
    source = msgspec.convert(options, _Source, from_attributes=True)
    with _reading:
        return _load(source)


@functools.lru_cache(maxsize=4)
def _load(source: _Source) -> Split[_Row]:
    """Read and divide.

    Raises:
        ConfigError: a file, column or value is missing, or a side would be empty.
    """
    held_out = None if source.held_out_path is None else _read(source.held_out_path, source)
    return divide(_read(source.path, source), held_out, source.held_out_fraction, source.path)


def _read(path: str, source: _Source) -> list[_Row]:
    prompts, answers = read_columns(path, [source.prompt_column, source.answer_column])
    return [
        _Row(read_prompt(prompt, f"{path}, row {index}"), _answer(answer, f"{path}, row {index}"))
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _answer(value: Any, place: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{place}: the answer must be text or a number, but is {value!r}")
