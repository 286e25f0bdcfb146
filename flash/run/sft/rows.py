"""Rows of a data set as token sequences: which tokens of each are learned, behind which others.

Law: an answer is learned behind the very tokens that an engine would be shown to have it said. A conversation whose
template shows its later turns behind the earlier ones as they were said is one sequence; where it shows them otherwise,
as those that drop earlier reasoning, the later turn begins a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from flash.data.shapes import Conversation, Text, example_of, spoken
from flash.data.tables import read_rows, refuse_rows
from flash.errors import ConfigError, EnvError
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.service import tools
from flash.service.errors import ApiError
from flash.types import ASSISTANT, Outcome, Span, Task, Trajectory, Turn, VersionRun


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
    """The rows of a table, all of them read.

    Raises:
        ConfigError: the table cannot be read or is empty, or rows of it have none of the shapes of `flash.data.shapes`.
    """

    def __init__(self, path: str) -> None:
        self._places: list[str] = []
        self._examples: list[Conversation | Text] = []
        faults: list[str] = []
        for row in read_rows(path):
            try:
                self._examples.append(example_of(row))
                self._places.append(row.place)
            except ConfigError as error:
                faults.append(str(error))
        refuse_rows(faults)
        if not self._examples:
            raise ConfigError(f"{path} has no rows")

    def __len__(self) -> int:
        return len(self._examples)

    def tokens(self, index: int, tokenizer: HfTokenizer, most: int) -> TokenRow:
        """Return a row in tokens, without those beyond the first `most` of a sequence. Raises ConfigError."""
        return tokenized(self._examples[index], self._places[index], tokenizer, most)


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
    """Raises EnvError, as `HfTokenizer.said`, and ConfigError for messages and tools of a wrong form."""
    if isinstance(example, Text):
        prompt = tokenizer.render(example.prompt)
        answer = [*tokenizer.follow(example.completion, stopped=False), *tokenizer.end]
        yield _grown([], prompt, answer)
        return
    messages = spoken(example.messages, place)
    try:
        offered = tools.offered(msgspec.convert(example.tools, list[tools.GivenTool]))
    except (ApiError, msgspec.ValidationError) as error:
        raise ConfigError(f"{place}: {error}") from None
    growing = Learned([], [])
    # An engine is asked behind some message: one that begins a conversation is shown, and not learned.
    for index in range(max(example.shown, 1), len(messages)):
        if messages[index].role != ASSISTANT:
            continue
        prompt, answer = tokenizer.said(messages[: index + 1], offered)
        if prompt[: len(growing.tokens)] != growing.tokens:
            yield growing
            growing = Learned([], [])
        growing = _grown(growing.spans, prompt, answer)
    yield growing


def _grown(spans: Sequence[Span], prompt: list[int], answer: list[int]) -> Learned:
    return Learned([*prompt, *answer], [*spans, Span(len(prompt), len(prompt) + len(answer))])


def _cut(whole: Learned, most: int) -> Learned:
    """Keep the first tokens. Nothing predicts the very first one."""
    spans = [Span(max(span.start, 1), min(span.stop, most)) for span in whole.spans]
    return Learned(whole.tokens[:most], [span for span in spans if span.start < span.stop])
