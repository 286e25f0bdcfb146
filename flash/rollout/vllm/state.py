"""State of one vLLM engine: the adapters that it holds, its load, and whether it hangs. Pure; `VLLMEngine` drives it.

The adapters are the versions of a LoRA run. An engine with room for one adapter replaces it by the next version, and
running requests go on under the next version. With room for several, the next version is put beside the others: a
request ends under the version that it began with, and new requests begin under the newest version.

Law: no adapter that a request runs under is dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Any

import anyio
import msgspec

from flash.foreign import vllm
from flash.rollout.engine import Pressure

SHARE_STEPS = 100
"""Steps over which shares are reported: enough for a mean, few enough to follow a change."""


@dataclass(eq=False)
class Adapter:
    """A version of the adapter in an engine, or, with number 0, a whole model."""

    version: int = -1
    number: int = 0
    """Number of the adapter in vLLM; 0: a whole model."""
    pinned: bool = False
    """True if requests end under the version that they began with."""
    requests: int = 0
    """Number of requests that run under this adapter."""

    @property
    def lora_request(self) -> Any:
        """Argument with which vLLM runs a request under this adapter; None for a whole model.

        The name has the version, by which vLLM keeps the blocks of versions apart in its prefix cache.
        """
        return vllm.adapter_request(f"version {self.version}", self.number) if self.number else None

    @property
    def version_starts(self) -> list[tuple[str, int]] | None:
        """Version label of all tokens of a request, in the form of `flash.foreign.vllm.version_starts`.

        None if vLLM's own labels are right, because requests go on under later versions.
        """
        return [(str(self.version), 0)] if self.pinned else None


class Adapters:
    """The adapters of an engine. See the module's docstring.

    Args:
        room: adapters that the engine holds at once; 0: it serves whole models.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._numbers = count(1)
        self._held: list[Adapter] = []
        self._freed = anyio.Event()
        self.newest = Adapter()
        """Adapter of new requests."""

    @property
    def several(self) -> bool:
        """True if several versions are held beside each other."""
        return self._room > 1

    def begin_request(self) -> Adapter:
        """Count a new request, and return the adapter that it runs under."""
        self.newest.requests += 1
        return self.newest

    def end_request(self, adapter: Adapter) -> None:
        """Note that a request under `adapter` has ended."""
        adapter.requests -= 1
        self._freed.set()

    def add(self, version: int) -> tuple[Adapter, list[int]] | None:
        """Make room for the next version.

        Returns its adapter and the numbers of the adapters to drop. None: requests run under all held adapters.
        """
        if not self.several:
            # The number is 1 for the only adapter, and 0 for a whole model.
            return Adapter(version, self._room), []
        kept = [adapter for adapter in self._held if adapter.requests or adapter is self.newest]
        if len(kept) == self._room:
            return None
        dropped = [adapter.number for adapter in self._held if adapter not in kept]
        self._held = [*kept, Adapter(version, next(self._numbers), pinned=True)]
        return self._held[-1], dropped

    async def wait_and_add(self, version: int) -> tuple[Adapter, list[int]]:
        """Make room for the next version like `add`. If there is no room, wait until requests have ended."""
        while (added := self.add(version)) is None:
            self._freed = anyio.Event()
            await self._freed.wait()
        return added


class _Share:
    """A share, such as that of cached prompt tokens, over the last `SHARE_STEPS` steps whose whole was not 0."""

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque(maxlen=SHARE_STEPS)

    def add(self, part: int, whole: int) -> float | None:
        """Add the counts of a step and return the share; None before the first step that counts."""
        if whole:
            self._counts.append((part, whole))
        return sum(part for part, _ in self._counts) / sum(whole for _, whole in self._counts) if self._counts else None


class PressureGauge:
    """Load of an engine, computed from the numbers that vLLM reports after each step."""

    def __init__(self) -> None:
        self._pressure = Pressure(running=0, waiting=0, kv_used=0.0, preemptions=0)
        self._excused = 0
        """Sequences that a swap has preempted and that have not gone on yet."""
        self._hits, self._accepted = _Share(), _Share()

    @property
    def pressure(self) -> Pressure:
        """Load as of the engine's last step."""
        return self._pressure

    def set_cache(self, tokens: int) -> None:
        """Note that the engine has started, with a KV cache for `tokens` tokens."""
        self._pressure = msgspec.structs.replace(self._pressure, kv_tokens=tokens)

    def excuse_preemptions(self) -> None:
        """Do not count the sequences that run now as preempted: a swap drops their cache, not a lack of room."""
        self._excused = self._pressure.running

    def read(
        self,
        *,
        running: int,
        waiting: int,
        resumed: int,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        drafted: int = 0,
        accepted: int = 0,
        **others: float,
    ) -> None:
        """Update the load by the numbers of one step.

        Args:
            running: sequences that the engine decodes.
            waiting: requests that it has not begun, or has preempted.
            resumed: sequences that went on in this step after a preemption.
            prompt_tokens: prompt tokens of the requests that began in it.
            cached_tokens: those of the prompt tokens that the prefix cache held.
            drafted: draft tokens.
            accepted: draft tokens that were accepted.
            others: fields of `Pressure`, unchanged.
        """
        excused = min(resumed, self._excused)
        # If nothing waits, all sequences that the swap had preempted have gone on.
        self._excused = self._excused - excused if waiting else 0
        self._pressure = msgspec.structs.replace(
            self._pressure,
            running=running,
            waiting=waiting,
            preemptions=self._pressure.preemptions + resumed - excused,
            drafted=self._pressure.drafted + drafted,
            accepted=self._pressure.accepted + accepted,
            prefix_hit_share=self._hits.add(cached_tokens, prompt_tokens),
            accepted_share=self._accepted.add(accepted, drafted),
            **others,
        )


class StepWatch:
    """Decides if an engine hangs: it has requests, is not paused, and has made no step for too long.

    Each method takes the time of the change in seconds.

    Args:
        limit_s: seconds that a step may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since = 0.0
        """When the engine last made a step, or got its first request."""
        self._requests = 0
        self._paused = False

    def begin_request(self, now: float) -> None:
        """Note that the engine has one more request."""
        if self._requests == 0:
            self._since = now
        self._requests += 1

    def end_request(self) -> None:
        """Note that the engine has one request less."""
        self._requests -= 1

    def pause(self) -> None:
        """Expect no step before `resume`, as during a swap, which has a deadline of its own."""
        self._paused = True

    def resume(self, now: float) -> None:
        """Expect steps again."""
        self._paused, self._since = False, now

    def step(self, now: float) -> None:
        """Note that the engine has made a step."""
        self._since = now

    def seconds_left(self, now: float) -> float:
        """Return the seconds after which the engine counts as hanging if it makes no step; 0 if it hangs already.

        `limit_s` while no step is expected.
        """
        if self._paused or self._requests == 0:
            return self._limit_s
        return max(0.0, self._since + self._limit_s - now)
