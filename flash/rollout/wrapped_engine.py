"""Engines around another one: who wraps an engine says only what it does otherwise."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from flash.errors import EngineDeadError
from flash.rollout.engine import Engine, Pressure, Progress, ResponseRequest
from flash.types import Completion, Published

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

    def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
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
