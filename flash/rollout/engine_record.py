"""What the proxy knows of one engine: what it runs, how much it may hold, when it was busy."""

from __future__ import annotations

import anyio

from flash.errors import EngineDeadError
from flash.observe.state_times import StateTimes
from flash.rollout.concurrency import ConcurrencyLimit, ResponseLengths
from flash.rollout.engine import Engine
from flash.rollout.routing import EngineView, RequestRecord
from flash.types import Activity

MERGE_GAP_S = 0.05
"""Idle gaps shorter than this are not drawn on the timeline: they are scheduling noise, though they count as idle."""


class EngineUsage:
    """When one engine was busy and when idle: seconds for its reports, bars for the run's timeline. Pure.

    It is busy while it has a running request. Seconds count from its first version on, bars always. Told of each change
    with the time in Unix seconds; `lane` names the engine on the timeline.
    """

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self._times = StateTimes()
        self._busy_since: float | None = None
        self._bars: list[Activity] = []

    def begin(self, now: float, *, busy: bool) -> None:
        """It has loaded a version: if that is its first one, its seconds count from now."""
        if self._times.state is None:
            self._times.enter("busy" if busy else "idle", now)

    def busy(self, now: float) -> None:
        """Its only request began."""
        idle = self._times.enter("busy", now) if self._times.state is not None else 0.0
        # The last bar cannot tell: it is a swap's, or has left with a report.
        if self._busy_since is None or idle > MERGE_GAP_S:
            self._busy_since = now

    def idle(self, now: float) -> None:
        """Its last request ended."""
        if self._times.state is not None:
            self._times.enter("idle", now)
        self._draw(now)

    def restart(self) -> None:
        """Another engine, idle and without a version, takes its place: seconds count from its first version."""
        self._times, self._busy_since = StateTimes(), None

    def swapped(self, start: float, now: float) -> None:
        """It has loaded a version since `start`."""
        self._bars.append(Activity(self.lane, "swap", start, now))

    def seconds(self, now: float) -> tuple[float, float]:
        """Idle ones and all of them, since its first version."""
        lifetime = now - self._times.begun if self._times.state is not None else 0.0
        return self._times.seconds(now).get("idle", 0.0), lifetime

    def take_bars(self, now: float, *, busy: bool) -> list[Activity]:
        """What it did since the last call; a request that goes on is cut in two."""
        if busy:
            self._draw(now)
            self._busy_since = now
        bars, self._bars = self._bars, []
        return bars

    def _draw(self, now: float) -> None:
        """Close or extend the last bar up to now."""
        assert self._busy_since is not None, "a request that ends has begun"
        bar = Activity(self.lane, "generate", self._busy_since, now)
        if self._bars and self._bars[-1].name == "generate" and self._bars[-1].start == self._busy_since:
            self._bars[-1] = bar
        else:
            self._bars.append(bar)


class EngineRecord(EngineView):
    """One engine: what the router sees of it, and what that does not: itself, what it runs, and when.

    `index` counts the engines of this proxy, `number` those of the run.
    """

    def __init__(self, engine: Engine, index: int, number: int, limit: int, lengths: ResponseLengths) -> None:
        super().__init__(index, limit, engine.version)
        self.number = number
        self._lengths = lengths
        self.running: dict[anyio.CancelScope, RequestRecord] = {}
        """One scope per request, the youngest last: cancelling it makes the request move."""
        self.emptied = anyio.Event()
        self.usage = EngineUsage(f"engine {number}")
        self.tokens = 0
        """That have come from this place."""
        self.begin(engine, limit)

    def renumber(self, number: int) -> None:
        """It is this one among the engines of the next hub's run."""
        self.number = number
        self.usage.lane = f"engine {number}"

    def begin(self, engine: Engine, limit: int) -> None:
        """From now on it is this one, of which nothing is known yet."""
        self.engine = engine
        self.concurrency = ConcurrencyLimit(limit, self._lengths)
        self.canary_error = 0.0
        self.loaded: tuple[float, float] | None = None
        """When it began to load its version, and when it had it."""
        self.failed_in_a_row = 0
        self.death: EngineDeadError | None = None
        self.died = anyio.Event()
