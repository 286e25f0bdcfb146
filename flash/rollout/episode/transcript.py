"""Transcript: the sequences of tokens that an episode consists of.

Each only grows: observations as they were rendered, responses exactly as they were sampled. Most episodes have one. One
whose environment goes on from an earlier place has branches: the new one begins with the tokens up to there, which are
prompt in it. Conservation: every sampled token is in exactly one span of one branch.

An environment that asks for it sees all this, as `flash.rollout.episode.view` has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np

from flash.errors import EnvError
from flash.rollout.episode.tokenizer import Tokenizer
from flash.sampling import Kept, Routes, routed, together
from flash.types import (
    TOOL,
    Completion,
    Message,
    Observation,
    Outcome,
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
being tokenized: tokenizing megabytes takes seconds."""
LARGE_LETTERS = 16_384
"""Letters of an observation from which on a thread renders it, if the tokenizer is slow. To render them takes some ten
milliseconds, in which an event loop would do nothing else."""
MESSAGE_LETTERS = 64
"""Letters that take as long to render as a message without any: the chat template takes 40 microseconds for it."""


class EpisodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How far an episode may go."""

    max_length: int
    """Longest sequence of observations and responses, in tokens."""
    max_turns: int
    """Responses, over all branches, after which an episode is truncated."""
    max_branches: int
    """Sequences that an episode may consist of."""
    max_tokens: int
    """Most tokens of all of these."""
    max_new_tokens: int
    """Longest response, in tokens."""


class _End(NamedTuple):
    """The end of a response that stands in a branch."""

    place: int
    cut: bool
    """The token limit ended it."""
    ended: bool
    """The model did, with a token of its own."""


class BranchForm(NamedTuple):
    """How a branch is rendered throughout."""

    chat: bool
    tokenizer: Tokenizer
    """The model's, with the arguments of the chat template that hold in the branch."""
    tools: Sequence[Tool] = ()
    """The tools that the prompt offers."""


