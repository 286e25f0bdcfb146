"""DatasetEnv: one question, one answer, one score, from a data set with a prompt and an answer column.

How rows are divided and dealt to seeds is in `envs.data.split`. They are read once per process.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Literal

import anyio.to_thread
import msgspec

from envs.data.split import Prompt, Split, divide, read_prompt, show_prompt
from envs.data.tables import column_names, read_columns
from envs.rewards.verifier import load_verifier, verify
from flash.environment.interface import Info, StepResult
from flash.errors import ConfigError, EnvError
from flash.types import Observation


class _Source(msgspec.Struct, frozen=True):
    """Where rows come from and how they are divided: the key of the cache."""

    path: str
    prompt_column: str
    answer_column: str
    held_out_path: str | None
    held_out_fraction: float


class _Row(msgspec.Struct, frozen=True):
    prompt: Prompt
    answer: str


class DatasetEnv:
    """A row of a data set.

    Options:
        path: a JSONL or Parquet file, a folder of Parquet files, a folder written by `save_to_disk`, or a glob pattern.
        prompt_column: holds text, or chat messages as a list of {role, content}.
        answer_column: holds what the verifier compares with; numbers are taken as text.
        held_out_path: another such data set for evaluation. None: a part of `path` is kept aside.
        held_out_fraction: the share of the distinct prompts that is kept aside then.
        verifier: `module:function` of (completion, answer) -> float.
        system_prompt: comes before each prompt: as system message, or as text in front of plain text.
        template: `chat` sends a text prompt as user message through the model's chat template, `plain` as it is.
        timeout: seconds the verifier may take.
    """

    def __init__(
        self,
        path: str,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        held_out_path: str | None = None,
        held_out_fraction: float = 0.05,
        verifier: str = "envs.rewards.exact:exact_match",
        system_prompt: str | None = None,
        template: Literal["chat", "plain"] = "chat",
        timeout: float = 30.0,
    ) -> None:
        self._source = _Source(path, prompt_column, answer_column, held_out_path, held_out_fraction)
        self._verifier = verifier
        self._system_prompt = system_prompt
        self._template = template
        self._timeout = timeout
        self._row: _Row | None = None

    @classmethod
    def check(
        cls,
        path: str,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        held_out_path: str | None = None,
        held_out_fraction: float = 0.05,
        verifier: str = "envs.rewards.exact:exact_match",
        system_prompt: str | None = None,
        template: str = "chat",
        timeout: float = 30.0,
    ) -> None:
        """Look at files, columns, the verifier and the numbers; read no rows.

        Raises:
            ConfigError: naming what is missing and what is there instead.
        """
        if template not in ("chat", "plain"):
            raise ConfigError(f"template must be chat or plain, but is {template!r}")
        if system_prompt is not None and not isinstance(system_prompt, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"system_prompt must be text, but is {system_prompt!r}")
        if held_out_path is None and not 0 < held_out_fraction < 1:
            raise ConfigError(f"held_out_fraction must lie between 0 and 1, but is {held_out_fraction!r}")
        if not timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, but is {timeout!r}")
        for place in [path, held_out_path]:
            if place is not None:
                column_names(place, needed=[prompt_column, answer_column])
        load_verifier(verifier)

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Show the row of this seed."""
        # A thread, because the first episode of a process reads files and imports, and the first of an epoch shuffles.
        self._row = await anyio.to_thread.run_sync(self._prepare, seed, abandon_on_cancel=True)
        return show_prompt(self._row.prompt, self._system_prompt, self._template), {}

    async def step(self, action: str) -> StepResult:
        """Score the answer; the episode ends."""
        if self._row is None:
            raise EnvError("step() was called before reset()")
        reward = await verify(self._verifier, action, self._row.answer, self._timeout)
        return "", reward, True, False, {}

    async def close(self) -> None:
        """Nothing is held."""

    def _prepare(self, seed: int) -> _Row:
        load_verifier(self._verifier)
        return _row_of_seed(self._source, seed)


_reading = threading.Lock()
"""Episodes that start together would otherwise all read the files."""


def _row_of_seed(source: _Source, seed: int) -> _Row:
    with _reading:
        rows = _load(source)
    return rows.of_seed(seed)


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
