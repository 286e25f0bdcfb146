"""The run directory: all files that a run writes, their readers and writers, and `Followed` for files that still grow.

    config.toml                       the resolved configuration
    flash_code_0123456789abcdef.py    functions and classes of a Python program, by value (flash.config.shipping)
    metrics.jsonl                     one object per step
    evals.jsonl                       one object per held-out evaluation
    spans.jsonl                       one `Activity` per line: an engine or a trainer rank did something for some time
    samples.jsonl                     one `SampleTimes` per trained sample: lengths, times, versions
    trajectories/step-000012.arrow    a few readable samples of each step (flash.observe.rundir.samples)
    batches/step-000012.bin           exact batch of a step (flash.observe.rundir.recording)
    journal/                          events of samples since a checkpoint (flash.run.journal)
    ledger.json                       counts of the run's samples and tokens so far, by their fate
    summary.json                      result of a run that has ended
    cluster.json                      nodes, engines and failures (flash.observe.cluster)
    checkpoints/, plots/, track/      written by other packages
    earlier/001/                      rows, batches, readable samples and the summary that a resume moved away
    hub-lives                         number of hub processes that the run has had

Invariants: a line is appended whole, and the operating system has it before the call returns. A line that a crash cut
off is never read as a row. Other files are replaced atomically. Rows are removed from a file only after they are in
`earlier/`. A file of rows that somebody deletes while the run writes it is restored.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
import tomllib
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from flash.branches import spans_by_turn
from flash.errors import DECODE_ERRORS, RunDirectoryError
from flash.observe.rundir import recording
from flash.observe.rundir.summary import Summary, number
from flash.types import Activity, Batch, Trajectory

if TYPE_CHECKING:
    from typing_extensions import Buffer

Row = Mapping[str, Any]
"""Content of one line of `metrics.jsonl` or `evals.jsonl`, or of `ledger.json`: numbers by their names."""
T = TypeVar("T")

_log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, or of a user's quota."""
FACTS = (
    ("model", ("model", "path")),
    ("environment", ("env", "path")),
    ("objective", ("algorithm", "objective")),
    ("α", ("train", "async_ratio")),
    ("steps", ("run", "steps")),
    ("batch", ("train", "batch_size")),
    ("seed", ("run", "seed")),
)
"""Settings that describe a run to people: a name for each, and its section and key in the configuration."""


