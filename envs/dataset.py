"""DatasetEnv: questions and answers from the columns of a data set. Each episode has one turn and one score.

`flash.data` reads the rows. `envs.data.split` divides them into training rows and held-out rows, which are for
evaluation only, and assigns them to seeds. Each process reads the rows once. A function that is named by its import
path scores each answer: a verifier, which gets the reference answer, or a reward, which gets the whole row. See
`envs.rewards.verifier`.
"""

from __future__ import annotations

import functools
import logging
import threading
from contextlib import suppress
from typing import Annotated, Any, cast

import anyio.to_thread
import msgspec
from msgspec import Meta

from envs.data.split import KEPT, Prompt, Split, SplitOptions, divide, show_prompt
from envs.rewards.verifier import load_verifier, verify
from flash.data.shapes import ANSWERS, PROMPTS, answer_of, find_column, prompt_of, template_of
from flash.data.tables import Row, column_names, read_rows, refuse_rows, value_of
from flash.environment import Info, StepResult
from flash.errors import ConfigError, EnvError
from flash.types import Observation

log = logging.getLogger("flash")

EXACT = "envs.rewards.exact:exact_match"
"""Verifier of rows for which the options name no function."""
ONE_ANSWER = (EXACT, "envs.rewards.math:math_equal")
"""Verifiers that compare with one answer. A list of several answers would become a text that no completion equals."""


class DatasetOptions(SplitOptions, frozen=True, kw_only=True):
    """Source of the rows, and the function that scores answers.

    Raises:
        ConfigError: a number is out of range, or two functions are named.
    """

    path: str
    """File (.jsonl, .json, .csv, also .gz; .parquet, .arrow), folder of such files, or glob pattern of the data."""
    answer_column: str | None = None
    """Column with the answer, which the verifier compares with as text. None: `answer` or another usual name."""
    longest_prompt: Annotated[int, Meta(gt=0)] | None = None
    """Longest prompt, in characters. Rows with longer prompts are left out and counted. None: no limit."""
    verifier: str = EXACT
    """Verifier that scores answers: `module:function` of (completion, answer) -> float."""
    reward: str | None = None
    """Function that scores answers in place of a verifier: `module:function` of (answer, row) -> float. `row` is the
    whole row as a dict, and may have no reference answer. None: `verifier` scores."""
    timeout: float = 30.0
    """Seconds that the function has for one answer."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        super().__post_init__()
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, but is {self.timeout!r}")
        if self.reward is not None and self.verifier != EXACT:
            raise ConfigError("expected one of `reward` and `verifier`: each of them scores the answers")

    @property
    def scorer(self) -> str:
        """Import path of the function that scores answers."""
        return self.verifier if self.reward is None else self.reward


class _Source(msgspec.Struct, frozen=True):
    """Key of the rows that a process has read: the fields of `DatasetOptions` that decide which rows there are.

    Environments that differ in other options share the rows. None means the same as in the options.
    """

    path: str
    prompt_column: str | None
    answer_column: str | None
    held_out_path: str | None
    held_out_fraction: float
    longest_prompt: int | None
    verifier: str
    whole_rows: bool
    """True if a reward gets whole rows, which then need no reference answer."""

    def columns(self, path: str) -> tuple[str, str | None]:
        """Return the names of the prompt and the answer column of the table at `path`. Raises ConfigError without one.

        The answer column is None if a reward gets whole rows and none of the usual columns is there.
        """
        names = column_names(path)
        prompt = find_column(names, self.prompt_column, PROMPTS, "prompt_column", path)
        if self.whole_rows and self.answer_column is None and not set(ANSWERS) & set(names):
            return prompt, None
        return prompt, find_column(names, self.answer_column, ANSWERS, "answer_column", path)


class _Row(msgspec.Struct, frozen=True):
    """A row of the data set, in the form in which episodes use it."""

    prompt: Prompt
    answer: str | None
    """Reference answer, as text; None if the row needs none and has none."""
    values: dict[str, Any] | None
    """Values of all columns, for a reward; None if a verifier scores."""
    template: dict[str, Any]
    """Arguments of the model's chat template that the row gives; empty if it gives none."""


