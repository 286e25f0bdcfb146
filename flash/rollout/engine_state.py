"""State of a node's engines: running requests, busy times, and outages.

The proxy keeps one `EngineRecord` for each *place* of the node, which has one engine after another, and updates it on
each change. The router decides by the part that the record inherits from `EngineView`. Deadlines that must not count
the time without any engine (an *outage*) use the `OutageClock`.

A *swap* is the load of a new policy version into an engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager

import anyio

from flash.errors import EngineDeadError
from flash.rollout.concurrency import ConcurrencyLimit, ResponseLengths
from flash.rollout.engine import Engine
from flash.rollout.routing import EngineView, RequestRecord
from flash.types import Activity

MERGE_GAP_S = 0.05
"""Largest idle time, in seconds, between two bars of the timeline that are drawn as one bar. Such short gaps come from
the scheduling of tasks. The gaps still count as idle time."""


class StateTimes:
    """Seconds spent in each state, on the owner's clock.

    Conservation: from the first state on, the seconds of all states add up to the time that has passed.
    """

    def __init__(self) -> None:
        self.state: str | None = None
        """State now; None before the first state."""
        self.begun = 0.0
        """Time of the first state, in seconds of the owner's clock."""
        self._since = 0.0
        """Time of the last call of `enter`."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds in each state until `_since`."""

    def enter(self, state: str, now: float) -> float:
        """Change to a state at the time `now`. Returns the seconds since the last call; 0 for the first call."""
        if self.state is None:
            self.begun = self._since = now
        passed = now - self._since
        if passed > 0:
            assert self.state is not None, "no time passes before the first state"
            self._seconds[self.state] += passed
        self.state, self._since = state, now
        return passed

    def forget(self) -> None:
        """Set all seconds to 0, and count from the last call of `enter` on."""
        self.begun = self._since
        self._seconds.clear()

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds spent in each state until `now`."""
        seconds = dict(self._seconds)
        if self.state is not None and now > self._since:
            seconds[self.state] = seconds.get(self.state, 0.0) + now - self._since
        return seconds


class EngineUsage:
    """Record of when one engine was busy or idle: seconds for its reports, bars for the run's timeline. Pure state.

    An engine is busy while it has a running request. Seconds are counted from the first version on, because the engine
    serves no samples before it. Bars need no version: one is drawn for every busy time. The proxy calls each method at
    the moment of the change, with the time in Unix seconds.

    Args:
        lane: name of the engine's row on the timeline.
    """

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self._times = StateTimes()
        """Seconds in the states "busy" and "idle", from the first version on."""
        self._busy_since: float | None = None
        """Start of the current busy time. After this time has ended, it is kept, so that a short gap can be bridged.
        None before the first request."""
        self._bars: list[Activity] = []
        """Bars that `take_bars` has not returned yet, in the order in which they ended."""

    def note_load(self, start: float, now: float, *, busy: bool) -> None:
        """Note that the engine has loaded a version, from `start` until `now`, and add a bar for the swap.

        With the first version, the counting of busy and idle seconds begins. `busy`: True if a request runs now.
        """
        if self._times.state is None:
            self._times.enter("busy" if busy else "idle", now)
        self._bars.append(Activity(self.lane, "swap", start, now))

    def busy(self, now: float) -> None:
        """Note that a request has begun on the idle engine."""
        # Seconds of the idle time that ends now. Before the first version no idle time is counted, so it is 0 here; the
        # proxy sends requests only later.
        idle = self._times.enter("busy", now) if self._times.state is not None else 0.0
        # The idle time comes from the state times and not from the last bar: that bar may show a swap, or may have been
        # reported already. After a short gap the start stays, so that `_draw` extends the last bar.
        if self._busy_since is None or idle > MERGE_GAP_S:
            self._busy_since = now

    def idle(self, now: float) -> None:
        """Note that the last running request has ended, and draw the bar of the busy time."""
        if self._times.state is not None:
            self._times.enter("idle", now)
        self._draw(now)

    def restart(self) -> None:
        """Reset the seconds for a new engine, which is idle and has no version yet. Bars that are not reported yet
        stay."""
        self._times, self._busy_since = StateTimes(), None

    def seconds(self, now: float) -> tuple[float, float]:
        """Return the idle seconds and all seconds since the engine's first version. Both are 0 before it."""
        lifetime = now - self._times.begun if self._times.state is not None else 0.0
        return self._times.seconds(now).get("idle", 0.0), lifetime

    def take_bars(self, now: float, *, busy: bool) -> list[Activity]:
        """Return the bars since the last call, and forget them.

        `busy`: True if a request runs now. Then the bar up to now is returned, and another bar begins.
        """
        if busy:
            self._draw(now)
            self._busy_since = now
        bars, self._bars = self._bars, []
        return bars

    def _draw(self, now: float) -> None:
        """Add the bar of a busy time that ends now, or extend the last bar if it has the same start."""
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
        index: number of the place on the node, from 0.
        number: number of the engine among all engines of the run, for messages and the timeline.
        limit: largest number of requests that the engine may hold.
        lengths: statistics of the lengths of responses, shared by all engines of the node.
    """

    def __init__(self, engine: Engine, index: int, number: int, limit: int, lengths: ResponseLengths) -> None:
        super().__init__(index, limit, engine.version)
        self.number = number
        self._lengths = lengths
        self.running: dict[anyio.CancelScope, RequestRecord] = {}
        """The running requests, in the order in which they began. Cancelling the scope of a request makes it move to
        another engine."""
        self.emptied = anyio.Event()
        """Event that is set when the engine's last request has left. The code that waits replaces the event before each
        wait."""
        self.usage = EngineUsage(f"engine {number}")
        self.tokens = 0
        """Number of tokens that all engines of this place have given."""
        self.install(engine, limit)

    def renumber(self, number: int) -> None:
        """Set the number that the engine has at the next hub, to which the node moves when it has lost its hub."""
        self.number = number
        self.usage.lane = f"engine {number}"

    def install(self, engine: Engine, limit: int) -> None:
        """Put an engine into the place, and reset the state of the engine before it.

        This is called for the first engine, and for each engine that replaces a dead one. The requests of the dead
        engine have left it before. `Router.replace` resets the fields of `EngineView`.
        """
        self.usage.restart()
        self.backend = engine
        """The engine of the place."""
        self.concurrency = ConcurrencyLimit(limit, self._lengths)
        self.canary_error = 0.0
        """Mean absolute difference between the engine's and the trainer's log-probs of the canary, a fixed text, at the
        last load, in nats."""
        self.loaded: tuple[float, float] | None = None
        """Start and end of the load of the engine's version, in Unix seconds; None before the first load."""
        self.failed_in_a_row = 0
        """Number of requests that the engine has failed since its last token."""
        self.death: EngineDeadError | None = None
        """Error that says how the engine died; None while it lives."""
        self.died = anyio.Event()
        """Event that is set when the engine is dead, after `death` was set."""


