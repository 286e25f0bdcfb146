"""All outsiders of a run, as its configuration names them: `observe.sink`, `track.to` and `alarms.command`."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flash.config.load import dump
from flash.config.objects import is_sink, load_sink
from flash.config.tree import Config
from flash.observe.alarms import RaisedAlarm
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.trackers.alarm_command import AlarmCommand
from flash.observe.trackers.feed import Fault, Feed, Outlet
from flash.observe.trackers.teller import TrackerOutlet

Sink = Callable[[str, dict[str, Any]], object]
"""What `observe.sink` makes: it is called with a row's kind and the row."""


class SinkOutlet(Outlet):
    """The user's own sink. `make` makes it in the feed's thread, since it may have to connect to something."""

    def __init__(self, path: str, make: Callable[[], Sink]) -> None:
        super().__init__(f"the sink {path}")
        self._make = make
        self._sink: Sink | None = None

    def open(self) -> None:
        self._sink = self._make()

    def tell(self, kind: str, row: dict[str, Any]) -> None:
        if self._sink is None:
            raise Fault("was not made")
        self._sink(kind, row)


class Outsiders:
    """Tell them what happens, read what went wrong, close them with the run."""

    def __init__(self, config: Config, directory: RunDirectory, resume_at: int | None) -> None:
        path, command = config.observe.sink, config.alarms.command
        self._sink = None if path is None else Feed(SinkOutlet(path, lambda: make_sink(path, config, resume_at)))
        self._alarms = None if command is None else Feed(AlarmCommand(command))
        trackers = [Feed(TrackerOutlet(directory, name)) for name in dict.fromkeys(config.track.to)]
        self._told_rows = [*([] if self._sink is None else [self._sink]), *trackers]

    def row(self, kind: str, row: Mapping[str, Any], *, last: bool = False) -> None:
        """A `step`, an `evaluation`, and at last the `summary` or the `error` that ended the run."""
        for feed in self._told_rows:
            feed.put(kind, row, last=last)

    def alarm(self, alarm: RaisedAlarm) -> None:
        """An alarm."""
        if self._alarms is not None:
            self._alarms.put("alarm", alarm._asdict())

    def lost(self) -> Mapping[str, int]:
        """Rows that the sink has missed so far, as a column of the row of a step; empty without a sink."""
        return {} if self._sink is None else {"sink_lost": self._sink.lost}

    def warnings(self) -> list[str]:
        """What has gone wrong since the last time."""
        return [line for feed in self._all() for line in feed.warnings()]

    def close(self, seconds: float) -> list[str]:
        """Wait for all of them, so long together. What went wrong, and what was not told."""
        limit = time.monotonic() + seconds
        return [line for feed in self._all() for line in feed.close(limit - time.monotonic())]

    def _all(self) -> Iterator[Feed]:
        yield from self._told_rows
        if self._alarms is not None:
            yield self._alarms


def make_sink(path: str, config: Config, resume_at: int | None) -> Sink:
    """Call what `observe.sink` names.

    Raises:
        ConfigError: there is none.
        TypeError: what it made is no sink.
        Exception: whatever it raises.
    """
    made = load_sink(path)(tomllib.loads(dump(config)), resume_at)
    if not is_sink(made):
        raise TypeError(f"it returned {made!r}, which cannot be called as `sink(kind, row)`")
    return made
