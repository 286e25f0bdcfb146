"""State of a node's engines, beside the requests themselves: when each was busy, and when no engine was there at all.

The proxy keeps one `EngineRecord` per engine and tells it of each change; the router decides by the part that it
inherits from `EngineView`. Deadlines that are not to count the time without any engine use the `OutageClock`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import anyio

from flash.errors import EngineDeadError
from flash.observe.state_times import StateTimes
from flash.rollout.concurrency import ConcurrencyLimit, ResponseLengths
from flash.rollout.engine import Engine
from flash.rollout.routing import EngineView, RequestRecord
from flash.types import Activity

MERGE_GAP_S = 0.05
"""Idle seconds up to which two bars of the timeline are drawn as one: such gaps are scheduling noise. They still count
as idle time."""


class EngineUsage:
    """When one engine was busy and when idle: seconds for its reports, bars for the run's timeline. Pure state.

    An engine is busy while it has a running request. Its seconds count from its first version on, its bars always.
    Each method takes the time of the change in Unix seconds.

    Args:
        lane: names the engine on the timeline.
    """

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self._times = StateTimes()
        self._busy_since: float | None = None
        self._bars: list[Activity] = []

    def loaded(self, start: float, now: float, *, busy: bool) -> None:
        """Note that the engine has loaded a version since `start`. Its seconds count from its first version on."""
        if self._times.state is None:
            self._times.enter("busy" if busy else "idle", now)
        self._bars.append(Activity(self.lane, "swap", start, now))

    def busy(self, now: float) -> None:
        """Note that a request has begun on the idle engine."""
        idle = self._times.enter("busy", now) if self._times.state is not None else 0.0
        # The last bar does not tell when the engine was busy: it may be a swap's, or have left with a report.
        if self._busy_since is None or idle > MERGE_GAP_S:
            self._busy_since = now

    def idle(self, now: float) -> None:
        """Note that the last running request has ended."""
        if self._times.state is not None:
            self._times.enter("idle", now)
        self._draw(now)

    def restart(self) -> None:
        """Note that another engine, idle and without a version, has taken the place."""
        self._times, self._busy_since = StateTimes(), None

    def seconds(self, now: float) -> tuple[float, float]:
        """Return the idle seconds and all seconds since the engine's first version."""
        lifetime = now - self._times.begun if self._times.state is not None else 0.0
        return self._times.seconds(now).get("idle", 0.0), lifetime

    def take_bars(self, now: float, *, busy: bool) -> list[Activity]:
        """Return the bars since the last call. A bar that goes on is cut in two."""
        if busy:
            self._draw(now)
            self._busy_since = now
        bars, self._bars = self._bars, []
        return bars

    def _draw(self, now: float) -> None:
        """Add a bar up to now, or extend the last one."""
        assert self._busy_since is not None, "a request that ends has begun"
        bar = Activity(self.lane, "generate", self._busy_since, now)
        if self._bars and self._bars[-1].name == "generate" and self._bars[-1].start == self._busy_since:
            self._bars[-1] = bar
        else:
            self._bars.append(bar)


class EngineRecord(EngineView):
    """The proxy's record of one place of the node: its engine, what runs there, and since when.

    Args:
        engine: the first engine of the place.
        index: number of the place on the node.
        number: number of the engine in the run.
        limit: most requests that the engine may hold.
        lengths: lengths of responses, shared by all engines of the node.
    """

    def __init__(self, engine: Engine, index: int, number: int, limit: int, lengths: ResponseLengths) -> None:
        super().__init__(index, limit, engine.version)
        self.number = number
        self._lengths = lengths
        self.running: dict[anyio.CancelScope, RequestRecord] = {}
        """The running requests, the youngest last. Cancelling the scope of one makes it move to another engine."""
        self.emptied = anyio.Event()
        """Set when the engine holds no request any more; renewed by each wait."""
        self.usage = EngineUsage(f"engine {number}")
        self.tokens = 0
        """Tokens that have come from this place, over all its engines."""
        self.begin(engine, limit)

    def renumber(self, number: int) -> None:
        """Give the engine the number that it has at the next hub."""
        self.number = number
        self.usage.lane = f"engine {number}"

    def begin(self, engine: Engine, limit: int) -> None:
        """Begin with an engine, of which nothing is known yet."""
        self.backend = engine
        self.concurrency = ConcurrencyLimit(limit, self._lengths)
        self.canary_error = 0.0
        """Mean difference of log-probs on the canary, as of the last load."""
        self.loaded: tuple[float, float] | None = None
        """When the engine began to load its version, and when it had loaded it, in Unix seconds."""
        self.failed_in_a_row = 0
        """Requests that the engine has failed since its last token."""
        self.death: EngineDeadError | None = None
        self.died = anyio.Event()


class OutageClock:
    """Extends deadlines by the time in which no engine serves.

    The proxy reports the beginning and the end of an outage. Whoever waits for an engine under a deadline of its own
    enters `left_out` for as long as it waits. At the beginning of an outage such a deadline is put off by the longest
    time that the outage may last; at the end the part that was not needed is taken back.

    Args:
        longest_s: most seconds that an outage is left out; what it lasts beyond counts in every deadline.
        now: seconds on the loop's clock.
    """

    def __init__(self, longest_s: float = 0.0, now: Callable[[], float] = anyio.current_time) -> None:
        self._longest_s = longest_s
        self._now = now
        self._since: float | None = None
        self._extended: set[anyio.CancelScope] = set()

    @property
    def left(self) -> float:
        """Seconds that the outage may still last; 0 if there is none."""
        return 0.0 if self._since is None else max(0.0, self._since + self._longest_s - self._now())

    def begin(self) -> None:
        """Note that no engine is left. Does nothing during an outage."""
        if self._since is None:
            self._since = self._now()
            self._put_off(self.left)

    def end(self) -> None:
        """Note that an engine serves. Does nothing if there is no outage."""
        if self._since is not None:
            self._put_off(-self.left)
            self._since = None

    @contextmanager
    def left_out(self, scope: anyio.CancelScope) -> Generator[None]:
        """Let outages not count in the deadline of `scope` within the block."""
        # Each change of a deadline sets a new timer, and this runs for every response: outages are rare.
        if self._since is not None:
            scope.deadline += self.left
        self._extended.add(scope)
        try:
            yield
        finally:
            self._extended.discard(scope)
            # A caller that waits again during the same outage would put its deadline off twice.
            if self._since is not None:
                scope.deadline -= self.left

    def _put_off(self, seconds: float) -> None:
        for scope in self._extended:
            scope.deadline += seconds
