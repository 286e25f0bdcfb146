"""Rows of `flash sft`: the rows of a data set as token sequences, and the course that decides which rows a step trains.

Law: an answer is learned after exactly those tokens that an engine would get as its prompt. A conversation is one
sequence if the chat template renders the earlier turns unchanged in front of later ones. If it renders them
differently, for example without earlier reasoning, the later turn begins a new sequence.

Law: the batch of a step follows only from the file, `run.seed` and the step. So a resumed run trains the same batches,
on any number of ranks.

All rows are tokenized before a run starts: the command `flash sft` calls `CourseTokens.read`, which uses several
processes if there are many rows. Invalid rows are then refused with file and row number. Rows without a token to learn
are left out and counted. Trainer ranks (`flash.run.sft_rank`) map the tokens from files (`TokenTable`), so a row cannot
fail in the middle of a run.

Terms: a sequence is *cut* after `model.max_length` tokens. A *span* is a range of token positions. A *control token*
is a special token that the chat template writes, such as the mark of the end of a turn.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from flash.branches import Int64Array
from flash.config.tree import Config, ModelConfig
from flash.data.shapes import Conversation, Text, example_of, spoken
from flash.data.tables import Row, read_rows, refuse_rows
from flash.errors import ConfigError, EnvError
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.service import tools
from flash.service.fields import ApiError
from flash.types import ASSISTANT, Batch, Message, Outcome, Span, Task, Trajectory, Turn, VersionRun
from flash.waiting import worker_deaths_named

PARALLEL_FROM = 2000
"""Number of rows from which several processes tokenize. Their start takes some five seconds."""
CHUNK = 500
"""Number of rows that a process tokenizes in one task."""
PROGRESS_S = 5.0
"""Seconds between two lines about the progress of tokenizing."""


ARRAYS = ("tokens", "token_ends", "spans", "span_ends", "sequence_ends", "cut")
"""Names of the arrays of a `TokenTable`, and of their files.