def open_regular_file(path: Path) -> BufferedReader:
    """Return a regular file, opened for reading. The plain `open` would block at a pipe; this function raises.

    Raises:
        FileNotFoundError: there is no such file.
        RunDirectoryError: it is no regular file, or it cannot be opened, for example without permission.
    """
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - returned
    except FileNotFoundError:
        raise  # callers handle a missing file themselves
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}: {error.strerror or error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise RunDirectoryError(f"cannot read {path}: it is a pipe or a device, expected a regular file; remove it")
    return file


class Followed(Generic[T]):
    """Rows of a growing file, for `flash watch`, `flash view` and trackers, which read while the run writes.

    Each call of `read` adds the lines that were appended since the last call, as far as they are complete. If the file
    was replaced or cut, as a resumed run does, `rows` starts again from the beginning of the file, and `restarts`
    increases.
    """

    def __init__(self, path: Path, kind: type[T]) -> None:
        """Prepare to read rows of type `kind` from the file `path`, which need not exist yet."""
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._file: tuple[int, int] | None = None
        """Device and inode of the file that was read; None if there was none."""
        self._offset = 0
        """Bytes of the file that were read."""
        self.rows: list[T] = []
        """Rows so far. A line that is no row is left out."""
        self.restarts = 0
        """Number of times that `rows` started again. After that, results computed from earlier rows are out of date."""

    def read(self) -> None:
        """Add the appended rows to `rows`. Raises RunDirectoryError if the file cannot be read."""
        try:
            with open_regular_file(self._path) as file:
                status = os.fstat(file.fileno())
                self._forget_replaced((status.st_dev, status.st_ino), status.st_size)
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            self._forget_replaced(None, 0)
            return
        except OSError as error:
            raise RunDirectoryError(f"cannot read {self._path}: {error.strerror or error}") from error
        # A line without its end is read again by the next call.
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with suppress(*DECODE_ERRORS):
                self.rows.append(self._decoder.decode(line))

    def _forget_replaced(self, file: tuple[int, int] | None, size: int) -> None:
        """Forget all rows if this is another file than before, or if it is shorter than the part that was read.

        `file` is the device and inode of the file that `read` has found, None if there is none; `size` is its bytes.
        """
        if file != self._file or size < self._offset:
            if self._file is not None:
                self.restarts += 1
            self._file, self._offset, self.rows = file, 0, []


class TurnTimes(msgspec.Struct, frozen=True, array_like=True):
    """Lengths and times of a response of a trained sample, without its text."""

    observation_tokens: int
    """Tokens of the observation before the response. In the first turn of a branch: all tokens that the branch began
    with."""
    tokens: int
    """Tokens of the response."""
    start: float
    """Time when the response was requested, in Unix seconds."""
    generate_s: float
    """Seconds from the request to the last token."""
    env_s: float
    """Seconds of the environment's step after the response."""
    oldest_version: int
    """Oldest policy version of the response's tokens; −1 if the response is empty."""
    branch: int = 0
    """Number of the response's branch in its episode."""


class SampleTimes(msgspec.Struct, frozen=True):
    """Lengths and times of a trained sample. `flash calibrate` fits the simulator to them."""

    step: int
    """Step that trained the sample."""
    group_id: int
    """Number of the group: the samples with the same problem, whose rewards are compared."""
    reward: float
    turns: list[TurnTimes]
    """Responses in the order in which the episode played them."""


def sample_times(trajectory: Trajectory, step: int) -> SampleTimes:
    """Return lengths and times of a trajectory that was trained at `step`: a row of `samples.jsonl`."""
    spans = spans_by_turn(trajectory)
    oldest = _oldest_versions(trajectory)
    # The spans of a trajectory with branches are ordered by branch, and its turns by time. Order the versions by turn.
    if spans is not trajectory.action_spans:
        of_span = dict(zip(trajectory.action_spans, oldest, strict=True))
        oldest = [of_span[span] for span in spans]
    turns: list[TurnTimes] = []
    ends = list(trajectory.branches)  # of each branch: the end of its tokens so far, at first its first token
    for span, turn, version in zip(spans, trajectory.turns, oldest, strict=True):
        observed, sampled = span.start - ends[turn.branch], span.stop - span.start
        turns.append(TurnTimes(observed, sampled, turn.start, turn.generate_s, turn.env_s, version, turn.branch))
        ends[turn.branch] = span.stop
    return SampleTimes(step, trajectory.task.group_id, trajectory.reward, turns)


def _oldest_versions(trajectory: Trajectory) -> list[int]:
    """Return the oldest policy version in each action span (tokens that the policy sampled); −1 for an empty span.

    `trajectory.versions` is run-length encoded over all action tokens, so a run may reach over several spans.
    """
    runs, left, version = iter(trajectory.versions), 0, 0
    oldest: list[int] = []
    for span in trajectory.action_spans:
        wanted, versions = span.stop - span.start, list[int]()
        while wanted > 0:
            if left == 0:
                run = next(runs)
                left, version = run.count, run.version
            versions.append(version)
            taken = min(wanted, left)
            wanted, left = wanted - taken, left - taken
        oldest.append(min(versions, default=-1))
    return oldest


class HubNumbers:
    """Numbers of the hub processes of a run, in the file `hub-lives`.

    Numbers of leases begin with the number of the hub, so that two hubs never give the same lease number.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def begin(self) -> int:
        """Return the number of the hub that starts now, higher than that of all earlier hubs.

        The process of the hub calls this once, when it starts. The number is in the file before this returns, so that
        no two hubs can ever have the same one.

        Raises:
            RunDirectoryError: the file cannot be read or written.
        """
        number = self.last() + 1
        write_atomically(self._file, f"{number}\n".encode())
        return number

    def last(self) -> int:
        """Return the number of the last hub; 0 if there was none.

        Raises RunDirectoryError if the file cannot be read.
        """
        try:
            return int(self._file.read_text()) if self._file.exists() else 0
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{self._file}, which counts the run's hubs, cannot be read: {error}; delete it once no process of the "
                "run is left, and counting starts again at 1"
            ) from error


class AppendedFile:
    """Appender of lines to a file of rows. It restores the file if somebody deletes or replaces it meanwhile.

    `RunDirectory` has one for each file of rows. From the first append on, a descriptor stays open: the rows of a
    deleted file can still be read through it. It is open for reading only, since a disk cannot be made read-only while
    a file on it is open for writing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        """Descriptor of the file, open for reading only; None before the first append."""
        self._end = 0
        """Size of the file after the last append, in bytes."""

    def append(self, rows: Iterable[Any]) -> None:
        """Append each row as a line of JSON, all with one write: a killed process cuts off at most the last line.

        Raises:
            RunDirectoryError: the file cannot be written, for example because the disk is full.
        """
        data = _lines(rows)
        self._restore()
        # The file is unbuffered. Otherwise closing it after an error would write the rest, which would fail again.
        with writing(self._path), self._path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                with memoryview(data) as view:
                    done = 0
                    while done < len(view):
                        done += file.write(view[done:])
            except OSError:
                # Cut the file back to its old end: a later line behind a cut-off one would be lost with it.
                with suppress(OSError):
                    file.truncate(end)
                raise
            self._end = end + len(data)
            if self._descriptor is None:
                self._open_descriptor()

    def _open_descriptor(self) -> None:
        """Open the descriptor that keeps a deleted file readable. It is closed with this object."""
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)

    def _restore(self) -> None:
        """Write the file again if somebody has deleted or replaced it since the last append, and log a warning.

        A file that somebody has cut cannot be restored: then this only logs a warning.
        """
        if self._descriptor is None:
            return  # Nothing was appended yet.
        ours = os.fstat(self._descriptor)
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
            with open(self._descriptor, "rb", closefd=False) as file:
                file.seek(0)
                rows = file.read()
            kept = ""
            if found is not None:
                aside = self._path.with_name(f"{self._path.name}.replaced")
                self._path.replace(aside)
                kept = f"; the other file is now {aside.name}"
        write_atomically(self._path, rows)
        self._finalizer()  # closes the descriptor of the deleted file
        self._open_descriptor()
        _log.warning("%s was deleted or replaced while the run wrote it: its rows are put back%s", self._path, kept)


