"""The book of busy and idle time: how long something was in each of its states. Pure: its owner tells the time."""

from __future__ import annotations

from collections import defaultdict


class StateTimes:
    """Seconds by state of one thing, on its owner's clock.

    Conservation: from the first state on, the seconds of all states add up to the time that has passed.
    """

    def __init__(self) -> None:
        self.state: str | None = None
        """None: nothing counts yet."""
        self.begun = 0.0
        """When it got its first state."""
        self._since = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, state: str, now: float) -> float:
        """It is in this state from now on. Returns the seconds since the last call."""
        if self.state is None:
            self.begun = self._since = now
        passed = now - self._since
        if passed > 0:
            assert self.state is not None, "no time passes before the first state"
            self._seconds[self.state] += passed
        self.state, self._since = state, now
        return passed

    def forget(self) -> None:
        """Count anew from the last call of `enter`."""
        self.begun = self._since
        self._seconds.clear()

    def seconds(self, now: float) -> dict[str, float]:
        """Seconds of each state that it has been in, up to now."""
        seconds = dict(self._seconds)
        if self.state is not None and now > self._since:
            seconds[self.state] = seconds.get(self.state, 0.0) + now - self._since
        return seconds
