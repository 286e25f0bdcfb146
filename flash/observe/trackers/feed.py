"""A feed passes the rows and alarms of a run to one receiver: a tracker, the user's own sink, or the alarm command.

The run neither waits for a receiver nor fails with it: `Feed.put` only adds an event to a queue, and a thread of the
feed calls the receiver. The owner of all feeds of a run is `flash.observe.trackers.receivers.Receivers`. The recorder
prints the results of `warnings`, and at the end of the run those of `close`.

An *event* is a row of the run or an alarm, with its *kind*: `step`, `evaluation`, `summary`, `error` or `alarm`.
Law: once a feed is closed, the number of events given = taken + failed + dropped. The receiver's loss is reported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

WAITING = 1000
"""Largest number of events in the queue of a slow receiver. Further events are dropped until there is room again."""
SILENT_S = 60.0
"""Seconds of a single call after which a warning is given. It is long, because importing a package and connecting to a
server may take long without a fault."""
STOPPED_S = 0.5
"""Seconds that a killed receiver has to return to the feed's thread. The user's own sink cannot be killed, and neither
can a command that runs as another user."""


class ReceiverError(Exception):
    """A receiver has failed. The message completes a sentence that begins with the receiver's name.

    A `Receiver` raises it, and `Feed` makes a warning of it. The warning about any other error names the error's type.
    """


class Receiver:
    """Base of receivers, which get the events of a run. A subclass must define `send`, and may define the others.

    The feed's thread calls `open` once, then `send` for each event, also if `open` has failed, and `close` at the end.
    These three may block and raise anything. `Feed.close` calls `kill` and `missed`, in the thread of its own caller.
    """

    consequence = "; the run goes on, and its directory has all rows"
    """End of the warning about a failure: its consequence for the user."""
    catches_up = False
    """True if one event makes up for all earlier ones, as for a tracker's process, which reads rows from the run's
    files. Then at most one event needs to wait in the queue."""

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
        """End what `open` and `send` have started, since the deadline is over. Must not raise.

        `Feed.close` calls this in the thread of its own caller, where an error would end the run. A call of `open`,
        `send` or `close` may still run in the feed's thread; killing should make it return.
        """

    def missed(self, given: int, failed: int, dropped: int) -> str:
        """Return a sentence about events that the receiver did not get; empty if it got all.

        `Feed.close` calls this, so it must not raise either. `given` is the number of all events. Of these, the
        receiver failed on `failed`, and did not get `dropped`.
        """
        missed = failed + dropped
        return f"{self.name} missed {missed} of {given}: {failed} failed, {dropped} dropped" if missed else ""


def kill_group(process: subprocess.Popen[bytes] | None) -> None:
    """Kill a receiver's process, which has a session of its own, and all processes of its group, if it runs.

    The process still runs afterwards if it has become another user's, as with `sudo`. None: there is no process.
    """
    if process is not None and process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


class Feed:
    """Queue and thread of one receiver. `now` gives seconds of a monotonic clock.

    The owner calls `put` and `warnings`, and at last `end` and `close`, one call at a time. The thread runs `_run`.
    """

    def __init__(self, receiver: Receiver, now: Callable[[], float] = time.monotonic) -> None:
        self._receiver = receiver
        self._now = now
        self._events: SimpleQueue[tuple[str, dict[str, Any]] | None] = SimpleQueue()
        """Events that wait. None is the end."""
        self._given = 0
        """Number of events that `put` has counted."""
        self._dropped = 0
        """Number of these events that `put` has dropped because the queue was full."""
        self._reported: set[str] = set()
        """Warnings that were given, of `failure`, `behind` and `silent`. Each is given once."""
        self._limit = 0.0
        """Seconds that `end` has given the receiver to take the rest; 0 before."""
        self._ends_at: float | None = None
        """End of these seconds, on the clock `now`; None before `end`."""
        self._closed = False
        """True once `close` was called."""
        self._late = False
        """True if the receiver did not end in time and was killed. Its further failures are not reported."""
        # Only the feed's thread writes the next two numbers.
        self._taken = 0
        """Number of events for which `send` has returned."""
        self._failed = 0
        """Number of events for which `send` has raised an error."""
        self._failures: SimpleQueue[str] = SimpleQueue()
        """Warnings about failures that `warnings` has not returned yet."""
        self._calling_since: float | None = None
        """Start of the receiver's call that now runs, in seconds of `now`; None between calls."""
        self._thread = threading.Thread(target=self._run, name=receiver.name, daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Number of events so far that the receiver failed on or that were dropped."""
        return self._failed + self._dropped

    def put(self, kind: str, row: Mapping[str, Any], *, last: bool = False) -> None:
        """Add an event, without waiting. The run's last event (`last`) is always added.

        Any other event is dropped if the queue is full. If the receiver catches up and an event waits already, it is
        neither added nor counted.
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
        if self._dropped and self._is_first("behind"):
            found.append(f"{name} is {WAITING} rows behind: new rows are dropped until it has caught up")
        seconds = 0.0 if (since := self._calling_since) is None else self._now() - since
        # After a failure the user has read the consequence already.
        if seconds > SILENT_S and "failure" not in self._reported and self._is_first("silent"):
            hangs = f"{name} has not answered for {seconds:.0f} s: it hangs, or cannot be reached"
            found.append(f"{hangs}{self._receiver.consequence}")
        return found

    def end(self, seconds: float) -> None:
        """Give the receiver `seconds` to take the rest, without waiting. `close` waits. A second call does nothing."""
        if self._ends_at is None:
            self._limit, self._ends_at = seconds, self._now() + seconds
            self._events.put(None)

    def close(self) -> list[str]:
        """Wait until the receiver has taken the rest. At the limit of `end`, kill the receiver and drop what is left.

        Returns the last warnings, and a sentence about all events that the receiver missed. A second call does nothing
        and returns an empty list: the recorder closes receivers after the last row, and again when it is closed itself.
        """
        assert self._ends_at is not None, "`end` comes before `close`"
        if self._closed:
            return []
        self._closed = True
        self._thread.join(max(0.0, self._ends_at - self._now()))
        self._late = self._thread.is_alive()
        if self._late:
            self._receiver.kill()
            self._thread.join(STOPPED_S)
        found = self.warnings()
        if self._late:
            fate = "still runs" if self._thread.is_alive() else "was ended"
            found.append(f"{self._receiver.name} did not take the rest in {self._limit:g} s and {fate}")
        # Beside the events that `put` has dropped, these are events still in the queue, and one that still runs.
        dropped = self._given - self._taken - self._failed
        missed = self._receiver.missed(self._given, self._failed, dropped)
        return [*found, missed] if missed else found

    def _is_first(self, warning: str) -> bool:
        """Return True if this warning (`failure`, `behind` or `silent`) was not given before, and remember it."""
        first = warning not in self._reported
        self._reported.add(warning)
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
        """Call a method of the receiver, in the feed's thread, and return True if it raised nothing.

        The first failure becomes a warning, which `warnings` returns.
        """
        self._calling_since = self._now()
        try:
            method()
        except BaseException as error:  # foreign code: whatever it raises is its failure, and not the run's
            if not self._late and self._is_first("failure"):
                failure = f"{error}" if isinstance(error, ReceiverError) else f"failed: {type(error).__name__}: {error}"
                self._failures.put(f"{self._receiver.name} {failure}{self._receiver.consequence}")
            return False
        finally:
            self._calling_since = None
        return True
