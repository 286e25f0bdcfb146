"""What the rollout side needs of an inference engine, in six methods.

An engine serves many `generate` calls at once. `load` swaps weights under sequences in flight: it pauses between two
engine steps, loads, resumes; sequences go on and their later tokens carry the new version.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from flash.errors import EngineDeadError
from flash.types import Completion, Published


class SamplingSettings(msgspec.Struct, frozen=True):
    """How to sample one response."""

    max_new_tokens: int
    temperature: float
    """0 is greedy."""


class Progress(msgspec.Struct, frozen=True):
    """A piece of a response that is still being generated."""

    token_ids: list[int]
    logprobs: list[float]


class Engine(Protocol):
    """One inference engine. All methods may raise `EngineError`; `EngineDeadError` when it is gone for good."""

    @property
    def version(self) -> int:
        """The policy version loaded and verified; −1 before the first `load`."""
        ...

    async def start(self) -> None:
        """Load the model and be ready to generate. Bounded by deadlines.engine_start."""
        ...

    def generate(
        self, prompt: Sequence[int], sampling: SamplingSettings
    ) -> AsyncGenerator[Progress | Completion, None]:
        """Stream one response: any number of `Progress`, then one `Completion` that holds all of it.

        Closing or cancelling the iterator aborts the request in the engine.
        """
        ...

    async def load(self, published: Published) -> float:
        """Swap to a published version with sequences in flight; return the largest canary difference.

        Raises:
            WeightsError: a tensor fails its checksum (named), or the canary differs by more than the tolerance.
        """
        ...

    async def wait_dead(self) -> EngineDeadError:
        """Return, with the reason, when the engine dies on its own. Never returns while it lives."""
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
