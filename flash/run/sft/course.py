"""Which rows each step trains.

Law: what a step trains follows from the file, `run.seed` and the step alone, so that a run that goes on, on however
many ranks, trains what it would have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from msgspec.structs import replace

from flash.branches import Int64Array
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.run.sft.rows import Rows, TokenRow
from flash.types import Batch


class Course:
    """The rows of `sft.data`, epoch after epoch, each in an order of its own, and those that are held out.

    Raises:
        ConfigError: as `Rows`.
    """

    def __init__(self, config: Config, tokenizer: HfTokenizer) -> None:
        assert config.sft is not None
        self._config, self._tokenizer = config, tokenizer
        self.rows = Rows(config.sft.data)
        self._length = _length(config, len(self.rows))
        held_out = config.sft.held_out
        self._held_out: list[TokenRow] = []
        if held_out is not None:
            rows = Rows(held_out)
            places = range(min(len(rows), config.eval.problems))
            self._held_out = [rows.tokens(place, tokenizer, config.model.max_length) for place in places]
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> Int64Array:
        return np.random.default_rng([self._config.run.seed, epoch]).permutation(len(self.rows))

    def batch(self, step: int) -> tuple[Batch, dict[str, float]]:
        """What a step trains, and what there is to say of it. Raises ConfigError: nothing of it can be learned."""
        size, most = self._config.train.batch_size, self._config.model.max_length
        places = range(step * size, min((step + 1) * size, self._length))
        found: dict[int, TokenRow] = {}
        for place in places:
            epoch, number = divmod(place, len(self.rows))
            found[place] = self.rows.tokens(int(self._order(epoch)[number]), self._tokenizer, most)
        batch = _batch(step, found)
        if not batch.trajectories:
            raise ConfigError(f"model.max_length: {most} is too short, as step {step} has no answer within it")
        cut = sum(row.cut for row in found.values()) / len(found)
        return batch, {"samples": len(found), "epoch": places.stop / len(self.rows), "cut_share": cut}

    def held_out(self, version: int) -> Batch | None:
        """The rows that are held out, as if this version were to train them; None: there are none."""
        return _batch(version, dict(enumerate(self._held_out))) if self._held_out else None


def _batch(step: int, rows: dict[int, TokenRow]) -> Batch:
    return Batch(step, step, [one for place, row in rows.items() for one in row.trajectories(place, step)], [])


def _length(config: Config, rows: int) -> int:
    """Rows of all epochs together."""
    assert config.sft is not None
    return math.ceil(rows * config.sft.epochs)


def with_steps(config: Config) -> Config:
    """With as many steps as the epochs take, the last of them with what is left. Raises ConfigError as `Rows`."""
    assert config.sft is not None
    steps = math.ceil(_length(config, len(Rows(config.sft.data))) / config.train.batch_size)
    return replace(config, run=replace(config.run, steps=steps))


def look(config: Config) -> Iterator[str]:
    """Tokenize every row; what was found, in lines for people.

    Raises:
        ConfigError: as `Rows.tokens`, or nothing can be learned of a file.
    """
    assert config.sft is not None
    tokenizer = HfTokenizer(config.model).ready()
    for key, path in (("sft.data", config.sft.data), ("sft.held_out", config.sft.held_out)):
        if path is None:
            continue
        rows, most = Rows(path), config.model.max_length
        found = [rows.tokens(place, tokenizer, most) for place in range(len(rows))]
        lengths = [len(one.tokens) for row in found for one in row.sequences]
        learned = sum(span.stop - span.start for row in found for one in row.sequences for span in one.spans)
        cut, none = sum(row.cut for row in found), sum(not row.sequences for row in found)
        yield (
            f"{key}: {len(found)} rows of {sum(lengths)} tokens, {learned} of them learned; the longest has "
            f"{max(lengths, default=0)}; {cut} rows are cut at model.max_length, {none} have nothing to learn"
        )
        if not learned:
            raise ConfigError(f"{key}: no row of {path} has anything to learn within model.max_length = {most}")
        if first := next((row.sequences[0] for row in found if row.sequences), None):
            texts = tokenizer.token_texts(first.tokens)
            for span in reversed(first.spans):
                texts[span.start : span.stop] = [f"[{''.join(texts[span.start : span.stop])}]"]
            yield f"{key}: the first row, what is learned of it in brackets: {''.join(texts)!r}"
    yield f"steps: {config.run.steps} of {config.train.batch_size} rows"
