"""An engine that serves the model folder as it is, for runs that train nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from flash.errors import EngineDeadError
from flash.rollout.engine import GenerateRequest, Pressure, Progress
from flash.rollout.vllm_engine import VLLMEngine
from flash.types import Completion, Published


class Resident:
    """A `VLLMEngine` that takes a published version for the weights which it has."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def pressure(self) -> Pressure:
        return self._engine.pressure

    async def start(self) -> None:
        await self._engine.start()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Progress | Completion, None]:
        return self._engine.generate(request)

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        await self._engine.adopt(published.version)
        return 0.0

    def reassign(self, number: int) -> None:
        self._engine.reassign(number)

    async def wait_dead(self) -> EngineDeadError:
        return await self._engine.wait_dead()

    async def close(self) -> None:
        await self._engine.close()
