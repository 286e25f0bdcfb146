"""Course of `flash sft`: decides which rows each step trains.

Law: the batch of a step follows only from the file, `run.seed` and the step. So a resumed run trains the same batches,
on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from flash.branches import Int64Array
from flash.config.tree import Config
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.run.sft.rows import TokenRow, TokenTable, read_tokens
from flash.types import Batch

ROWS = "rows"
"""Folder in the job's temporary folder with the tokenized rows. The launcher writes it, and the trainer ranks read
it."""


class CourseTokens(NamedTuple):
    """Tokenized rows of a run: those to learn and those held out. Rows without a token to learn are left out."""

    data: TokenTable
    held_out: TokenTable | None
    lines: list[str] = []  # noqa: RUF012
    """Lines for the user: how many rows were taken, cut and left out, with the reasons."""

    @classmethod
    def read(cls, config: Config, tell: Callable[[str], object]) -> CourseTokens:
        """Read and tokenize all rows. `tell` is called with lines about the progress. Raises ConfigError."""
        assert config.sft is not None
        model = replace(config.model, tool_parser=None, reasoning_parser=None)  # no response is parsed
        data, held_out = read_tokens("sft.data", config.sft.data, model, tell), None
        if config.sft.held_out is not None:
            held_out = read_tokens("sft.held_out", config.sft.held_out, model, tell, config.eval.problems)
        return cls(data.table, held_out and held_out.table, data.lines + (held_out.lines if held_out else []))

    @classmethod
    def load(cls, folder: Path) -> CourseTokens:
        """Map the rows that `save` has written into memory."""
        held_out = folder / "held_out"
        return cls(TokenTable.load(folder / "data"), TokenTable.load(held_out) if held_out.is_dir() else None)

    def save(self, folder: Path) -> None:
        """Write the rows into a new folder, for the trainer ranks."""
        self.data.save(folder / "data")
        if self.held_out is not None:
            self.held_out.save(folder / "held_out")

    def with_steps(self, config: Config) -> Config:
        """Return the configuration with the number of steps that the epochs take. The last step may have fewer rows."""
        steps = math.ceil(_length(config, len(self.data)) / config.train.batch_size)
        return replace(config, run=replace(config.run, steps=steps))

    def described(self, tokenizer: HfTokenizer) -> Iterator[str]:
        """Yield lines for the user: the numbers of rows, and the tokens of the first row."""
        yield from self.lines
        if ends := tokenizer.missing_ends():
            yield f"model: {ends}"
        first = self.data.row(0).sequences[0]
        texts = tokenizer.token_texts(first.tokens)
        for span in reversed(first.spans):
            texts[span.start : span.stop] = [f"[{''.join(texts[span.start : span.stop])}]"]
        yield f"sft.data: the first row, what is learned of it in brackets: {''.join(texts)!r}"


class Course:
    """Rows of `sft.data` in the order in which they are trained, shuffled for each epoch, and the held-out rows."""

    def __init__(self, config: Config, tokens: CourseTokens) -> None:
        self._config, self._tokens = config, tokens
        self._length = _length(config, len(tokens.data))
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> Int64Array:
        return np.random.default_rng([self._config.run.seed, epoch]).permutation(len(self._tokens.data))

    def digest(self) -> str:
        """Return a hash that is equal for equal rows of `sft.data` as tokens. Reads all rows."""
        return self._tokens.data.digest()

    def batch(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Return the batch of a step, and metrics about it."""
        # No batch is empty, and every row has something to learn.
        size, rows = self._config.train.batch_size, self._tokens.data
        places = range(step * size, min((step + 1) * size, self._length))
        found: dict[int, TokenRow] = {}
        for place in places:
            epoch, number = divmod(place, len(rows))
            found[place] = rows.row(int(self._order(epoch)[number]))
        cut = sum(row.cut for row in found.values()) / len(found)
        return _batch(step, found), {"samples": len(found), "epoch": places.stop / len(rows), "cut_share": cut}

    def held_out(self, version: int) -> Batch | None:
        """Return the held-out rows as a batch of the step that trains `version`; None if there are none."""
        rows = self._tokens.held_out
        return None if rows is None else _batch(version, {place: rows.row(place) for place in range(len(rows))})


def _batch(step: int, rows: dict[int, TokenRow]) -> Batch:
    return Batch(step, step, [one for place, row in rows.items() for one in row.trajectories(place, step)], [])


def _length(config: Config, rows: int) -> int:
    """Return the number of rows that all epochs train together."""
    assert config.sft is not None
    return math.ceil(rows * config.sft.epochs)
