"""Responses that are sampled ahead, which means before the episode has reached the observations that they answer.

Sampling ahead is optional. Without it an episode requests one response after another. An environment that will probably
need several responses, for example because its agent has sent several requests at once, announces the later responses
(`flash.rollout.episode.view.TranscriptView.expect`). Each of them is sampled in its own task and kept here until the
episode reaches the same observation with the same limits. A response is dropped if the episode never reaches this
observation.

To *render* an observation is to turn it into tokens. A branch is one of the sequences of tokens of an episode. A place
is the end of a response in a branch, which an observation may follow.

Invariant: every token that is sampled ahead is in a response that the episode takes, or is counted as lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import anyio
from anyio.abc import TaskGroup

from flash.environment.interface import Expected
from flash.errors import EngineError, EnvError, FlashError
from flash.rollout.engine import ResponseRequest, ignore_tokens
from flash.rollout.episode.transcript import BranchFormat, Transcript, min_tokens, run_in_thread
from flash.sampling import Grammar
from flash.types import Completion

NewRequest = Callable[
    [list[int], int, tuple[str, ...], Grammar | None, Callable[[Sequence[int]], None]], ResponseRequest
]
"""Function that makes the next request of an episode. The arguments are the prompt, the largest number of new tokens,
the texts that end the response, the grammar that limits its tokens (None: no grammar), and a function that is called
with new tokens. Requests are numbered in the order in which they are made."""

SampleResponse = Callable[[ResponseRequest, Callable[[int], None]], Awaitable[Completion]]
"""Function that sends a request to the engines and returns the response. While tokens arrive, it calls its second
argument with the number of new tokens. The sum of these numbers is the length of the response."""


class ExpectedResponse:
    """A response that is sampled ahead, finished or not."""

    def __init__(self, name: str, request: ResponseRequest, start: float) -> None:
        self.name = name
        """Name that the environment has given to the observation which the response answers (`Expected.name`)."""
        self.request = request
        self.start = start
        """Time of the request, in Unix seconds."""
        self.tokens = 0
        """Number of tokens sampled so far."""
        self.finished = anyio.Event()
        """Event that is set when the response is complete, or cannot be sampled."""
        self.outcome: Completion | FlashError | None = None
        """The response, or the error that prevented it. None until `finished` is set."""


class ResponsesAhead:
    """Set of the responses that one episode samples ahead. `EpisodePlayer` makes one for each episode that may sample
    ahead.

    The environment's view calls `expect` and `announce`. The player calls `find` and `take` before it would request a
    response, and `drop` at the end of the episode.

    Args:
        transcript: the transcript of the episode. It is only read, except that large observations that were rendered
            here are kept in its `rendered_ahead`.
        rendering: held while a thread renders a large observation; all episodes of the node share it.
        new_request: makes requests of the episode.
        sample: sends a request to the engines and returns the response.
        tasks: runs the tasks that sample ahead; cancelled when the episode ends.
        now: returns the present time in Unix seconds.
    """

    def __init__(
        self,
        transcript: Transcript,
        rendering: anyio.Lock,
        new_request: NewRequest,
        sample: SampleResponse,
        tasks: TaskGroup,
        *,
        now: Callable[[], float],
    ) -> None:
        self._transcript = transcript
        self._rendering = rendering
        self._new_request = new_request
        self._sample = sample
        self._tasks = tasks
        self._now = now
        self._responses: list[ExpectedResponse] = []
        """Responses that the episode has not taken yet."""
        self._to_prepare: set[str] = set()
        """Names of observations that wait to be rendered, because they are large, or for the grammar of their form. A
        name is removed when the episode reaches it."""
        self._one_at_a_time = anyio.Lock()
        """Held while a large observation of this episode is rendered, or waits for the lock `rendering`. So only one
        observation of this episode waits for `rendering` at a time, and other episodes get the lock in between."""

    def expect(self, expected: Expected) -> None:
        """Sample the response to an observation that the environment will probably show, if the limits allow it.

        A large observation is rendered in a thread first, and the grammar of a form is made by another process. This
        method returns before. No error is raised if the observation cannot be shown, or the form cannot be enforced:
        the episode raises it if it reaches the observation.
        """
        transcript = self._transcript
        # Without forms the episode refuses the form, and would never take the response.
        if not self._fits() or (expected.form is not None and not transcript.limits.forms):
            return
        # An observation that is certainly too large is not rendered, because that could take seconds. The tokenizer's
        # own bound is slow to find the first time, so small observations do without it: a message counts as 1 token.
        if transcript.needs_thread(expected.observation, expected.tools):
            least = min_tokens(expected.observation, expected.tools, transcript.tokenizer.min_message_tokens)
            if least <= transcript.limits.max_length:
                self._to_prepare.add(expected.name)
                self._tasks.start_soon(self._expect_large, expected)
            return
        if min_tokens(expected.observation, expected.tools, 1) > transcript.limits.max_length:
            return
        with suppress(EnvError):  # the error is raised again when the observation is shown
            prompt, format = prompt_of(expected, transcript)
            if expected.form is None:
                self._request(expected, prompt, format, None)
            else:
                self._to_prepare.add(expected.name)
                self._tasks.start_soon(self._expect_formed, expected, prompt, format)

    async def _expect_large(self, expected: Expected) -> None:
        """Render a large observation in a thread, then request the response.

        If the episode has reached the observation before the rendering begins, this does nothing, because the episode
        renders the observation itself. If the episode reaches it during the rendering, this requests no response,
        because the episode requests it.
        """
        async with self._one_at_a_time, self._rendering:
            if expected.name not in self._to_prepare:
                return
            try:
                prompt, format = await run_in_thread(lambda: prompt_of(expected, self._transcript))
                # The tokenizer keeps the tokens of first observations. Tokens of later observations are kept in the
                # transcript.
                if responses := expected.responses:
                    position = self._transcript.branches[expected.branch].ends[responses - 1].position
                    self._transcript.rendered_ahead[expected.name] = expected, prompt[position:]
            except EnvError:  # it is raised again when the observation is shown
                return
        await self._expect_formed(expected, prompt, format)

    async def _expect_formed(self, expected: Expected, prompt: list[int], format: BranchFormat) -> None:
        """Wait for the grammar of the form, if there is one, then request the response.

        If the episode reaches the observation during the wait, this requests no response, because the episode requests
        it.
        """
        with suppress(EnvError, EngineError):  # the error is raised again when the episode asks for the form
            grammar = None if expected.form is None else await format.grammar(expected.form)
            if expected.name in self._to_prepare:
                self._request(expected, prompt, format, grammar)

    def _fits(self) -> bool:
        """Return True if the limits allow one more response.

        Each response that the episode has not taken, finished or not, is counted. So sampling ahead never uses up the
        turn that the episode would need for its own next response.
        """
        # The episode itself waits for one response, which is not in `_responses`.
        return self._transcript.turns_left > len(self._responses) + 1

    def _request(self, expected: Expected, prompt: list[int], format: BranchFormat, grammar: Grammar | None) -> None:
        """Start to sample the response to an expected observation with this prompt, if the limits allow it.

        The response gets the options that the environment has given with the observation.
        """
        limits = self._transcript.limits
        room = limits.max_length - len(prompt)
        if room < 1 or not self._fits():
            return
        on_tokens = ignore_tokens
        if expected.hear is not None:
            reader = format.start_reading(prompt, calling=expected.calling)
            on_tokens = reader.forward_to(expected.hear, len(prompt))
        max_new_tokens = min(limits.max_new_tokens, room, room if expected.tokens is None else expected.tokens)
        request = self._new_request(prompt, max_new_tokens, expected.stop, grammar, on_tokens)
        response = ExpectedResponse(expected.name, request, self._now())
        self._responses.append(response)
        self._tasks.start_soon(self._fetch, response)

    async def _fetch(self, response: ExpectedResponse) -> None:
        """Sample a response, and store it or the error that prevented it, which `take` raises."""

        def count(tokens: int) -> None:
            """Add new tokens to the length of the response, which counts as lost if the episode does not take it."""
            response.tokens += tokens

        try:
            response.outcome = await self._sample(response.request, count)
        except FlashError as error:
            response.outcome = error
        response.finished.set()

    def announce(self, name: str) -> None:
        """Report that the episode reaches the observation of this name, so it is not prepared ahead any more."""
        self._to_prepare.discard(name)

    def find(
        self, name: str, prompt: list[int], max_new_tokens: int, stop: tuple[str, ...], grammar: Grammar | None
    ) -> ExpectedResponse | None:
        """Return the response of this name if it is sampled ahead for exactly this request; None otherwise.

        The result is None, for example, if the environment has shown another observation under this name, or set other
        options. The parameters after `name` are fields of the `ResponseRequest` that the player would make.
        """
        wanted = (prompt, max_new_tokens, stop, grammar)
        for response in self._responses:
            request = response.request
            asked = (request.prompt, request.max_new_tokens, request.stop, request.grammar)
            if response.name == name and asked == wanted:
                return response
        return None

    async def take(self, response: ExpectedResponse) -> Completion:
        """Wait until a response that `find` returned is complete, and return it.

        The response then belongs to the episode, also if its error is raised. If the caller is cancelled while it
        waits, the response stays here, and `drop` counts its tokens.

        Raises:
            EngineError, DeadlineError: the response could not be sampled.
            EnvError, RewardError: the environment listens to the response, and its function raised an error.
        """
        await response.finished.wait()
        self._responses.remove(response)
        if isinstance(response.outcome, FlashError):
            raise response.outcome
        assert response.outcome is not None
        return response.outcome

    def drop(self) -> int:
        """Forget the responses that the episode has not taken. Return the number of their tokens, which are lost.

        This is called at the end of the episode, when the tasks that sample ahead have been cancelled.
        """
        tokens = sum(response.tokens for response in self._responses)
        self._responses.clear()
        return tokens


def prompt_of(expected: Expected, transcript: Transcript) -> tuple[list[int], BranchFormat]:
    """Return the prompt of the response to an expected observation, and the format of its branch. May run in a thread.

    The prompt has the tokens up to the place that the observation follows, and the tokens of the observation. The
    transcript will have exactly these tokens if the episode reaches the observation.

    Raises:
        EnvError: the observation cannot be shown.
    """
    observation, tools = expected.observation, expected.tools
    if not expected.responses:
        if tools:
            transcript.tokenizer.check_reads_calls()
        tokenizer = transcript.tokenizer.with_arguments(expected.template)
        format = BranchFormat(not isinstance(observation, str), tokenizer, list(tools))
        return tokenizer.render(observation, tools), format
    branch = transcript.branches[expected.branch]
    shown = transcript.follow(branch, expected.responses, observation)
    return branch.tokens[: branch.ends[expected.responses - 1].position] + shown, branch.format
