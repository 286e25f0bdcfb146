"""An engine for tests: answers after a set time per token on the loop's clock, with the tokens a function gives.

It keeps the contract of `Engine` that matters to its callers: progress streams, requests beyond its slots wait in
order, a swap pauses after the step in flight and changes the version of later tokens only, a request that was begun
elsewhere goes on after its own tokens, a killed engine fails every request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

import anyio
import anyio.lowlevel

from flash.errors import EngineDeadError, EngineError
from flash.rollout.engine import GenerateRequest, Pressure, Progress
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
    ) -> None:
        self._answer = answer
        self._seconds_per_token = seconds_per_token
        self._swap_seconds = swap_seconds
        self._slots = anyio.Semaphore(slots)
        self._version = -1
        self._dead = anyio.Event()
        self._resumed = anyio.Event()
        self._resumed.set()
        self._failures = 0
        self.aborted = 0
        self.running = 0
        self.waiting = 0
        self.requests: list[GenerateRequest] = []
        """All that it was ever asked."""
        self.kept_cache: list[bool] = []
        """What each load was told about the KV cache."""
        self.kv_used = 0.0
        self.preemptions = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def pressure(self) -> Pressure:
        return Pressure(self.running, self.waiting, self.kv_used, self.preemptions)

    async def start(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Progress | Completion, None]:
        self.requests.append(request)
        problem = len(request.prompt) - request.done
        answer = self._answer(request.prompt[:problem])[request.done :]
        limit = request.sampling.max_new_tokens
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        finished = False
        versions: list[VersionRun] = []
        try:
            for token in answer[:limit]:
                await self._step()
                newest = [VersionRun(self._version, 1)]
                append_versions(versions, newest)
                yield Progress([token], [-1.0], newest)
            finished = True
        finally:
            self.running -= 1
            self._slots.release()
            self.aborted += not finished
        finish = "length" if len(answer) > limit else "stop"
        yield Completion(answer[:limit], [-1.0] * len(answer[:limit]), versions, finish)

    async def _step(self) -> None:
        """One token's time, after any pause."""
        await self._resumed.wait()
        await anyio.sleep(self._seconds_per_token)
        if self._dead.is_set():
            raise EngineDeadError("the fake engine was killed")
        if self._failures:
            self._failures -= 1
            raise EngineError("the fake engine was told to fail")

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        self.kept_cache.append(keep_cache)
        self._resumed = anyio.Event()
        try:
            await anyio.sleep(self._seconds_per_token if self.running else 0.0)
            await anyio.sleep(self._swap_seconds)
            if self._dead.is_set():
                raise EngineDeadError("the fake engine was killed")
            assert published.version > self._version, "an engine never goes back"
            self._version = published.version
        finally:
            self._resumed.set()
        return 0.0

    def kill(self) -> None:
        """Die, as a process does."""
        self._dead.set()

    def fail_next(self, requests: int = 1) -> None:
        """Fail this many requests, at their next token."""
        self._failures = requests

    async def wait_dead(self) -> EngineDeadError:
        await self._dead.wait()
        return EngineDeadError("the fake engine was killed")

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
