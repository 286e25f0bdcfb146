"""Which versions of a run's adapters an engine holds, and which requests run under which: pure state.

An engine with room for one has each version take the place of the one before, and what runs goes on under it, as under
new weights. With room for more the next one stands beside them: requests end under the version that they began with,
and those that come begin under the newest. Law: no adapter that a request runs under is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import anyio

from flash.config.tree import Config
from flash.foreign import vllm


@dataclass(eq=False)
class Adapter:
    """One version in an engine."""

    version: int = -1
    number: int = 0
    """By which vLLM knows it; 0: there is none, but a whole model."""
    stays: bool = False
    """Whether its requests end under it."""
    requests: int = 0
    """That run under it."""

    @property
    def asked(self) -> Any:
        """What has vLLM run a request under it, and find its blocks in the prefix cache by its version."""
        return vllm.adapter_request(f"version {self.version}", self.number) if self.number else None

    @property
    def labels(self) -> list[tuple[str, int]] | None:
        """As of `flash.foreign.vllm.version_starts`, of a request that ends under it; None: vLLM's own are right."""
        return [(str(self.version), 0)] if self.stays else None


class Adapters:
    """See the module's docstring.

    Args:
        room: versions at once; 0: the engine serves whole models.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._numbers = count(1)
        self._held: list[Adapter] = []
        self._freed = anyio.Event()
        self.newest = Adapter()
        """What new requests run under."""

    @property
    def beside(self) -> bool:
        """Whether versions stand beside each other."""
        return self._room > 1

    def begins(self) -> Adapter:
        """A request begins; what it runs under."""
        self.newest.requests += 1
        return self.newest

    def ends(self, adapter: Adapter) -> None:
        """It is over."""
        adapter.requests -= 1
        self._freed.set()

    def place(self, version: int) -> tuple[Adapter, list[int]] | None:
        """Where the next version goes, and the numbers of those that leave; None: all of them are in use."""
        if not self.beside:
            return Adapter(version, self._room), []
        kept = [one for one in self._held if one.requests or one is self.newest]
        if len(kept) == self._room:
            return None
        dropped = [one.number for one in self._held if one not in kept]
        self._held = [*kept, Adapter(version, next(self._numbers), stays=True)]
        return self._held[-1], dropped

    async def placed(self, version: int) -> tuple[Adapter, list[int]]:
        """The same once there is room, for which it waits as long as requests run."""
        while (found := self.place(version)) is None:
            self._freed = anyio.Event()
            await self._freed.wait()
        return found


def adapter_arguments(config: Config) -> dict[str, Any]:
    """vLLM's arguments for an engine of this run; none where it trains whole models."""
    lora = config.lora
    if lora is None:
        return {}
    targets: Sequence[str] = lora.targets
    if not targets:
        from flash.foreign.transformers import linear_layers, without_weights

        # Else vLLM would multiply by adapters of the output layer, too, though they are 0.
        targets = linear_layers(without_weights(config.model.path, trusted=config.model.trust_remote_code))
    return {
        "enable_lora": True,
        "max_loras": config.adapters,
        "max_lora_rank": vllm.room_for_rank(lora.rank),
        "lora_target_modules": [*targets],
    }
