"""What a node tells of itself, for people: its engines, its episodes, and what their environments borrow."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import asdict

from flash.environment.shared import stocks
from flash.observe.cluster import FAILURE_TEXT, EngineNow, EngineState, NodeStatus, shortened
from flash.observe.columns.table import columns
from flash.rollout.engine_record import EngineRecord
from flash.rollout.proxy import LLMProxy
from flash.rollout.scheduler import Scheduler


class _Deaths(NamedTuple):
    """Of the engines of one place."""

    number: int
    last: float
    why: str
    returns: bool
    """Whether another one starts."""


class NodeWatch:
    """Ask for its status now and then: rates are those since the last time.

    Args:
        proxy: knows the engines.
        scheduler: knows the episodes.
        now: Unix seconds on the loop's clock.
    """

    def __init__(self, proxy: LLMProxy, scheduler: Scheduler, now: Callable[[], float]) -> None:
        self._proxy = proxy
        self._scheduler = scheduler
        self._now = now
        self._since = self._last = now()
        self._host, self._process = socket.gethostname(), os.getpid()
        self._tokens = [0 for _ in proxy.records]
        """Of each place, as of the last time."""
        self._deaths: dict[int, _Deaths] = {}

    def died(self, place: int, why: str, *, returns: bool) -> None:
        """The engine of a place has died."""
        before = self._deaths[place].number if place in self._deaths else 0
        self._deaths[place] = _Deaths(before + 1, self._now(), shortened(why, FAILURE_TEXT), returns)

    def status(self) -> NodeStatus:
        """How the node is now."""
        now, records = self._now(), self._proxy.records
        seconds, self._last = now - self._last, now
        engines = [self._engine(record, seconds) for record in records]
        self._tokens = [record.tokens for record in records]
        asking, waiting = sum(len(record.running) for record in records), self._proxy.waiting
        return NodeStatus(
            self._host, self._process, self._since, engines, self._scheduler.alive, asking, waiting, stocks()
        )

    def _engine(self, record: EngineRecord, seconds: float) -> EngineNow:
        place = record.index
        deaths = self._deaths.get(place)
        start, loaded_at = record.loaded or (0.0, None)
        known: dict[str, float | None] = asdict(record.engine.pressure) | {
            "requests": len(record.running),
            "limit": record.limit,
            "tokens_per_second": (record.tokens - self._tokens[place]) / seconds if seconds > 0 else 0.0,
            "load_s": None if loaded_at is None else loaded_at - start,
        }
        return EngineNow(
            number=record.number,
            state=self._state(record, deaths),
            version=record.engine.version if record.alive else -1,
            loaded_at=loaded_at,
            figures={column.name: told for column in columns("engine") if (told := known.get(column.name)) is not None},
            deaths=deaths.number if deaths is not None else 0,
            died_at=deaths.last if deaths is not None else None,
            why=deaths.why if deaths is not None else "",
        )

    def _state(self, record: EngineRecord, deaths: _Deaths | None) -> EngineState:
        if not record.alive:
            return "gone" if deaths is not None and not deaths.returns else "returning"
        if record.swapping:
            return "loading"
        return "serving" if record.engine.version >= 0 else "starting"
