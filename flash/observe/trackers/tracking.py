"""A run directory told to a tracker, from where it was told last: as the run goes on, after it, and when it is resumed.

    track/NAME.json    the run's id in the tracker, and the last step and evaluation that it was told
    track/NAME.lock    held by who tells it
    track/NAME.log     what the tracker printed

Law: a step is told once, also where a resumed run does it again, unless the process is killed between telling it and
writing that down. Nothing is dropped: what was not told stays in the run's own files.
"""

from __future__ import annotations

import fcntl
import re
import tomllib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from flash.config.observe import TrackConfig, TrackerName
from flash.errors import ConfigError, RunDirectoryError
from flash.observe.columns.table import APART, Kind, column_of
from flash.observe.rundir.follow import Followed
from flash.observe.rundir.rundir import RunDirectory, write_atomically, writing
from flash.observe.rundir.summary import number
from flash.observe.trackers.trackers import TRACKERS, Opening, Tracker

LONGEST = 200
"""Characters of a name."""
_STRANGE = re.compile(r"[^\w.-]")


class TrackerPlace(msgspec.Struct, frozen=True):
    """How far a tracker was told."""

    id: str | None = None
    """The run's in the tracker."""
    step: int = -1
    evaluation: int = -1
    """Steps of the last rows."""


class Tracking:
    """One tracker of one run. Use it under `held`."""

    def __init__(self, directory: RunDirectory, name: TrackerName) -> None:
        self._directory = directory
        self._name: TrackerName = name
        self._file = folder_of(directory) / f"{name}.json"
        self._place = _read_place(self._file)
        self._steps = Followed(directory.metrics, dict[str, Any])
        self._evals = Followed(directory.evals, dict[str, Any])
        self._tracker: Tracker | None = None

    def send(self, project: str | None = None) -> None:
        """Tell what came since the last time; `project` in place of `track.project`. Raises what the tracker raises."""
        tracker = self._tracker or self._opened(project)
        # One that fails is opened anew: it may be of no more use.
        self._tracker = None
        for kind, step, row in self._new():
            tracker.log(tracked(kind, row), step, number(row, "time") or 0.0)
            change = {"step": step} if kind == "step" else {"evaluation": step}
            self._remember(msgspec.structs.replace(self._place, **change))
        self._tracker = tracker

    def left(self) -> int:
        """Rows that the tracker has not been told."""
        return sum(1 for _ in self._new())

    def close(self, *, failed: bool) -> None:
        """Let go of the tracker. Raises what it raises."""
        if self._tracker is not None:
            self._tracker.close(failed=failed)

    def _opened(self, project: str | None) -> Tracker:
        config = settings(self._directory)
        table = config.get("track", {})
        opening = Opening(
            name=config.get("run", {}).get("name") or self._directory.path.resolve().name,
            project=project or table.get("project") or TrackConfig().project,
            config=config,
            folder=self._file.parent,
            id=self._place.id,
        )
        tracker = TRACKERS[self._name](opening)
        self._remember(msgspec.structs.replace(self._place, id=tracker.id))
        return tracker

    def _new(self) -> Iterator[tuple[Kind, int, dict[str, Any]]]:
        self._steps.read()
        self._evals.read()
        streams: tuple[tuple[Kind, Followed[dict[str, Any]], int], ...] = (
            ("step", self._steps, self._place.step),
            ("evaluation", self._evals, self._place.evaluation),
        )
        for kind, followed, told in streams:
            for row in followed.rows:
                step = number(row, "step")
                if step is not None and step > told:
                    told = int(step)
                    yield kind, told, row

    def _remember(self, place: TrackerPlace) -> None:
        self._place = place
        write_atomically(self._file, msgspec.json.encode(place))


def folder_of(directory: RunDirectory) -> Path:
    """Where the places of a run's trackers are kept."""
    return directory.path / "track"


def settings(directory: RunDirectory) -> dict[str, Any]:
    """The run's configuration. Raises ConfigError."""
    try:
        return tomllib.loads(directory.config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory.config} cannot be read: {error}") from error


@contextmanager
def held(directory: RunDirectory, name: TrackerName, *, wait: bool = False) -> Generator[bool]:
    """Whether this process alone tells the tracker inside the block; False: another one does, and is not waited for."""
    folder = folder_of(directory)
    with writing(folder):
        folder.mkdir(exist_ok=True)
        lock = (folder / f"{name}.lock").open("ab")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _read_place(file: Path) -> TrackerPlace:
    try:
        return msgspec.json.decode(file.read_bytes(), type=TrackerPlace)
    except FileNotFoundError:
        return TrackerPlace()
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise RunDirectoryError(
            f"{file} cannot be read: {error}; remove it to have all told again, as another run"
        ) from error


def tracked(kind: Kind, row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row, by the names that trackers have for them."""
    known = {key: value for key in row if key not in APART and (value := number(row, key)) is not None}
    return {_tracked_name(kind, key): float(value) for key, value in known.items()}


def _tracked_name(kind: Kind, key: str) -> str:
    """One that every tracker takes: environments name their metrics as they like, and MLflow reads them as paths."""
    if (column := column_of(key, kind)) is not None and column.tracker_name:
        return column.tracker_name
    parts = (_STRANGE.sub("_", part) for part in key.split("/"))
    name = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    return f"{'train' if kind == 'step' else 'eval'}/{name[:LONGEST]}"
