"""State of a node's engines: what runs on each, when each was busy, and when no engine was there at all.

The proxy keeps one `EngineRecord` per engine and updates it on each change. The router decides by the part that the
record inherits from `EngineView`. Deadlines that must not count the time without any engine use the `OutageClock`.
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
    """Record of when one engine was busy or idle: seconds for its reports, bars for the run's timeline. Pure state.

    An engine is busy while it has a running request. Seconds are counted from its first version on; bars are drawn
    before that too.
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
        # The end of the last bar does not say since when the engine was idle: the bar may be that of a swap, or may
        # have been reported already.
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
        """Return the bars since the last call; `busy`: a request runs now. A bar that is not over is cut in two."""
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
    """The proxy's record of one place of the node: its engine, and the requests that run there.

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
        """The running requests, the youngest last. A request whose scope is cancelled moves to another engine."""
        self.emptied = anyio.Event()
        """Set when the engine holds no request any more; renewed by each wait."""
        self.usage = EngineUsage(f"engine {number}")
        self.tokens = 0
        """Tokens that have come from this place, over all its engines."""
        self.install(engine, limit)

    def renumber(self, number: int) -> None:
        """Give the engine the number that it has at the next hub."""
        self.number = number
        self.usage.lane = f"engine {number}"

    def install(self, engine: Engine, limit: int) -> None:
        """Use this engine from now on, and reset the numbers that belong to one engine."""
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

    The proxy reports the beginning and the end of an outage. Code that waits for an engine under a deadline of its own
    enters `extending` for as long as it waits. At the beginning of an outage such a deadline is put off by the longest
    time that the outage may last; at the end the part that was not needed is taken back.

    Args:
        longest_s: most seconds of an outage that are left out; further seconds count in every deadline.
        now: seconds on the loop's clock.
    """

    def __init__(self, longest_s: float = 0.0, now: Callable[[], float] = anyio.current_time) -> None:
        self._longest_s = longest_s
        self._now = now
        self._since: float | None = None
        self._extended: set[anyio.CancelScope] = set()

    @property
    def remaining_s(self) -> float:
        """Seconds that the outage may still last; 0 if there is none."""
        return 0.0 if self._since is None else max(0.0, self._since + self._longest_s - self._now())

    def begin(self) -> None:
        """Note that no engine is left. Does nothing during an outage."""
        if self._since is None:
            self._since = self._now()
            self._extend(self.remaining_s)

    def end(self) -> None:
        """Note that an engine serves. Does nothing if there is no outage."""
        if self._since is not None:
            self._extend(-self.remaining_s)
            self._since = None

    @contextmanager
    def extending(self, scope: anyio.CancelScope) -> Generator[None]:
        """Let outages not count in the deadline of `scope` within the block."""
        # The deadline is changed only during an outage, which is rare: each change sets a new timer, and this method
        # runs for every response.
        if self._since is not None:
            scope.deadline += self.remaining_s
        self._extended.add(scope)
        try:
            yield
        finally:
            self._extended.discard(scope)
            # A caller that waits again during the same outage would put its deadline off twice.
            if self._since is not None:
                scope.deadline -= self.remaining_s

    def _extend(self, seconds: float) -> None:
        for scope in self._extended:
            scope.deadline += seconds
