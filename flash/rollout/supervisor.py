"""EngineSupervisor: keeps the places of a node filled with engines, and each engine on the newest policy version.

Lifecycle of a place: an engine starts. It loads each version that the hub publishes, while the proxy sends it requests.
When it dies, it is closed, and after a pause another engine starts in its place, until the restarts are used up. An
engine that is killed while it starts counts as dead too. The node ends when no place can be filled any more.

The node calls `start` and then `run`. The supervisor calls `load`, `retire` and `replace` of the proxy, and reports
deaths and swaps to the hub.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import anyio

from flash.config.waits import LONGEST_PAUSE_S
from flash.errors import DeadlineError, EngineDeadError, EngineError, TransportError
from flash.hub import protocol as p
from flash.rollout.engine import Engine
from flash.rollout.hub_client import HubClient
from flash.rollout.proxy import LLMProxy
from flash.rollout.reports import NodeReports
from flash.types import Published
from flash.waiting import deadline

FIRST_PAUSE_S = 1.0
"""Seconds before the first restart in a row. Each further pause is twice as long, up to `LONGEST_PAUSE_S`."""
STEADY_STARTS, MIN_STEADY_S, MAX_STEADY_S = 10.0, 60.0, 600.0
"""An engine that has served for `STEADY_STARTS` times the seconds of its start, within these bounds, was healthy: a
later death has another cause, so the count of its restarts begins at 0 again."""
LOOK_AT = "the engines' output and deadlines.engine_start"


class Restart(NamedTuple):
    """Decision to start another engine in a place."""

    pause_s: float
    """Seconds to wait before the start."""
    number: int
    """Number of restarts in a row, with this one."""


class RestartBudget:
    """Decides if and when another engine starts after a death. Pure state.

    Args:
        max_restarts: most restarts in a row.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._in_a_row = 0
        self._healthy_at = math.inf
        """When the engine that serves now counts as healthy."""

    def started(self, now: float, start_s: float) -> None:
        """Note that an engine has started, which took `start_s` seconds."""
        self._healthy_at = now + min(max(STEADY_STARTS * start_s, MIN_STEADY_S), MAX_STEADY_S)

    def died(self, now: float) -> Restart | None:
        """Note that the engine died, or did not start. Returns None if no other engine may start."""
        if now >= self._healthy_at:
            self._in_a_row = 0
        self._healthy_at = math.inf
        if self._in_a_row >= self._max_restarts:
            return None
        self._in_a_row += 1
        return Restart(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._in_a_row - 1)), self._in_a_row)


class EnginePlace:
    """A place of a node, which has one engine after the other.

    Args:
        index: number of the place on its node.
        number: number of its engine among all engines of the run.
        make_engine: makes an engine that has a number, not started.
        start_s: deadline of a restart, in seconds.
    """

    def __init__(self, index: int, number: int, make_engine: Callable[[int], Engine], start_s: float) -> None:
        self.index = index
        self.number = number
        self._make_engine = make_engine
        self._start_s = start_s
        self.engine = make_engine(number)
        """The newest engine of the place."""
        self.open = True
        """True if the place has an engine, or will have one."""
        self.died_at: float | None = None
        """When the place lost its engine, in Unix seconds. None before that, and again as soon as a later engine has
        loaded a version."""
        self.served = False
        """True if an engine of the place has ever loaded a version."""
        self.killed_at_start: EngineDeadError | None = None
        """Death of the first engine, if it was killed while it started."""
        self.took_s = 0.0
        """Seconds that the start of the newest engine took."""
        self._has_started = False
        """True if an engine of the place has ever started."""

    def renumber(self, number: int) -> None:
        """Give the place's engines the number that they have at the next hub."""
        self.number = number
        self.engine.reassign(number)

    async def start_first(self) -> None:
        """Start the first engine, under the caller's deadline.

        If the engine is killed meanwhile, this raises no error: `killed_at_start` keeps how it died.

        Raises:
            EngineError: the engine cannot start.
        """
        try:
            await self._start()
        except EngineDeadError as death:
            self.killed_at_start = death

    async def start_next(self) -> EngineDeadError | None:
        """Start another engine in the place. Returns the error if the start failed, else None.

        Raises:
            EngineError, DeadlineError: the engine could not start, and no engine of this place has ever started.
        """
        self.engine = self._make_engine(self.number)
        try:
            with deadline(self._start_s, "an engine to start again", LOOK_AT):
                await self._start()
        except EngineDeadError as death:
            return death
        except (EngineError, DeadlineError) as error:
            # A start that has never worked will not work the next time: the model does not fit, or the options are
            # wrong. In a place where an engine has started before, the cause may pass.
            if not self._has_started:
                raise
            return EngineDeadError(str(error))
        return None

    async def _start(self) -> None:
        begin = anyio.current_time()
        await self.engine.start()
        self._has_started, self.took_s = True, anyio.current_time() - begin


