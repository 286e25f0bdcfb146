"""Rows of a data set as token sequences: which tokens of each are learned, behind which others.

Law: an answer is learned behind the very tokens that an engine would be shown to have it said. A conversation whose
template shows its later turns behind the earlier ones as they were said is one sequence; where it shows them otherwise,
as those that drop earlier reasoning, the later turn begins a sequence of its own.

All rows are tokenized before a run starts (`read_tokens`), by several processes where there are many. A row that cannot
be taken is refused then, by its file and number; a row of which nothing can be learned is left out and counted. Trainer
ranks read the tokens from files (`TokenTable`), so that no row can fail in the middle of a run.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from hashlib import blake2b
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from flash.config.tree import ModelConfig
from flash.data.shapes import Conversation, Text, example_of, spoken
from flash.data.tables import Row, read_rows, refuse_rows
from flash.errors import ConfigError, EnvError
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.service import tools
from flash.service.errors import ApiError
from flash.types import ASSISTANT, Message, Outcome, Span, Task, Trajectory, Turn, VersionRun

ALONE = 2000
"""Rows from which tokenizing by several processes gains more than their start costs, some five seconds."""
CHUNK = 500
"""Rows that a process tokenizes at once."""
TELL_S = 5.0
"""Seconds between two lines on how far tokenizing is."""


class Learned(NamedTuple):
    """Tokens, and which of them are learned."""

    tokens: list[int]
    spans: list[Span]


class TokenRow(NamedTuple):
    """A row in tokens."""

    sequences: list[Learned]
    """Each has a token to learn."""
    cut: bool
    """True if a part of the row lies beyond the longest sequence."""

    def trajectories(self, place: int, version: int) -> Iterator[Trajectory]:
        """Yield the row as samples of the step that trains this version; `place` is its place in the course."""
        for member, (tokens, spans) in enumerate(self.sequences):
            count = sum(span.stop - span.start for span in spans)
            yield Trajectory(
                task=Task(place, place, member, seed=place),
                outcome=Outcome.OK,
                reward=0.0,
                token_ids=np.array(tokens, dtype="<i4").tobytes(),
                action_spans=spans,
                logprobs=np.zeros(count, dtype="<f4").tobytes(),  # nobody has sampled them, and nothing asks how
                versions=[VersionRun(version, count)],
                turns=[Turn("", "", 0.0, 0.0, 0.0, 0.0) for _ in spans],
            )


class TokenTable:
    """Rows in tokens, as arrays that trainer ranks map into memory.

    Args:
        arrays: by their names in `ARRAYS`.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays

    @classmethod
    def of(cls, rows: Sequence[TokenRow]) -> TokenTable:
        """Return the table of these rows."""
        sequences = [one for row in rows for one in row.sequences]
        spans = [span for one in sequences for span in one.spans]
        arrays = {
            "tokens": np.concatenate([np.array(one.tokens, np.int32) for one in sequences] or [np.zeros(0, np.int32)]),
            "token_ends": _ends(len(one.tokens) for one in sequences),
            "spans": np.array([(span.start, span.stop) for span in spans], np.int64).reshape(-1, 2),
            "span_ends": _ends(len(one.spans) for one in sequences),
            "sequence_ends": _ends(len(row.sequences) for row in rows),
            "cut": np.array([row.cut for row in rows], np.bool_),
        }
        return cls(arrays)

    @classmethod
    def joined(cls, tables: Sequence[TokenTable]) -> TokenTable:
        """Return one table of the rows of several."""
        parts = [table._arrays for table in tables]
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in ("tokens", "spans", "cut")}
        for name in ("token_ends", "span_ends", "sequence_ends"):
            before = np.cumsum([0, *(part[name][-1] if len(part[name]) else 0 for part in parts)])
            arrays[name] = np.concatenate([part[name] + start for part, start in zip(parts, before, strict=False)])
        return cls(arrays)

    @classmethod
    def load(cls, folder: Path) -> TokenTable:
        """Map the table that `save` has written."""
        return cls({name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS})

    def save(self, folder: Path) -> None:
        """Write the table into a new folder."""
        folder.mkdir(parents=True)
        for name in ARRAYS:
            np.save(folder / f"{name}.npy", self._arrays[name])

    def __len__(self) -> int:
        return len(self._arrays["sequence_ends"])

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return len(self._arrays["tokens"])

    @property
    def learned(self) -> int:
        """Tokens that are learned."""
        return int((self._arrays["spans"][:, 1] - self._arrays["spans"][:, 0]).sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(np.diff(self._arrays["token_ends"], prepend=0).max(initial=0))

    @property
    def greatest(self) -> int:
        """The greatest token; -1 if there is none."""
        return int(self._arrays["tokens"].max(initial=-1))

    def digest(self) -> str:
        """Return a text that is equal for equal tables, in the same order."""
        told = blake2b(digest_size=16)
        for name in ARRAYS:
            told.update(np.ascontiguousarray(self._arrays[name]).data)
        return told.hexdigest()

    @property
    def cut(self) -> int:
        """Rows of which a part lies beyond the longest sequence."""
        return int(self._arrays["cut"].sum())

    def row(self, index: int) -> TokenRow:
        """Return a row."""
        arrays = self._arrays
        sequences: list[Learned] = []
        for sequence in range(*_range(arrays["sequence_ends"], index)):
            tokens = arrays["tokens"][slice(*_range(arrays["token_ends"], sequence))].tolist()
            spans = arrays["spans"][slice(*_range(arrays["span_ends"], sequence))].tolist()
            sequences.append(Learned(tokens, [Span(start, stop) for start, stop in spans]))
        return TokenRow(sequences, bool(arrays["cut"][index]))


ARRAYS = ("tokens", "token_ends", "spans", "span_ends", "sequence_ends", "cut")


def _ends(lengths: Iterable[int]) -> Any:
    return np.cumsum(np.fromiter(lengths, np.int64), dtype=np.int64)


def _range(ends: Any, index: int) -> tuple[int, int]:
    return int(ends[index - 1]) if index else 0, int(ends[index])


class _Part(NamedTuple):
    """A part of a table in tokens."""

    table: TokenTable
    too_long: list[str]
    """Places of rows that are left out, since no answer begins within the longest sequence."""
    unlearned: list[str]
    """Places of rows that are left out, since nothing in them is to be learned."""
    controls: list[str]
    """Places of texts that hold the text of a control token."""
    faults: list[str]
    """Error messages for rows that cannot be taken."""


class TokenReport(NamedTuple):
    """A whole table in tokens."""

    table: TokenTable
    lines: list[str]
    """How many rows were taken, cut and left out, and why."""


def read_tokens(
    key: str, path: str, model: ModelConfig, tell: Callable[[str], object], most_rows: int | None = None
) -> TokenReport:
    """Read and tokenize the rows of a table; with `most_rows`, no more than its first ones.

    Args:
        key: the setting that names the table, for people.
        path: the table.
        model: has the tokenizer, and the length at which rows are cut.
        tell: is given a line every few seconds.
        most_rows: number of rows.

    Raises:
        ConfigError: the table cannot be read or is empty, rows of it cannot be taken, or nothing can be learned of it.
    """
    rows, faults, shapes = _examples(islice(read_rows(path), most_rows)), list[str](), Counter[str]()
    parts: list[_Part] = []
    done, told = 0, time.monotonic()
    with closing(_tokenized_parts(_counted(rows, faults, shapes), model)) as tokenized_parts:
        for part in tokenized_parts:
            parts.append(part)
            done += len(part.table) + len(part.too_long) + len(part.unlearned) + len(part.faults)
            if time.monotonic() - told > TELL_S:
                told = time.monotonic()
                tell(f"{key}: {done} rows are tokenized")
    faults += (fault for part in parts for fault in part.faults)
    refuse_rows(faults)
    if not parts:
        raise ConfigError(f"{path} has no rows")
    table, most = TokenTable.joined([part.table for part in parts]), model.max_length
    long = [place for part in parts for place in part.too_long]
    unlearned = [place for part in parts for place in part.unlearned]
    controls = [place for part in parts for place in part.controls]
    if not len(table):
        raise ConfigError(f"{key}: no row of {path} has anything to learn within model.max_length = {most}")
    if (size := _vocabulary(model)) is not None and table.greatest >= size:
        text = HfTokenizer(model).token_texts([table.greatest])[0]
        raise ConfigError(
            f"{key}: rows have the token {text!r} ({table.greatest}), and the model {model.path} has {size} tokens: "
            "tokens were added to its tokenizer alone. Add them to the model, as transformers' resize_token_embeddings "
            "does, or use the model's own tokenizer"
        )
    counts = ", ".join(f"{count} {'row' if count == 1 else 'rows'} with {shape}" for shape, count in shapes.items())
    learned = (
        f"{len(table)} rows are learned: {table.learned} of {table.tokens} tokens, at most {table.longest} a sequence"
    )
    lines = [f"{key}: {path} has {counts}; {learned}"]
    if table.cut:
        lines.append(f"{key}: {table.cut} of these rows are cut at model.max_length = {most}")
    if long:
        lines.append(f"{key}: {_left_out(long)}: no answer begins within model.max_length = {most}")
    if unlearned:
        lines.append(f"{key}: {_left_out(unlearned)}: their answers are empty, of weight 0, or follow no message")
    if controls:
        lines.append(
            f"{key}: {len(controls)} texts hold the text of a control token, as {controls[0]} does; it is learned as "
            "the letters that it has: give conversations as `messages`, without control tokens"
        )
    return TokenReport(table, lines)


def _vocabulary(model: ModelConfig) -> int | None:
    """Return the number of tokens of a model in a local folder, as its config.json says; None if that is not known."""
    try:
        described: Any = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
        size = described.get("text_config", described).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None  # the model comes from a hub or is still to be made
    return size if isinstance(size, int) else None


def _left_out(places: Sequence[str]) -> str:
    more = ", …" if len(places) > 1 else ""
    return f"{len(places)} {'row is' if len(places) == 1 else 'rows are'} left out ({places[0]}{more})"


_Example = tuple[str, Conversation | Text]
"""The place of a row and what it teaches."""


def _examples(rows: Iterable[Row]) -> Iterator[_Example | ConfigError]:
    for row in rows:
        try:
            yield row.place, example_of(row)
        except ConfigError as error:
            yield error


def _counted(examples: Iterable[_Example | ConfigError], faults: list[str], shapes: Counter[str]) -> Iterator[_Example]:
    """Yield the examples; note the errors, and how many rows of each shape there are."""
    for one in examples:
        if isinstance(one, ConfigError):
            faults.append(str(one))
        else:
            shapes[one[1].shape] += 1
            yield one


def _tokenized_parts(examples: Iterator[_Example], model: ModelConfig) -> Generator[_Part]:
    """Tokenize here, or from some number of rows on in as many processes as there are cores."""
    first = list(islice(examples, ALONE))
    if len(first) < ALONE:
        if first:
            yield _tokenize(first, HfTokenizer(model).ready(), model.max_length)
        return
    cores = len(os.sched_getaffinity(0))
    chunks = _chunks(chain(first, examples))
    with ProcessPoolExecutor(cores, get_context("spawn"), _begin_worker, (model,)) as pool:
        try:
            waiting = deque(pool.submit(_tokenize_in_worker, chunk) for chunk in islice(chunks, 2 * cores))
            while waiting:
                yield waiting.popleft().result()
                waiting += [pool.submit(_tokenize_in_worker, chunk) for chunk in islice(chunks, 1)]
        finally:
            pool.shutdown(cancel_futures=True)


def _chunks(examples: Iterator[_Example]) -> Iterator[list[_Example]]:
    while chunk := list(islice(examples, CHUNK)):
        yield chunk


_worker: list[tuple[HfTokenizer, int]] = []
"""The tokenizer of this process, and the length at which rows are cut."""


def _begin_worker(model: ModelConfig) -> None:
    def end_with_parent() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)  # a pool's process would wait for work for ever

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the pool ends these
    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker.append((HfTokenizer(model).ready(), model.max_length))


