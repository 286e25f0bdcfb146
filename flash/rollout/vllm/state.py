"""State of one vLLM engine: the adapters that it holds, its load, and the time of its last step.

`VLLMEngine` calls these classes. The classes make no calls themselves, own no tasks, and read no clock.

The adapters are the versions of a LoRA run, one after each training step. An engine with room for one adapter replaces
it by the next version, and running requests continue under the next version. With room for several adapters, the next
version is put beside the others: a request ends under the version with which it began, and new requests begin under the
newest version. A run that trains whole models has the single "adapter" with number 0.

A *swap* is the load of a version.

Invariant: an adapter is not dropped while a request runs under it.
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
"""Number of steps over which shares are computed: enough for a mean, and few enough to follow a change."""


@dataclass(eq=False)
class Adapter:
    """A version of the adapter in an engine, or, with number 0, a whole model."""

    version: int = -1
    """Policy version; -1 before the first one is loaded."""
    number: int = 0
    """Number of the adapter in vLLM; 0 for a whole model."""
    pinned: bool = False
    """True if requests end under this version, because it is never replaced in place."""
    requests: int = 0
    """Number of requests that run under this adapter now."""

    @property
    def lora_request(self) -> Any:
        """Argument with which vLLM runs a request under this adapter; None for a whole model.

        The name of the argument contains the version. vLLM's prefix cache shares blocks only between requests with
        equal names, so no request uses the cache of another version.
        """
        return vllm.adapter_request(f"version {self.version}", self.number) if self.number else None

    @property
    def version_starts(self) -> list[tuple[str, int]] | None:
        """Version label of all tokens of a request, in the form of `flash.foreign.vllm.version_starts`.

        None if vLLM's own labels are to be used. With several adapters these would be wrong: vLLM labels every token
        with the newest version, even if the request runs under an older version.
        """
        return [(str(self.version), 0)] if self.pinned else None


class Adapters:
    """The adapters that one engine holds, and the number of requests under each.

    Args:
        room: number of adapters that the engine holds at once; 0 if it serves whole models.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._numbers = count(1)
        """Numbers of new adapters in vLLM, if there is room for several. A number is never used again."""
        self._held: list[Adapter] = []
        """Adapters in the engine, the newest last; unused unless there is room for several."""
        self._freed = anyio.Event()
        """Event that is set when a request ends. Each wait for room replaces it first."""
        self.newest = Adapter()
        """Adapter of new requests. `VLLMEngine` sets it when a version is loaded."""

    @property
    def several(self) -> bool:
        """True if the engine holds several versions at the same time."""
        return self._room > 1

    def begin_request(self) -> Adapter:
        """Count a new request under the newest adapter, and return that adapter."""
        self.newest.requests += 1
        return self.newest

    def end_request(self, adapter: Adapter) -> None:
        """Note that a request under `adapter` has ended, and wake a waiting `wait_and_add`."""
        adapter.requests -= 1
        self._freed.set()

    def add(self, version: int) -> tuple[Adapter, list[int]] | None:
        """Make room for the next version, if possible.

        Returns the adapter of the version, and the numbers of the adapters to drop from the engine. Returns None if
        there is no room, because requests run under all other adapters. The newest adapter is always kept.
        """
        if not self.several:
            # The new version replaces the old one in place, under the same number: 1 for the only adapter, and 0 for a
            # whole model.
            return Adapter(version, self._room), []
        kept = [adapter for adapter in self._held if adapter.requests or adapter is self.newest]
        if len(kept) == self._room:
            return None
        dropped = [adapter.number for adapter in self._held if adapter not in kept]
        self._held = [*kept, Adapter(version, next(self._numbers), pinned=True)]
        return self._held[-1], dropped

    async def wait_and_add(self, version: int) -> tuple[Adapter, list[int]]:
        """Wait until there is room for the next version, and return the results of `add`."""
        while (added := self.add(version)) is None:
            self._freed = anyio.Event()
            await self._freed.wait()
        return added


class _Share:
    """Share of a part in a whole, over the last `SHARE_STEPS` steps in which the whole was not 0.

    An example is the share of prompt tokens that were in the cache.
    """

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque(maxlen=SHARE_STEPS)
        """Part and whole of each of these steps."""

    def add(self, part: int, whole: int) -> float | None:
        """Add the counts of a step, and return the share; None if the whole was 0 in all steps so far."""
        if whole:
            self._counts.append((part, whole))
        return sum(part for part, _ in self._counts) / sum(whole for _, whole in self._counts) if self._counts else None


class PressureGauge:
    """Computes the load of an engine (`Pressure`) from the numbers that vLLM reports after each step.

    A sequence is *preempted* if vLLM frees its KV cache, to compute it again later: for lack of room, or in a swap.
    """

    def __init__(self) -> None:
        self._pressure = Pressure(running=0, waiting=0, kv_used=0.0, preemptions=0)
        self._excused = 0
        """Number of sequences that a swap has preempted and that do not run again yet."""
        self._hits, self._accepted = _Share(), _Share()
        """Share of prompt tokens that were in the prefix cache, and share of draft tokens that were accepted."""

    @property
    def pressure(self) -> Pressure:
        """Load of the engine after its last step."""
        return self._pressure

    def set_cache(self, tokens: int) -> None:
        """Set the number of tokens that the KV cache of the started engine can hold."""
        self._pressure = msgspec.structs.replace(self._pressure, kv_tokens=tokens)

    def excuse_preemptions(self) -> None:
        """Do not count the sequences that run now as preempted. This is called when a swap drops their cache.

        `Pressure.preemptions` only counts preemptions for lack of room.
        """
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
        """Update the load by the numbers of one step. All counts are for this step alone.

        Args:
            running: number of sequences that the engine decodes.
            waiting: number of requests that it has not begun, or has preempted.
            resumed: number of sequences that run again in this step after a preemption.
            prompt_tokens: number of prompt tokens of the requests that began in this step.
            cached_tokens: number of these prompt tokens that the prefix cache held.
            drafted: number of draft tokens, which are guesses of speculative decoding.
            accepted: number of draft tokens that the model accepted.
            others: further fields of `Pressure`, which are taken as they are.
        """
        # vLLM reports a preempted sequence when it runs again, so preemptions are counted then.
        excused = min(resumed, self._excused)
        # If nothing waits, all sequences that the swap had preempted run again or have ended.
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

    `VLLMEngine.wait_dead` uses it. An engine that hangs counts as dead. `now` is the time of a change in seconds on the
    loop's clock.

    Args:
        limit_s: seconds that a step may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since = 0.0
        """Time of the engine's last step, or of its first request after it had none."""
        self._requests = 0
        """Number of requests that the engine has."""
        self._paused = False
        """True while no step is expected, because of a swap."""

    def begin_request(self, now: float) -> None:
        """Note that the engine has one more request."""
        if self._requests == 0:
            self._since = now
        self._requests += 1

    def end_request(self) -> None:
        """Note that the engine has one request less."""
        self._requests -= 1

    def pause(self) -> None:
        """Expect no step until `resume`. This is called for a swap, which has a deadline of its own."""
        self._paused = True

    def resume(self, now: float) -> None:
        """Expect steps again."""
        self._paused, self._since = False, now

    def step(self, now: float) -> None:
        """Note that the engine has made a step."""
        self._since = now

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the engine counts as hanging if it makes no step; 0 if it hangs already.

        Returns `limit_s` while no step is expected, so that the caller checks again after that time.
        """
        if self._paused or self._requests == 0:
            return self._limit_s
        return max(0.0, self._since + self._limit_s - now)
