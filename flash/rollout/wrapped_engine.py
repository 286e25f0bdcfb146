"""Engines around another one: who wraps an engine says only what it does otherwise."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from typing import Any, Generic, Protocol, TypeVar

from flash.errors import EngineDeadError, FlashError
from flash.profile.order import ProfileOrder, RecordingFacts, write_part
from flash.rollout.engine import Engine, GenerateRequest, Pressure, Progress
from flash.types import Completion, Published

log = logging.getLogger("flash")

MOST_STEPS = 256
"""Steps of an engine that are recorded."""

EngineT = TypeVar("EngineT", bound=Engine)


class WrappedEngine(Generic[EngineT]):
    """`Engine`, by the one within it."""

    def __init__(self, engine: EngineT) -> None:
        self._engine = engine

    @property
    def version(self) -> int:
        """See `Engine`."""
        return self._engine.version

    @property
    def pressure(self) -> Pressure:
        """See `Engine`."""
        return self._engine.pressure

    async def start(self) -> None:
        """See `Engine`."""
        await self._engine.start()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Progress | Completion, None]:
        """See `Engine`."""
        return self._engine.generate(request)

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """See `Engine`."""
        return await self._engine.load(published, keep_cache=keep_cache)

    def reassign(self, number: int) -> None:
        """See `Engine`."""
        self._engine.reassign(number)

    async def wait_dead(self) -> EngineDeadError:
        """See `Engine`."""
        return await self._engine.wait_dead()

    async def close(self) -> None:
        """See `Engine`."""
        await self._engine.close()


class AskableEngine(Engine, Protocol):
    """An engine with workers that do as they are told, such as `VLLMEngine`."""

    async def ask_workers(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of each worker between two steps."""
        ...


class ProfiledEngine(WrappedEngine[AskableEngine]):
    """`Engine`, as the one within it, whose own steps are recorded while the trainer makes those to be profiled.

    It records from the load of the first version on until that of the last, at most `MOST_STEPS` of its steps: they are
    alike, and a training step has thousands. One that starts after them, as where a resumed run makes its first steps
    of samples that it had, says so in its file. What goes wrong with that is told, and costs the profile, not the
    engine.

    Args:
        engine: that works.
        number: its number in the run, by which its files are named.
        order: says which steps.
    """

    def __init__(self, engine: AskableEngine, number: int, order: ProfileOrder) -> None:
        super().__init__(engine)
        self._number = number
        self._order = order
        self._recording = False
        self._done = False

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """See `Engine`. Begins or ends the recording before it."""
        covered = self._order.covers(published.version)
        if covered and not self._recording and not self._done:
            await self._begin()
        if not covered:
            await self._end()
        if published.version >= self._order.stop and not self._done:
            self._done = True
            self._started_late()
        return await super().load(published, keep_cache=keep_cache)

    async def close(self) -> None:
        """See `Engine`. What was recorded is written before."""
        await self._end()
        await super().close()

    def _started_late(self) -> None:
        """Say so; what an engine before this one has recorded in its place stays."""
        file, now = self._order.file(f"engine-{self._number}"), time.time()
        if not file.exists():
            write_part(file, RecordingFacts(f"engine {self._number}", now, now, 0, 0), [])

    async def _begin(self) -> None:
        self._recording = True
        name = f"engine-{self._number}"
        await self._ask("flash_profile_begin", self._order.folder, name, MOST_STEPS)

    async def _end(self) -> None:
        if self._recording:
            self._recording, self._done = False, True
            await self._ask("flash_profile_end")

    async def _ask(self, method: str, *arguments: object) -> None:
        try:
            await self._engine.ask_workers(method, *arguments)
        except EngineDeadError:
            self._recording, self._done = False, True  # who serves it will notice, and say so
        except FlashError as error:
            self._recording, self._done = False, True
            log.warning("engine %d is not profiled: %s", self._number, error)