def _tokenize_in_worker(chunk: list[_Example]) -> _Part:
    return _tokenize(chunk, *_worker[0])


def _tokenize(examples: Sequence[_Example], tokenizer: HfTokenizer, most: int) -> _Part:
    controls = [str(one) for one in tokenizer.inner.added_tokens_decoder.values() if one.special]
    rows: list[TokenRow] = []
    too_long, unlearned, with_controls, faults = list[str](), list[str](), list[str](), list[str]()
    for place, example in examples:
        try:
            row = tokenized(example, place, tokenizer, most)
        except ConfigError as error:
            faults.append(str(error))
            continue
        if row.sequences:
            rows.append(row)
        else:
            (too_long if row.cut else unlearned).append(place)
        if isinstance(example, Text) and any(one in example.prompt or one in example.completion for one in controls):
            with_controls.append(place)
    return _Part(TokenTable.of(rows), too_long, unlearned, with_controls, faults)


def tokenized(example: Conversation | Text, place: str, tokenizer: HfTokenizer, most: int) -> TokenRow:
    """Return a row in tokens, without those beyond the first `most` of a sequence.

    Raises:
        ConfigError: the row cannot be shown by the model's chat template. `place` names it.
    """
    try:
        whole = list(_sequences(example, place, tokenizer))
    except EnvError as error:
        raise ConfigError(f"{place}: {error}") from error
    kept = [one for one in (_cut(one, most) for one in whole) if one.spans]
    return TokenRow(kept, cut=any(len(one.tokens) > most for one in whole))


