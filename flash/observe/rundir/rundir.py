"""The run directory: what a run leaves on disk, and the only door to it.

    config.toml                       the resolved configuration
    metrics.jsonl                     one object per step
    evals.jsonl                       one object per held-out evaluation
    spans.jsonl                       one `Activity` per line: who was busy with what
    samples.jsonl                     one `SampleTimes` per trained sample: lengths, times, versions
    trajectories/step-000012.arrow    a few readable samples of each step (flash.observe.rundir.sample_files)
    batches/step-000012.bin           what a step trained, exactly (flash.observe.rundir.recording)
    journal/                          what happened to samples since a checkpoint (flash.run.restart.journal)
    ledger.json, summary.json         totals
    cluster.json                      nodes, engines and failures (flash.observe.cluster)
    checkpoints/, plots/, track/      written by their own rooms
    earlier/001/                      rows of steps that a later incarnation did again
    hub-lives                         how many hubs the run has had

Invariants: a line is appended whole and reaches the operating system before the call returns; a line torn by a crash is
never read as a row; whole files are replaced atomically; rows leave a file only after they lie in `earlier/`; a file of
rows that somebody deletes while the run writes it is put back.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from flash.branches import spans_by_turn
from flash.errors import RunDirectoryError
from flash.observe.rundir import recording
from flash.observe.rundir.follow import NO_ROW, opened
from flash.observe.rundir.summary import Summary
from flash.types import Activity, Batch, Trajectory

Row = Mapping[str, Any]

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FULL = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger(__name__)

T = TypeVar("T")


class TurnTimes(msgspec.Struct, frozen=True, array_like=True):
    """One response of a trained sample, without its text."""

    observation_tokens: int
    """Tokens shown before the response: in the first turn of a branch all that it began with."""
    tokens: int
    """Tokens of the response."""
    start: float
    """Unix seconds at which the response was asked for."""
    generate_s: float
    """Seconds from there to its last token."""
    env_s: float
    """Seconds of the environment's step after it."""
    oldest_version: int
    """The oldest policy version among the response's tokens; −1 for an empty one."""
    branch: int = 0
    """Which branch of the episode it is in."""


class SampleTimes(msgspec.Struct, frozen=True):
    """One trained sample in numbers: what calibration fits to and analysis counts."""

    step: int
    """The step that trained it."""
    group_id: int
    reward: float
    turns: list[TurnTimes]


def sample_times(trajectory: Trajectory, step: int) -> SampleTimes:
    """Describe a trajectory that was trained at `step`."""
    spans = spans_by_turn(trajectory)
    oldest = _oldest_versions(trajectory)
    if spans is not trajectory.action_spans:
        of_span = dict(zip(trajectory.action_spans, oldest, strict=True))
        oldest = [of_span[span] for span in spans]
    turns: list[TurnTimes] = []
    ends = list(trajectory.branches)
    for span, turn, version in zip(spans, trajectory.turns, oldest, strict=True):
        shown, said = span.start - ends[turn.branch], span.stop - span.start
        turns.append(TurnTimes(shown, said, turn.start, turn.generate_s, turn.env_s, version, turn.branch))
        ends[turn.branch] = span.stop
    return SampleTimes(step, trajectory.task.group_id, trajectory.reward, turns)


def _oldest_versions(trajectory: Trajectory) -> list[int]:
    """Of each span; −1 of an empty one."""
    runs, left, version = iter(trajectory.versions), 0, 0
    found: list[int] = []
    for span in trajectory.action_spans:
        wanted, seen = span.stop - span.start, list[int]()
        while wanted > 0:
            if left == 0:
                run = next(runs)
                left, version = run.count, run.version
            seen.append(version)
            taken = min(wanted, left)
            wanted, left = wanted - taken, left - taken
        found.append(min(seen, default=-1))
    return found


