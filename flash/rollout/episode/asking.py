"""The responses of one episode: asked for when it comes to them, or ahead, where its environment knows what it will
show.

What was asked for ahead is sampled beside the response under way, and waits until the episode comes to it: the episode
itself goes on one response after the other. Conservation: every token is in a response that was taken, or lost.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup

from flash.errors import FlashError
from flash.types import Completion

T = TypeVar("T")


class Wanted(NamedTuple):
    """A response that an episode wants."""

    prompt: list[int]
    tokens: int
    """At most."""
    stop: tuple[str, ...]
    """Texts that end it."""
    hears: Callable[[Sequence[int]], None]
    """Told its tokens as they come."""
    name: str = ""
    """Of one that is expected."""


class ResponseSampler(Protocol):
    """Samples the response of a number, counted from 0 in the order in which they were asked for."""

    async def __call__(self, wanted: Wanted, number: int, *, ahead: bool) -> Completion: ...


class SampledTokens(Protocol):
    """What an episode has sampled."""

    tokens: int
    lost: int


class Asked:
    """One response, and what became of it."""

    def __init__(self, wanted: Wanted, number: int, start: float) -> None:
        self.wanted = wanted
        self.number = number
        self.start = start
        self.tokens = 0
        """Those that have come."""
        self.over = anyio.Event()
        self.outcome: Completion | FlashError | None = None


class Asking:
    """See the module's docstring.

    Args:
        sample: asks the engines.
        progress: the episode's.
        ahead: where what is asked for ahead is waited for; None: nothing is.
        now: Unix seconds on the loop's clock.
    """

    def __init__(
        self, sample: ResponseSampler, progress: SampledTokens, ahead: TaskGroup | None, *, now: Callable[[], float]
    ) -> None:
        self._sample = sample
        self._progress = progress
        self._ahead = ahead
        self._now = now
        self._count = 0
        self._expected: list[Asked] = []

    @property
    def waiting(self) -> int | None:
        """How many responses wait for the episode to come to them; None: none may be asked for ahead."""
        return None if self._ahead is None else len(self._expected)

    def start(self, prepare: Callable[[T], Coroutine[Any, Any, None]], what: T) -> None:
        """Prepare something that may be asked for ahead, beside the episode."""
        assert self._ahead is not None, "nothing is asked for ahead here"
        self._ahead.start_soon(prepare, what)

    def expect(self, wanted: Wanted) -> None:
        """Ask for this ahead: the episode will come to it."""
        assert self._ahead is not None, "nothing is asked for ahead here"
        asked = self._new(wanted)
        self._expected.append(asked)
        self._ahead.start_soon(self._fetch, asked)

    async def respond(self, wanted: Wanted) -> tuple[Completion, float]:
        """The next response, and when it was asked for.

        Raises:
            EngineError, DeadlineError: there is none.
        """
        named = (one for one in self._expected if wanted.name and one.wanted.name == wanted.name)
        asked = next((one for one in named if one.wanted[:3] == wanted[:3]), None)
        if asked is None:
            asked = self._new(wanted)
            return await self._generate(asked, ahead=False), asked.start
        await asked.over.wait()
        self._expected.remove(asked)
        if isinstance(asked.outcome, FlashError):
            raise asked.outcome
        assert asked.outcome is not None
        return asked.outcome, asked.start

    def drop(self) -> None:
        """The episode will not come to what it expected: what was sampled of it is lost."""
        for asked in self._expected:
            self._progress.tokens -= asked.tokens
            self._progress.lost += asked.tokens
        self._expected.clear()

    def _new(self, wanted: Wanted) -> Asked:
        asked = Asked(wanted, self._count, self._now())
        self._count += 1
        return asked

    async def _fetch(self, asked: Asked) -> None:
        try:
            asked.outcome = await self._generate(asked, ahead=True)
        except FlashError as error:
            asked.outcome = error
        asked.over.set()

    async def _generate(self, asked: Asked, *, ahead: bool) -> Completion:
        def hears(tokens: Sequence[int]) -> None:
            self._come(asked, len(tokens))
            asked.wanted.hears(tokens)

        completion = await self._sample(asked.wanted._replace(hears=hears), asked.number, ahead=ahead)
        self._come(asked, len(completion.token_ids) - asked.tokens)
        return completion

    def _come(self, asked: Asked, tokens: int) -> None:
        asked.tokens += tokens
        self._progress.tokens += tokens
