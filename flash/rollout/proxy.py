"""LLMProxy: one door to several engines.

`flash.rollout.routing` decides who is served where, `flash.rollout.concurrency` how much an engine may hold; what is
beyond that waits here. A request whose engine dies, fails it or is emptied for a swap goes on elsewhere with its tokens
so far. It keeps the books of who was busy: an engine is idle while it has no running request.

Conservation: every `generate` call is waiting, held by exactly one engine, or over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Literal

import anyio
import msgspec

from flash.errors import EngineDeadError, EngineError
from flash.hub.protocol import EngineStatus
from flash.rollout.concurrency import ConcurrencyLimit
from flash.rollout.engine import Engine, Request
from flash.rollout.response import Response
from flash.rollout.routing import Router, Ticket
from flash.types import Activity, Completion, Published
from flash.waiting import deadline

MERGE_GAP_S = 0.05
"""Idle gaps shorter than this are not drawn on the timeline: they are scheduling noise, though they count as idle."""
MAX_FAILURES = 3
"""Engines that may fail one request before it counts as failed; deaths of engines are not counted."""


class ProxySettings(msgspec.Struct, frozen=True):
    """What the proxies of a run share."""

    max_sequences: int
    """Most requests that an engine holds at once."""
    swap: Literal["recompute", "keep", "abort", "drain"]
    """What a swap does to running requests; see `rollout.swap`."""
    bind_groups: bool
    """All requests of a group go to one engine."""
    swap_s: float
    drain_s: float
    """Deadlines, in seconds: of requests that were told to leave, and of those that may end."""


class _Slot:
    """One engine, what it runs, and its books."""

    def __init__(self, engine: Engine, index: int, ceiling: int) -> None:
        self.engine = engine
        self.index = index
        self.limit = ConcurrencyLimit(ceiling)
        self.alive = True
        self.running: dict[anyio.CancelScope, Ticket] = {}
        """One scope per request, the youngest last: cancelling it makes the request move."""
        self.emptied = anyio.Event()
        self.first_version_at: float | None = None
        self.idle_since: float | None = None
        self.busy_since: float | None = None
        self.idle_s = 0.0
        self.canary_error = 0.0
        self.bars: list[Activity] = []


class _Wait:
    """A request in the queue. It is over when an engine has taken it, or, with none, when it has to ask again."""

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.engine: int | None = None


class LLMProxy:
    """Generates on whichever engine suits.

    Args:
        engines: they need not have started.
        first_index: the first engine's number in the run.
        settings: how to share them.
        on_room: called whenever `capacity` may have grown.
        now: Unix seconds on the loop's clock.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        first_index: int,
        settings: ProxySettings,
        *,
        on_room: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        ceiling = settings.max_sequences
        self._slots = [_Slot(engine, first_index + i, ceiling) for i, engine in enumerate(engines)]
        self._router = Router(ceiling, [engine.version for engine in engines], bind_groups=settings.bind_groups)
        self._waits: dict[Ticket, _Wait] = {}
        self._death: EngineDeadError | None = None
        self._on_room = on_room
        self._now = now

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request: Request,
        *,
        min_version: int,
        affinity: tuple[int, int],
        progress: Callable[[int], None],
        timeout: float,
    ) -> Completion:
        """Sample one response.

        Args:
            request: what to sample.
            min_version: oldest engine version that may sample any of its tokens.
            affinity: the group's and the task's number; the engine that served them before is preferred.
            progress: told the number of new tokens as they come.
            timeout: seconds until the request is aborted; waiting for an engine counts.

        Raises:
            EngineDeadError: the last engine is gone.
            EngineError: all engines, or `MAX_FAILURES` of them, failed the request.
            DeadlineError: the response took longer than `timeout`.
        """
        ticket, response = Ticket(affinity, min_version), Response(request)
        with deadline(timeout, "a response", lambda: self._whereabouts(min_version)):
            while (whole := response.exhausted()) is None:
                engine = await self._admit(ticket)
                whole = await self._stream(engine, ticket, response, progress)
                if whole is not None:
                    break
            return whole

    async def _admit(self, ticket: Ticket) -> int:
        """Wait for an engine; returns the one that holds the ticket from then on."""
        while True:
            if not self._router.alive:
                raise self._gone()
            engine = self._router.ask(ticket)
            if engine is not None:
                self._observe(engine, ended=False)
                return engine
            engine = await self._queued(ticket)
            if engine is None:
                continue
            lane = self._router.lanes[engine]
            if lane.alive and not lane.closed:
                return engine
            # A swap or its death came between the choice and now.
            self._release(engine, ended=False)

    async def _queued(self, ticket: Ticket) -> int | None:
        """Wait in the queue until an engine has taken the ticket; None when the last engine died instead."""
        wait = self._waits[ticket] = _Wait()
        try:
            await wait.over.wait()
        except BaseException:  # cancelled: the ticket leaves the queue, or gives back what it has just got
            if wait.engine is not None:
                self._release(wait.engine, ended=False)
            elif ticket.place is not None:
                self._router.withdraw(ticket)
                self._on_room()
            raise
        finally:
            del self._waits[ticket]
        return wait.engine

    async def _stream(
        self, engine: int, ticket: Ticket, response: Response, progress: Callable[[int], None]
    ) -> Completion | None:
        """One engine's part of a response: the whole, or None when it goes on elsewhere."""
        slot, scope = self._slots[engine], anyio.CancelScope()
        self._begin(slot, scope, ticket)
        try:
            with scope:
                async with aclosing(slot.engine.generate(response.rest())) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, Completion):
                            return response.completed(piece)
                        response.add(piece)
                        progress(len(piece.token_ids))
                raise EngineError(f"engine {slot.index} ended a response without completing it")
        except EngineDeadError as error:
            self.fail(engine, error)
        except EngineError:
            ticket.barred |= {engine}
            if len(ticket.barred) >= MAX_FAILURES or self._router.hopeless(ticket):
                raise
        finally:
            self._end(slot, scope)
            self._release(engine, ended=True)
        return None

    def _release(self, engine: int, *, ended: bool) -> None:
        """A request has left an engine: the oldest that waits takes its place."""
        self._observe(engine, ended=ended)
        self._router.release(engine)
        if self._router.lanes[engine].held == 0:
            self._slots[engine].emptied.set()
        self._fill(engine)

    def _observe(self, engine: int, *, ended: bool) -> None:
        """Let the engine's limit follow its pressure."""
        slot = self._slots[engine]
        slot.limit.observe(slot.engine.pressure, self._router.lanes[engine].held, ended=ended)
        self._router.set_limit(engine, slot.limit.limit)

    def _fill(self, engine: int) -> None:
        for ticket in self._router.fill(engine):
            wait = self._waits[ticket]
            wait.engine = engine
            wait.over.set()
        self._on_room()

    def _gone(self) -> EngineDeadError:
        assert self._death is not None, "only a proxy whose engines have all died has no engine"
        return EngineDeadError(f"no engine is left; the last one: {self._death}")

    def _whereabouts(self, min_version: int) -> str:
        states = [
            f"engine {slot.index} has version {slot.engine.version} and {lane.held} of {lane.limit} requests"
            for slot, lane in zip(self._slots, self._router.lanes, strict=True)
            if slot.alive
        ]
        waiting = f"{self._router.waiting} requests wait; this one needs version {min_version}"
        return f"deadlines.generate and rollout.max_new_tokens ({'; '.join([*states, waiting])})"

    def capacity(self) -> int:
        """How many more requests could start now on engines that have a version."""
        return self._router.room()

    # -- engines -----------------------------------------------------------------------------------------------------

    async def load(self, engine: int, published: Published) -> None:
        """Swap one engine of this proxy to a version. Raises WeightsError, EngineError, DeadlineError."""
        slot, mode = self._slots[engine], self._settings.swap
        self._router.begin_swap(engine, closed=mode in ("abort", "drain"))
        if mode == "abort":
            self._move_all(slot)
            await self._emptied(engine, "to stop", self._settings.swap_s)
        elif mode == "drain":
            await self._emptied(engine, "to end", self._settings.drain_s)
        start = self._now()
        # After an error the engine stays closed where it was: its weights are undefined.
        slot.canary_error = await slot.engine.load(published, keep_cache=mode == "keep")
        if slot.first_version_at is None:
            slot.first_version_at = self._now()
            slot.idle_since = self._now() if not slot.running else None
        slot.bars.append(Activity(f"engine {slot.index}", "swap", start, self._now()))
        self._router.end_swap(engine, slot.engine.version)
        self._fill(engine)
        self._balance(engine)

    def _balance(self, engine: int) -> None:
        """The first engine that reaches a version is given all that waited for it: share it with one that comes later.

        The youngest requests move, since the least has to be computed again for them.
        """
        for giver, count in self._router.surplus(engine):
            for scope, ticket in list(self._slots[giver].running.items())[-count:]:
                ticket.settled = False
                scope.cancel()

    async def _emptied(self, engine: int, what: str, seconds: float) -> None:
        """Wait until an engine that is closed holds no request."""
        slot, lane = self._slots[engine], self._router.lanes[engine]

        def waited_for() -> str:
            return f"{lane.held} requests of engine {slot.index} {what} before its swap"

        with deadline(seconds, waited_for, "the engine, deadlines.swap and rollout.swap"):
            while lane.held:
                slot.emptied = anyio.Event()
                await slot.emptied.wait()

    def _move_all(self, slot: _Slot) -> None:
        for scope in slot.running:
            scope.cancel()

    def fail(self, engine: int, error: EngineDeadError) -> None:
        """An engine is gone for good: its requests, and those that wait for it, move to the others, if any is left."""
        slot = self._slots[engine]
        if not slot.alive:
            return
        slot.alive = False
        self._death = error
        self._move_all(slot)
        homeless = self._router.fail(engine)
        # Asked again by those who wait themselves, the oldest first: that is the order in which they are woken.
        for ticket in homeless if self._router.alive else list(self._waits):
            self._waits[ticket].over.set()

    @property
    def alive(self) -> bool:
        """Whether an engine is left."""
        return self._router.alive

    def versions(self) -> list[int]:
        """Version of each engine, −1 for those that are dead or have none."""
        return [slot.engine.version if slot.alive else -1 for slot in self._slots]

    # -- books -------------------------------------------------------------------------------------------------------

    def _begin(self, slot: _Slot, scope: anyio.CancelScope, ticket: Ticket) -> None:
        slot.running[scope] = ticket
        if len(slot.running) > 1:
            return
        now = self._now()
        idle = now - slot.idle_since if slot.idle_since is not None else 0.0
        slot.idle_s += idle
        slot.idle_since = None
        # The last bar cannot tell: it is a swap's, or has left with a report.
        if slot.busy_since is None or idle > MERGE_GAP_S:
            slot.busy_since = now

    def _end(self, slot: _Slot, scope: anyio.CancelScope) -> None:
        del slot.running[scope]
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
        """State of the living engines, and what all of them did since the last report."""
        now = self._now()
        statuses: list[EngineStatus] = []
        activities: list[Activity] = []
        for slot in self._slots:
            idle = slot.idle_s + (now - slot.idle_since if slot.idle_since is not None else 0.0)
            lifetime = now - slot.first_version_at if slot.first_version_at is not None else 0.0
            if slot.alive:
                statuses.append(EngineStatus(slot.index, slot.engine.version, idle, lifetime, slot.canary_error))
            if slot.running and slot.busy_since is not None:
                self._draw(slot, now)
                slot.busy_since = now
            activities += slot.bars
            slot.bars = []
        return statuses, activities


async def start_engines(engines: Sequence[Engine], timeout: float) -> None:
    """Start all engines at once. Raises DeadlineError, EngineError."""
    with deadline(timeout, "the engines to start", "the engines' output and deadlines.engine_start"):
        async with anyio.create_task_group() as group:
            for engine in engines:
                group.start_soon(engine.start)
