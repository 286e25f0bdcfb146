"""Transcript: the one sequence of tokens that an episode consists of.

It only grows: observations as they were rendered, responses exactly as they were sampled. An environment that asks for
it sees it as an `EpisodeView`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flash.environment.interface import Said
from flash.errors import EnvError
from flash.rollout.tokenizer import Tokenizer
from flash.types import (
    Completion,
    Observation,
    Outcome,
    Span,
    Task,
    Trajectory,
    Turn,
    VersionRun,
    append_versions,
)


class Transcript:
    """What was shown and said.

    Args:
        tokenizer: the model's.
        max_length: longest sequence, in tokens.
        max_turns: most responses.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int, max_turns: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._max_turns = max_turns
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.turns: list[Turn] = []
        self._spans: list[Span] = []
        self._versions: list[VersionRun] = []
        self._chat = False
        self._cut = False
        """Whether the last response was cut off."""
        self._most = max_length
        """Tokens that the next response may have."""
        self._rendered: tuple[Observation, list[int]] | None = None

    # -- EpisodeView -------------------------------------------------------------------------------------------------

    @property
    def last(self) -> Said:
        """The last response."""
        span = self._spans[-1]
        return Said(span.start, span.stop - span.start, self._cut)

    @property
    def turns_left(self) -> int:
        """Responses that may still follow."""
        return self._max_turns - len(self._spans)

    def room(self, observation: Observation) -> int:
        """Tokens left for a response if this is shown next, 0 or below where none can follow. Raises EnvError."""
        return self._max_length - len(self.tokens) - len(self.render(observation))

    def limit(self, tokens: int) -> None:
        """Let the next response have at most so many tokens."""
        self._most = tokens

    # -- Episode -----------------------------------------------------------------------------------------------------

    def render(self, observation: Observation) -> list[int]:
        """Tokens of what is shown next. Raises EnvError."""
        if self._rendered is None or self._rendered[0] != observation:
            self._rendered = observation, self._render(observation)
        return self._rendered[1]

    def _render(self, observation: Observation) -> list[int]:
        chat = not isinstance(observation, str)
        if not self._spans:
            self._chat = chat
            return self._tokenizer.render(observation)
        if chat != self._chat:
            forms = ("chat messages", "text") if self._chat else ("text", "chat messages")
            raise EnvError(
                "an environment shows either text or chat messages throughout an episode: reset() returned "
                f"{forms[0]}, a later step() {forms[1]}"
            )
        return self._tokenizer.follow(observation, not self._cut)

    def show(self, tokens: Sequence[int]) -> None:
        """Append what the environment shows."""
        self.tokens += tokens
        self._rendered = None

    def most(self, max_new_tokens: int) -> int:
        """How many tokens the next response may have, where the run gives it `max_new_tokens`."""
        most = min(max_new_tokens, self._max_length - len(self.tokens), self._most)
        self._most = self._max_length
        return most

    def say(self, completion: Completion) -> None:
        """Append what the policy sampled."""
        start = len(self.tokens)
        self.tokens += completion.token_ids
        self.logprobs += completion.logprobs
        self._spans.append(Span(start, len(self.tokens)))
        append_versions(self._versions, completion.versions)
        self._cut = completion.finish == "length"

    def trajectory(self, task: Task, outcome: Outcome, lost_tokens: int) -> Trajectory:
        """All of it, framed."""
        count = sum(span.stop - span.start for span in self._spans)
        versions = sum(run.count for run in self._versions)
        assert count == len(self.logprobs) == versions, "one log-prob and one version per action token"
        return Trajectory(
            task=task,
            outcome=outcome,
            reward=math.fsum(turn.reward for turn in self.turns),
            token_ids=np.array(self.tokens, dtype="<i4").tobytes(),
            action_spans=self._spans,
            logprobs=np.array(self.logprobs, dtype="<f4").tobytes(),
            versions=self._versions,
            turns=self.turns,
            lost_tokens=lost_tokens,
        )
