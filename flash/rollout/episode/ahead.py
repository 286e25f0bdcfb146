"""Responses that an episode samples ahead: before it comes to them, because the environment expects to need them.

This is optional and stands beside the episode, which goes on from one response to the next. The environment names a
response that it will probably want (`TranscriptView.expect`); the response is then sampled in a task of its own, and
waits here until the episode comes to the same name, prompt and limits.

Conservation: every sampled token is in a response that the episode took, or is counted as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from flash.errors import FlashError
from flash.rollout.engine import ResponseRequest
from flash.types import Completion


class NewRequest(Protocol):
    """Makes the next request of an episode. Requests are numbered in the order in which they are made."""

    def __call__(
        self,
        prompt: list[int],
        max_new_tokens: int,
        stop: tuple[str, ...],
        on_tokens: Callable[[Sequence[int]], None],
    ) -> ResponseRequest: ...


class SampleAhead(Protocol):
    """Sends a request to the engines and returns its response.

    Calls `count` with the number of new tokens as they come; the sum is the length of the response.
    """

    async def __call__(self, request: ResponseRequest, count: Callable[[int], None]) -> Completion: ...


class SampledTokens(Protocol):
    """Token counts of an episode."""

    tokens: int
    """Sampled tokens that the episode has or may still take."""
    lost: int
    """Sampled tokens that the episode will not take."""


class ResponseAhead:
    """One response that is sampled ahead, and what has become of it so far."""

    def __init__(self, name: str, request: ResponseRequest, start: float) -> None:
        self.name = name
        self.request = request
        self.start = start
        """When it was requested, in Unix seconds."""
        self.tokens = 0
        """Tokens sampled so far."""
        self.finished = anyio.Event()
        self.outcome: Completion | FlashError | None = None
        """The response, or the reason why there is none. None until `finished`."""


class ResponsesAhead:
    """The responses that one episode samples ahead.

    Args:
        new_request: makes requests of the episode.
        sample: sends a request to the engines.
        progress: token counts of the episode.
        tasks: runs what goes on beside the episode; cancelled when the episode ends.
        now: Unix seconds on the loop's clock.
    """

    def __init__(
        self,
        new_request: NewRequest,
        sample: SampleAhead,
        progress: SampledTokens,
        tasks: TaskGroup,
        *,
        now: Callable[[], float],
    ) -> None:
        self._new_request = new_request
        self._sample = sample
        self._progress = progress
        self.tasks = tasks
        self._now = now
        self._pending: list[ResponseAhead] = []

    @property
    def pending(self) -> int:
        """Number of responses that the episode has not come to yet."""
        return len(self._pending)

    def expect(
        self,
        name: str,
        prompt: list[int],
        max_new_tokens: int,
        stop: tuple[str, ...],
        on_tokens: Callable[[Sequence[int]], None],
    ) -> None:
        """Start to sample a response that the episode will probably come to under this name."""
        request = self._new_request(prompt, max_new_tokens, stop, on_tokens)
        response = ResponseAhead(name, request, self._now())
        self._pending.append(response)
        self.tasks.start_soon(self._fetch, response)

    def find(self, name: str, prompt: list[int], max_new_tokens: int, stop: tuple[str, ...]) -> ResponseAhead | None:
        """Return the response of this name that is sampled ahead for just this request, if there is one."""
        for response in self._pending:
            request = response.request
            if response.name == name and (request.prompt, request.max_new_tokens, request.stop) == (
                prompt,
                max_new_tokens,
                stop,
            ):
                return response
        return None

    async def take(self, response: ResponseAhead) -> Completion:
        """Wait until a response that `find` returned is complete, and return it.

        Raises:
            EngineError, DeadlineError: it could not be sampled.
        """
        await response.finished.wait()
        self._pending.remove(response)
        if isinstance(response.outcome, FlashError):
            raise response.outcome
        assert response.outcome is not None
        return response.outcome

    def drop(self) -> None:
        """Forget the responses that the episode never came to: their tokens count as lost."""
        for response in self._pending:
            self._progress.tokens -= response.tokens
            self._progress.lost += response.tokens
        self._pending.clear()

    async def _fetch(self, response: ResponseAhead) -> None:
        def count(tokens: int) -> None:
            response.tokens += tokens

        try:
            response.outcome = await self._sample(response.request, count)
        except FlashError as error:
            response.outcome = error
        response.finished.set()
