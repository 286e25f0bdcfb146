"""The transcript as an environment sees it: an `EpisodeView`.

`Episode._respond` takes the request for each response from `next_request`. An environment that has a method `inform`
gets the view before its reset. With the view, the environment reads the last response, sets options of the next
response, and chooses the place that the next observation follows (`Transcript.go_on`). `Episode` makes each request
with these options, which hold for one response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from flash.environment.interface import Expected, Said, Spoken
from flash.rollout.engine import ResponseRequest, ignore_tokens
from flash.rollout.episode.ahead import ExpectedResponse, NewRequest, ResponsesAhead, in_thread
from flash.rollout.episode.tokenizer import Tokenizer
from flash.rollout.episode.transcript import Branch, EpisodeLimits, Transcript
from flash.sampling import Sampling
from flash.types import Observation, Piece, Span


class TranscriptView(Transcript):
    """A transcript, and the options of the next response.

    Args:
        tokenizer: the model's tokenizer.
        limits: limits of the episode.
        sampling: the distribution that responses are drawn from.
        rendering: held while a thread renders a large observation; all episodes of the node share it.
    """

    def __init__(
        self, tokenizer: Tokenizer, limits: EpisodeLimits, sampling: Sampling, rendering: anyio.Lock | None = None
    ) -> None:
        super().__init__(tokenizer, limits)
        self.sampling = sampling
        self.rendering = rendering or anyio.Lock()
        self.ahead: ResponsesAhead | None = None
        """Responses that are sampled ahead. None if nothing is: the environment has no `inform`, or `phases` makes
        episodes wait for each other."""
        self._max_tokens = limits.max_length
        """Largest number of tokens of the next response, as the environment has set it."""
        self._stop: tuple[str, ...] = ()
        """Texts that end the next response."""
        self._listener: tuple[Callable[[Piece], None], bool] | None = None
        """Function that gets the pieces of the next response; True if the pieces leave out calls of functions."""
        self._name = ""
        """Name by which the environment has announced the next observation (`comes`); empty if it has not."""

    # -- the last response -------------------------------------------------------------------------------------------

    @property
    def last(self) -> Said:
        """Place and size of the last response, and whether a limit has cut it."""
        branch, span = self._last_response()
        return Said(span.start, span.stop - span.start, branch.ends[-1].cut)

    def scored(self) -> list[tuple[str, float]]:
        """Return the text and the log-prob of each token of the last response."""
        branch, span = self._last_response()
        texts = self.tokenizer.token_texts(branch.tokens[span.start : span.stop])
        return list(zip(texts, branch.logprobs[-len(texts) :], strict=True))

    def spoken(self, *, calling: bool = True) -> Spoken:
        """Return the last response as a message. There must be a response.

        In a branch of chat messages, vLLM's parsers that the run names (`model.tool_parser`, `model.reasoning_parser`)
        find its calls and its reasoning. Without parsers, and in a branch of plain text, all of it is content.

        `calling`: True if calls of functions are read; False if they stay part of the text.
        """
        branch, span = self._last_response()
        tokens, prompt = branch.tokens[span.start : span.stop], branch.tokens[: span.start]
        return branch.format.read_response(tokens, branch.ends[-1].ended, prompt, calling=calling)

    def _last_response(self) -> tuple[Branch, Span]:
        """Return the branch that got the last response, and the tokens of the response in it."""
        assert self.last_branch is not None, "there is no response yet"
        return self.last_branch, self.last_branch.spans[-1]

    # -- options of the next response --------------------------------------------------------------------------------

    def limit(self, tokens: int) -> None:
        """Limit the next response to this number of tokens."""
        self._max_tokens = tokens

    def stop_at(self, texts: Sequence[str]) -> None:
        """End the next response after the first of these texts that it contains."""
        self._stop = tuple(texts)

    def listen(self, hear: Callable[[Piece], None], *, calling: bool = True) -> None:
        """Call `hear` with pieces of the next response while it is sampled; `calling`: without calls of functions."""
        self._listener = hear, calling

    def comes(self, name: str) -> None:
        """Announce that the next observation may be the one that `expect` was called with under this name."""
        self._name = name
        if self.ahead is not None:
            self.ahead.announce(name)

    def expect(self, expected: Expected) -> None:
        """Start to sample the response to a later observation, if the limits allow it."""
        if self.ahead is not None:
            self.ahead.expect(expected)

    async def prepare(self, observation: Observation) -> None:
        """Render an observation that may be shown next, in a thread if it is large.

        Then `room`, which counts the tokens that this observation leaves for a response, returns at once.

        Raises:
            EnvError: the observation cannot be shown.
        """
        if self._rendered is not None and self._rendered[0] == observation:
            return
        tools = () if self._responses else self._new_format.tools
        if not self.is_slow(observation, tools) or self._min_tokens(observation) > self.tokens_left():
            return
        async with self.rendering:
            tokens = None
            if self.ahead is not None:
                tokens = self.ahead.take_rendered(self._name, self.branch, self._responses, observation)
            if tokens is None:
                tokens = await in_thread(lambda: self._render(observation))
        self._rendered = observation, tokens

    # -- requests ----------------------------------------------------------------------------------------------------

    def find_ahead(self) -> ExpectedResponse | None:
        """Return the response that is sampled ahead for the next request; None if there is none.

        If a response is returned, the options that the environment has set for the next response are reset.
        """
        if self.ahead is None or not self._name:
            return None
        found = self.ahead.find(self._name, self.tokens, self._max_new_tokens(), self._stop)
        if found is not None:
            self._reset_options()
        return found

    def next_request(self, new_request: NewRequest) -> ResponseRequest:
        """Return the request of the next response, and reset the options that the environment has set for it."""
        on_tokens = ignore_tokens
        if self._listener is not None:
            hear, calling = self._listener
            format = self.branches[self.branch].format
            on_tokens = format.start_reading(self.tokens, calling=calling).forward_to(hear)
        request = new_request(list(self.tokens), self._max_new_tokens(), self._stop, on_tokens)
        self._reset_options()
        return request

    def _max_new_tokens(self) -> int:
        """Return the most tokens that the next response may have."""
        return min(self.tokens_left(), self._max_tokens, self.limits.max_new_tokens)

    def _reset_options(self) -> None:
        self._max_tokens, self._stop, self._name, self._listener = self.limits.max_length, (), "", None