class HubIncarnations:
    """The numbers of a run's hubs, in a file that counts them."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def begin(self) -> int:
        """The number of the hub that begins now, higher than those before it, and recorded before anybody hears of it.

        Raises:
            RunDirectoryError: it cannot be read or written.
        """
        number = self.last() + 1
        write_atomically(self._file, f"{number}\n".encode())
        return number

    def last(self) -> int:
        """The number of the last hub, 0 where there was none. Raises RunDirectoryError: it cannot be read."""
        try:
            return int(self._file.read_text()) if self._file.exists() else 0
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{self._file}, which counts the run's hubs, cannot be read: {error}; delete it once no process of the "
                "run is left, and they are counted anew"
            ) from error


class AppendedFile:
    """Appends lines to a file of rows, and puts the file back if somebody deletes or replaces it meanwhile.

    A descriptor is held from the first append on: through it the rows of a deleted file can still be read. It does not
    write, since a disk cannot be made read-only while a file is open for writing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: int | None = None
        self._end = 0
        """Size of the file after the last append, in bytes."""

    def append(self, rows: Iterable[Any]) -> None:
        """Append whole lines with one write, so that a killed process tears at most the last one.

        A disk that takes only a part of them is left with none: what came after a torn line would be lost with it.
        """
        data = _lines(rows)
        self._check()
        # Unbuffered: so nothing is left to write, and to fail again, when it is closed after an error.
        with writing(self._path), self._path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                with memoryview(data) as view:
                    done = 0
                    while done < len(view):
                        done += file.write(view[done:])
            except OSError:
                with suppress(OSError):
                    file.truncate(end)
                raise
            self._end = end + len(data)
            if self._held is None:
                self._hold()

    def _hold(self) -> None:
        self._held = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._held)

    def _check(self) -> None:
        """Warn if somebody has changed the file since the last append. Put it back if it was deleted or replaced."""
        if self._held is None:
            return
        ours = os.fstat(self._held)
        try:
            found = self._path.stat()
        except OSError:
            found = None
        if found is not None and os.path.samestat(found, ours):
            if found.st_size < self._end:
                _log.warning(
                    "%s was cut from %d to %d bytes by somebody else: the rows that were cut are lost",
                    *(self._path, self._end, found.st_size),
                )
            return
        with writing(self._path):
            with open(self._held, "rb", closefd=False) as file:
                file.seek(0)
                rows = file.read()
            kept = ""
            if found is not None:
                aside = self._path.with_name(f"{self._path.name}.replaced")
                self._path.replace(aside)
                kept = f"; the other file is now {aside.name}"
        write_atomically(self._path, rows)
        self._finalizer()
        self._hold()
        _log.warning("%s was deleted or replaced while the run wrote it: its rows are put back%s", self._path, kept)


