"""A feed passes the rows and alarms of a run to one receiver: a tracker, the user's own sink, or the alarm command.

The run neither waits for a receiver nor fails with it: `Feed.put` only adds an event to a queue, and a thread of the
feed calls the receiver. The owner prints `Feed.warnings()` and, at the end of the run, the result of `Feed.close()`.

Law: once a feed is closed, the number of events given = taken + failed + dropped. The receiver's loss is reported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

WAITING = 1000
"""Largest number of events in the queue of a slow receiver. Further events are dropped until there is room again."""
SILENT_S = 60.0
"""Seconds of a single call after which a warning is given. Importing a package and connecting may take long too."""

STOPPED_S = 0.5
"""Seconds that a killed receiver has to return to the feed's thread. The user's own sink cannot be killed."""


class ReceiverError(Exception):
    """A receiver has failed. The message completes a sentence that begins with the receiver's name."""


class Receiver:
    """Base of receivers, which get the events of a run. A subclass must define `send`, and may define the others.

    The feed's thread calls `open` once, then `send` for each event, and `close` at the end. These three may block and
    raise anything. The owner of the feed calls `kill` and `missed` at the end of the run, through `Feed.close`.
    """

    consequence = "; the run goes on, and its directory has all rows"
    """End of the warning about a failure: its consequence for the user."""
    catches_up = False
    """True if one event makes up for all events before it. Then at most one event needs to wait in the queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Name in warnings, such as `the tracker wandb`."""

    def open(self) -> None:
        """Connect, or start what is needed."""

    def send(self, kind: str, row: dict[str, Any]) -> None:
        """Receive an event: `step`, `evaluation`, `summary`, `error` or `alarm`, with its row."""
        raise NotImplementedError

    def close(self) -> None:
        """Release everything. No event comes after it."""

    def kill(self) -> None:
        """End what was started, since the deadline is over. Called by another thread, while a call may still run."""

    def missed(self, given: int, failed: int, dropped: int) -> str:
        """Return a sentence about events that the receiver did not get; empty if it got all.

        `given` is the number of all events. Of these, the receiver failed on `failed`, and did not get `dropped`.
        """
        missed = failed + dropped
        return f"{self.name} missed {missed} of {given}: {failed} failed, {dropped} dropped" if missed else ""


class Feed:
    """Queue and thread of one receiver. `now` gives seconds of a monotonic clock.

    The owner's thread calls `put`, `warnings` and `close`.
    """

    def __init__(self, receiver: Receiver, now: Callable[[], float] = time.monotonic) -> None:
        self._receiver = receiver
        self._now = now
        self._events: SimpleQueue[tuple[str, dict[str, Any]] | None] = SimpleQueue()
        """Events that wait. None is the end."""
        self._given = self._dropped = 0
        """Numbers of events that `put` has counted, and of those that it has dropped for lack of room."""
        self._reported: set[str] = set()
        """Kinds of warnings that were given. Each is given once."""
        self._closed = self._late = False
        """`_late`: True if the receiver did not end in time and was killed. Its further failures are not reported."""
        # Only the feed's thread writes these.
        self._taken = self._failed = 0
        """Numbers of events that the receiver has taken, and on which it has failed."""
        self._failures: SimpleQueue[str] = SimpleQueue()
        """Warnings about failures that `warnings` has not returned yet."""
        self._calling_since: float | None = None
        """Start of the call that now runs; None between calls."""
        self._thread = threading.Thread(target=self._run, name=receiver.name, daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Number of events so far that the receiver failed on or that were dropped."""
        return self._failed + self._dropped

    def put(self, kind: str, row: Mapping[str, Any], *, last: bool = False) -> None:
        """Add an event, without waiting. If the queue is full, the event is dropped, unless it is the run's last one.

        An event for a receiver that catches up is not added, and not counted, if another one waits already.
        """
        waiting = self._events.qsize()
        if self._receiver.catches_up and waiting and not last:
            return
        self._given += 1
        if waiting >= WAITING and not last:
            self._dropped += 1
        else:
            self._events.put((kind, dict(row)))

    def warnings(self) -> list[str]:
        """Return warnings that were not returned before: failures, a full queue, and a call that takes very long."""
        name, found = self._receiver.name, [self._failures.get() for _ in range(self._failures.qsize())]
        if self._dropped and self._first_time("behind"):
            found.append(f"{name} is {WAITING} rows behind: new rows are dropped until it has caught up")
        seconds = 0.0 if (since := self._calling_since) is None else self._now() - since
        if seconds > SILENT_S and "failure" not in self._reported and self._first_time("silent"):
            hangs = f"{name} has not answered for {seconds:.0f} s: it hangs, or cannot be reached"
            found.append(f"{hangs}{self._receiver.consequence}")
        return found

    def close(self, seconds: float) -> list[str]:
        """Wait at most `seconds` until the receiver has taken the rest, then kill the receiver and drop what is left.

        Returns the last warnings, and a sentence about all events that the receiver missed. A second call returns
        nothing.
        """
        if self._closed:
            return []
        self._closed = True
        self._events.put(None)
        self._thread.join(max(0.0, seconds))
        self._late = self._thread.is_alive()
        if self._late:
            self._receiver.kill()
            self._thread.join(STOPPED_S)
        found = self.warnings()
        if self._late:
            found.append(f"{self._receiver.name} did not take the rest in {seconds:g} s and was ended")
        dropped = self._given - self._taken - self._failed
        missed = self._receiver.missed(self._given, self._failed, dropped)
        return [*found, missed] if missed else found

    def _first_time(self, kind: str) -> bool:
        """Return True at the first call for a kind of warning, so that each kind is reported once."""
        first = kind not in self._reported
        self._reported.add(kind)
        return first

    def _run(self) -> None:
        """Pass events to the receiver, in the feed's thread.

        Consumes the queue of events. Waits for the next event and for each call of the receiver. Ends at None in the
        queue, or after `close` has killed the receiver.
        """
        self._call(self._receiver.open)
        while (event := self._events.get()) is not None and not self._late:
            if self._call(partial(self._receiver.send, *event)):
                self._taken += 1
            elif not self._late:
                self._failed += 1
        self._call(self._receiver.close)

    def _call(self, method: Callable[[], None]) -> bool:
        """Call a method of the receiver, and return True if it raised nothing. The first failure becomes a warning."""
        self._calling_since = self._now()
        try:
            method()
        except BaseException as error:  # foreign code: whatever it raises is its failure, and not the run's
            if not self._late and self._first_time("failure"):
                failure = f"{error}" if isinstance(error, ReceiverError) else f"failed: {type(error).__name__}: {error}"
                self._failures.put(f"{self._receiver.name} {failure}{self._receiver.consequence}")
            return False
        finally:
            self._calling_since = None
        return True
