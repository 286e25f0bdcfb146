"""Whether an engine hangs: it has requests, may work on them, and has made no step for too long. Pure state."""

from __future__ import annotations


class StepWatch:
    """Told of each change, with the time in seconds.

    Args:
        limit_s: how long a step may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since = 0.0
        """When it last made a step, or got something to do."""
        self._requests = 0
        """What it has to do."""
        self._paused = False

    def begins(self, now: float) -> None:
        """It has one more request."""
        if self._requests == 0:
            self._since = now
        self._requests += 1

    def ends(self) -> None:
        """It has one request less."""
        self._requests -= 1

    def pauses(self) -> None:
        """It makes no step before `goes_on`: a swap has a deadline of its own."""
        self._paused = True

    def goes_on(self, now: float) -> None:
        """It may make steps again."""
        self._paused, self._since = False, now

    def steps(self, now: float) -> None:
        """It has made a step."""
        self._since = now

    def left(self, now: float) -> float:
        """Seconds in which it cannot count as hanging; none are left of one that hangs."""
        if self._paused or self._requests == 0:
            return self._limit_s
        return max(0.0, self._since + self._limit_s - now)
