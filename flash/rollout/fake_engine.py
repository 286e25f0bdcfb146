"""An engine for tests: answers after a set time per token on the loop's clock, with the tokens a function gives.

It keeps the contract of `Engine`, which `tests/rollout/engine_contract.py` holds it and vLLM to: progress streams, the
last tokens come with the completion, requests beyond its slots wait in order, a swap pauses after the step in flight
and changes the version of later tokens only, a request begun elsewhere goes on after its own tokens, a dead engine
fails every request at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

import anyio
import anyio.lowlevel

from flash.errors import EngineDeadError, EngineError, EngineRefusal
from flash.rollout.engine import Pressure, Progress, ResponseRequest
from flash.types import Completion, Published, VersionRun, append_versions

UNLIMITED = 1 << 30
"""Slots of an engine that runs whatever it is given."""


class FakeEngine:
    """`answer(prompt)` gives the response's tokens; each takes `seconds_per_token`."""

    def __init__(
        self,
        answer: Callable[[Sequence[int]], list[int]],
        seconds_per_token: float = 0.01,
        swap_seconds: float = 0.05,
        slots: int = UNLIMITED,
        start_seconds: float = 0.0,
    ) -> None:
        self._answer = answer
        self._seconds_per_token = seconds_per_token
        self._swap_seconds = swap_seconds
        self._slots = anyio.Semaphore(slots)
        self.start_seconds = start_seconds
        self.start_error: Exception | None = None
        """What its start ends with."""
        self.load_error: Exception | None = None
        """What its next loads end with."""
        self.closed = False
        self._version = -1
        self._death: EngineDeadError | None = None
        self._died = anyio.Event()
        self._resumed = anyio.Event()
        self._resumed.set()
        self._failures: list[EngineError] = []
        self.aborted = 0
        self.running = 0
        self.waiting = 0
        self.requests: list[ResponseRequest] = []
        """All that it was ever asked."""
        self.numbers: list[int] = []
        """What it was called by one hub after the first."""
        self.kept_cache: list[bool] = []
        """What each load was told about the KV cache."""
        self.kv_used = 0.0
        self.preemptions = 0
        self.kv_tokens = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def pressure(self) -> Pressure:
        return Pressure(self.running, self.waiting, self.kv_used, self.preemptions, self.kv_tokens)

    async def start(self) -> None:
        await anyio.sleep(self.start_seconds)
        if self.start_error is not None:
            raise self.start_error

    async def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        self._check_alive()
        if not request.prompt:
            raise EngineRefusal("a prompt of 0 tokens does not fit")
        self.requests.append(request)
        problem = len(request.prompt) - request.generated
        answer = self._answer(request.prompt[:problem])[request.generated :]
        tokens = answer[: request.max_new_tokens]
        finish = "length" if len(answer) > len(tokens) else "stop"
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        finished = False
        versions: list[VersionRun] = []
        try:
            for token in tokens:
                await self._step()
                newest = [VersionRun(self._version, 1)]
                append_versions(versions, newest)
                if sum(run.count for run in versions) < len(tokens):
                    yield Progress([token], [-1.0], newest)
            finished = True
        finally:
            self.running -= 1
            self._slots.release()
            self.aborted += not finished
        yield Completion(tokens, [-1.0] * len(tokens), versions, finish)

    async def _step(self) -> None:
        """One token's time, after any pause."""
        await self._resumed.wait()
        await self._live(self._seconds_per_token)
        if self._failures:
            raise self._failures.pop()

    async def _live(self, seconds: float) -> None:
        """Let time pass, unless the engine dies in it."""
        with anyio.move_on_after(seconds):
            await self._died.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death

    def reassign(self, number: int) -> None:
        self.numbers.append(number)

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        self._check_alive()
        self.kept_cache.append(keep_cache)
        if self._resumed.is_set():
            self._resumed = anyio.Event()
        await self._live(self._seconds_per_token if self.running else 0.0)
        await self._live(self._swap_seconds)
        if self.load_error is not None:
            raise self.load_error
        assert published.version > self._version, "an engine never goes back"
        self._version = published.version
        self._resumed.set()
        return 0.0

    def kill(self) -> None:
        """Die, as a process does."""
        self._death = self._death or EngineDeadError("the fake engine was killed")
        self._died.set()
        self._resumed.set()

    def fail_next(self, requests: int = 1) -> None:
        """Fail this many requests, at their next token."""
        self._failures = [EngineError("the fake engine was told to fail")] * requests

    def refuse_next(self, requests: int = 1) -> None:
        """Refuse this many requests."""
        self._failures = [EngineRefusal("the fake engine was told to refuse")] * requests

    async def wait_dead(self) -> EngineDeadError:
        await self._died.wait()
        assert self._death is not None
        return self._death

    async def close(self) -> None:
        """What is asked of it from now on finds it gone; `wait_dead` does not return for that."""
        self._death = self._death or EngineDeadError("the fake engine is closed")
        self.closed = True
        await anyio.lowlevel.checkpoint()


class FakeLine:
    """Makes one fake engine after the other for a place, as a supervisor asks for them; `made` has them all."""

    def __init__(self, make: Callable[[], FakeEngine]) -> None:
        self._make = make
        self.made: list[FakeEngine] = []

    def __call__(self, number: int = 0) -> FakeEngine:
        self.made.append(self._make())
        return self.made[-1]

    @property
    def newest(self) -> FakeEngine:
        """The one that was made last."""
        return self.made[-1]
