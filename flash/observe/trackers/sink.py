"""A run's rows for a tracker: what `observe.sink` names is given each of them, in a thread of its own.

The run neither waits for it nor fails with it. Law: given = taken + failed + dropped, once it is closed; what was not
taken is counted and told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

WAITING = 1000
"""Rows that may wait for a slow sink; those that come while so many do are dropped."""

Sink = Callable[[str, dict[str, Any]], object]
"""Called with a row's kind and the row."""


class SinkFeed:
    """Feed it rows, read what went wrong.

    Args:
        name: what the sink is called in messages.
        make: makes it; called in the thread, since it may have to connect to something.
    """

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name = name
        self._make = make
        self._rows: SimpleQueue[tuple[str, dict[str, Any]] | None] = SimpleQueue()
        self._given = self._dropped = 0
        # Written by the thread alone.
        self._taken = self._failed = 0
        self._fault: str | None = None
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._feed, name="sink", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Rows so far that it failed on, or that were dropped."""
        return self._failed + self._dropped

    def put(self, kind: str, row: Mapping[str, Any], *, last: bool = False) -> None:
        """Give it a row, at once. The last one of a run finds room in any case."""
        self._given += 1
        if self._rows.qsize() >= WAITING and not last:
            self._dropped += 1
        else:
            self._rows.put((kind, dict(row)))

    def warnings(self) -> list[str]:
        """What has gone wrong in a way that was not told yet."""
        found: list[str] = []
        if self._fault is not None:
            found.append(
                f"the sink {self._name} failed: {self._fault}; the run goes on, and its directory has all rows"
            )
        if self._dropped:
            found.append(f"the sink {self._name} is {WAITING} rows behind: new ones are dropped until it has caught up")
        new = [text for text in found if text not in self._told]
        self._told.update(new)
        return new

    def close(self, seconds: float) -> list[str]:
        """Wait for it to take what is left; what is left then is dropped. What was not told yet, and the total."""
        self._rows.put(None)
        self._thread.join(seconds)
        missed = self._given - self._taken
        left = missed - self._failed - self._dropped
        told = self.warnings()
        if left:
            told.append(f"the sink {self._name} did not end within {seconds:g} s: see deadlines.sink")
        if missed:
            how = f"{self._failed} failed, {self._dropped + left} dropped"
            told.append(f"the sink {self._name} missed {missed} of {self._given} rows: {how}")
        return told

    def _feed(self) -> None:
        """Consumes rows. Waits for the next, or the end. Produces calls."""
        sink: Sink | None = None
        try:
            sink = self._make()
        except BaseException as error:  # the user's code: whatever it raises is its failure, not the run's
            self._fault = f"{type(error).__name__}: {error}"
        while (item := self._rows.get()) is not None:
            if sink is None:
                self._failed += 1
                continue
            try:
                sink(*item)
            except BaseException as error:  # as above
                self._failed += 1
                self._fault = self._fault or f"{type(error).__name__}: {error}"
            else:
                self._taken += 1