class RunDirectory:
    """Paths, readers and writers of one run directory.

    The constructor touches nothing: use it to read. `RunDirectory.open` prepares the folder for a run that
    writes. All writers raise RunDirectoryError when the disk is full or the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.evals = path / "evals.jsonl"
        self.spans = path / "spans.jsonl"
        self.samples = path / "samples.jsonl"
        self.ledger = path / "ledger.json"
        self.summary = path / "summary.json"
        self.cluster = path / "cluster.json"
        self.trajectories = path / "trajectories"
        self.batches = path / "batches"
        self.checkpoints = path / "checkpoints"
        self.plots = path / "plots"
        self.earlier = path / "earlier"
        self.incarnations = HubIncarnations(path / "hub-lives")
        files = (self.metrics, self.evals, self.spans, self.samples)
        self._appended = {file: AppendedFile(file) for file in files}

    @classmethod
    def open(cls, path: Path, config_text: str, resume_at: int | None = None) -> RunDirectory:
        """Create the folders, write the resolved configuration and clear the way for the rows to come.

        `resume_at` is the version a resumed run continues from: what an earlier incarnation recorded beyond it moves to
        `earlier/`, because those steps will be done again. None starts a new run: the directory of an earlier run of
        this name moves as a whole to `<name>.1`, `<name>.2`, …
        """
        directory = cls(path)
        with writing(path, "check that run.output_dir names a folder you may write to"):
            if resume_at is None:
                _set_aside(path)
            for folder in (path, directory.trajectories, directory.batches, directory.checkpoints, directory.plots):
                folder.mkdir(parents=True, exist_ok=True)
            if resume_at is not None:
                directory._roll_back(resume_at)
        write_atomically(directory.config, config_text.encode())
        return directory

    def append_metrics(self, row: Row) -> None:
        """Append the row of a committed step."""
        self._appended[self.metrics].append([row])

    def append_evaluation(self, row: Row) -> None:
        """Append the row of a held-out evaluation."""
        self._appended[self.evals].append([row])

    def append_spans(self, spans: Iterable[Activity]) -> None:
        """Append bars of the timeline."""
        self._appended[self.spans].append(spans)

    def append_samples(self, samples: Iterable[SampleTimes]) -> None:
        """Append the samples of one step."""
        self._appended[self.samples].append(samples)

    def write_batch(self, batch: Batch, *, keep_all: bool) -> None:
        """Write what a step trains; without `keep_all` what lies before the oldest checkpoint goes."""
        with writing(self.batches):
            recording.write_batch(self.batches, batch)
            if not keep_all and (versions := recording.checkpointed(self.checkpoints)):
                recording.forget_before(self.batches, versions[0])

    def write_totals(self, file: Path, totals: Row | Summary) -> None:
        """Replace its `ledger` or its `summary` as a whole, so that readers never see half of one."""
        write_atomically(file, _pretty(totals))

    def read_metrics(self) -> list[dict[str, Any]]:
        """All steps, in the order they were recorded."""
        return read_rows(self.metrics, dict[str, Any])

    def read_undone(self) -> list[dict[str, Any]]:
        """The steps that earlier incarnations had recorded and later ones did again."""
        files = (folder / self.metrics.name for folder in sorted(self.earlier.glob("[0-9]*")))
        return [row for file in files for row in read_rows(file, dict[str, Any])]

    def read_evaluations(self) -> list[dict[str, Any]]:
        """All evaluations, in the order they were recorded."""
        return read_rows(self.evals, dict[str, Any])

    def read_spans(self) -> list[Activity]:
        """All bars of the timeline, in the order they were recorded."""
        return read_rows(self.spans, Activity)

    def read_samples(self) -> list[SampleTimes]:
        """All trained samples, in the order they were recorded."""
        return read_rows(self.samples, SampleTimes)

    def _roll_back(self, resume_at: int) -> None:
        """Move what the coming incarnation will do again to `earlier/`, and drop torn lines.

        A step and its samples belong to the past if it was trained before version `resume_at`, an evaluation if it
        saw no newer weights than that. Spans are facts about time and stay. The summary is that of the earlier
        incarnation.
        """
        used = [int(entry.name) for entry in self.earlier.glob("[0-9]*")]
        aside = self.earlier / f"{max(used, default=0) + 1:03d}"
        _split(self.metrics, aside, dict[str, Any], lambda row: row.get("step", 0) < resume_at)
        _split(self.evals, aside, dict[str, Any], lambda row: row.get("version_max", row.get("step", 0)) <= resume_at)
        _split(self.spans, aside, Activity, lambda _: True)
        _split(self.samples, aside, SampleTimes, lambda sample: sample.step < resume_at)
        for folder in (self.trajectories, self.batches):
            for file in sorted(folder.glob("*.*")):
                step = recording.step_named(file.name.partition(".")[0])
                if step is not None and step >= resume_at:
                    (aside / folder.name).mkdir(parents=True, exist_ok=True)
                    file.replace(aside / folder.name / file.name)
        if self.summary.exists():
            aside.mkdir(parents=True, exist_ok=True)
            self.summary.replace(aside / self.summary.name)


def _set_aside(path: Path) -> None:
    if path.exists():
        number = next(n for n in itertools.count(1) if not path.with_name(f"{path.name}.{n}").exists())
        path.rename(path.with_name(f"{path.name}.{number}"))


def write_atomically(path: Path, data: Buffer, *, durably: bool = True) -> None:
    """Replace a file as a whole: readers see the old content or the new one, also after a crash.

    Not `durably`, a machine that loses its power may leave it empty: for what somebody only looks at.
    """
    aside = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                if durably:
                    os.fsync(file.fileno())
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


@contextmanager
def writing(path: Path, advice: str = "") -> Generator[None]:
    """Turn the operating system's refusal into an error that says what to do: `advice`, unless the disk is full or the
    folder gone."""
    try:
        yield
    except OSError as error:
        advice = advice or f"check that you may write to {path.parent}"
        if error.errno == errno.ENOENT and not path.parent.exists():
            advice = f"the folder {path.parent} is gone: it was moved or removed while somebody wrote there"
        if error.errno in _FULL:
            advice = "free space on that disk; a run continues with run.resume=true"
        raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}; {advice}") from error


def _lines(rows: Iterable[Any]) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _whole_lines(path: Path, kind: type[T]) -> Iterator[tuple[bytes, T]]:
    """The lines that hold a row of this kind, each with its row.

    A crash may have torn the end of the file. Lines that are no such row otherwise are left out, and their number told.
    """
    decoder = msgspec.json.Decoder(kind)
    try:
        with opened(path) as file:
            data = file.read()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}: {error.strerror or error}") from error
    damaged = 0
    for line in data.splitlines(keepends=True):
        if line.endswith(b"\n"):
            try:
                yield line, decoder.decode(line)
            except NO_ROW:
                damaged += 1
    if damaged:
        _log.warning("%s: %d damaged lines are left out", path, damaged)


def read_rows(path: Path, kind: type[T]) -> list[T]:
    """The rows of a file; `kind` may have less than they have."""
    return [row for _, row in _whole_lines(path, kind)]


def _split(path: Path, aside: Path, kind: type[T], stays: Callable[[T], bool]) -> None:
    """Keep the rows that stay; move the others under `aside` first, so that a crash in between loses none."""
    kept: list[bytes] = []
    cut: list[bytes] = []
    for line, row in _whole_lines(path, kind):
        (kept if stays(row) else cut).append(line)
    if cut:
        aside.mkdir(parents=True, exist_ok=True)
        write_atomically(aside / path.name, b"".join(cut))
    if path.exists() and path.stat().st_size != sum(map(len, kept)):
        write_atomically(path, b"".join(kept))
