"""What an environment sees of its episode's transcript, and how it wants the next responses: an `EpisodeView`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import anyio
import anyio.to_thread

from flash.environment.interface import Expected, Said, Spoken
from flash.errors import EnvError
from flash.rollout.engine import ResponseRequest, ignore_tokens
from flash.rollout.episode.ahead import NewRequest, ResponseAhead, ResponsesAhead
from flash.rollout.episode.tokenizer import ResponseReader, Tokenizer
from flash.rollout.episode.transcript import (
    Branch,
    BranchForm,
    EpisodeLimits,
    Transcript,
    least_tokens,
)
from flash.sampling import Sampling
from flash.types import Observation, Piece, Span

_T = TypeVar("_T")


class _Rendered(NamedTuple):
    """A large observation that was rendered ahead, and the place that it follows."""

    branch: int
    responses: int
    observation: Observation
    tokens: list[int]


class TranscriptView(Transcript):
    """A transcript as its environment sees it. What it asks of the next response holds for that one.

    Args:
        tokenizer: the model's.
        limits: of the episode.
        sampling: the distribution that responses are drawn from.
        rendering: held while a thread renders a large observation; the episodes of a node share it.
    """

    def __init__(
        self, tokenizer: Tokenizer, limits: EpisodeLimits, sampling: Sampling, rendering: anyio.Lock | None = None
    ) -> None:
        super().__init__(tokenizer, limits)
        self._rendering = rendering or anyio.Lock()
        self._rendering_ahead = anyio.Lock()
        """Held while one large observation is rendered ahead: another episode's turn comes before the next one."""
        self._expected: set[str] = set()
        """Names of large observations that are to be rendered ahead, until the episode comes to them."""
        self._ahead: dict[str, _Rendered] = {}
        """Large observations that were rendered ahead, by their names."""
        self.sampling = sampling
        self._most = limits.max_length
        """Tokens that the next response may have."""
        self._stop: tuple[str, ...] = ()
        """Texts that end it."""
        self._hears: tuple[Callable[[Piece], None], bool] | None = None
        """Who hears it, and whether its calls are told apart."""
        self._name = ""
        """By which the next response may be expected."""
        self._responses_ahead: ResponsesAhead | None = None
        """Responses that are sampled ahead; None: none may be."""

    @property
    def last(self) -> Said:
        """The last response."""
        branch, span = self._spoke()
        return Said(span.start, span.stop - span.start, branch.ends[-1].cut)

    def scored(self) -> list[tuple[str, float]]:
        """Text and log-prob of each token of the last response."""
        branch, span = self._spoke()
        texts = self.tokenizer.token_texts(branch.tokens[span.start : span.stop])
        return list(zip(texts, branch.logprobs[-len(texts) :], strict=True))

    def spoken(self, *, calling: bool = True) -> Spoken:
        """The last response, read by the parsers of the run."""
        branch, span = self._spoke()
        said, before = branch.tokens[span.start : span.stop], branch.tokens[: span.start]
        form = branch.form
        return form.tokenizer.read_response(said, branch.ends[-1].ended, before, form.tools, calling=calling)

    def _spoke(self) -> tuple[Branch, Span]:
        assert self.spoke is not None, "nothing was said yet"
        return self.spoke, self.spoke.spans[-1]

    def limit(self, tokens: int) -> None:
        """Let the next response have at most so many tokens."""
        self._most = tokens

    def stop_at(self, texts: Sequence[str]) -> None:
        """Let the next response end with the first of these texts that comes."""
        self._stop = tuple(texts)

    def listen(self, hear: Callable[[Piece], None], *, calling: bool = True) -> None:
        """Let this hear the next response while it is sampled."""
        self._hears = hear, calling

    async def prepare(self, observation: Observation) -> None:
        """Render an observation that may be shown next, in a thread if it is large: `room` takes no time then.

        Raises:
            EnvError: it cannot be shown.
        """
        if self._rendered is not None and self._rendered[0] == observation:
            return
        tools = () if self._responses else self._form.tools
        if not self._slow(observation, tools) or self._least(observation) > self.left():
            return
        async with self._rendering:
            known = self._ahead.pop(self._name, None)
            if known is None or known[:3] != (self.branch, self._responses, observation):
                tokens = await _in_thread(lambda: self._render(observation))
            else:
                tokens = known.tokens
        self._rendered = observation, tokens

    def expect(self, expected: Expected) -> None:
        """Let a later response be sampled from now on, where the limits have room for it, whatever else is."""
        if self._responses_ahead is None or not self._may_expect(self._responses_ahead):
            return
        if self._slow(expected.observation, expected.tools):
            least = least_tokens(expected.observation, expected.tools, self.tokenizer.min_message_tokens)
            if least <= self.limits.max_length:
                self._expected.add(expected.name)
                self._responses_ahead.tasks.start_soon(self._expect_large, expected)
            return
        if least_tokens(expected.observation, expected.tools, 1) > self.limits.max_length:
            return
        with suppress(EnvError):  # raised again when it is shown
            self._ask_ahead(expected, *self._expected_prompt(expected))

    async def _expect_large(self, expected: Expected) -> None:
        """Render a large observation in a thread, then ask for the response if the episode has not come to it yet."""
        async with self._rendering_ahead, self._rendering:
            if expected.name not in self._expected:
                return
            with suppress(EnvError):  # raised again when it is shown
                prompt, form = await _in_thread(lambda: self._expected_prompt(expected))
                if responses := expected.responses:
                    # First observations are kept by the tokenizer.
                    place = self.branches[expected.branch].ends[responses - 1].place
                    shown = _Rendered(expected.branch, responses, expected.observation, prompt[place:])
                    self._ahead[expected.name] = shown
                if expected.name in self._expected:
                    self._ask_ahead(expected, prompt, form)

    def _may_expect(self, ahead: ResponsesAhead) -> bool:
        """Return True if the limits have room for one more response, whatever becomes of those under way."""
        under_way = ahead.pending + 1
        together = sum(len(branch.tokens) for branch in self.branches) + (under_way + 1) * self.limits.max_length
        return together <= self.limits.max_tokens and min(self.turns_left, self.branches_left) > under_way

    def _ask_ahead(self, expected: Expected, prompt: list[int], form: BranchForm) -> None:
        room = self.limits.max_length - len(prompt)
        if room < 1 or self._responses_ahead is None or not self._may_expect(self._responses_ahead):
            return
        hear = expected.hear
        hears = ignore_tokens if hear is None else self._heard(prompt, form, hear, expected.calling)
        most = min(self.limits.max_new_tokens, room, room if expected.tokens is None else expected.tokens)
        self._responses_ahead.expect(expected.name, prompt, most, expected.stop, hears)

    def comes(self, name: str) -> None:
        """Show next what was expected by this name, if anything was."""
        self._name = name
        self._expected.discard(name)

    def _expected_prompt(self, expected: Expected) -> tuple[list[int], BranchForm]:
        """Its tokens, as `render` and `show` will have them. Raises EnvError."""
        observation, tools = expected.observation, expected.tools
        if not expected.responses:
            if tools:
                self.tokenizer.check_calls()
            tokenizer = self.tokenizer.with_arguments(expected.template)
            form = BranchForm(not isinstance(observation, str), tokenizer, list(tools))
            return tokenizer.render(observation, tools), form
        branch = self.branches[expected.branch]
        shown = self.follow(branch, expected.responses, observation)
        return branch.tokens[: branch.ends[expected.responses - 1].place] + shown, branch.form

    def sample_ahead(self, responses: ResponsesAhead) -> None:
        """Let `expect` have responses sampled ahead."""
        self._responses_ahead = responses

    def _listening(self) -> Callable[[Sequence[int]], None]:
        """What is to be told the tokens of the next response as they come."""
        heard = self._hears
        branch = self.branches[self.branch]
        return ignore_tokens if heard is None else self._heard(branch.tokens, branch.form, *heard)

    def _heard(
        self, prompt: Sequence[int], form: BranchForm, hear: Callable[[Piece], None], calling: bool
    ) -> Callable[[Sequence[int]], None]:
        if form.chat:
            reading = form.tokenizer.start_reading(prompt, form.tools, calling=calling)
        else:
            reading = ResponseReader(self.tokenizer.decode)

        def hears(tokens: Sequence[int]) -> None:
            piece = reading.add(tokens)
            if piece.content or piece.reasoning:
                hear(piece)

        return hears

    def take_ahead(self) -> ResponseAhead | None:
        """Return the response that was sampled ahead for the next request, if there is one.

        The options that the environment has set for the next response are then used up.
        """
        if self._responses_ahead is None or not self._name:
            return None
        found = self._responses_ahead.find(self._name, self.tokens, self._max_new_tokens(), self._stop)
        if found is not None:
            self._reset_options()
        return found

    def next_request(self, new_request: NewRequest) -> ResponseRequest:
        """Return the request of the next response. Uses up the options that the environment has set for it."""
        request = new_request(list(self.tokens), self._max_new_tokens(), self._stop, self._listening())
        self._reset_options()
        return request

    def _max_new_tokens(self) -> int:
        """Return how many tokens the next response may have."""
        return min(self.left(), self._most, self.limits.max_new_tokens)

    def _reset_options(self) -> None:
        self._most, self._stop, self._name, self._hears = self.limits.max_length, (), "", None


async def _in_thread(work: Callable[[], _T]) -> _T:
    # A limiter of its own: the threads of the default one may all be busy with an environment's calls.
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
