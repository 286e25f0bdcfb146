"""TranscriptView: the handle by which an environment reads and steers the tokens of its episode.

An environment that has a method `inform` gets the view before its reset. With the view, the environment reads the last
response, chooses the place that the next observation follows, and sets options of the next response. It may announce
later observations, so that the responses to them can be sampled ahead. The view changes no tokens: it records the
choices in the `Transcript`, where `EpisodePlayer` finds them. Most environments do not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flash.environment.interface import Expected, Said, Spoken
from flash.rollout.episode.ahead import ResponsesAhead, prompt_of
from flash.rollout.episode.transcript import Branch, Transcript, min_tokens, run_in_thread
from flash.sampling import Sampling
from flash.types import Observation, Piece, ResponseForm, Span, Tool


class TranscriptView:
    """The `EpisodeView` of one episode. That protocol describes the methods for authors of environments.

    Args:
        transcript: the transcript of the episode.
        sampling: the distribution from which all responses of the episode are drawn.
        ahead: samples responses ahead; None if nothing is sampled ahead.
    """

    def __init__(self, transcript: Transcript, sampling: Sampling, ahead: ResponsesAhead | None) -> None:
        self._transcript = transcript
        self.sampling = sampling
        self._ahead = ahead

    # -- the last response -------------------------------------------------------------------------------------------

    @property
    def last(self) -> Said:
        """Size of the last response, size of the prompt before it, and whether a limit has cut it."""
        branch, span = self._last_response()
        return Said(span.start, span.stop - span.start, branch.ends[-1].cut)

    def scored(self) -> list[tuple[str, float]]:
        """Return the text and the log-prob of each token of the last response."""
        branch, span = self._last_response()
        texts = self._transcript.tokenizer.token_texts(branch.tokens[span.start : span.stop])
        return list(zip(texts, branch.logprobs[-len(texts) :], strict=True))

    def spoken(self, *, calling: bool = True) -> Spoken:
        """Return the last response as a message.

        In a branch of chat messages, the parsers named in the configuration (`model.tool_parser`,
        `model.reasoning_parser`) separate the calls of functions and the reasoning from the text of the response.
        Without parsers, and in a branch of plain text, the whole response is content.

        `calling`: True if calls of functions are read; False if they stay part of the text.
        """
        branch, span = self._last_response()
        tokens, prompt = branch.tokens[span.start : span.stop], branch.tokens[: span.start]
        return branch.format.read_response(tokens, branch.ends[-1].ended, prompt, calling=calling)

    def _last_response(self) -> tuple[Branch, Span]:
        """Return the branch that got the last response, and the positions of the response in it.

        Call this only after a response, for example in `step`.
        """
        branch = self._transcript.last_branch
        assert branch is not None, "there is no response yet"
        return branch, branch.spans[-1]

    # -- the next response -------------------------------------------------------------------------------------------

    def limit(self, tokens: int) -> None:
        """Limit the next response to this number of tokens, in addition to the limits of the run."""
        self._transcript.options = self._transcript.options._replace(tokens=tokens)

    def stop_at(self, texts: Sequence[str]) -> None:
        """End the next response after the first of these texts that it contains."""
        self._transcript.options = self._transcript.options._replace(stop=tuple(texts))

    async def form(self, form: ResponseForm) -> None:
        """Let the next response have this form.

        Raises:
            EnvError: engines cannot sample in this form, or the run's responses can have no form at all.
        """
        await self._transcript.set_form(form)

    def listen(self, hear: Callable[[Piece, int], None], *, calling: bool = True) -> None:
        """Call `hear` with pieces of the next response, and the size of its prompt in tokens, while it is sampled.

        `calling`: True if the pieces leave out calls of functions.
        """
        self._transcript.options = self._transcript.options._replace(hear=hear, calling=calling)

    # -- the room that is left ---------------------------------------------------------------------------------------

    @property
    def turns_left(self) -> int:
        """Number of responses that may still follow."""
        return self._transcript.turns_left

    async def prepare(self, observation: Observation) -> None:
        """Render a large observation that may be shown next, in a thread, so that `room` returns at once.

        Does nothing if the observation is small, or certainly too large.

        Raises:
            EnvError: a large observation cannot be shown.
        """
        await self._transcript.prepare(observation)

    def room(self, observation: Observation) -> int:
        """Return the number of tokens left for a response if this observation is shown next. It may be negative.

        Raises:
            EnvError: the observation cannot be shown.
        """
        return self._transcript.room(observation)

    async def count(self, expected: Expected) -> int:
        """Return the number of tokens of the prompt that the response to an observation would have.

        A thread renders a large observation. An observation that is certainly too large is not rendered, because that
        could take seconds. The result is then a lower bound that exceeds the limit of a branch.

        Raises:
            EnvError: the observation cannot be shown.
        """
        transcript, observation = self._transcript, expected.observation
        tools = () if expected.responses else expected.tools
        if not transcript.needs_thread(observation, tools):
            return len(prompt_of(expected, transcript)[0])
        ends = transcript.branches[expected.branch].ends
        before = ends[expected.responses - 1].position if expected.responses else 0
        least = before + min_tokens(observation, tools, transcript.tokenizer.min_message_tokens)
        if least > transcript.limits.max_length:
            return least
        async with transcript.rendering:
            prompt, _ = await run_in_thread(lambda: prompt_of(expected, transcript))
        return len(prompt)

    # -- the next observation ----------------------------------------------------------------------------------------

    def go_on(self, branch: int, responses: int) -> None:
        """Let the next observation follow the first `responses` responses of a branch.

        Raises:
            EnvError: a response is being sampled.
        """
        self._transcript.go_on(branch, responses)

    def offer(self, tools: Sequence[Tool]) -> None:
        """Let the policy call these functions in each branch that begins later and copies no tokens.

        Raises:
            EnvError: `tools` is not empty, and calls of functions cannot be read from responses.
        """
        self._transcript.offer_tools(tools)

    def template(self, arguments: Mapping[str, Any]) -> None:
        """Set arguments of the chat template for each branch that begins later and copies no tokens.

        Raises:
            EnvError: the chat template cannot have such an argument.
        """
        self._transcript.set_template_arguments(arguments)

    def expect(self, expected: Expected) -> None:
        """Start to sample the response to a later observation, unless sampling ahead is off or its limits are
        reached."""
        if self._ahead is not None:
            self._ahead.expect(expected)

    def comes(self, name: str) -> None:
        """Announce that the next observation may be the one that was passed to `expect` with this name.

        `EpisodePlayer` then looks for a response under this name that was sampled ahead, and the observation is not
        rendered ahead any more.
        """
        self._transcript.options = self._transcript.options._replace(name=name)
        if self._ahead is not None:
            self._ahead.announce(name)
