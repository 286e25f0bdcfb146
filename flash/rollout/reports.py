"""Reports of a node to its hub: the activities and deaths of its engines, and the status of the node.

`EngineSupervisor` calls `add_death` and `note` for events, and `send` after an engine has loaded a version (a *swap*),
has died or has started again. The hub adds up the idle and blocked seconds and the restarts, leases tasks for new
versions, and shows the notes to people. A node that moves to another hub sends a report there, too.

`run` sends a status every few seconds. The status is only for people (`cluster.json`), and nothing is decided by it.

A node has a fixed number of *places*, each of which has one engine at a time. An *activity* is a bar of the run's
timeline, such as a swap.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import anyio
from msgspec.structs import asdict

from flash.environment.calls import UserTask
from flash.environment.shared import stocks
from flash.errors import TransportError
from flash.hub import protocol as p
from flash.observe.cluster import FAILURE_TEXT, EngineNow, EngineState, NodeStatus, shortened
from flash.observe.columns.table import columns
from flash.rollout.engine_state import EngineRecord
from flash.rollout.proxy import LLMProxy
from flash.rollout.scheduler import HubClient, Scheduler


class _Deaths(NamedTuple):
    """The deaths of the engines in one place, for the status."""

    number: int
    """Number of deaths so far."""
    last: float
    """Time of the last death, in Unix seconds."""
    why: str
    """Text that says how the last engine died."""
    returns: bool
    """True if another engine starts in the place."""


class NodeReports:
    """Collects the reports of one node, and sends them.

    Args:
        hub: receives the reports.
        proxy: has the state of the engines.
        scheduler: has the number of episodes.
        now: returns Unix seconds, also while the loop is blocked.
        blocked_s: returns the seconds in which the event loop was blocked so far.
    """

    def __init__(
        self,
        hub: HubClient,
        proxy: LLMProxy,
        scheduler: Scheduler,
        *,
        now: Callable[[], float],
        blocked_s: Callable[[], float],
    ) -> None:
        self._hub = hub
        self._proxy = proxy
        self._scheduler = scheduler
        self._now = now
        self._blocked_s = blocked_s
        self._numbers = count(1)
        """Numbers of the reports. The hub ignores the engines of a report that arrives after a later one."""
        self._notes: list[str] = []
        """Lines for people since the last report."""
        self._restarts = 0
        """Number of restarts of engines since the last report."""
        self._reported = blocked_s(), UserTask.abandoned
        """Blocked seconds and number of abandoned calls, at the last report. A call of users' code is abandoned if it
        goes on although it was cancelled."""
        # Unix seconds of the start of this object, and of the last status, over which rates are averaged.
        self._started = self._last_status = now()
        self._host, self._process = socket.gethostname(), os.getpid()
        self._tokens = [0 for _ in proxy.records]
        """Number of tokens that each place had given at the last status."""
        self._deaths: dict[int, _Deaths] = {}
        """Deaths of engines by the index of their place."""

    # -- engine reports ----------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Add a line for people to the next report."""
        self._notes.append(text)

    def add_death(self, place: int, why: str, *, returns: bool) -> None:
        """Add the death of an engine to the next report, and to each later status.

        `place`: index of the place; `why`: text that says how the engine died and what follows; `returns`: True if
        another engine starts in the place.
        """
        before = self._deaths[place].number if place in self._deaths else 0
        self._deaths[place] = _Deaths(before + 1, self._now(), shortened(why, FAILURE_TEXT), returns)
        self._restarts += returns
        self.note(why)

    async def send(self) -> None:
        """Send an engine report.

        If the hub is lost meanwhile, the same report goes to the next hub.

        Raises:
            FlashError: the hub refuses the report, or it is lost and no other hub follows it.
        """
        await self._hub.call(self.next_report())

    def next_report(self) -> Callable[[int], p.EngineReport]:
        """Return a function that makes the next engine report, given the node's number at the hub.

        The result is a function, because the report goes to the next hub if this hub is lost, and the node may have
        another number there. `send` uses it, and so does `RolloutNode.move`, which reports over its new connection.

        The report has the events since the last report: activities, notes, restarts, seconds in which the event loop
        was blocked, and abandoned calls. Calling this method takes these events out of this object, so they are lost if
        the caller does not send the report.
        """
        engines, activities = self._proxy.report()
        notes, self._notes = self._notes, []
        restarts, self._restarts = self._restarts, 0
        number = next(self._numbers)
        before, self._reported = self._reported, (self._blocked_s(), UserTask.abandoned)
        blocked_s, abandoned = self._reported[0] - before[0], self._reported[1] - before[1]
        return lambda node: p.EngineReport(
            node, number, engines, activities, notes, restarts, blocked_s=blocked_s, abandoned=abandoned
        )

    # -- status ------------------------------------------------------------------------------------------------------

    async def run(self, every_s: float | None) -> None:
        """Send the node's status every `every_s` seconds, until cancelled. Send nothing if `every_s` is None."""
        while every_s is not None:
            # The status is only for people, so the node does not end if it cannot be sent.
            with suppress(TransportError):
                await self._hub.call(lambda node: p.StatusReport(node, self.status()))
            await anyio.sleep(every_s)

    def status(self) -> NodeStatus:
        """Return the state of the node for people. Rates are averages over the time since the last call."""
        now, records = self._now(), self._proxy.records
        seconds, self._last_status = now - self._last_status, now
        engines = [self._engine(record, seconds) for record in records]
        self._tokens = [record.tokens for record in records]
        sampling = sum(len(record.running) for record in records)
        # `stocks` returns the use of the resources that environments share, such as sandboxes.
        return NodeStatus(
            host=self._host,
            process=self._process,
            since=self._started,
            engines=engines,
            episodes=self._scheduler.alive,
            asking=sampling,
            waiting=self._proxy.waiting,
            stocks=stocks(),
        )

    def _engine(self, record: EngineRecord, seconds: float) -> EngineNow:
        """Return the state of one engine for people. `seconds`: time since the last status, for the rates.

        The figures have the names of the columns in `flash.observe.columns.table`. Figures without a known value are
        left out.
        """
        place = record.index
        deaths = self._deaths.get(place)
        start, loaded_at = record.loaded or (0.0, None)
        # `known` has the values by the names of the columns.
        known: dict[str, float | None] = asdict(record.backend.pressure) | {
            "requests": len(record.running),
            "limit": record.limit,
            "tokens_per_second": (record.tokens - self._tokens[place]) / seconds if seconds > 0 else 0.0,
            "load_s": None if loaded_at is None else loaded_at - start,
        }
        figures = {column.name: value for column in columns("engine") if (value := known.get(column.name)) is not None}
        return EngineNow(
            number=record.number,
            state=_engine_state(record, deaths),
            version=record.backend.version if record.alive else -1,
            loaded_at=loaded_at,
            figures=figures,
            deaths=deaths.number if deaths is not None else 0,
            died_at=deaths.last if deaths is not None else None,
            why=deaths.why if deaths is not None else "",
        )


def _engine_state(record: EngineRecord, deaths: _Deaths | None) -> EngineState:
    """Return the word for the state of an engine that the status shows to people."""
    if not record.alive:
        return "gone" if deaths is not None and not deaths.returns else "returning"
    if record.swapping:
        return "loading"
    return "serving" if record.backend.version >= 0 else "starting"
