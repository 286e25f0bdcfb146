"""Meter: what the simulated engines did with their time, by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

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
        self._states = [""] * count
        self._running = [0] * count
        self._since = [0.0] * count
        self._idle: set[int] = set(range(count))
        self._totals = _empty(count)
        self._slot_s = 0.0

    def start(self) -> None:
        """Count from now."""
        self._settle()
        self._totals = _empty(len(self._totals))
        self._slot_s = 0.0

    def engine(self, index: int) -> None:
        """This engine's state may have changed."""
        now = self._now()
        passed = now - self._since[index]
        if passed > 0:
            self._totals[index][self._states[index]] += passed
            self._slot_s += passed * self._running[index]
        self._since[index] = now
        self._states[index] = state = self._state_of(index)
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
        return [dict(totals) for totals in self._totals], self._slot_s

    def _settle(self) -> None:
        for index in range(len(self._states)):
            self.engine(index)


def _empty(count: int) -> list[defaultdict[str, float]]:
    return [defaultdict(float) for _ in range(count)]
