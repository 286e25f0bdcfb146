"""Meter: the seconds that simulated engines spend in each state, with the causes of idleness."""

from __future__ import annotations

from collections.abc import Callable

from flash.rollout.engine_state import StateTimes

BUSY = "busy"
"""State of an engine with a running sequence. All other states are causes of idleness."""


class Meter:
    """Adds up the time of engines by state.

    The owner reports each change at once: with `engine` if the sequences or swaps of an engine have changed, and with
    `idle` if the cause of idleness may have changed. Conservation: from `start` on, the seconds of an engine's states
    add up to the time that has passed.

    Args:
        count: number of engines.
        state: returns the present state of an engine; called after each change.
        running: returns the number of sequences that an engine runs; called after each change.
        now: the clock, in seconds.
    """

    def __init__(
        self, count: int, state: Callable[[int], str], running: Callable[[int], int], now: Callable[[], float]
    ) -> None:
        self._state_of = state
        self._running_of = running
        self._now = now
        self._times = [StateTimes() for _ in range(count)]
        self._running = [0] * count
        self._idle: set[int] = set(range(count))
        self._slot_s = 0.0

    def start(self) -> None:
        """Begin to measure now, and discard all earlier time."""
        self._settle()
        for times in self._times:
            times.forget()
        self._slot_s = 0.0

    def engine(self, index: int) -> None:
        """Record that the state of this engine may have changed."""
        state = self._state_of(index)
        self._slot_s += self._times[index].enter(state, self._now()) * self._running[index]
        self._running[index] = self._running_of(index)
        if state == BUSY:
            self._idle.discard(index)
        else:
            self._idle.add(index)

    def idle(self) -> None:
        """Record that the cause of the idleness of idle engines may have changed."""
        for index in tuple(self._idle):
            self.engine(index)

    def read(self) -> tuple[list[dict[str, float]], float]:
        """Return, for each engine, its seconds by state; and the sequence seconds of all engines together."""
        self._settle()
        now = self._now()
        return [times.seconds(now) for times in self._times], self._slot_s

    def _settle(self) -> None:
        for index in range(len(self._times)):
            self.engine(index)
