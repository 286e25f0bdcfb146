"""An engine that serves the model folder as it is, for runs that train nothing."""

from __future__ import annotations

from flash.rollout.vllm.engine import VLLMEngine
from flash.rollout.wrapped_engine import WrappedEngine
from flash.types import Published


class FixedEngine(WrappedEngine[VLLMEngine]):
    """A `VLLMEngine` that takes a published version for the weights which it has."""

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """See `Engine`. Only its number is taken."""
        await self._engine.adopt(published.version)
        return 0.0