The sequences of all rows lie one after another. `tokens` holds their tokens, `spans` the start and stop of each learned
span, and `cut` a bool for each row. An array `*_ends` holds the position at which each item ends: `token_ends` for each
sequence in `tokens`, `span_ends` for each sequence in `spans`, `sequence_ends` for each row in the list of sequences.
"""
SFT_ROWS = "rows"
"""Folder in the job's temporary folder with the tokenized rows. The launcher writes it, and the trainer ranks read
it."""


class Learned(NamedTuple):
    """Token sequence with the spans that are learned: the answers, which the trained model shall give."""

    tokens: list[int]
    """Token ids of the prompts and the answers."""
    spans: list[Span]
    """Start and stop of each answer in `tokens`, in order."""


class TokenRow(NamedTuple):
    """Row of a data set as token sequences. A conversation may need several sequences, see the law above."""

    sequences: list[Learned]
    """Sequences of the row, each with at least one token to learn."""
    cut: bool
    """True if some tokens of the row were cut off, because a sequence was longer than the limit."""

    def trajectories(self, place: int, version: int) -> Iterator[Trajectory]:
        """Yield a trajectory for each sequence of the row.

        The trainer takes only trajectories. In a run with rewards, engines sample them; here they hold the row's
        tokens. `place` is the number of the row in the course or among the held-out rows, and `version` the policy
        version that the trainer holds before the step.
        """
        for member, (tokens, spans) in enumerate(self.sequences):
            count = sum(span.stop - span.start for span in spans)
            yield Trajectory(
                # The row's place is the number of task and group, so that all sequences of a row form one group.
                task=Task(place, place, member, seed=place),
                outcome=Outcome.OK,
                reward=0.0,
                token_ids=np.array(tokens, dtype="<i4").tobytes(),
                action_spans=spans,
                # The log-probs are 0: no engine sampled these tokens, and the loss does not use the log-probs.
                logprobs=np.zeros(count, dtype="<f4").tobytes(),
                # As if this version had sampled the tokens: their age is 0, so none counts as stale.
                versions=[VersionRun(version, count)],
                # A trajectory has one turn per span. Nothing was shown or timed here.
                turns=[Turn("", "", 0.0, 0.0, 0.0, 0.0) for _ in spans],
            )


class TokenTable:
    """Table of rows as arrays, which trainer ranks map into memory, so that a large table exists once on a machine.

    Args:
        arrays: the arrays by name; `ARRAYS` lists the names.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays

    @classmethod
    def of(cls, rows: Sequence[TokenRow]) -> TokenTable:
        """Return a table of these rows, in their order; without rows an empty table.

        Each chunk of tokenized rows becomes a table of its own.
        """
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
        """Return one table with the rows of at least one table, in this order. `read_tokens` joins the chunks."""
        parts = [table._arrays for table in tables]
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in ("tokens", "spans", "cut")}
        for name in ("token_ends", "span_ends", "sequence_ends"):
            # The ends of a table count from its own beginning, so the items of the tables before are added.
            before = np.cumsum([0, *(part[name][-1] if len(part[name]) else 0 for part in parts)])
            arrays[name] = np.concatenate([part[name] + start for part, start in zip(parts, before, strict=False)])
        return cls(arrays)

    @classmethod
    def load(cls, folder: Path) -> TokenTable:
        """Map a table from the files that `save` has written to `folder`. Trainer ranks call this."""
        return cls({name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS})

    def save(self, folder: Path) -> None:
        """Write the table to a new folder, one file for each array. The launcher calls this."""
        folder.mkdir(parents=True)
        for name in ARRAYS:
            np.save(folder / f"{name}.npy", self._arrays[name])

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._arrays["sequence_ends"])

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows."""
        return len(self._arrays["tokens"])

    @property
    def learned(self) -> int:
        """Number of tokens that are learned."""
        return int((self._arrays["spans"][:, 1] - self._arrays["spans"][:, 0]).sum())

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return int(np.diff(self._arrays["token_ends"], prepend=0).max(initial=0))

    @property
    def largest_id(self) -> int:
        """Largest token id; −1 if there are no tokens."""
        return int(self._arrays["tokens"].max(initial=-1))

    def digest(self) -> str:
        """Return a hash that is equal for tables with equal rows in the same order. Reads the whole table."""
        digest = blake2b(digest_size=16)
        for name in ARRAYS:
            digest.update(np.ascontiguousarray(self._arrays[name]).data)
        return digest.hexdigest()

    @property
    def cut(self) -> int:
        """Number of rows of which some tokens were cut off."""
        return int(self._arrays["cut"].sum())

    def row(self, index: int) -> TokenRow:
        """Return row number `index` of the table, counted from 0."""
        arrays = self._arrays
        sequences: list[Learned] = []
        for sequence in range(*_range(arrays["sequence_ends"], index)):
            tokens = arrays["tokens"][slice(*_range(arrays["token_ends"], sequence))].tolist()
            spans = arrays["spans"][slice(*_range(arrays["span_ends"], sequence))].tolist()
            sequences.append(Learned(tokens, [Span(start, stop) for start, stop in spans]))
        return TokenRow(sequences, bool(arrays["cut"][index]))


def _ends(lengths: Iterable[int]) -> Any:
    """Return the end of each item in a flat array that holds items of these lengths one after another."""
    return np.cumsum(np.fromiter(lengths, np.int64), dtype=np.int64)


def _range(ends: Any, index: int) -> tuple[int, int]:
    """Return start and stop of item number `index` (from 0) in the flat array whose items end at `ends`."""
    return int(ends[index - 1]) if index else 0, int(ends[index])


class _TokenizedChunk(NamedTuple):
    """Tokenized chunk of rows. A *place* of a row is its file and number, as messages show it."""

    table: TokenTable
    """Rows that are learned."""
    too_long: list[str]
    """Places of rows that are left out because no answer begins before the length at which sequences are cut."""
    unlearned: list[str]
    """Places of rows that are left out because they have no token to learn."""
    with_controls: list[str]
    """Places of rows of plain text (`text`, or `prompt` and `completion`) that contain the text of a control token."""
    faults: list[str]
    """Error messages of invalid rows."""


class TokenReport(NamedTuple):
    """Tokenized table, with a report."""

    table: TokenTable
    """Rows that are learned."""
    lines: list[str]
    """Lines for the user: how many rows were taken, cut and left out, with the reasons."""


def read_tokens(
    key: str, path: str, model: ModelConfig, report: Callable[[str], object], max_rows: int | None = None
) -> TokenReport:
    """Read and tokenize the rows of a data set, in the process of `flash sft`, before the run starts.

    Args:
        key: configuration key that names the data set, for messages.
        path: path of the data set.
        model: gives the tokenizer, and `max_length`, the number of tokens after which a sequence is cut.
        report: called with a line about the progress every few seconds.
        max_rows: number of rows to read from the beginning of the data set; None: all.

    Raises:
        ConfigError: the data set cannot be read or is empty, some rows are invalid, or no row has a token to learn; or
            the model has no usable tokenizer.
        FlashError: a process that tokenizes has died.
    """
    faults, shapes = list[str](), Counter[str]()  # `_examples` fills both while its rows are read
    examples = _examples(islice(read_rows(path), max_rows), faults, shapes)
    parts: list[_TokenizedChunk] = []
    done, reported = 0, time.monotonic()
    with closing(_tokenized_parts(examples, model)) as tokenized_parts:  # an error closes the worker processes
        for part in tokenized_parts:
            parts.append(part)
            done += len(part.table) + len(part.too_long) + len(part.unlearned) + len(part.faults)
            if time.monotonic() - reported > PROGRESS_S:
                reported = time.monotonic()
                report(f"{key}: {done} rows are tokenized")
    faults += (fault for part in parts for fault in part.faults)
    refuse_rows(faults)
    if not parts:
        raise ConfigError(f"{path} has no rows")
    table, limit = TokenTable.joined([part.table for part in parts]), model.max_length
    long = [place for part in parts for place in part.too_long]
    unlearned = [place for part in parts for place in part.unlearned]
    with_controls = [place for part in parts for place in part.with_controls]
    if not len(table):
        raise ConfigError(f"{key}: no row of {path} has anything to learn within model.max_length = {limit}")
    # The embedding of the model has no row for such a token, so the first step with it would fail.
    if (size := _vocabulary(model)) is not None and table.largest_id >= size:
        text = HfTokenizer(model).token_texts([table.largest_id])[0]
        raise ConfigError(
            f"{key}: rows have the token {text!r} ({table.largest_id}), and the model {model.path} has {size} tokens: "
            "tokens were added to its tokenizer alone. Add them to the model, as transformers' resize_token_embeddings "
            "does, or use the model's own tokenizer"
        )
    counts = ", ".join(f"{_rows(count)} with {shape}" for shape, count in shapes.items())
    # The lines for the user.
    learned = (
        f"{len(table)} rows are learned: {table.learned} of {table.tokens} tokens, at most {table.longest} a sequence"
    )
    lines = [f"{key}: {path} has {counts}; {learned}"]
    if table.cut:
        lines.append(f"{key}: {table.cut} of these rows are cut at model.max_length = {limit}")
    if long:
        lines.append(f"{key}: {_left_out(long)}: no answer begins within model.max_length = {limit}")
    if unlearned:
        lines.append(f"{key}: {_left_out(unlearned)}: their answers are empty, of weight 0, or follow no message")
    if with_controls:
        more = ", …" if len(with_controls) > 1 else ""
        lines.append(
            f"{key}: {_rows(len(with_controls))} ({with_controls[0]}{more}) {'have' if more else 'has'} the text of a "
            "control token, which is learned as ordinary letters: give conversations as `messages`, without control "
            "tokens"
        )
    return TokenReport(table, lines)


def _vocabulary(model: ModelConfig) -> int | None:
    """Return the vocabulary size of a model in a local folder, as its config.json states it; None if it is unknown."""
    try:
        described: Any = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
        # A model for text and images describes its language model in a table of its own.
        size = described.get("text_config", described).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None  # the model is on a hub, or is not made yet
    return size if isinstance(size, int) else None


def _rows(count: int) -> str:
    """Return a number of rows as a phrase: `1 row` or `2 rows`."""
    return f"{count} {'row' if count == 1 else 'rows'}"


def _left_out(places: Sequence[str]) -> str:
    """Return a phrase about the rows that are left out, with the place of the first one. `places` is not empty."""
    more = ", …" if len(places) > 1 else ""
    return f"{_rows(len(places))} {'is' if len(places) == 1 else 'are'} left out ({places[0]}{more})"


_Example = tuple[str, Conversation | Text]
"""Place of a row (its file and number, for messages), and its content."""


def _examples(rows: Iterable[Row], faults: list[str], shapes: Counter[str]) -> Iterator[_Example]:
    """Yield each valid row as an example. Adds the messages about invalid rows to `faults`, and counts the valid rows
    of each shape (such as `messages`) in `shapes`."""
    for row in rows:
        try:
            example = example_of(row)
        except ConfigError as error:
            faults.append(str(error))
            continue
        shapes[example.shape] += 1
        yield row.place, example


def _tokenized_parts(examples: Iterator[_Example], model: ModelConfig) -> Generator[_TokenizedChunk]:
    """Tokenize the examples chunk by chunk: in this process if there are few, else in one process per CPU core.

    Yields the chunks in the order of the rows; nothing if there are no examples. Closing the generator ends the worker
    processes, after the chunks that they work on.

    Raises:
        ConfigError: the model has no usable tokenizer (`HfTokenizer`, `HfTokenizer.ready`).
        FlashError: a process has died.
    """
    if not (first := list(islice(examples, PARALLEL_FROM))):
        return
    # With many rows this process only checks the tokenizer: an error in the start of a worker would break the pool.
    tokenizer = HfTokenizer(model).ready()
    if len(first) < PARALLEL_FROM:
        yield _tokenize_chunk(first, tokenizer, model.max_length)
        return
    cores = len(os.sched_getaffinity(0))
    chunks = _chunks(chain(first, examples))
    pool = ProcessPoolExecutor(cores, get_context("spawn"), _begin_worker, (model,))
    with worker_deaths_named("tokenizes the rows"), pool:
        try:
            # At most two chunks per process are read ahead, so that a large file is never in memory as a whole.
            waiting = deque(pool.submit(_tokenize_in_worker, chunk) for chunk in islice(chunks, 2 * cores))
            while waiting:
                yield waiting.popleft().result()
                waiting += [pool.submit(_tokenize_in_worker, chunk) for chunk in islice(chunks, 1)]
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C, waiting chunks are not tokenized


def _chunks(examples: Iterator[_Example]) -> Iterator[list[_Example]]:
    """Yield the examples in lists of CHUNK; the last list may be shorter."""
    while chunk := list(islice(examples, CHUNK)):
        yield chunk


_worker: list[tuple[HfTokenizer, int]] = []
"""Tokenizer of this worker process, and the length at which sequences are cut; empty in other processes."""


def _begin_worker(model: ModelConfig) -> None:
    """Make the tokenizer of this worker process, and let the process end with its parent.

    The pool calls this once in each worker, before the first chunk.
    """

    def end_with_parent() -> None:
        """Wait for the end of the parent process, and end this one. Runs in a thread."""
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)  # otherwise the worker would wait for work for ever

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the pool ends its workers
    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker.append((HfTokenizer(model).ready(), model.max_length))


def _tokenize_in_worker(chunk: list[_Example]) -> _TokenizedChunk:
    """Tokenize a chunk in a worker process of the pool, with the tokenizer that `_begin_worker` has made."""
    return _tokenize_chunk(chunk, *_worker[0])


def _tokenize_chunk(examples: Sequence[_Example], tokenizer: HfTokenizer, max_tokens: int) -> _TokenizedChunk:
    """Tokenize examples, and separate the rows that are learned from those left out and from invalid ones.

    `max_tokens`: number of tokens after which a sequence is cut.
    """
    rows: list[TokenRow] = []
    too_long, unlearned, with_controls, faults = list[str](), list[str](), list[str](), list[str]()
    for place, example in examples:
        try:
            row = tokenize_row(example, place, tokenizer, max_tokens)
        except ConfigError as error:
            faults.append(str(error))
            continue
        if row.sequences:
            rows.append(row)
        elif row.cut:  # all tokens to learn were cut off
            too_long.append(place)
        else:
            unlearned.append(place)
        # The author of a plain text may have rendered it with a chat template, and expects real control tokens. In a
        # conversation the template writes the control tokens, and a message that mentions one means its letters.
        if isinstance(example, Text) and any(
            control in text for control in tokenizer.control_texts for text in (example.prompt, example.completion)
        ):
            with_controls.append(place)
    return _TokenizedChunk(TokenTable.of(rows), too_long, unlearned, with_controls, faults)


def tokenize_row(example: Conversation | Text, place: str, tokenizer: HfTokenizer, max_tokens: int) -> TokenRow:
    """Return a row as tokens. Each sequence is cut after `max_tokens` tokens; one without a token to learn is left out.

    So the result has no sequences if nothing in the row can be learned. `place` names the row in error messages.

    Raises:
        ConfigError: the row is invalid, or the model's chat template cannot render it.
    """
    try:
        whole = list(_sequences(example, place, tokenizer))
    except EnvError as error:
        raise ConfigError(f"{place}: {error}") from error
    kept = [one for one in (_cut(one, max_tokens) for one in whole) if one.spans]
    return TokenRow(kept, cut=any(len(one.tokens) > max_tokens for one in whole))


def _sequences(example: Conversation | Text, place: str, tokenizer: HfTokenizer) -> Iterator[Learned]:
    """Yield the whole, uncut sequences of a row, for `tokenize_row`. A sequence may have no spans to learn.

    Raises:
        EnvError: the chat template fails.
        ConfigError: a message or a tool is invalid.
    """
    if isinstance(example, Text):
        if not example.completion.strip():
            return
        prompt = tokenizer.render(example.prompt)
        # `end` is the end-of-text token, so that the model learns to stop after a completion.
        answer = [*tokenizer.follow(example.completion, None), *tokenizer.end]
        yield _grown([], prompt, answer)
        return
    messages = spoken(example.messages, place)
    try:
        offered = tools.offered(msgspec.convert(example.tools, list[tools.GivenTool]))
    except (ApiError, msgspec.ValidationError) as error:
        raise ConfigError(f"{place}: {error}") from None
    # `example.template` holds the row's own arguments for the chat template.
    # One sequence grows with each answer as long as the template renders earlier turns unchanged.
    growing, tokenizer = Learned([], []), tokenizer.with_arguments(example.template)
    # The first `example.shown` messages are a prompt without answers to learn. An engine always gets some message
    # before it answers, so an answer that begins a conversation is not learned either.
    for index in range(max(example.shown, 1), len(messages)):
        weight = example.messages[index].get("weight")
        if messages[index].role != ASSISTANT or not _is_learned(weight, index, place) or _is_empty(messages[index]):
            continue
        prompt, answer = tokenizer.prompt_and_answer(messages[: index + 1], offered)
        # The prompt holds the earlier turns. If the template renders them differently now, such as without their
        # reasoning, the sequence so far cannot be continued.
        if prompt[: len(growing.tokens)] != growing.tokens:
            yield growing
            growing = Learned([], [])
        growing = _grown(growing.spans, prompt, answer)
    yield growing


def _is_empty(answer: Message) -> bool:
    """Return True for an answer without content.

    It is not learned, because it would teach the model to end its turn at once.
    """
    return not (answer.content.strip() or answer.reasoning.strip() or answer.tool_calls)


def _is_learned(weight: Any, index: int, place: str) -> bool:
    """Return True unless a message has the weight 0, with which OpenAI's format marks answers that are not learned.

    Args:
        weight: weight of the message; None if it has no weight.
        index: index of the message in its row, for the error message.
        place: place of the row, for the error message.

    Raises:
        ConfigError: the weight is neither 0 nor 1.
    """
    if weight not in (None, 0, 1):
        raise ConfigError(f"{place}: messages[{index}].weight must be 0 (not learned) or 1, but is {weight!r}")
    return weight != 0


def _grown(spans: Sequence[Span], prompt: list[int], answer: list[int]) -> Learned:
    """Return the sequence `prompt` + `answer`. The answer becomes one more span to learn, after the spans of earlier
    answers, which lie in `prompt`."""
    return Learned([*prompt, *answer], [*spans, Span(len(prompt), len(prompt) + len(answer))])


def _cut(whole: Learned, max_tokens: int) -> Learned:
    """Return the first `max_tokens` tokens of a sequence, with the spans that remain, in whole or in part."""
    # The spans leave out the very first token, because no token before it predicts it.
    spans = [Span(max(span.start, 1), min(span.stop, max_tokens)) for span in whole.spans]
    return Learned(whole.tokens[:max_tokens], [span for span in spans if span.start < span.stop])


class CourseTokens(NamedTuple):
    """Tokenized rows of a run. Rows without a token to learn are left out.

    Lifecycle: `read` makes the tokens in the process of `flash sft`, `save` writes them to the job's temporary folder,
    and each trainer rank maps them into memory with `load`.
    """

    data: TokenTable
    """Rows of `sft.data`, which are trained."""
    held_out: TokenTable | None
    """Rows of `sft.held_out`, whose loss is only measured; None if there are none."""
    lines: list[str] = []  # noqa: RUF012
    """Lines for the user: how many rows were taken, cut and left out, with the reasons. Empty after `load`."""

    @classmethod
    def read(cls, config: Config, report: Callable[[str], object]) -> CourseTokens:
        """Read and tokenize all rows of `sft.data` and the first `eval.problems` rows of `sft.held_out`.

        `flash sft` calls this before it starts processes. `report` is called with lines about the progress. Raises the
        errors of `read_tokens`.
        """
        assert config.sft is not None
        model = replace(config.model, tool_parser=None, reasoning_parser=None)  # no response is parsed
        data, held_out = read_tokens("sft.data", config.sft.data, model, report), None
        if config.sft.held_out is not None:
            held_out = read_tokens("sft.held_out", config.sft.held_out, model, report, config.eval.problems)
        return cls(data.table, held_out and held_out.table, data.lines + (held_out.lines if held_out else []))

    @classmethod
    def load(cls, folder: Path) -> CourseTokens:
        """Map the rows that `save` has written to `folder` into memory. Each trainer rank calls this."""
        held_out = folder / "held_out"
        return cls(TokenTable.load(folder / "data"), TokenTable.load(held_out) if held_out.is_dir() else None)

    def save(self, folder: Path) -> None:
        """Write the rows into a new folder, for the trainer ranks. The launcher calls this before it starts them."""
        self.data.save(folder / "data")
        if self.held_out is not None:
            self.held_out.save(folder / "held_out")

    def with_steps(self, config: Config) -> Config:
        """Return a configuration whose `run.steps` is the number of steps that the epochs take.

        The last step may have fewer rows than the others. `flash sft` calls this before it starts processes.
        """
        steps = math.ceil(_length(config, len(self.data)) / config.train.batch_size)
        return replace(config, run=replace(config.run, steps=steps))

    def described(self, tokenizer: HfTokenizer) -> Iterator[str]:
        """Yield lines for a dry run: the numbers of rows, and the first row with its learned tokens in brackets.

        A note about tokens that end a turn, which the model's own settings lack, comes between them if there are any.
        """
        yield from self.lines
        if ends := tokenizer.missing_ends():
            yield f"model: {ends}"
        first = self.data.row(0).sequences[0]
        texts = tokenizer.token_texts(first.tokens)
        for span in reversed(first.spans):  # from the end, since each replacement moves what follows
            texts[span.start : span.stop] = [f"[{''.join(texts[span.start : span.stop])}]"]
        yield f"sft.data: the first row, what is learned of it in brackets: {''.join(texts)!r}"


class Course:
    """Rows of `sft.data` in the order in which they are trained, shuffled for each epoch, and the held-out rows.

    Each trainer rank has one, and all ranks compute the same order.
    """

    def __init__(self, config: Config, tokens: CourseTokens) -> None:
        self._config, self._tokens = config, tokens
        self._length = _length(config, len(tokens.data))
        """Number of rows that all epochs train together. A *place* in the course counts them, from 0."""
        # Cached for each epoch; two, because a batch may begin in one epoch and end in the next.
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> Int64Array:
        """Return the numbers of all rows in the order of an epoch, which follows only from `run.seed` and `epoch`."""
        return np.random.default_rng([self._config.run.seed, epoch]).permutation(len(self._tokens.data))

    def digest(self) -> str:
        """Return a hash that is equal for equal rows of `sft.data` as tokens. Reads all rows."""
        return self._tokens.data.digest()

    def batch(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Return the batch of a step, and metrics about it by name.

        The metrics are `samples`, the number of rows; `epoch`, the number of passes over the data after this step, such
        as 1.5; and `cut_share`, the share of the rows that were cut.

        The training loop of each rank calls this, in a thread, one step ahead. `step` is the policy version before the
        step, from 0. It is below `run.steps`, so the batch is not empty.
        """
        size, rows = self._config.train.batch_size, self._tokens.data
        places = range(step * size, min((step + 1) * size, self._length))
        found: dict[int, TokenRow] = {}
        for place in places:
            epoch, number = divmod(place, len(rows))
            found[place] = rows.row(int(self._order(epoch)[number]))
        cut = sum(row.cut for row in found.values()) / len(found)
        return _batch(step, found), {"samples": len(found), "epoch": places.stop / len(rows), "cut_share": cut}

    def held_out(self, version: int) -> Batch | None:
        """Return all held-out rows as one batch; None if there are none. The training loop only measures their loss.

        `version`: policy version whose loss is measured. The batch has the form of the step that would train it.
        """
        rows = self._tokens.held_out
        return None if rows is None else _batch(version, {place: rows.row(place) for place in range(len(rows))})


def _batch(step: int, rows: dict[int, TokenRow]) -> Batch:
    """Return rows as the batch of a step, in which no token is stale and no group continues an earlier one.

    `step` is also the policy version before the step. `rows`: by place in the course, or by number if they are held
    out.
    """
    trajectories = [one for place, row in rows.items() for one in row.trajectories(place, step)]
    return Batch(step=step, min_version=step, trajectories=trajectories, earlier=[])


def _length(config: Config, rows: int) -> int:
    """Return the number of rows that all epochs train together. `rows`: number of rows of `sft.data`."""
    assert config.sft is not None
    return math.ceil(rows * config.sft.epochs)
