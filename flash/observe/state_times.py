"""Seconds that something, such as an engine, has spent in each of its states. Pure: the owner passes the time."""

from __future__ import annotations

from collections import defaultdict


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
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, state: str, now: float) -> float:
        """Change to a state at the time `now`. Returns the seconds since the last call."""
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
