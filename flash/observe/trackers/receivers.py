"""All receivers of a run that its configuration names: the trackers and sinks of `track.to`, and `alarms.command`.

`flash.observe.recorder` owns the `Receivers` of a run. Each receiver has a `Feed` of its own: a queue, and a thread
that calls the receiver. So no receiver makes the run wait.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from flash.config.load import dump
from flash.config.objects import is_sink, load_sink
from flash.config.tree import Config
from flash.observe.alarms import RaisedAlarm
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.trackers.feed import STOPPED_S, Feed, Receiver, ReceiverError, kill_group
from flash.observe.trackers.trackers import TrackerProcess

COMMAND_S = 5.0
"""Seconds that one start of the alarm command may take. It is less than the default of `deadlines.close`, for which a
run that was interrupted or has failed waits for its receivers: the command of its last alarm should end before."""
ERROR_BYTES = 1000
"""Bytes of the alarm command's error output that a warning quotes."""

Sink = Callable[[str, dict[str, Any]], object]
"""Function that a function named by `track.to` returns. It is called with the kind of a row and the row."""


class Receivers:
    """All receivers of a run: pass them rows and alarms, print their warnings, and close them with the run."""

    def __init__(self, config: Config, directory: RunDirectory, resume_at: int | None) -> None:
        """Start a feed for each receiver.

        Args:
            config: configuration of the run, which names the receivers.
            directory: run directory, from which the trackers' processes read rows.
            resume_at: version that a resumed run continues from; None for a new run.
        """
        command = config.alarms.command
        self._sinks = [
            Feed(SinkReceiver(path, partial(make_sink, path, config, resume_at))) for path in config.track.sinks
        ]
        """Feeds of the user's sinks."""
        self._alarms = None if command is None else Feed(AlarmCommand(command))
        """Feed of the alarm command; None if the configuration names none."""
        self._row_feeds = [*self._sinks, *(Feed(TrackerProcess(directory, name)) for name in config.track.trackers)]
        """Feeds that get rows: of the sinks and of the trackers."""

    def row(self, kind: str, row: Mapping[str, Any], *, last: bool = False) -> None:
        """Pass a row to the sinks and the trackers, without waiting.

        `kind` is `step` or `evaluation`; for the last row it is `summary`, or `error` if an error has ended the run.
        `last` is true for the last row, which enters even a full queue.
        """
        for feed in self._row_feeds:
            feed.put(kind, row, last=last)

    def alarm(self, alarm: RaisedAlarm) -> None:
        """Pass an alarm to the command of `alarms.command`, without waiting."""
        if self._alarms is not None:
            self._alarms.put("alarm", alarm._asdict())

    def lost(self) -> Mapping[str, int]:
        """Return the number of rows that the sinks have missed so far, as a column of a step's row.

        The recorder adds it to each such row. It is empty without a sink.
        """
        return {"sink_lost": sum(sink.lost for sink in self._sinks)} if self._sinks else {}

    def warnings(self) -> list[str]:
        """Return the new warnings of all receivers."""
        return [line for feed in self._feeds() for line in feed.warnings()]

    def close(self, seconds: float) -> list[str]:
        """Wait at most `seconds` for all receivers together. Returns their last warnings and what they missed."""
        # All get the end before the first wait: otherwise a receiver that hangs would use up the time of the others.
        for feed in self._feeds():
            feed.end(seconds)
        return [line for feed in self._feeds() for line in feed.close()]

    def _feeds(self) -> Iterator[Feed]:
        """Yield the feeds of all receivers."""
        yield from self._row_feeds
        if self._alarms is not None:
            yield self._alarms


class SinkReceiver(Receiver):
    """A sink of the user."""

    def __init__(self, path: str, make: Callable[[], Sink]) -> None:
        """Prepare the sink that `track.to` names as `path`.

        `make` makes it. It runs in the feed's thread, since a sink may have to connect to a server first.
        """
        super().__init__(f"the sink {path}")
        self._make = make
        self._sink: Sink | None = None
        """Sink that `open` has made; None before, and if making it failed."""

    def open(self) -> None:
        """Call the user's function that makes the sink."""
        self._sink = self._make()

    def send(self, kind: str, row: dict[str, Any]) -> None:
        """Call the sink with an event. Raises ReceiverError if the sink could not be made."""
        if self._sink is None:
            raise ReceiverError("was not made")
        self._sink(kind, row)


def make_sink(path: str, config: Config, resume_at: int | None) -> Sink:
    """Call the function that `track.to` names as `path`, and return the sink that it makes.

    The function gets the configuration as tables of settings, and `resume_at`: the version that a resumed run
    continues from; None for a new run.

    Raises:
        ConfigError: there is no such function.
        TypeError: the function returned something that is no sink.
        Exception: whatever the function raises.
    """
    made = load_sink(path)(tomllib.loads(dump(config)), resume_at)
    if not is_sink(made):
        raise TypeError(f"it returned {made!r}, which cannot be called as `sink(kind, row)`")
    return made


class AlarmCommand(Receiver):
    """The command of `alarms.command`. It is started for each alarm, one after the other.

    The command gets the alarm's text as its input, and the alarm's name in the environment variable FLASH_ALARM.
    """

    consequence = ""  # the terminal shows each alarm, so the user loses nothing

    def __init__(self, command: str, seconds: float = COMMAND_S) -> None:
        """Split `command` as a shell does it. `seconds` is the time limit of a call."""
        super().__init__("alarms.command")
        self._words = shlex.split(command)
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        """Process of the command that was started last; None before the first alarm."""

    def send(self, kind: str, row: dict[str, Any]) -> None:
        """Start the command with an alarm and wait for its end. `row` has the fields of a `RaisedAlarm`.

        Raises:
            ReceiverError: the command cannot be started, takes too long, or ends with an error.
        """
        # The error output goes to a file and not to a pipe. A full pipe would block the command, and a process that the
        # command has left behind could hold the pipe open.
        with tempfile.TemporaryFile() as errors:
            try:
                process = self._process = subprocess.Popen(
                    self._words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=os.environ | {"FLASH_ALARM": row["name"]},
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise ReceiverError(f"cannot be started: {error}") from error
            try:
                process.communicate(f"{row['text']}\n".encode(), self._seconds)
            except subprocess.TimeoutExpired:
                self.kill()
                # Without a limit, a command of another user, which cannot be killed, would hold up all later alarms.
                try:
                    process.wait(STOPPED_S)
                except subprocess.TimeoutExpired:
                    fate = f"process {process.pid} cannot be killed"
                else:
                    fate = "was killed"
                raise ReceiverError(f"took longer than {self._seconds:g} s and {fate}") from None
            if process.returncode:
                errors.seek(0)
                text = errors.read(ERROR_BYTES).decode("utf-8", "replace").strip()
                raise ReceiverError(f"ended with code {process.returncode}: {text}")

    def kill(self) -> None:
        """Kill the command and all processes of its group, if it runs: after its time limit, or at the run's end."""
        kill_group(self._process)
