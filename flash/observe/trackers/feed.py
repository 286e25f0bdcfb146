"""A feed of what a run measures to one outsider: its tracker, the user's own sink, the command that alarms call.

A run neither waits for an outsider nor fails with one: events wait in a queue, and a thread gives them to its outlet.
Law: given = taken + failed + dropped, once a feed is closed. What an outsider misses is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

WAITING = 1000
"""Events that may wait for a slow outlet; those that come while so many do are dropped."""
SILENT_S = 60.0
"""Until one that has not taken an event is told of: importing and connecting take some of it."""

STOPPED_S = 0.5
"""For one that was stopped to let go; the user's own sink cannot be stopped."""


class Fault(Exception):
    """What is wrong with an outlet, in words that go on after its name."""


class Outlet:
    """How an outsider is told."""

    after = "; the run goes on, and its directory has all rows"
    """What follows from a failure."""
    catches_up = False
    """Whether an event makes up for those before it: then no more than one needs to wait."""

    def __init__(self, name: str) -> None:
        self.name = name

    # The feed's thread calls these: they may take their time, and raise anything.

    def open(self) -> None:
        """Begin."""

    def tell(self, kind: str, row: dict[str, Any]) -> None:
        """Give it an event."""
        raise NotImplementedError

    def close(self) -> None:
        """There is no other event."""

    # The others are called from outside.

    def stop(self) -> None:
        """Its time is over: end what was started, while another call may be under way."""

    def missed(self, given: int, failed: int, dropped: int) -> str:
        """What it was not told, in a sentence; empty: nothing."""
        missed = failed + dropped
        return f"{self.name} missed {missed} of {given}: {failed} failed, {dropped} dropped" if missed else ""


class Feed:
    """Feed it events, read what went wrong. `now` gives seconds."""

    def __init__(self, outlet: Outlet, now: Callable[[], float] = time.monotonic) -> None:
        self._outlet = outlet
        self._now = now
        self._events: SimpleQueue[tuple[str, dict[str, Any]] | None] = SimpleQueue()
        self._given = self._dropped = 0
        self._told: set[str] = set()
        self._closed = self._late = False
        # Written by the thread alone.
        self._taken = self._failed = 0
        self._faults: SimpleQueue[str] = SimpleQueue()
        self._calling_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=outlet.name, daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Events so far that it failed on, or that were dropped."""
        return self._failed + self._dropped

    def put(self, kind: str, row: Mapping[str, Any], *, last: bool = False) -> None:
        """Give it an event, at once. The last one of a run finds room in any case."""
        waiting = self._events.qsize()
        if self._outlet.catches_up and waiting and not last:
            return
        self._given += 1
        if waiting >= WAITING and not last:
            self._dropped += 1
        else:
            self._events.put((kind, dict(row)))

    def warnings(self) -> list[str]:
        """What has gone wrong, and was not told yet."""
        name, found = self._outlet.name, [self._faults.get() for _ in range(self._faults.qsize())]
        if self._dropped and self._once("behind"):
            found.append(f"{name} is {WAITING} rows behind: new ones are dropped until it has caught up")
        seconds = 0.0 if (since := self._calling_since) is None else self._now() - since
        if seconds > SILENT_S and "fault" not in self._told and self._once("silent"):
            hangs = f"{name} has not answered for {seconds:.0f} s: it hangs, or cannot be reached"
            found.append(f"{hangs}{self._outlet.after}")
        return found

    def close(self, seconds: float) -> list[str]:
        """Wait so long for it to take what is left, and drop the rest. What was not told yet, and the total."""
        if self._closed:
            return []
        self._closed = True
        self._events.put(None)
        self._thread.join(max(0.0, seconds))
        self._late = self._thread.is_alive()
        if self._late:
            self._outlet.stop()
            self._thread.join(STOPPED_S)
        told = self.warnings()
        if self._late:
            told.append(f"{self._outlet.name} did not end in time: see deadlines.sink")
        dropped = self._given - self._taken - self._failed
        missed = self._outlet.missed(self._given, self._failed, dropped)
        return [*told, missed] if missed else told

    def _once(self, what: str) -> bool:
        new = what not in self._told
        self._told.add(what)
        return new

    def _run(self) -> None:
        """Consumes events. Waits for the next, or the end. Produces calls."""
        self._call(self._outlet.open)
        while (event := self._events.get()) is not None and not self._late:
            if self._call(partial(self._outlet.tell, *event)):
                self._taken += 1
            elif not self._late:
                self._failed += 1
        self._call(self._outlet.close)

    def _call(self, what: Callable[[], None]) -> bool:
        """Whether it went well."""
        self._calling_since = self._now()
        try:
            what()
        except BaseException as error:  # an outsider's code: whatever it raises is its failure, not the run's
            if not self._late and self._once("fault"):
                said = f"{error}" if isinstance(error, Fault) else f"failed: {type(error).__name__}: {error}"
                self._faults.put(f"{self._outlet.name} {said}{self._outlet.after}")
            return False
        finally:
            self._calling_since = None
        return True
