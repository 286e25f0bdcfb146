"""An engine for tests: answers after a set time per token on the loop's clock, with the tokens a function gives.

It keeps the contract of `Engine` that matters to its callers: progress streams, a swap in between changes the
version of later tokens only, a killed engine fails every request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

import anyio
import anyio.lowlevel

from flash.errors import EngineDeadError
from flash.rollout.engine import Progress, SamplingSettings
from flash.types import Completion, Published, VersionRun


class FakeEngine:
    """`answer(prompt)` gives the response's tokens; each takes `seconds_per_token`."""

    def __init__(
        self,
        answer: Callable[[Sequence[int]], list[int]],
        seconds_per_token: float = 0.01,
        swap_seconds: float = 0.05,
    ) -> None:
        self._answer = answer
        self._seconds_per_token = seconds_per_token
        self._swap_seconds = swap_seconds
        self._version = -1
        self._dead = anyio.Event()
        self.aborted = 0
        self.running = 0

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingSettings
    ) -> AsyncGenerator[Progress | Completion, None]:
        answer = self._answer(prompt)
        tokens = answer[: sampling.max_new_tokens]
        versions: list[VersionRun] = []
        self.running += 1
        finished = False
        try:
            for token in tokens:
                await anyio.sleep(self._seconds_per_token)
                if self._dead.is_set():
                    raise EngineDeadError("the fake engine was killed")
                if versions and versions[-1].version == self._version:
                    versions[-1] = VersionRun(self._version, versions[-1].count + 1)
                else:
                    versions.append(VersionRun(self._version, 1))
                yield Progress([token], [-1.0])
            finished = True
            finish = "length" if len(answer) > sampling.max_new_tokens else "stop"
            yield Completion(tokens, [-1.0] * len(tokens), versions, finish)
        finally:
            self.running -= 1
            self.aborted += not finished

    async def load(self, published: Published) -> float:
        await anyio.sleep(self._swap_seconds)
        assert published.version > self._version, "an engine never goes back"
        self._version = published.version
        return 0.0

    def kill(self) -> None:
        """Die, as a process does."""
        self._dead.set()

    async def wait_dead(self) -> EngineDeadError:
        await self._dead.wait()
        return EngineDeadError("the fake engine was killed")

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