class EngineSupervisor:
    """See the module's docstring.

    Args:
        places: the node's places, whose engines are not started.
        proxy: serves requests with the engines.
        hub: publishes versions.
        reports: reports swaps, deaths and restarts.
        now: Unix seconds on the loop's clock.
        max_restarts: most restarts of a place in a row (`engine.max_restarts`).
    """

    def __init__(
        self,
        places: Sequence[EnginePlace],
        proxy: LLMProxy,
        hub: HubClient,
        reports: NodeReports,
        *,
        now: Callable[[], float],
        max_restarts: int,
    ) -> None:
        self._places = places
        self._proxy = proxy
        self._hub = hub
        self._reports = reports
        self._now = now
        self._max_restarts = max_restarts
        self._leaving = False
        self._death = anyio.Event()

    async def start(self, seconds: float) -> None:
        """Start the first engines of all places at once. Raises DeadlineError, EngineError."""
        with deadline(seconds, "the engines to start", LOOK_AT):
            async with anyio.create_task_group() as group:
                for place in self._places:
                    group.start_soon(place.start_first)

    async def run(self) -> None:
        """Keep all places filled until cancelled.

        Raises:
            EngineDeadError: no place can be filled any more. The error says how the last engine died.
        """
        async with anyio.create_task_group() as group:
            for place in self._places:
                group.start_soon(self._fill_place, place)

    def stop_reporting_deaths(self) -> None:
        """Report no more deaths of engines. Called when the node leaves: if its machine ends, engines die too."""
        self._leaving = True

    async def no_engine_left(self) -> None:
        """Wait until no place has an engine. After a death a place has none until the next engine loads a version."""
        while any(place.open and place.died_at is None for place in self._places):
            self._death = anyio.Event()
            await self._death.wait()

    async def close(self) -> None:
        """End the engines."""
        for place in self._places:
            await place.engine.close()

    async def _fill_place(self, place: EnginePlace) -> None:
        """Fill a place with one engine after the other.

        Waits for deaths, pauses and starts. Ends when the place has no restarts left.

        Raises:
            EngineDeadError: no place can be filled any more.
            EngineError, DeadlineError: no engine of this place has ever started, and not because it was killed.
        """
        budget = RestartBudget(self._max_restarts)
        budget.started(anyio.current_time(), place.took_s)
        death = place.killed_at_start or await self._serve_until_dead(place)
        while True:
            restart = budget.died(anyio.current_time())
            await self._on_death(place, death, restart)
            # The last engine is closed too: the remains of a dead engine hold memory.
            await place.engine.close()
            if restart is None:
                break
            await anyio.sleep(restart.pause_s)
            failed = await place.start_next()
            if failed is not None:
                death = failed
                continue
            budget.started(anyio.current_time(), place.took_s)
            await self._proxy.replace(place.index, place.engine)
            # The hub keeps published versions for the engines that it knows, so it has to know this engine before the
            # engine asks for a version.
            await self._reports.send()
            death = await self._serve_until_dead(place)
        if not any(each.open for each in self._places):
            raise death

    async def _serve_until_dead(self, place: EnginePlace) -> EngineDeadError:
        """Keep an engine on the newest version until it is dead, and return how it died."""

        async def follow() -> None:
            try:
                await self._follow(place)
            except EngineDeadError as error:
                self._proxy.retire(place.index, error)

        deaths: list[EngineDeadError] = []
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            deaths.append(await self._proxy.wait_dead(place.index))
            group.cancel_scope.cancel()
        return deaths[0]

    async def _follow(self, place: EnginePlace) -> None:
        """Keep one engine on the newest version.

        Asks the hub for a version newer than that of the engine, waits for it, loads it, and sends a report after each
        swap. Ends when the hub has no more versions.
        """
        engine = place.engine
        while True:
            reply = await self._hub.call(lambda node: p.VersionRequest(node, after=engine.version))
            if reply.done:
                return
            if reply.published is not None and await self._load(place, reply.published):
                await self._reports.send()

    async def _load(self, place: EnginePlace, published: Published) -> bool:
        """Swap an engine to a version.

        Returns False if nobody holds the version any more; the engine then waits for the next publisher.

        Raises:
            EngineDeadError: the engine died, or the swap failed in a place that has loaded a version before. Another
                engine may be able to load it.
            EngineError, DeadlineError: the first swap of this place failed.
            WeightsError: the version itself is damaged.
        """
        try:
            await self._proxy.load(place.index, published)
        except (EngineError, DeadlineError) as error:
            if not isinstance(error, EngineDeadError):
                reply = await self._hub.call(lambda node: p.LoadFailed(node, published.incarnation))
                if reply.gone:
                    return False
            # A swap that has never worked in this place will not work in the next engine: the model does not fit, or
            # the options are wrong.
            if isinstance(error, EngineDeadError) or not place.served:
                raise
            raise EngineDeadError(str(error)) from error
        place.served = True
        if place.died_at is not None:
            seconds, place.died_at = self._now() - place.died_at, None
            self._reports.note(f"engine {place.number} is back after {seconds:.0f} s, with version {published.version}")
        return True

    async def _on_death(self, place: EnginePlace, death: EngineDeadError, restart: Restart | None) -> None:
        """Move the requests of a dead engine, and report the death to people and to the hub."""
        if place.died_at is None:
            place.died_at = self._now()
        # The proxy does not know yet of an engine that was killed while it started.
        self._proxy.retire(place.index, death)
        self._death.set()
        if self._leaving:
            return
        place.open = restart is not None
        self._reports.add_death(place.index, f"{death}. {self._consequence(restart)}", returns=place.open)
        if any(each.open for each in self._places):
            await self._reports.send()
        else:
            # The node ends with its last engine, even if this report does not reach the hub.
            with suppress(TransportError):
                await self._reports.send()

    def _consequence(self, restart: Restart | None) -> str:
        """Return a sentence that says what happens after a death: a restart, or the end of the place or of the node."""
        if restart is not None:
            count = f"{restart.number} of {self._max_restarts} restarts in a row"
            return f"It starts again in {restart.pause_s:g} s ({count})"
        spent = f"engine.max_restarts is {self._max_restarts}"
        if any(each.open for each in self._places):
            return f"The run goes on without it: {spent}"
        return f"It was the last one of node {self._hub.node}, which ends with it: {spent}"


def same_engine(engine: Engine) -> Callable[[int], Engine]:
    """Return a maker of engines that returns this one whatever its number, so that the caller can inspect it."""
    return lambda number: engine