class DatasetEnv:
    """Environment of one row of a data set. The rollout node makes one object for each episode."""

    def __init__(self, options: DatasetOptions) -> None:
        self._options = options
        self._row: _Row | None = None
        """Row of the episode; None before `reset`."""

    @classmethod
    def check(cls, options: DatasetOptions) -> None:
        """Check the files, the columns and the function that scores; read no rows.

        The process that reads the configuration calls this.

        Raises:
            ConfigError: something is missing. The message names it, and names the existing alternatives.
        """
        source = _source_of(options)
        for place in (options.path, options.held_out_path):
            if place is not None:
                source.columns(place)
        try:
            load_verifier(options.scorer)
        except ConfigError as error:
            raise ConfigError(f"`{'verifier' if options.reward is None else 'reward'}`: {error}") from error

    @classmethod
    async def prepare(cls, options: DatasetOptions) -> None:
        """Read all rows. Each node calls this once, before its engines start.

        Raises:
            ConfigError: rows cannot be used. The message names them by file and number.
        """
        await anyio.to_thread.run_sync(_rows, options, abandon_on_cancel=True)

    @classmethod
    def held_out_problems(cls, options: DatasetOptions) -> int:
        """Return the number of held-out rows. An evaluation shows each of them once.

        The first call of a process reads the rows. Raises ConfigError if they cannot be used.
        """
        return len(_rows(options).held_out)

    @classmethod
    def solution_of(cls, seed: int, options: DatasetOptions) -> str | None:
        """Return the answer of the row that a seed shows. `flash train --dry-run` tries out that it gets a reward.

        With the option `reward` the result is None: a reward may expect something else than the answer of its row.
        Raises ConfigError if the rows cannot be used.
        """
        if options.reward is not None:
            return None
        return _rows(options).of_seed(seed).answer

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Return the prompt of this seed's row, and the row's arguments of the chat template in the info.

        Raises:
            ConfigError: the rows cannot be used. They are read in the first episode of a process.
        """
        # In a thread, because the first episode of a process reads files and imports, and the first of an epoch
        # shuffles.
        self._row = await anyio.to_thread.run_sync(self._prepare, seed, abandon_on_cancel=True)
        shown = show_prompt(self._row.prompt, self._options.system_prompt, self._options.template)
        return shown, {"chat_template_kwargs": self._row.template} if self._row.template else {}

    async def step(self, action: str) -> StepResult:
        """Score the answer; the episode ends. Returns (observation, reward, terminated, truncated, info).

        Raises:
            RewardError: the function that scores failed, or did not answer in time.
            EnvError: an asynchronous function that scores raised it, or `reset` was not called before.
        """
        if self._row is None:
            raise EnvError("step() was called before reset()")
        row, options = self._row, self._options
        reference = row.answer if row.values is None else {**row.values}  # user code may change it
        assert reference is not None, "only rows for a reward may lack an answer"
        reward = await verify(options.scorer, action, reference, options.timeout, solution=row.answer)
        return "", reward, True, False, {}

    async def close(self) -> None:
        """Do nothing: the rows belong to the process."""

    def _prepare(self, seed: int) -> _Row:
        """Import the function that scores, so that `step` does not block, and return the row of a seed."""
        load_verifier(self._options.scorer)
        return _rows(self._options).of_seed(seed)


_reading = threading.Lock()
"""Lock around reading. Without it, episodes that start together would all read the files."""


def _source_of(options: DatasetOptions) -> _Source:
    """Return the options that decide which rows there are."""
    return _Source(
        path=options.path,
        prompt_column=options.prompt_column,
        answer_column=options.answer_column,
        held_out_path=options.held_out_path,
        held_out_fraction=options.held_out_fraction,
        longest_prompt=options.longest_prompt,
        verifier=options.verifier,
        whole_rows=options.reward is not None,
    )


def _rows(options: DatasetOptions) -> Split[_Row]:
    """Return all rows. The first call of a process reads them; it takes long and blocks.

    Raises:
        ConfigError: a file, column or value is missing, or one of the two sides would be empty.
    """
    with _reading:
        return _load(_source_of(options))


@functools.lru_cache(maxsize=KEPT)
def _load(source: _Source) -> Split[_Row]:
    """Read and divide the rows, and log their number. `_rows` calls it with its lock held.

    Raises:
        ConfigError: a file, column or value is missing, or one of the two sides would be empty.
    """
    rows, summary = _read(source.path, source)
    held_out = None
    if source.held_out_path is not None:
        held_out, held_out_summary = _read(source.held_out_path, source)
        summary = f"{summary}; {held_out_summary}"
    split = divide(rows, held_out, source.held_out_fraction, source.path)
    log.info("%s; %d rows to train on, %d held out", summary, len(split.train), len(split.held_out))
    return split


def _read(path: str, source: _Source) -> tuple[list[_Row], str]:
    """Read the rows of a table. Also returns a log message with the numbers of rows that were taken and left out.

    Raises:
        ConfigError: rows are invalid. The message names the first of them.
    """
    prompt_column, answer_column = source.columns(path)
    rows: list[_Row] = []
    faults: list[str] = []
    long = 0
    for row in read_rows(path):
        try:
            accepted = _Row(
                prompt=prompt_of(row, prompt_column),
                answer=_answer_of(row, answer_column, source),
                values=row.values if source.whole_rows else None,
                template=template_of(row.values, row.place),
            )
        except ConfigError as error:
            faults.append(str(error))
            continue
        if source.longest_prompt is not None and _length(accepted.prompt) > source.longest_prompt:
            long += 1
        else:
            rows.append(accepted)
    refuse_rows(faults)
    left = f", {long} left out (prompts longer than longest_prompt = {source.longest_prompt})" if long else ""
    columns = " and ".join(repr(column) for column in (prompt_column, answer_column) if column is not None)
    return rows, f"{path}: {len(rows)} rows with {columns}{left}"


def _answer_of(row: Row, column: str | None, source: _Source) -> str | None:
    """Return the reference answer of a row; None if a reward scores and the row has none.

    Raises:
        ConfigError: the row has no answer, or several where the verifier compares with one.
    """
    if source.whole_rows:
        with suppress(ConfigError):  # a reward may need no answer, or one of another form
            return None if column is None else answer_of(row, column)
        return None
    assert column is not None
    answer = answer_of(row, column)
    given = value_of(row, column) if source.verifier in ONE_ANSWER else None
    if isinstance(given, dict) or (isinstance(given, list) and len(cast("list[Any]", given)) > 1):
        # A list of one value is that value; `answer_of` makes JSON text of the others.
        raise ConfigError(
            f"{row.place}: {column!r} holds several values, and {source.verifier} compares with one; give one answer, "
            "or set `verifier` to a function of yours, which gets them as JSON text"
        )
    return answer


def _length(prompt: Prompt) -> int:
    """Return the number of characters of a prompt."""
    return len(prompt) if isinstance(prompt, str) else sum(len(message.content) for message in prompt)
