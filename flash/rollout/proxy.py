"""LLMProxy: one door to several engines.

`flash.rollout.routing` decides who is served where, as far as engines may hold more; what is beyond that waits here. A
request whose engine dies, fails it or is emptied for a swap goes on elsewhere with its tokens so far; where there is no
other it waits with them for the next one.

Conservation: every `generate` call is waiting, held by exactly one engine, or over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Literal

import anyio
import msgspec

from flash.errors import EngineDeadError, EngineError, EngineRefusal, PoisonError
from flash.hub.protocol import EngineStatus
from flash.rollout.concurrency import ResponseLengths
from flash.rollout.engine import Engine, ResponseRequest
from flash.rollout.engine_record import EngineRecord
from flash.rollout.outage import OutageClock
from flash.rollout.response import Response
from flash.rollout.routing import MAX_DEATHS, RequestRecord, Router
from flash.types import Activity, Completion, Published
from flash.waiting import deadline

MAX_FAILURES = 3
"""Engines that may fail one request before it counts as failed; deaths of engines are counted by the router."""
MAX_FAILED_IN_A_ROW = 8
"""Requests that an engine may fail without a token of any other in between, before it counts as dead: else one broken
engine would use up the attempts of every sample. Requests that it refuses are not counted."""


class ProxySettings(msgspec.Struct, frozen=True):
    """What the proxies of a run share."""

    max_sequences: int
    """Most requests that an engine holds at once."""
    swap: Literal["recompute", "keep", "abort", "drain", "beside"]
    """What a swap does to running requests; see `rollout.swap`. `beside`: nothing, they end under their version."""
    bind_groups: bool
    """All requests of a group go to one engine."""
    swap_s: float
    drain_s: float
    """Deadlines, in seconds: of requests that were told to leave, and of those that may end."""


class _Wait:
    """A request in the queue. It is over when an engine has taken it, or, with none, when it has to ask again."""

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.engine: EngineRecord | None = None


class LLMProxy:
    """Generates on whichever engine suits.

    Args:
        engines: they need not have started.
        first_index: the first engine's number in the run.
        settings: how to share them.
        outages: told when no engine is left, and when one serves again.
        on_room: called whenever `capacity` may have grown.
        now: Unix seconds on the loop's clock.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        first_index: int,
        settings: ProxySettings,
        outages: OutageClock,
        *,
        on_room: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._outages = outages
        lengths = ResponseLengths()
        self.records = [
            EngineRecord(engine, index, first_index + index, settings.max_sequences, lengths)
            for index, engine in enumerate(engines)
        ]
        """Of each engine, what is known of it."""
        self._router = Router(self.records, bind_groups=settings.bind_groups)
        self._waits: dict[RequestRecord, _Wait] = {}
        self._on_room = on_room
        self._now = now

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: ResponseRequest) -> Completion:
        """Sample one response.

        Raises:
            PoisonError: it has killed `MAX_DEATHS` engines.
            EngineError: all engines, or `MAX_FAILURES` of them, failed the request.
            DeadlineError: the response took longer than it may.
        """
        response = Response(request)
        routed = RequestRecord(request)
        with (
            deadline(request.timeout_s, "a response", lambda: self._whereabouts(request.min_version)) as scope,
            self._outages.left_out(scope),
        ):
            while (whole := response.exhausted()) is None:
                record = await self._admit(routed)
                whole = await self._stream(record, routed, response)
                if whole is not None:
                    break
            return whole

    async def _admit(self, routed: RequestRecord) -> EngineRecord:
        """Wait for an engine; returns the one that holds the request from then on."""
        while True:
            if routed.deaths >= MAX_DEATHS:
                self._convict_group(routed.order[0])
                raise PoisonError(f"{MAX_DEATHS} engines died before they had given a token of it: {routed.death}")
            engine = self._router.ask(routed)
            if engine is not None:
                return self.records[engine]
            record = await self._queued(routed)
            if record is None:
                continue
            if record.alive and not record.closed:
                return record
            # A swap or its death came between the choice and now.
            self._release(record, routed)

    async def _queued(self, routed: RequestRecord) -> EngineRecord | None:
        """Wait in the queue until an engine has taken the request; None when it has to ask again."""
        wait = self._waits[routed] = _Wait()
        try:
            await wait.over.wait()
        except BaseException:  # cancelled: the request leaves the queue, or gives back what it has just got
            if wait.engine is not None:
                self._release(wait.engine, routed)
            elif routed.place is not None:
                self._router.withdraw(routed)
                self._on_room()
            raise
        finally:
            del self._waits[routed]
        return wait.engine

    async def _stream(self, record: EngineRecord, routed: RequestRecord, response: Response) -> Completion | None:
        """One engine's part of a response: the whole, or None when it goes on elsewhere."""
        scope, concurrency, rest, whole = anyio.CancelScope(), record.concurrency, response.rest(), None
        self._begin(record, scope, routed)
        own = rest.generated
        concurrency.begins(scope, len(rest.prompt) - own, own, own + rest.max_new_tokens)
        self._look(record)
        if not routed.settled:  # others may have run dry while it moved
            for other in self.records:
                self._balance(other)
        try:
            with scope:
                async with aclosing(record.engine.generate(rest)) as pieces:
                    async for piece in pieces:
                        record.failed_in_a_row = 0
                        if isinstance(piece, Completion):
                            before, whole = response.length, response.completed(piece)
                            record.tokens += response.length - before
                            concurrency.grows(scope, response.length - before)
                            return whole
                        record.tokens += len(piece.token_ids)
                        concurrency.grows(scope, len(piece.token_ids))
                        if not routed.proven:
                            self._proven(record, routed)
                            self._look(record)
                        response.add(piece)
                        routed.request.on_tokens(piece.token_ids)
                raise EngineError(f"engine {record.number} ended a response without completing it")
        except EngineDeadError as error:
            self._died(record, error)
        except EngineError as error:
            self._failed(record, error)
            routed.barred |= {record.index}
            gone = not record.alive
            if not gone and (len(routed.barred) >= MAX_FAILURES or self._router.hopeless(routed)):
                raise
        finally:
            concurrency.ends(scope, whole=whole is not None)
            self._end(record, scope)
            self._release(record, routed)
        return None

    def _release(self, record: EngineRecord, routed: RequestRecord) -> None:
        """A request has left an engine: the oldest that waits takes its place."""
        self._observe(record)
        record.release(routed)
        if record.held == 0:
            record.emptied.set()
        self._fill(record)

    def _look(self, record: EngineRecord) -> None:
        """A request has begun, or has its first tokens: the engine may hold more, or less."""
        before = record.limit
        self._observe(record)
        if record.limit > before:
            self._fill(record)

    def _observe(self, record: EngineRecord) -> None:
        """Let the engine's limit follow its pressure."""
        record.concurrency.observe(record.engine.pressure)
        record.limit = record.concurrency.limit

    def _fill(self, record: EngineRecord) -> None:
        for routed in self._router.fill(record.index):
            wait = self._waits[routed]
            wait.engine = record
            wait.over.set()
        self._balance(record)
        self._on_room()

    def _failed(self, record: EngineRecord, error: EngineError) -> None:
        """An engine has failed a request, or refused it."""
        if isinstance(error, EngineRefusal):
            return
        record.failed_in_a_row += 1
        if record.failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            times = f"{record.failed_in_a_row} requests in a row"
            self.fail(record.index, EngineDeadError(f"engine {record.number} failed {times}; the last: {error}"))

    def _whereabouts(self, min_version: int) -> str:
        states = [
            f"engine {record.number} has version {record.engine.version} and {record.held} of {record.limit} requests"
            for record in self.records
            if record.alive
        ]
        waiting = f"{self._router.waiting} requests wait; this one needs version {min_version}"
        return f"deadlines.generate and rollout.max_new_tokens ({'; '.join([*states, waiting])})"

    @property
    def waiting(self) -> int:
        """Requests that no engine has taken."""
        return len(self._waits)

    def capacity(self) -> int:
        """How many more requests could start now on engines that have a version."""
        return self._router.room()

    # -- engines -----------------------------------------------------------------------------------------------------

    async def load(self, engine: int, published: Published) -> None:
        """Swap one engine of this proxy to a version. Raises WeightsError, EngineError, DeadlineError."""
        record, mode = self.records[engine], self._settings.swap
        record.begin_swap(closed=mode in ("abort", "drain"))
        if mode == "abort":
            self._move_all(record)
            await self._emptied(record, "to stop before its swap", self._settings.swap_s)
        elif mode == "drain":
            await self._emptied(record, "to end before its swap", self._settings.drain_s)
        start = self._now()
        # After an error the engine stays closed where it was: its weights are undefined.
        keep_cache = mode == "keep" and record.engine.version >= 0
        record.canary_error = await record.engine.load(published, keep_cache=keep_cache)
        record.loaded = start, self._now()
        record.usage.begin(self._now(), busy=bool(record.running))
        record.usage.swapped(start, self._now())
        record.end_swap(record.engine.version)
        self._outages.ends()
        self._observe(record)
        self._fill(record)

    def _balance(self, record: EngineRecord) -> None:
        """Let an engine with room have its share of what fuller ones run: the pace of all is that of the fullest.

        Those with the shortest contexts move, as the least has to be computed again; the next ones when these have.
        """
        gives = self._router.surplus(record.index)
        if not gives or any(scope.cancel_called for each in self.records for scope in each.running):
            return
        for giver, count in gives:
            fuller = self.records[giver]
            scopes = {fuller.running[scope]: scope for scope in fuller.concurrency.worth_moving([*fuller.running])}
            for routed in self._router.adopted(record.index, scopes, count):
                routed.settled = False
                scopes[routed].cancel()

    async def _emptied(self, record: EngineRecord, what: str, seconds: float) -> None:
        """Wait until an engine that is closed holds no request."""

        def waited_for() -> str:
            return f"{record.held} requests of engine {record.number} {what}"

        with deadline(seconds, waited_for, "the engine, deadlines.swap and rollout.swap"):
            while record.held:
                record.emptied = anyio.Event()
                await record.emptied.wait()

    def _move_all(self, record: EngineRecord) -> None:
        for scope in record.running:
            scope.cancel()

    def _proven(self, record: EngineRecord, routed: RequestRecord) -> None:
        """An engine has given a token of a request."""
        routed.proven = True
        if routed.deaths:
            routed.deaths = 0
            record.acquit(routed)
            self._fill(record)

    def _convict_group(self, group: int) -> None:
        """A request of this group has killed its engines: the suspects that share its prompt are given none either."""
        for routed, wait in self._waits.items():
            if routed.suspected and routed.order[0] == group:
                routed.deaths = MAX_DEATHS
                if routed.place is not None:
                    self._router.withdraw(routed)
                wait.over.set()

    def _died(self, record: EngineRecord, error: EngineDeadError) -> None:
        """An engine is gone by itself, and not for what was done to it."""
        if record.alive:
            for routed in record.running.values():
                routed.died_under(str(error))
        self.fail(record.index, error)

    def fail(self, engine: int, error: EngineDeadError) -> None:
        """An engine is gone: its requests, and those that wait for it, move to the others, or wait for the next."""
        record = self.records[engine]
        if not record.alive:
            return
        record.death = error
        record.died.set()
        self._move_all(record)
        self._ask_again(self._router.fail(engine))
        if not self._router.alive:
            # No response has failed: they get the time in which another engine may come.
            self._outages.begins()

    async def replace(self, engine: int, new: Engine) -> None:
        """Another engine, started and without a version, takes the place of a dead one that was closed."""
        record = self.records[engine]
        # Cancelled when it died; a late one would count for the new engine.
        await self._emptied(record, "to leave", self._settings.swap_s)
        record.begin(new, self._settings.max_sequences)
        record.usage.restart()
        self._ask_again(self._router.replace(engine, self._settings.max_sequences, new.version))

    def _ask_again(self, homeless: Sequence[RequestRecord]) -> None:
        """The queue has forgotten these: who waits for them asks, in the order in which they are woken."""
        for routed in homeless:
            self._waits[routed].over.set()

    async def dead(self, engine: int) -> EngineDeadError:
        """Return, with the reason, when an engine is gone, whoever noticed. Never returns while one is in its place."""
        record = self.records[engine]

        async def watch() -> None:
            self._died(record, await record.engine.wait_dead())

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await record.died.wait()
            group.cancel_scope.cancel()
        assert record.death is not None
        return record.death

    def renumber(self, first: int) -> None:
        """From now on the first engine has this number in the run."""
        for record in self.records:
            record.renumber(first + record.index)

    def versions(self) -> list[int]:
        """Version of each engine, −1 for those that are dead or have none."""
        return [record.engine.version if record.alive else -1 for record in self.records]

    # -- usage -------------------------------------------------------------------------------------------------------

    def _begin(self, record: EngineRecord, scope: anyio.CancelScope, routed: RequestRecord) -> None:
        record.running[scope] = routed
        routed.proven = False
        if len(record.running) == 1:
            record.usage.busy(self._now())

    def _end(self, record: EngineRecord, scope: anyio.CancelScope) -> None:
        del record.running[scope]
        if not record.running:
            record.usage.idle(self._now())

    def report(self) -> tuple[list[EngineStatus], list[Activity]]:
        """State of the living engines, and what all of them did since the last report."""
        now = self._now()
        statuses: list[EngineStatus] = []
        activities: list[Activity] = []
        for record in self.records:
            if record.alive:
                idle_s, lifetime_s = record.usage.seconds(now)
                version, canary_error, pressure = record.engine.version, record.canary_error, record.engine.pressure
                drafts = (pressure.drafted, pressure.accepted)
                statuses.append(EngineStatus(record.number, version, idle_s, lifetime_s, canary_error, *drafts))
            activities += record.usage.take_bars(now, busy=bool(record.running))
        return statuses, activities