class OutageClock:
    """Extends deadlines by the time in which no engine of the node serves (an outage).

    Otherwise all samples that wait for a response would fail when the node's last engine restarts. The proxy calls
    `begin` and `end`. Code that waits for an engine under a deadline of its own (`LLMProxy.generate`, `EpisodePlayer`)
    enters `extending` for as long as it waits. At the beginning of an outage such a deadline is extended by the longest
    time that the outage may last. At the end it is shortened by the time that was not needed.

    Args:
        longest_s: largest number of seconds of an outage that do not count; further seconds count in every deadline.
        now: returns seconds; only their differences are used.
    """

    def __init__(self, longest_s: float = 0.0, now: Callable[[], float] = anyio.current_time) -> None:
        self._longest_s = longest_s
        self._now = now
        self._since: float | None = None
        """Beginning of the outage; None if there is none."""
        self._extended: set[anyio.CancelScope] = set()
        """Scopes that are inside `extending` now. A scope is inside at most once at a time."""

    @property
    def remaining_s(self) -> float:
        """Seconds of the present outage that may still come and will not count; 0 if there is no outage."""
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
        """Extend the deadline of `scope` by the outages within the block."""
        # Outside of outages the deadline is not changed: each change sets a new timer, and this method runs for every
        # response.
        if self._since is not None:
            scope.deadline += self.remaining_s
        self._extended.add(scope)
        try:
            yield
        finally:
            self._extended.discard(scope)
            # Take the unused extension back. Otherwise a caller that waits again during the same outage would get the
            # extension twice.
            if self._since is not None:
                scope.deadline -= self.remaining_s

    def _extend(self, seconds: float) -> None:
        """Move the deadlines of all scopes inside `extending` by `seconds`, which may be negative."""
        for scope in self._extended:
            scope.deadline += seconds