class RunDirectory:
    """Paths, readers and writers of one run directory.

    The constructor touches no file. Readers use it; a run that writes uses `RunDirectory.open`, which prepares the
    folder. The recorder of the run and its `Batches` call the methods that write, with each event of the run. These
    methods raise RunDirectoryError if the disk is full or the folder cannot be written. Those that read raise it if a
    file cannot be read; a file that is missing has no rows.
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
        self.hub_numbers = HubNumbers(path / "hub-lives")
        files = (self.metrics, self.evals, self.spans, self.samples)
        # An appender opens its file only when it appends, so it costs a reader nothing.
        self._appended = {file: AppendedFile(file) for file in files}

    @classmethod
    def open(cls, path: Path, config_text: str, resume_at: int | None = None) -> RunDirectory:
        """Prepare the directory of a run that begins or is resumed, and return it.

        Creates the folders and writes the resolved configuration, `config_text`. `resume_at` is the version that a
        resumed run goes on from. Rows of later steps move to `earlier/`, because the run makes these steps again. None
        starts a new run: the directory of an earlier run of this name is renamed to `<name>.1`, `<name>.2`, …
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
        """Append the row of a committed step to `metrics.jsonl`."""
        self._appended[self.metrics].append([row])

    def append_evaluation(self, row: Row) -> None:
        """Append the row of a held-out evaluation to `evals.jsonl`."""
        self._appended[self.evals].append([row])

    def append_spans(self, spans: Iterable[Activity]) -> None:
        """Append activities, the bars of the timeline, to `spans.jsonl`."""
        self._appended[self.spans].append(spans)

    def append_samples(self, samples: Iterable[SampleTimes]) -> None:
        """Append lengths and times of the samples of a step to `samples.jsonl`."""
        self._appended[self.samples].append(samples)

    def sync_rows(self) -> list[Path]:
        """Force the files of rows to the disk, so that they survive a failure of the machine. Returns these files."""
        files = [file for file in self._appended if file.exists()]
        for file in files:
            with writing(file), file.open("rb") as stream:
                os.fsync(stream.fileno())
        return files

    def write_batch(self, batch: Batch, *, keep_all: bool) -> None:
        """Write the exact batch of a step. Unless `keep_all`, delete the batches from before the oldest checkpoint."""
        with writing(self.batches):
            recording.write_batch(self.batches, batch)
            if not keep_all and (versions := recording.checkpointed(self.checkpoints)):
                recording.forget_before(self.batches, versions[0])

    def write_ledger(self, totals: Row) -> None:
        """Replace `ledger.json`: the counts of samples and tokens by their fate."""
        write_atomically(self.ledger, _pretty(totals))

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`, which shows that the run has ended."""
        write_atomically(self.summary, _pretty(summary))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the rows of all steps, in the order in which they were recorded."""
        return read_rows(self.metrics, dict[str, Any])

    def read_earlier_metrics(self) -> list[dict[str, Any]]:
        """Return the rows of `metrics.jsonl` in `earlier/`: rows of steps that a resumed run made again."""
        files = (folder / self.metrics.name for folder in sorted(self.earlier.glob("[0-9]*")))
        return [row for file in files for row in read_rows(file, dict[str, Any])]

    def read_evaluations(self) -> list[dict[str, Any]]:
        """Return the rows of all evaluations, in the order in which they were recorded."""
        return read_rows(self.evals, dict[str, Any])

    def read_spans(self) -> list[Activity]:
        """Return all activities, in the order in which they were recorded."""
        return read_rows(self.spans, Activity)

    def read_samples(self) -> list[SampleTimes]:
        """Return lengths and times of all trained samples, in the order in which they were recorded."""
        return read_rows(self.samples, SampleTimes)

    def _roll_back(self, resume_at: int) -> None:
        """Move rows and files of steps that the resumed run makes again to `earlier/`, and drop cut-off lines.

        The run is resumed from version `resume_at`. A step and its samples stay if the step trained a version before
        it. An evaluation stays if no newer version sampled for it. Spans stay, because they are about times and not
        about steps. The summary moves, because the run goes on.
        """
        # Each resume that moves files has its own folder. Somebody may have put others beside them, such as `001 copy`.
        used = [int(entry.name) for entry in self.earlier.glob("[0-9]*") if entry.name.isdecimal()]
        aside = self.earlier / f"{max(used, default=0) + 1:03d}"
        _split(self.metrics, aside, dict[str, Any], lambda row: (number(row, "step") or 0) < resume_at)

        def sampled(row: Row) -> float:
            """Return the newest version that sampled for an evaluation. A row of `flash sft` has only its step."""
            return number(row, "version_max" if "version_max" in row else "step") or 0

        _split(self.evals, aside, dict[str, Any], lambda row: sampled(row) <= resume_at)
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

    def has_ended(self) -> bool:
        """Return True if the run has ended, which its summary shows. A resumed run moves the summary away."""
        return self.summary.is_file()

    def facts(self) -> dict[str, str]:
        """Return the main settings of the run under names for people, for `flash watch` and `flash view`.

        The result is empty if the configuration is missing or damaged. If it may not be read, or is no regular file,
        the only entry is the error message.
        """
        try:
            with open_regular_file(self.config) as file:
                settings = tomllib.loads(file.read().decode("utf-8-sig"))
        except (OSError, ValueError, RecursionError):
            return {}
        except RunDirectoryError as error:
            return {"no configuration": str(error)}
        found: dict[str, str] = {}
        for name, (section, key) in FACTS:
            table = settings.get(section)
            if isinstance(table, dict) and (value := cast("dict[str, Any]", table).get(key)) is not None:
                found[name] = str(value)
        return found


def _set_aside(path: Path) -> None:
    """Rename the directory of an earlier run, if there is one, to `<name>.N`, with the smallest number that is free."""
    if path.exists():
        number = next(n for n in itertools.count(1) if not path.with_name(f"{path.name}.{n}").exists())
        path.rename(path.with_name(f"{path.name}.{number}"))


def write_atomically(path: Path, data: Buffer, *, durably: bool = True) -> None:
    """Replace the content of a file atomically: readers see the old content or the new one, also after a crash.

    Without `durably` the file may be empty after a power failure. Use that for files that nothing is resumed from.

    Raises:
        RunDirectoryError: the file cannot be written. It has its old content then.
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
    """Turn an OSError inside the block into a RunDirectoryError that says what to do.

    `path` is the file or the folder that is written, also outside a run directory. `advice` is the advice in the
    message, except for a full disk and for a missing folder: these two errors have advice of their own.
    """
    try:
        yield
    except OSError as error:
        advice = advice or f"check that you may write to {path.parent}"
        # If `path` is a folder, the file that failed is in it.
        folder = Path(error.filename).parent if isinstance(error.filename, str) else path.parent
        if error.errno == errno.ENOENT and not folder.exists():
            advice = f"the folder {folder} is gone: it was moved or removed while files were written there"
        if error.errno in _FULL:
            advice = "free space on that disk and start the command again; `flash train` continues with run.resume=true"
        raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}; {advice}") from error


def _lines(rows: Iterable[Any]) -> bytes:
    """Return the rows as lines of JSON."""
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def _pretty(value: Any) -> bytes:
    """Return a value as indented JSON, for files that people open."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _whole_lines(path: Path, kind: type[T]) -> Iterator[tuple[bytes, T]]:
    """Yield each line that is a row of type `kind`, with the row. A missing file has no lines.

    A last line without its end was cut off by a crash, and is left out. Other lines that are no such row are skipped,
    and their number is logged. Raises RunDirectoryError if the file cannot be read.
    """
    decoder = msgspec.json.Decoder(kind)
    try:
        with open_regular_file(path) as file:
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
            except DECODE_ERRORS:  # a crash cut the line off and later lines follow, or the disk is broken
                damaged += 1
    if damaged:
        _log.warning("%s: %d damaged lines are skipped", path, damaged)


def read_rows(path: Path, kind: type[T]) -> list[T]:
    """Return the rows of a file; empty if there is no file. `kind` may have fewer fields than the rows.

    Raises RunDirectoryError if the file cannot be read.
    """
    return [row for _, row in _whole_lines(path, kind)]


def _split(path: Path, aside: Path, kind: type[T], stays: Callable[[T], bool]) -> None:
    """Move the rows for which `stays` is False from the file `path` to a file of its name in the folder `aside`.

    Lines that are no row of type `kind` are removed from the file.
    """
    kept: list[bytes] = []
    moved: list[bytes] = []
    for line, row in _whole_lines(path, kind):
        (kept if stays(row) else moved).append(line)
    # In this order a crash in between loses no row.
    if moved:
        aside.mkdir(parents=True, exist_ok=True)
        write_atomically(aside / path.name, b"".join(moved))
    # The sizes are equal if no line was moved and none was damaged.
    if path.exists() and path.stat().st_size != sum(map(len, kept)):
        write_atomically(path, b"".join(kept))
