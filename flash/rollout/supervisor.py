"""EngineSupervisor: keeps the places of a node filled with engines, and each engine on the newest policy version.

A *version* is the state of the weights after one training step. A *swap* is the load of a version into an engine.

A *place* of a node has one engine at a time. Lifecycle of a place: an engine starts. The engine loads each version that
the hub announces, while the proxy sends requests to it. When it dies, it is closed, and after a pause another engine
starts in its place, until the restarts are used up. An engine that is killed while it starts counts as dead, too. The
node ends when no place can be filled any more.

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
from flash.rollout.proxy import LLMProxy
from flash.rollout.reports import NodeReports
from flash.rollout.scheduler import HubClient
from flash.types import Published
from flash.waiting import deadline

FIRST_PAUSE_S = 1.0
"""Seconds before the first restart in a row. Each further pause is twice as long, up to `LONGEST_PAUSE_S`, so that a
cause that lasts has time to pass."""
STEADY_STARTS, MIN_STEADY_S, MAX_STEADY_S = 10.0, 60.0, 600.0
"""An engine counts as healthy once it has served `STEADY_STARTS` times as long as its start took, within the limits of
`MIN_STEADY_S` and `MAX_STEADY_S` seconds. A later death has another cause, so the count of restarts begins at 0."""
LOOK_AT = "the engines' output and deadlines.engine_start"
"""Advice in the error message of a start that took too long."""


class Restart(NamedTuple):
    """Decision of a `RestartBudget` to start another engine in a place."""

    pause_s: float
    """Seconds to wait before the start."""
    number: int
    """Number of restarts in a row, including this one."""


class RestartBudget:
    """Decides if and when another engine starts after a death. Each place has one. Pure state.

    Deaths in a row probably have one cause, so each pause is longer than the last one, to give the cause time to pass.
    After an engine that has served for long, the count begins at 0 again.

    Args:
        max_restarts: largest number of restarts in a row.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._in_a_row = 0
        """Number of restarts since an engine was last healthy."""
        self._healthy_at = math.inf
        """Time from which on the serving engine counts as healthy; infinite if no engine serves."""

    def started(self, now: float, start_s: float) -> None:
        """Note that an engine has started, which took `start_s` seconds. `now`: seconds on the loop's clock."""
        self._healthy_at = now + min(max(STEADY_STARTS * start_s, MIN_STEADY_S), MAX_STEADY_S)

    def died(self, now: float) -> Restart | None:
        """Note that the engine died, or did not start. Returns the decision to restart; None if no restart is left."""
        if now >= self._healthy_at:
            self._in_a_row = 0
        self._healthy_at = math.inf
        if self._in_a_row >= self._max_restarts:
            return None
        self._in_a_row += 1
        return Restart(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._in_a_row - 1)), self._in_a_row)