class Branch:
    """One sequence of tokens: what another one has lent it, then what was shown and said in it."""

    def __init__(self, tokens: Sequence[int], ends: Sequence[_End], form: BranchForm) -> None:
        self.tokens = list(tokens)
        self.form = form
        self.ends = list(ends)
        """Of all responses in it, those that were said in another branch first."""
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.versions: list[VersionRun] = []
        self.kept: list[Kept] = []
        self.routes: Routes | None = None
        """Of its first tokens."""

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
        self.tokenizer = tokenizer
        self.limits = limits
        self._form = BranchForm(chat=False, tokenizer=tokenizer)
        """Of the next branch that begins from nothing."""
        self.branches = [Branch([], [], self._form)]
        self.branch = 0
        """The one that goes on next, or from which another one begins; after a response, the one that it is in."""
        self._responses = 0
        """Of that branch, those after which it does."""
        self.turns: list[Turn] = []
        self.sampled = 0
        """Action tokens, over all branches."""
        self.spoke: Branch | None = None
        """The one of the last response."""
        self._rendered: tuple[Observation, list[int]] | None = None

    @property
    def turns_left(self) -> int:
        """Responses that may still follow."""
        return self.limits.max_turns - sum(len(branch.spans) for branch in self.branches)

    @property
    def branches_left(self) -> int:
        """Branches that may still begin."""
        return self.limits.max_branches - len(self.branches)

    def go_on(self, branch: int, responses: int) -> None:
        """Go on after so many responses of a branch: in it, where these are all; else in a new one."""
        if (branch, responses) != (self.branch, self._responses):
            assert 0 <= responses <= len(self.branches[branch].ends), "it goes on from what was said"
            self.branch, self._responses, self._rendered = branch, responses, None

    def room(self, observation: Observation) -> int:
        """Tokens left for a response if this is shown next, 0 or below where none can follow. Raises EnvError."""
        room, least = self.left(), self._least(observation)
        return room - (least if least > room else len(self.render(observation)))

    def _least(self, observation: Observation) -> int:
        tools = () if self._responses else self._form.tools
        return least_tokens(
            observation, tools, self.tokenizer.min_message_tokens if self._slow(observation, tools) else 1
        )

    def _slow(self, observation: Observation, tools: Sequence[Tool]) -> bool:
        """Return True if a thread should render this."""
        return self.tokenizer.slow and is_large(observation, tools)

    def left(self) -> int:
        """Tokens that may follow, those to be shown included."""
        kept = self.branches[self.branch].until(self._responses)
        together = sum(len(branch.tokens) for branch in self.branches) + (kept if self._begins else 0)
        return min(self.limits.max_length - kept, self.limits.max_tokens - together)

    def offer(self, tools: Sequence[Tool]) -> None:
        """Let the policy call these functions in branches that begin from nothing. Raises EnvError."""
        if tools:
            self.tokenizer.check_calls()
        self._form, self._rendered = self._form._replace(tools=list(tools)), None

    def template(self, arguments: Mapping[str, Any]) -> None:
        """Give the chat template these arguments in branches that begin from nothing. Raises EnvError."""
        self._form, self._rendered = self._form._replace(tokenizer=self.tokenizer.with_arguments(arguments)), None

    @property
    def _begins(self) -> bool:
        """Whether what is shown next begins a new branch."""
        return self._responses < len(self.branches[self.branch].ends)

    @property
    def tokens(self) -> list[int]:
        """Of the branch that goes on."""
        return self.branches[self.branch].tokens

    def render(self, observation: Observation) -> list[int]:
        """Tokens of what is shown next. Raises EnvError."""
        if self._rendered is None or self._rendered[0] != observation:
            self._rendered = observation, self._render(observation)
        return self._rendered[1]

    def _render(self, observation: Observation) -> list[int]:
        if self._responses:
            return self.follow(self.branches[self.branch], self._responses, observation)
        self._form = self._form._replace(chat=not isinstance(observation, str))
        return self._form.tokenizer.render(observation, self._form.tools)

    def follow(self, branch: Branch, responses: int, observation: Observation) -> list[int]:
        """Tokens of what is shown after so many responses of a branch. Raises EnvError."""
        if branch.form.chat == isinstance(observation, str):
            forms = ("chat messages", "text") if branch.form.chat else ("text", "chat messages")
            raise EnvError(
                "an environment shows either text or chat messages throughout an episode: reset() returned "
                f"{forms[0]}, a later step() {forms[1]}"
            )
        last = branch.ends[responses - 1]
        end = branch.tokens[last.place - 1] if last.ended else None
        return branch.form.tokenizer.follow(observation, end, branch.form.tools)

    def show(self, tokens: Sequence[int]) -> None:
        """Append what the environment shows, to the branch that goes on or to a new one."""
        if self._begins:
            origin, kept = self.branches[self.branch], self._responses
            self.branches.append(Branch(origin.tokens[: origin.until(kept)], origin.ends[:kept], origin.form))
            self.branches[-1].routes = origin.routes and origin.routes.part(0, origin.until(kept))
            self.branch = len(self.branches) - 1
        if not self._responses:
            self.branches[self.branch].form = self._form
        self.tokens.extend(tokens)
        self._rendered = None

    def say(self, completion: Completion) -> None:
        """Append what the policy sampled."""
        branch = self.branches[self.branch]
        start = len(branch.tokens)
        branch.tokens += completion.token_ids
        branch.logprobs += completion.logprobs
        branch.spans.append(Span(start, len(branch.tokens)))
        # A token that a run's sampling names as an end may be the model's own.
        named = completion.finish == "text" and branch.form.chat and branch.form.tokenizer.ends_turn(branch.tokens[-1])
        ended = completion.finish == "stop" or named
        branch.ends.append(_End(len(branch.tokens), completion.finish == "length", ended))
        append_versions(branch.versions, completion.versions)
        if completion.kept is not None:
            branch.kept.append(completion.kept)
        if completion.routes is not None:
            # What was computed before went into what was sampled before.
            known = 0 if branch.routes is None else branch.routes.tokens
            later = completion.routes.part(known, completion.routes.tokens)
            branch.routes = routed([branch.routes, later], [known, later.tokens])
        self.spoke = branch
        self._responses = len(branch.ends)
        self.sampled += len(completion.token_ids)

    def trajectory(self, task: Task, outcome: Outcome, lost_tokens: int) -> Trajectory:
        """All of it, framed."""
        branches = self.branches
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
        kept = [part for branch in branches for part in branch.kept]
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
            kept=together(kept) if kept else None,
            routes=routed([branch.routes for branch in branches], [len(branch.tokens) for branch in branches]),
        )


def least_tokens(observation: Observation, tools: Sequence[Tool], message: int) -> int:
    """Return a lower bound on the tokens of an observation; `message`: on those of a message without content."""
    letters = len(msgspec.json.encode(tools)) if tools else 0
    if isinstance(observation, str):
        return (letters + len(observation)) // LETTERS_PER_TOKEN
    return (letters + _letters(observation)) // LETTERS_PER_TOKEN + _messages(observation, message)


def is_large(observation: Observation, tools: Sequence[Tool]) -> bool:
    """Return True if a slow tokenizer takes so long to render this that a thread should."""
    letters = len(msgspec.json.encode(tools)) if tools else 0
    if isinstance(observation, str):
        return letters + len(observation) >= LARGE_LETTERS
    return letters + _letters(observation) + MESSAGE_LETTERS * _messages(observation, 1) >= LARGE_LETTERS


def _letters(observation: Sequence[Message]) -> int:
    calls = [call for message in observation for call in message.tool_calls]
    letters = sum(len(one.content) + len(one.reasoning) + len(one.name) + len(one.tool_call_id) for one in observation)
    return letters + sum(len(call.id) + len(call.name) + len(call.arguments) for call in calls)


def _messages(observation: Sequence[Message], message: int) -> int:
    """Return what messages and calls weigh that say nothing: they are shown all the same.

    Some templates show the results of several calls as one message.
    """
    return sum(len(one.tool_calls) + (1 if one.role == TOOL else message) for one in observation)
