"""Meter: what the simulated engines did with their time, by cause."""

from __future__ import annotations

from collections.abc import Callable

from flash.observe.state_times import StateTimes

BUSY = "busy"
"""The state of an engine with a running sequence; all others are causes of idleness."""


class Meter:
    """Adds up states of engines over time.

    Whoever changes something says so right away: `engine` for an engine's own sequences and swaps, `idle` for what
    tells idle engines apart. `state` is asked after each change, `running` too. Conservation: from `start` on, the
    seconds of an engine's states add up to the time that has passed.
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
        """Count from now, and forget what was before."""
        self._settle()
        for times in self._times:
            times.forget()
        self._slot_s = 0.0

    def engine(self, index: int) -> None:
        """This engine's state may have changed."""
        state = self._state_of(index)
        self._slot_s += self._times[index].enter(state, self._now()) * self._running[index]
        self._running[index] = self._running_of(index)
        if state == BUSY:
            self._idle.discard(index)
        else:
            self._idle.add(index)

    def idle(self) -> None:
        """The reason why idle engines are idle may have changed."""
        for index in tuple(self._idle):
            self.engine(index)

    def read(self) -> tuple[list[dict[str, float]], float]:
        """Seconds by state for each engine, and the sum over all of running sequences times seconds."""
        self._settle()
        now = self._now()
        return [times.seconds(now) for times in self._times], self._slot_s

    def _settle(self) -> None:
        for index in range(len(self._times)):
            self.engine(index)