class EnginePlace:
    """A place of a node, which has one engine after another.

    Args:
        index: number of the place on its node, from 0.
        number: number of its engine among all engines of the run.
        make_engine: makes an engine with the given number. The engine is not started.
        start_s: seconds that a restart may take.
    """

    def __init__(self, index: int, number: int, make_engine: Callable[[int], Engine], start_s: float) -> None:
        self.index = index
        self.number = number
        self._make_engine = make_engine
        self._start_s = start_s
        self.engine = make_engine(number)
        """The newest engine of the place."""
        self.open = True
        """True if the place has an engine, or will have one. False after its last restart was used up."""
        self.died_at: float | None = None
        """Time at which the place lost its engine, in Unix seconds. None while an engine serves: a later engine sets it
        back to None when it has loaded a version."""
        self.served = False
        """True if an engine of the place has ever loaded a version. If none has, a failed swap is no accident."""
        self.killed_at_start: EngineDeadError | None = None
        """Error that says how the first engine was killed while it started; None if it was not killed."""
        self.took_s = 0.0
        """Seconds that the start of the newest engine took."""
        self._has_started = False
        """True if an engine of the place has ever started. If none has, a failed start is no accident."""

    def renumber(self, number: int) -> None:
        """Set the number of the place's engines at the next hub. The node calls this when it moves to that hub."""
        self.number = number
        self.engine.reassign(number)

    async def start_first(self) -> None:
        """Start the first engine, under the caller's deadline.

        If the engine is killed meanwhile, this raises no error. `killed_at_start` keeps the error, so that
        `_fill_place` can start another engine, while the other places start theirs.

        Raises:
            ConfigError, EngineError, DeadlineError: the engine cannot start (`Engine.start`).
        """
        try:
            await self._start()
        except EngineDeadError as death:
            self.killed_at_start = death

    async def start_next(self) -> EngineDeadError | None:
        """Make and start another engine in the place. Returns the error if the start failed, else None.

        Raises:
            ConfigError: the model cannot be served on this machine.
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
        """Start the newest engine, and measure the time of the start. Raises the errors of `Engine.start`."""
        begin = anyio.current_time()
        await self.engine.start()
        self._has_started, self.took_s = True, anyio.current_time() - begin


class EngineSupervisor:
    """Starts the engines of a node, lets them load versions, and replaces the dead ones.

    Args:
        places: the node's places, whose engines are not started.
        proxy: serves requests with the engines. The engine records of the proxy have the indices of the places.
        hub: announces versions.
        reports: sends swaps, deaths and restarts to the hub.
        now: returns the present time in Unix seconds.
        max_restarts: largest number of restarts of a place in a row (`cluster.max_restarts`).
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
        """True if the node leaves. Then deaths are not reported, and the last one is no error of `run`."""
        self._death = anyio.Event()
        """Event that is set when the next engine dies. `no_engine_left` replaces it before each wait."""

    async def start(self, seconds: float) -> None:
        """Start the first engines of all places in parallel.

        Raises:
            DeadlineError: not all engines have started after `seconds`.
            ExceptionGroup: with the errors of `EnginePlace.start_first`, if an engine cannot start and was not killed.
        """
        with deadline(seconds, "the engines to start", LOOK_AT):
            async with anyio.create_task_group() as group:
                for place in self._places:
                    group.start_soon(place.start_first)

    async def run(self) -> None:
        """Keep all places filled until cancelled.

        Returns, instead, if the node leaves and no place has a restart left.

        Raises:
            ExceptionGroup: with the error of a place (`_fill_place`): no place can be filled any more, an engine of a
                place has never worked, a version is damaged, or the hub is lost.
        """
        async with anyio.create_task_group() as group:
            for place in self._places:
                group.start_soon(self._fill_place, place)

    def start_leaving(self) -> None:
        """Report no more deaths of engines, and raise no error when the last engine dies. The node calls this to leave.

        The machine may be ending, which kills engines. People need no report of such deaths, and an error would end the
        node before it has handed back its leases.
        """
        self._leaving = True

    async def no_engine_left(self) -> None:
        """Wait until no place has an engine that serves. `RolloutNode.drain` then gives up the remaining episodes.

        After a death a place has no such engine until the next one has loaded a version.
        """
        while any(place.open and place.died_at is None for place in self._places):
            self._death = anyio.Event()
            await self._death.wait()

    async def close(self) -> None:
        """End the engines."""
        for place in self._places:
            await place.engine.close()

    async def _fill_place(self, place: EnginePlace) -> None:
        """Fill a place with one engine after another.

        Waits for the death of each engine, for the pause after it, and for the start of the next engine. Ends when the
        place has no restarts left. Errors while an engine serves come in an ExceptionGroup (`_serve_until_dead`).

        Raises:
            EngineDeadError: no place can be filled any more, and the node does not leave.
            ConfigError: the model cannot be served on this machine.
            EngineError, DeadlineError: an engine failed to start or to load a version (it was not killed), and no
                engine of this place has ever succeeded in it; or the requests of a dead engine did not leave it.
            WeightsError: a version is damaged.
            FlashError: the hub refuses the request, or is lost and no other hub follows it.
        """
        # Serve with the first engine, which `start` has started.
        budget = RestartBudget(self._max_restarts)
        budget.started(anyio.current_time(), place.took_s)
        death = place.killed_at_start or await self._serve_until_dead(place)
        # After each death: report it, close the engine, pause, start another engine, and serve with that engine.
        while True:
            restart = budget.died(anyio.current_time())
            await self._on_death(place, death, restart)
            # The last engine is closed, too, because the remaining processes of a dead engine hold memory.
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
        """Keep the newest engine of a place on the newest version until it is dead, and return how it died.

        The errors of `_follow`, except EngineDeadError, come in an ExceptionGroup. If the engine dies while it loads a
        version, `follow` notices it and retires the engine, which ends the wait.
        """

        async def follow() -> None:
            """Keep the engine on the newest version. If it cannot load one, retire it, so that it is replaced."""
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

        Asks the hub for a version newer than the version of the engine, and waits for the reply, which is empty if
        there is none for a while. Loads the version, and reports the swap. The hub announces the next version only
        after this report. Ends when the hub says that there will be no more versions.

        Raises:
            EngineError, DeadlineError, WeightsError: the engine could not load a version (`_load`).
            FlashError: the hub refuses the request, or is lost and no other hub follows it.
        """
        engine = place.engine
        while True:
            reply = await self._hub.call(lambda node: p.VersionRequest(node, after=engine.version))
            if reply.done:
                return
            if reply.published is not None and await self._load(place, reply.published):
                await self._reports.send()

    async def _load(self, place: EnginePlace, published: Published) -> bool:
        """Let an engine load a version.

        Returns False if the trainer ranks that published the version are gone, so that no process holds it any more.
        The engine is then healthy, and waits for the version that the next ranks publish.

        Raises:
            EngineDeadError: the engine died, or the swap failed in a place that has loaded a version before. Another
                engine may be able to load it.
            EngineError, DeadlineError: the first swap of this place failed, for which the model or the options are at
                fault.
            WeightsError: the version itself is damaged.
            FlashError: the hub refuses the question about the trainer ranks, or is lost and no other hub follows it.
        """
        try:
            await self._proxy.load(place.index, published)
        except (EngineError, DeadlineError) as error:
            if not isinstance(error, EngineDeadError):
                # Perhaps the trainer ranks that published the version are lost, and the engine is healthy. The hub
                # knows this.
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
        """Let the proxy retire a dead engine, and report the death to the hub and to people.

        `restart`: decision about the place. If `restart` is None, the place stays empty and is closed, unless the node
        leaves. A node that leaves reports nothing and keeps its places open, so that `_fill_place` raises no error when
        the last engine dies: `no_engine_left` then ends the drain in order.

        Raises:
            FlashError: the hub refuses the report; or it is lost, no other hub follows it, and the node has a place
                left.
        """
        # An outage begins with the first death. Failed restarts after it belong to the same outage.
        if place.died_at is None:
            place.died_at = self._now()
        # The proxy has usually retired the engine already, and this call does nothing. But it does not know yet of an
        # engine that was killed while it started.
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
        """Return a sentence for the report of a death: another engine starts, the place stays empty, or the node ends.

        The sentence follows one about the engine. Call this after `open` of the engine's place is set.
        """
        if restart is not None:
            count = f"{restart.number} of {self._max_restarts} restarts in a row"
            return f"It starts again in {restart.pause_s:g} s ({count})"
        spent = f"cluster.max_restarts is {self._max_restarts}"
        if any(each.open for each in self._places):
            return f"The run goes on without it: {spent}"
        return f"It was the last one of node {self._hub.node}, which ends with it: {spent}"


def same_engine(engine: Engine) -> Callable[[int], Engine]:
    """Return a `make_engine` for tests and benchmarks. The function always returns this engine, so that a test can
    inspect the engine."""
    return lambda number: engine