def _sequences(example: Conversation | Text, place: str, tokenizer: HfTokenizer) -> Iterator[Learned]:
    """Yield the sequences of a row. Raises EnvError as `HfTokenizer.said`, ConfigError for a wrong message or tool."""
    if isinstance(example, Text):
        if not example.completion.strip():
            return
        prompt = tokenizer.render(example.prompt)
        answer = [*tokenizer.follow(example.completion, None), *tokenizer.end]
        yield _grown([], prompt, answer)
        return
    messages = spoken(example.messages, place)
    try:
        offered = tools.offered(msgspec.convert(example.tools, list[tools.GivenTool]))
    except (ApiError, msgspec.ValidationError) as error:
        raise ConfigError(f"{place}: {error}") from None
    growing, tokenizer = Learned([], []), tokenizer.with_arguments(example.template)
    # An engine is asked behind some message: one that begins a conversation is shown, and not learned.
    for index in range(max(example.shown, 1), len(messages)):
        given = example.messages[index]
        if (
            messages[index].role != ASSISTANT
            or not _weight(given.get("weight"), index, place)
            or _is_empty(messages[index])
        ):
            continue
        prompt, answer = tokenizer.prompt_and_answer(messages[: index + 1], offered)
        if prompt[: len(growing.tokens)] != growing.tokens:
            yield growing
            growing = Learned([], [])
        growing = _grown(growing.spans, prompt, answer)
    yield growing


def _is_empty(answer: Message) -> bool:
    """Return True for an answer that says nothing: learned, it would teach the model to end its turn at once."""
    return not (answer.content.strip() or answer.reasoning.strip() or answer.tool_calls)


def _weight(given: Any, index: int, place: str) -> bool:
    """Return False if a message is shown and not learned, as in OpenAI's files. Raises ConfigError."""
    if given not in (None, 0, 1):
        raise ConfigError(f"{place}: messages[{index}].weight must be 0 (not learned) or 1, but is {given!r}")
    return given != 0


def _grown(spans: Sequence[Span], prompt: list[int], answer: list[int]) -> Learned:
    return Learned([*prompt, *answer], [*spans, Span(len(prompt), len(prompt) + len(answer))])


def _cut(whole: Learned, most: int) -> Learned:
    """Keep the first tokens. Nothing predicts the very first one."""
    spans = [Span(max(span.start, 1), min(span.stop, most)) for span in whole.spans]
    return Learned(whole.tokens[:most], [span for span in spans if span.start < span.stop])
