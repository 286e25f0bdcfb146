"""Rows of JSON lines as token sequences: what is learned of each, behind what.

Law: an answer is learned behind the very tokens that an engine would be shown to have it said. A conversation whose
template shows its later turns behind the earlier ones as they were said is one sequence; where it shows them otherwise,
as those that drop earlier reasoning, the later turn begins a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from flash.errors import ConfigError, EnvError
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.service import tools
from flash.service.chat import Spoken, messages_of
from flash.service.errors import ApiError
from flash.types import ASSISTANT, Message, Outcome, Span, Task, Tool, Trajectory, Turn, VersionRun


class _Row(msgspec.Struct, frozen=True):
    messages: list[Spoken] | None = None
    prompt: str | list[Spoken] | None = None
    completion: str | list[Spoken] | None = None
    tools: list[tools.GivenTool] | None = None


class Chat(NamedTuple):
    """A conversation."""

    messages: list[Message]
    learned: list[int]
    """Places of the messages that are learned: the assistant's."""
    tools: tuple[Tool, ...]


class Text(NamedTuple):
    """A text and what follows it, without a template."""

    prompt: str
    completion: str


class Learned(NamedTuple):
    """Tokens, and which of them are learned."""

    tokens: list[int]
    spans: list[Span]


class TokenRow(NamedTuple):
    """A row in tokens."""

    sequences: list[Learned]
    """None of them without a token to learn."""
    cut: bool
    """Whether something of it is beyond the longest sequence."""

    def trajectories(self, place: int, version: int) -> Iterator[Trajectory]:
        """What a step that trains this version is given of the row at a place of its course."""
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


class Rows:
    """The rows of a file.

    Raises:
        ConfigError: it cannot be read, is empty, or a row of it is none of the forms of `SftConfig.data`.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
        self._lines = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        if not self._lines:
            raise ConfigError(f"{file} has no rows")
        for place in range(len(self._lines)):
            self.read(place)

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, place: int) -> Chat | Text:
        """One of them. Raises ConfigError."""
        number, line = self._lines[place]
        try:
            return _read(msgspec.json.decode(line, type=_Row))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ApiError, ValueError) as error:
            raise ConfigError(f"{self._file}, line {number}: {error}") from None

    def tokens(self, place: int, tokenizer: HfTokenizer, most: int) -> TokenRow:
        """One of them, without what lies beyond the first `most` tokens of a sequence. Raises ConfigError."""
        try:
            whole = list(_sequences(self.read(place), tokenizer))
        except EnvError as error:
            raise ConfigError(f"{self._file}, line {self._lines[place][0]}: {error}") from error
        kept = [one for one in (_cut(one, most) for one in whole) if one.spans]
        return TokenRow(kept, cut=any(len(one.tokens) > most for one in whole))


def _read(row: _Row) -> Chat | Text:
    """Raises ApiError or ValueError for what is none of the forms."""
    prompt, completion, messages = row.prompt, row.completion, row.messages
    if messages is not None and prompt is None and completion is None:
        first = 0
    elif messages is None and prompt is not None and completion is not None:
        if isinstance(prompt, str) and isinstance(completion, str):
            return Text(prompt, completion)
        before = [Spoken("user", prompt)] if isinstance(prompt, str) else prompt
        after = [Spoken(ASSISTANT, completion)] if isinstance(completion, str) else completion
        messages, first = [*before, *after], len(before)
    else:
        raise ValueError("expected `messages` alone, or `prompt` and `completion`")
    said = messages_of(messages)
    learned = [place for place, one in enumerate(said) if one.role == ASSISTANT and place >= first]
    if not learned:
        raise ValueError("there is no message of the assistant to learn")
    return Chat(said, learned, tools.offered(row.tools or []))


def _sequences(row: Chat | Text, tokenizer: HfTokenizer) -> Iterator[Learned]:
    """Raises EnvError, as `HfTokenizer.said`."""
    if isinstance(row, Text):
        prompt = tokenizer.render(row.prompt)
        answer = [*tokenizer.follow(row.completion, stopped=False), *tokenizer.end]
        yield _grown([], prompt, answer)
        return
    growing = Learned([], [])
    for place in row.learned:
        prompt, answer = tokenizer.said(row.messages[: place + 1], row.tools)
        if prompt[: len(growing.tokens)] != growing.tokens:
            yield growing
            growing = Learned([], [])
        growing = _grown(growing.spans, prompt, answer)
    yield growing


def _grown(spans: Sequence[Span], prompt: list[int], answer: list[int]) -> Learned:
    return Learned([*prompt, *answer], [*spans, Span(len(prompt), len(prompt) + len(answer))])


def _cut(whole: Learned, most: int) -> Learned:
    """Its first tokens; nothing predicts the very first one."""
    spans = [Span(max(span.start, 1), min(span.stop, most)) for span in whole.spans]
    return Learned(whole.tokens[:most], [span for span in spans if span.start < span.stop])
