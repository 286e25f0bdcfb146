"""LLMProxy: one door to several engines.

Routes each request to the live engine with the fewest running requests among those recent enough for the lease, and
keeps the books of who was busy: an engine is idle while it has no running request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing

import anyio

from flash.errors import DeadlineError, EngineDeadError, EngineError
from flash.hub.protocol import EngineStatus
from flash.rollout.engine import Engine, SamplingSettings
from flash.types import Activity, Completion, Published

MERGE_GAP_S = 0.05
"""Idle gaps shorter than this are not drawn on the timeline: they are scheduling noise, though they count as idle."""


class _Slot:
    """One engine and its load."""

    def __init__(self, engine: Engine, index: int) -> None:
        self.engine = engine
        self.index = index
        self.running = 0
        self.alive = True
        self.first_version_at: float | None = None
        self.idle_since: float | None = None
        self.busy_since: float | None = None
        self.idle_s = 0.0
        self.canary_error = 0.0
        self.bars: list[Activity] = []


class LLMProxy:
    """Generates on whichever engine suits. `now` gives Unix seconds on the loop's clock."""

    def __init__(self, engines: Sequence[Engine], first_index: int, *, now: Callable[[], float]) -> None:
        self._slots = [_Slot(engine, first_index + i) for i, engine in enumerate(engines)]
        self._now = now

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingSettings,
        min_version: int,
        progress: Callable[[int], None],
        timeout: float,
    ) -> Completion:
        """Sample one response.

        Args:
            prompt: token ids.
            sampling: how to sample.
            min_version: oldest engine version that may serve this request.
            progress: told the number of new tokens as they come.
            timeout: seconds until the request is aborted.

        Raises:
            EngineError: no live engine is recent enough, or the engine refused.
            DeadlineError: the response took longer than `timeout`.
        """
        slot = self._choose(min_version)
        self._begin(slot)
        try:
            with anyio.fail_after(timeout):
                async with aclosing(slot.engine.generate(prompt, sampling)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, Completion):
                            return piece
                        progress(len(piece.token_ids))
        except EngineDeadError:
            slot.alive = False
            raise
        except TimeoutError:
            where = f"engine {slot.index}, deadlines.generate and rollout.max_new_tokens"
            raise DeadlineError("a response", timeout, where) from None
        finally:
            self._end(slot)
        raise EngineError(f"engine {slot.index} ended a response without completing it")

    def _choose(self, min_version: int) -> _Slot:
        fit = [slot for slot in self._slots if slot.alive and slot.engine.version >= min_version]
        if not fit:
            versions = [slot.engine.version for slot in self._slots if slot.alive]
            raise EngineError(f"no live engine runs version {min_version} or newer (live engines run {versions})")
        return min(fit, key=lambda slot: (slot.running, slot.index))

    # -- weights -----------------------------------------------------------------------------------------------------

    async def load(self, engine: int, published: Published) -> None:
        """Swap one engine of this proxy to a version. Raises WeightsError, EngineError, DeadlineError."""
        slot = self._slots[engine]
        start = self._now()
        slot.canary_error = await slot.engine.load(published)
        if slot.first_version_at is None:
            slot.first_version_at = self._now()
            slot.idle_since = self._now() if slot.running == 0 else None
        slot.bars.append(Activity(f"engine {slot.index}", "swap", start, self._now()))

    def versions(self) -> list[int]:
        """Version of each engine, −1 for those that are dead or have none."""
        return [slot.engine.version if slot.alive else -1 for slot in self._slots]

    # -- books -------------------------------------------------------------------------------------------------------

    def _begin(self, slot: _Slot) -> None:
        slot.running += 1
        if slot.running > 1:
            return
        now = self._now()
        if slot.idle_since is not None:
            slot.idle_s += now - slot.idle_since
        slot.idle_since = None
        if slot.busy_since is None or (slot.bars and now - slot.bars[-1].stop > MERGE_GAP_S):
            slot.busy_since = now

    def _end(self, slot: _Slot) -> None:
        slot.running -= 1
        if slot.running:
            return
        now = self._now()
        slot.idle_since = now
        assert slot.busy_since is not None, "a request that ends has begun"
        self._draw(slot, now)

    def _draw(self, slot: _Slot, now: float) -> None:
        """Close or extend the engine's last bar up to now."""
        assert slot.busy_since is not None
        bar = Activity(f"engine {slot.index}", "generate", slot.busy_since, now)
        if slot.bars and slot.bars[-1].name == "generate" and slot.bars[-1].start == slot.busy_since:
            slot.bars[-1] = bar
        else:
            slot.bars.append(bar)

    def report(self) -> tuple[list[EngineStatus], list[Activity]]:
        """State of the engines, and what they did since the last report."""
        now = self._now()
        statuses: list[EngineStatus] = []
        activities: list[Activity] = []
        for slot, version in zip(self._slots, self.versions(), strict=True):
            idle = slot.idle_s + (now - slot.idle_since if slot.idle_since is not None else 0.0)
            lifetime = now - slot.first_version_at if slot.first_version_at is not None else 0.0
            statuses.append(EngineStatus(slot.index, version, idle, lifetime, slot.canary_error))
            if slot.running and slot.busy_since is not None:
                self._draw(slot, now)
                slot.busy_since = now
            activities += slot.bars
            slot.bars = []
        return statuses, activities


async def start_engines(engines: Sequence[Engine], timeout: float) -> None:
    """Start all engines at once. Raises DeadlineError, EngineError."""
    try:
        with anyio.fail_after(timeout):
            async with anyio.create_task_group() as group:
                for engine in engines:
                    group.start_soon(engine.start)
    except TimeoutError:
        raise DeadlineError("the engines to start", timeout, "the engines' output and deadlines.engine_start") from None
