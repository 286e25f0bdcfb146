"""LLMProxy: one door to several engines.

`flash.rollout.routing` decides who is served where, `flash.rollout.concurrency` how much an engine may hold; what is
beyond that waits here. A request whose engine dies, fails it or is emptied for a swap goes on elsewhere with its tokens
so far. `flash.rollout.usage` keeps who was busy.

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
from flash.rollout.engine import Engine, GenerateRequest
from flash.rollout.response import Response
from flash.rollout.routing import EngineView, RoutedRequest, Router
from flash.rollout.usage import EngineUsage
from flash.types import Activity, Completion, Published
from flash.waiting import deadline

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


class _EngineRecord:
    """One engine: itself, what it runs, and what is known of it.

    `view` is the router's part, a value of its own: the router decides without tasks, clocks and engines, so that it
    must not see the rest.
    """

    def __init__(self, engine: Engine, number: int, view: EngineView) -> None:
        self.engine = engine
        self.number = number
        """Among the engines of the run; `view.index` counts those of this proxy."""
        self.view = view
        self.limit = ConcurrencyLimit(view.limit)
        self.running: dict[anyio.CancelScope, RoutedRequest] = {}
        """One scope per request, the youngest last: cancelling it makes the request move."""
        self.emptied = anyio.Event()
        self.usage = EngineUsage(f"engine {number}")
        self.canary_error = 0.0


class _Wait:
    """A request in the queue. It is over when an engine has taken it, or, with none, when it has to ask again."""

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.engine: _EngineRecord | None = None


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
        versions = [engine.version for engine in engines]
        self._router = Router(settings.max_sequences, versions, bind_groups=settings.bind_groups)
        self._records = [
            _EngineRecord(engine, first_index + view.index, view)
            for engine, view in zip(engines, self._router.views, strict=True)
        ]
        self._waits: dict[RoutedRequest, _Wait] = {}
        self._death: EngineDeadError | None = None
        self._on_room = on_room
        self._now = now

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request: GenerateRequest,
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
        routed, response = RoutedRequest(affinity, min_version), Response(request)
        with deadline(timeout, "a response", lambda: self._whereabouts(min_version)):
            while (whole := response.exhausted()) is None:
                record = await self._admit(routed)
                whole = await self._stream(record, routed, response, progress)
                if whole is not None:
                    break
            return whole

    async def _admit(self, routed: RoutedRequest) -> _EngineRecord:
        """Wait for an engine; returns the one that holds the request from then on."""
        while True:
            if not self._router.alive:
                raise self._gone()
            engine = self._router.ask(routed)
            if engine is not None:
                record = self._records[engine]
                self._observe(record, ended=False)
                return record
            record = await self._queued(routed)
            if record is None:
                continue
            if record.view.alive and not record.view.closed:
                return record
            # A swap or its death came between the choice and now.
            self._release(record, ended=False)

    async def _queued(self, routed: RoutedRequest) -> _EngineRecord | None:
        """Wait in the queue until an engine has taken the request; None when the last engine died instead."""
        wait = self._waits[routed] = _Wait()
        try:
            await wait.over.wait()
        except BaseException:  # cancelled: the request leaves the queue, or gives back what it has just got
            if wait.engine is not None:
                self._release(wait.engine, ended=False)
            elif routed.place is not None:
                self._router.withdraw(routed)
                self._on_room()
            raise
        finally:
            del self._waits[routed]
        return wait.engine

    async def _stream(
        self, record: _EngineRecord, routed: RoutedRequest, response: Response, progress: Callable[[int], None]
    ) -> Completion | None:
        """One engine's part of a response: the whole, or None when it goes on elsewhere."""
        scope = anyio.CancelScope()
        self._begin(record, scope, routed)
        try:
            with scope:
                async with aclosing(record.engine.generate(response.rest())) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, Completion):
                            return response.completed(piece)
                        response.add(piece)
                        progress(len(piece.token_ids))
                raise EngineError(f"engine {record.number} ended a response without completing it")
        except EngineDeadError as error:
            self.fail(record.view.index, error)
        except EngineError:
            routed.barred |= {record.view.index}
            if len(routed.barred) >= MAX_FAILURES or self._router.hopeless(routed):
                raise
        finally:
            self._end(record, scope)
            self._release(record, ended=True)
        return None

    def _release(self, record: _EngineRecord, *, ended: bool) -> None:
        """A request has left an engine: the oldest that waits takes its place."""
        self._observe(record, ended=ended)
        self._router.release(record.view.index)
        if record.view.held == 0:
            record.emptied.set()
        self._fill(record)

    def _observe(self, record: _EngineRecord, *, ended: bool) -> None:
        """Let the engine's limit follow its pressure."""
        record.limit.observe(record.engine.pressure, record.view.held, ended=ended)
        self._router.set_limit(record.view.index, record.limit.limit)

    def _fill(self, record: _EngineRecord) -> None:
        for routed in self._router.fill(record.view.index):
            wait = self._waits[routed]
            wait.engine = record
            wait.over.set()
        self._on_room()

    def _gone(self) -> EngineDeadError:
        assert self._death is not None, "only a proxy whose engines have all died has no engine"
        return EngineDeadError(f"no engine is left; the last one: {self._death}")

    def _whereabouts(self, min_version: int) -> str:
        states = [
            f"engine {record.number} has version {record.engine.version} and {record.view.held} of "
            f"{record.view.limit} requests"
            for record in self._records
            if record.view.alive
        ]
        waiting = f"{self._router.waiting} requests wait; this one needs version {min_version}"
        return f"deadlines.generate and rollout.max_new_tokens ({'; '.join([*states, waiting])})"

    def capacity(self) -> int:
        """How many more requests could start now on engines that have a version."""
        return self._router.room()

    # -- engines -----------------------------------------------------------------------------------------------------

    async def load(self, engine: int, published: Published) -> None:
        """Swap one engine of this proxy to a version. Raises WeightsError, EngineError, DeadlineError."""
        record, mode = self._records[engine], self._settings.swap
        self._router.begin_swap(engine, closed=mode in ("abort", "drain"))
        if mode == "abort":
            self._move_all(record)
            await self._emptied(record, "to stop", self._settings.swap_s)
        elif mode == "drain":
            await self._emptied(record, "to end", self._settings.drain_s)
        start = self._now()
        # After an error the engine stays closed where it was: its weights are undefined.
        record.canary_error = await record.engine.load(published, keep_cache=mode == "keep")
        record.usage.begin(self._now(), busy=bool(record.running))
        record.usage.swapped(start, self._now())
        self._router.end_swap(engine, record.engine.version)
        self._fill(record)
        self._balance(record)

    def _balance(self, record: _EngineRecord) -> None:
        """The first engine that reaches a version is given all that waited for it: share it with one that comes later.

        The youngest requests move, since the least has to be computed again for them.
        """
        for giver, count in self._router.surplus(record.view.index):
            for scope, routed in list(self._records[giver].running.items())[-count:]:
                routed.settled = False
                scope.cancel()

    async def _emptied(self, record: _EngineRecord, what: str, seconds: float) -> None:
        """Wait until an engine that is closed holds no request."""

        def waited_for() -> str:
            return f"{record.view.held} requests of engine {record.number} {what} before its swap"

        with deadline(seconds, waited_for, "the engine, deadlines.swap and rollout.swap"):
            while record.view.held:
                record.emptied = anyio.Event()
                await record.emptied.wait()

    def _move_all(self, record: _EngineRecord) -> None:
        for scope in record.running:
            scope.cancel()

    def fail(self, engine: int, error: EngineDeadError) -> None:
        """An engine is gone for good: its requests, and those that wait for it, move to the others, if any is left."""
        record = self._records[engine]
        if not record.view.alive:
            return
        self._death = error
        self._move_all(record)
        homeless = self._router.fail(engine)
        # Asked again by those who wait themselves, the oldest first: that is the order in which they are woken.
        for routed in homeless if self._router.alive else list(self._waits):
            self._waits[routed].over.set()

    @property
    def alive(self) -> bool:
        """Whether an engine is left."""
        return self._router.alive

    def versions(self) -> list[int]:
        """Version of each engine, −1 for those that are dead or have none."""
        return [record.engine.version if record.view.alive else -1 for record in self._records]

    # -- usage -------------------------------------------------------------------------------------------------------

    def _begin(self, record: _EngineRecord, scope: anyio.CancelScope, routed: RoutedRequest) -> None:
        record.running[scope] = routed
        if len(record.running) == 1:
            record.usage.busy(self._now())

    def _end(self, record: _EngineRecord, scope: anyio.CancelScope) -> None:
        del record.running[scope]
        if not record.running:
            record.usage.idle(self._now())

    def report(self) -> tuple[list[EngineStatus], list[Activity]]:
        """State of the living engines, and what all of them did since the last report."""
        now = self._now()
        statuses: list[EngineStatus] = []
        activities: list[Activity] = []
        for record in self._records:
            if record.view.alive:
                idle_s, lifetime_s = record.usage.seconds(now)
                version, canary_error = record.engine.version, record.canary_error
                statuses.append(EngineStatus(record.number, version, idle_s, lifetime_s, canary_error))
            activities += record.usage.take_bars(now, busy=bool(record.running))
        return statuses, activities


async def start_engines(engines: Sequence[Engine], timeout: float) -> None:
    """Start all engines at once. Raises DeadlineError, EngineError."""
    with deadline(timeout, "the engines to start", "the engines' output and deadlines.engine_start"):
        async with anyio.create_task_group() as group:
            for engine in engines:
                group.start_soon(engine.start)
