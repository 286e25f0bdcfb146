"""Transcript: the sequences of tokens that an episode consists of.

Each only grows: observations as they were rendered, responses exactly as they were sampled. Most episodes have one. One
whose environment goes on from an earlier place has branches: the new one begins with the tokens up to there, which are
prompt in it. Conservation: every sampled token is in exactly one span of one branch.

An environment that asks for it sees all this as an `EpisodeView`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np

from flash.environment.interface import Expected, Said, Spoken
from flash.errors import EnvError
from flash.rollout.episode.asking import Asking, Wanted
from flash.rollout.episode.reading import PlainReading
from flash.rollout.episode.tokenizer import Tokenizer
from flash.types import (
    Completion,
    Observation,
    Outcome,
    Piece,
    Span,
    Task,
    Tool,
    Trajectory,
    Turn,
    VersionRun,
    append_versions,
)

LETTERS_PER_TOKEN = 32
"""More than any text has on average but for long runs of white space. What would need more to fit is too long without
being tokenized: a node does nothing else while it tokenizes, for seconds where there are megabytes."""


class EpisodeLimits(NamedTuple):
    """How far an episode may go."""

    length: int
    """Longest sequence, in tokens."""
    turns: int
    """Most responses, over all branches."""
    branches: int
    tokens: int
    """Most tokens of all branches together."""
    response: int
    """Most tokens of a response."""


class _End(NamedTuple):
    """The end of a response that stands in a branch."""

    place: int
    cut: bool
    """The token limit ended it."""
    ended: bool
    """The model did, with a token of its own."""


class _Form(NamedTuple):
    """How a branch is rendered throughout."""

    chat: bool
    tools: Sequence[Tool]
    """What its prompt offers."""


class _Branch:
    """One sequence of tokens: what another one has lent it, then what was shown and said in it."""

    def __init__(self, tokens: Sequence[int], ends: Sequence[_End], form: _Form) -> None:
        self.tokens = list(tokens)
        self.form = form
        self.ends = list(ends)
        """Of all responses in it, those that were said in another branch first."""
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.versions: list[VersionRun] = []

    def until(self, responses: int) -> int:
        """Tokens up to the end of so many responses; all, where there are no more."""
        if responses == len(self.ends):
            return len(self.tokens)
        return self.ends[responses - 1].place if responses else 0


class Transcript:
    """What was shown and said.

    Args:
        tokenizer: the model's.
        limits: of the episode.
    """

    def __init__(self, tokenizer: Tokenizer, limits: EpisodeLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._form = _Form(chat=False, tools=())
        """Of the next branch that begins from nothing."""
        self._branches = [_Branch([], [], self._form)]
        self.branch = 0
        """The one that goes on next, or from which another one begins; after a response, the one that it is in."""
        self._responses = 0
        """Of that branch, those after which it does."""
        self.turns: list[Turn] = []
        self.sampled = 0
        """Action tokens, over all branches."""
        self._spoke: _Branch | None = None
        """The one of the last response."""
        self._most = limits.length
        """Tokens that the next response may have."""
        self._stop: tuple[str, ...] = ()
        """Texts that end it."""
        self._hears: tuple[Callable[[Piece], None], bool] | None = None
        """Who hears it, and whether its calls are told apart."""
        self._name = ""
        """By which the next response may be expected."""
        self._asking: Asking | None = None
        self._rendered: tuple[Observation, list[int]] | None = None

    # -- EpisodeView -------------------------------------------------------------------------------------------------

    @property
    def last(self) -> Said:
        """The last response."""
        assert self._spoke is not None, "nothing was said yet"
        span = self._spoke.spans[-1]
        return Said(span.start, span.stop - span.start, self._spoke.ends[-1].cut)

    @property
    def turns_left(self) -> int:
        """Responses that may still follow."""
        return self._limits.turns - sum(len(branch.spans) for branch in self._branches)

    @property
    def branches_left(self) -> int:
        """Branches that may still begin."""
        return self._limits.branches - len(self._branches)

    def go_on(self, branch: int, responses: int) -> None:
        """Go on after so many responses of a branch: in it, where these are all; else in a new one."""
        if (branch, responses) != (self.branch, self._responses):
            assert 0 <= responses <= len(self._branches[branch].ends), "it goes on from what was said"
            self.branch, self._responses, self._rendered = branch, responses, None

    def room(self, observation: Observation) -> int:
        """Tokens left for a response if this is shown next, 0 or below where none can follow. Raises EnvError."""
        room, tools = self._room(), () if self._responses else self._form.tools
        least = _least_tokens(observation, tools)
        return room - (least if least > room else len(self.render(observation)))

    def _room(self) -> int:
        """Tokens that may follow, those to be shown included."""
        kept = self._branches[self.branch].until(self._responses)
        together = sum(len(branch.tokens) for branch in self._branches) + (kept if self._begins else 0)
        return min(self._limits.length - kept, self._limits.tokens - together)

    def limit(self, tokens: int) -> None:
        """Let the next response have at most so many tokens."""
        self._most = tokens

    def stop_at(self, texts: Sequence[str]) -> None:
        """Let the next response end with the first of these texts that comes."""
        self._stop = tuple(texts)

    def listen(self, hear: Callable[[Piece], None], *, calling: bool = True) -> None:
        """Let this hear the next response while it is sampled."""
        self._hears = hear, calling

    def expect(self, expected: Expected) -> None:
        """Let a later response be sampled from now on, where the limits have room for it, whatever else is."""
        if self._asking is None or (waiting := self._asking.waiting) is None:
            return
        under_way = waiting + 1
        together = sum(len(branch.tokens) for branch in self._branches) + (under_way + 1) * self._limits.length
        if together > self._limits.tokens or min(self.turns_left, self.branches_left) <= under_way:
            return
        if _least_tokens(expected.observation, expected.tools) > self._limits.length:
            return
        with suppress(EnvError):  # which the one who shows it will hear
            prompt, form = self._expected_prompt(expected)
            room = self._limits.length - len(prompt)
            if room < 1:
                return
            hear = expected.hear
            hears = _unheard if hear is None else self._heard(prompt, form, hear, expected.calling)
            most = room if expected.tokens is None else min(expected.tokens, room)
            self._asking.expect(Wanted(prompt, min(most, self._limits.response), expected.stop, hears, expected.name))

    def comes(self, name: str) -> None:
        """What is shown next was expected by this name, or has none that was."""
        self._name = name

    def _expected_prompt(self, expected: Expected) -> tuple[list[int], _Form]:
        """Its tokens, as `render` and `show` will have them. Raises EnvError."""
        branch, chat = self._branches[expected.branch], not isinstance(expected.observation, str)
        if not expected.responses:
            if expected.tools:
                self._tokenizer.check_calls()
            return self._tokenizer.render(expected.observation, expected.tools), _Form(chat, list(expected.tools))
        if chat != branch.form.chat:
            raise EnvError("it is shown in another form")
        end = branch.ends[expected.responses - 1]
        shown = self._tokenizer.follow(expected.observation, end.ended, branch.form.tools)
        return branch.tokens[: end.place] + shown, branch.form

    def offer(self, tools: Sequence[Tool]) -> None:
        """Let the policy call these functions in branches that begin from nothing. Raises EnvError."""
        if tools:
            self._tokenizer.check_calls()
        self._form, self._rendered = self._form._replace(tools=list(tools)), None

    def scored(self) -> list[tuple[str, float]]:
        """Text and log-prob of each token of the last response."""
        branch = self._spoke
        assert branch is not None, "nothing was said yet"
        span = branch.spans[-1]
        texts = self._tokenizer.token_texts(branch.tokens[span.start : span.stop])
        return list(zip(texts, branch.logprobs[-len(texts) :], strict=True))

    def spoken(self, *, calling: bool = True) -> Spoken:
        """The last response, read by the parsers of the run."""
        branch = self._spoke
        assert branch is not None, "nothing was said yet"
        span = branch.spans[-1]
        said, before = branch.tokens[span.start : span.stop], branch.tokens[: span.start]
        return self._tokenizer.read(said, branch.ends[-1].ended, before, branch.form.tools, calling=calling)

    # -- Episode -----------------------------------------------------------------------------------------------------

    def asks(self, asking: Asking) -> None:
        """Responses are asked for here."""
        self._asking = asking

    @property
    def _begins(self) -> bool:
        """Whether what is shown next begins a new branch."""
        return self._responses < len(self._branches[self.branch].ends)

    @property
    def tokens(self) -> list[int]:
        """Of the branch that goes on."""
        return self._branches[self.branch].tokens

    def render(self, observation: Observation) -> list[int]:
        """Tokens of what is shown next. Raises EnvError."""
        if self._rendered is None or self._rendered[0] != observation:
            self._rendered = observation, self._render(observation)
        return self._rendered[1]

    def _render(self, observation: Observation) -> list[int]:
        branch, chat = self._branches[self.branch], not isinstance(observation, str)
        if not self._responses:
            self._form = self._form._replace(chat=chat)
            return self._tokenizer.render(observation, self._form.tools)
        if chat != branch.form.chat:
            forms = ("chat messages", "text") if branch.form.chat else ("text", "chat messages")
            raise EnvError(
                "an environment shows either text or chat messages throughout an episode: reset() returned "
                f"{forms[0]}, a later step() {forms[1]}"
            )
        return self._tokenizer.follow(observation, branch.ends[self._responses - 1].ended, branch.form.tools)

    def show(self, tokens: Sequence[int]) -> None:
        """Append what the environment shows, to the branch that goes on or to a new one."""
        if self._begins:
            origin, kept = self._branches[self.branch], self._responses
            self._branches.append(_Branch(origin.tokens[: origin.until(kept)], origin.ends[:kept], origin.form))
            self.branch = len(self._branches) - 1
        if not self._responses:
            self._branches[self.branch].form = self._form
        self.tokens.extend(tokens)
        self._rendered = None

    def _listening(self) -> Callable[[Sequence[int]], None]:
        """What is to be told the tokens of the next response as they come."""
        heard, self._hears = self._hears, None
        branch = self._branches[self.branch]
        return _unheard if heard is None else self._heard(branch.tokens, branch.form, *heard)

    def _heard(
        self, prompt: Sequence[int], form: _Form, hear: Callable[[Piece], None], calling: bool
    ) -> Callable[[Sequence[int]], None]:
        if form.chat:
            reading = self._tokenizer.reading(prompt, form.tools, calling=calling)
        else:
            reading = PlainReading(self._tokenizer.decode)

        def hears(tokens: Sequence[int]) -> None:
            piece = reading.add(tokens)
            if piece.content or piece.reasoning:
                hear(piece)

        return hears

    def wanted(self) -> Wanted:
        """The next response."""
        most, stop, name = min(self._room(), self._most, self._limits.response), self._stop, self._name
        self._most, self._stop, self._name = self._limits.length, (), ""
        return Wanted(list(self.tokens), most, stop, self._listening(), name)

    def say(self, completion: Completion) -> None:
        """Append what the policy sampled."""
        branch = self._branches[self.branch]
        start = len(branch.tokens)
        branch.tokens += completion.token_ids
        branch.logprobs += completion.logprobs
        branch.spans.append(Span(start, len(branch.tokens)))
        branch.ends.append(_End(len(branch.tokens), completion.finish == "length", completion.finish == "stop"))
        append_versions(branch.versions, completion.versions)
        self._spoke = branch
        self._responses = len(branch.ends)
        self.sampled += len(completion.token_ids)

    def trajectory(self, task: Task, outcome: Outcome, lost_tokens: int) -> Trajectory:
        """All of it, framed."""
        branches = self._branches
        begins = list(accumulate((len(branch.tokens) for branch in branches), initial=0))[:-1]
        spans = [
            Span(begin + span.start, begin + span.stop)
            for begin, branch in zip(begins, branches, strict=True)
            for span in branch.spans
        ]
        versions: list[VersionRun] = []
        for branch in branches:
            append_versions(versions, branch.versions)
        tokens = [token for branch in branches for token in branch.tokens]
        logprobs = [logprob for branch in branches for logprob in branch.logprobs]
        counted = sum(run.count for run in versions)
        assert self.sampled == len(logprobs) == counted, "one log-prob and one version per action token"
        return Trajectory(
            task=task,
            outcome=outcome,
            reward=math.fsum(turn.reward for turn in self.turns),
            token_ids=np.array(tokens, dtype="<i4").tobytes(),
            action_spans=spans,
            logprobs=np.array(logprobs, dtype="<f4").tobytes(),
            versions=versions,
            turns=self.turns,
            lost_tokens=lost_tokens,
            branches=tuple(begins),
        )


def _least_tokens(observation: Observation, tools: Sequence[Tool]) -> int:
    """Tokens that this has at the least."""
    letters = len(msgspec.json.encode(tools)) if tools else 0
    if isinstance(observation, str):
        return (letters + len(observation)) // LETTERS_PER_TOKEN
    calls = [call for message in observation for call in message.tool_calls]
    letters += sum(len(one.content) + len(one.reasoning) + len(one.name) + len(one.tool_call_id) for one in observation)
    letters += sum(len(call.id) + len(call.name) + len(call.arguments) for call in calls)
    # What says nothing is shown all the same: as a message, and as a call.
    return letters // LETTERS_PER_TOKEN + len(observation) + len(calls)


def _unheard(tokens: Sequence[int]) -> None:
    """Nobody listens."""
