"""The journal in files: `journal/000003-step-000020.log` in the run directory, one from each checkpoint to the next.

A file is a sequence of records (`flash.observe.rundir.recording`): a `JournalHead`, then events
(`flash.samples.journal`). Files are numbered over all incarnations of a run, and a checkpoint names the one that
follows it. A record that a crash has torn is the end of its file; one that is damaged with others behind it is an
error. What lies before the oldest checkpoint is deleted.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import anyio
import msgspec
from anyio.to_thread import run_sync

from flash.errors import RecordingError
from flash.observe.rundir.recording import HEADER, append_frame, checkpointed, read_frames, whole_frame_after
from flash.observe.rundir.rundir import RunDirectory
from flash.samples.journal import Event
from flash.samples.replay import Replay
from flash.trainer.checkpoint_files import sync_to_disk

_NAME = re.compile(r"([0-9]{6,})-step-([0-9]{6,})\.log")
_DAMAGED = "damaged-"


class JournalHead(msgspec.Struct, frozen=True, array_like=True):
    """The first record of a file."""

    version: int
    """Of the checkpoint that it follows."""
    before: int
    """Events of the run in the files before it: one that is missing is noticed."""


_HEADS = msgspec.msgpack.Decoder(JournalHead)
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


class JournalPlace(NamedTuple):
    """Where a journal goes on."""

    number: int
    """Of the next file."""
    events: int
    """Before it."""


# -- writing ---------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """What is to be written to one file."""

    number: int
    version: int
    data: bytearray


class FileJournal:
    """Writes a journal; `run` has to run as a task.

    What is recorded while a write is under way is the next write, so that the disk's pace holds up who waits for an
    answer and nobody else. A disk that is full holds up nobody: people are told, and the next checkpoint tries again.

    Args:
        run_dir: the run directory.
        version: the one that the run goes on from.
        place: where the journal goes on.
        to_disk: force each write to the disk: then it also survives the end of the machine.
        tell: is given what people should know.
    """

    def __init__(
        self, run_dir: Path, version: int, place: JournalPlace, *, to_disk: bool, tell: Callable[[str], None]
    ) -> None:
        self._files = _Files(run_dir, to_disk)
        self._tell = tell
        self._failing = False
        self._next_number = place.number
        self._recorded = self._written = place.events
        self._parts: list[_Part] = []
        self._wake = anyio.Event()
        self._progress = anyio.Event()
        self.begin(version)

    def record(self, event: Event) -> None:
        """As of `flash.samples.journal.Journal`."""
        append_frame(self._parts[-1].data, event)
        self._recorded += 1
        self._wake.set()

    def begin(self, version: int) -> int:
        """As of `flash.samples.journal.Journal`."""
        part = _Part(self._next_number, version, bytearray())
        append_frame(part.data, JournalHead(version, self._recorded))
        self._parts.append(part)
        self._next_number += 1
        return part.number

    async def written(self) -> None:
        """As of `flash.samples.journal.Journal`."""
        recorded = self._recorded
        while self._written < recorded:
            await self._progress.wait()

    async def run(self) -> None:
        """Write what is recorded, until cancelled.

        Consumes records. Waits for some, then for the disk. Unblocked by `record`. Produces files, and wakes those who
        wait for it.
        """
        alone = anyio.CapacityLimiter(1)
        try:
            while True:
                await self._wake.wait()
                self._wake = anyio.Event()
                parts, recorded = self._parts, self._recorded
                self._parts = [_Part(parts[-1].number, parts[-1].version, bytearray())]
                problem = await run_sync(self._files.write, parts, limiter=alone)
                self._say(problem, parts[-1].version)
                self._written = recorded
                self._progress.set()
                self._progress = anyio.Event()
        finally:
            self._files.close()

    def _say(self, problem: OSError | None, version: int) -> None:
        if problem is not None and not self._failing:
            self._tell(
                f"the journal cannot be written: {problem}. The run goes on, and the next checkpoint tries again; a "
                "restart before that would generate again what is delivered from now on"
            )
        elif problem is None and self._failing:
            self._tell(f"the journal is written again, since the checkpoint of version {version}")
        self._failing = problem is not None


class _Files:
    """The files, as the writing thread has them."""

    def __init__(self, run_dir: Path, to_disk: bool) -> None:
        self._run_dir = run_dir
        self._folder = journal_folder(run_dir)
        self._to_disk = to_disk
        self._number = -1
        self._out: FileIO | None = None
        self._end = 0
        self._problem: OSError | None = None
        """Why nothing more is written to this file: there must be no gap in it."""

    def write(self, parts: list[_Part]) -> OSError | None:
        """Append to the files; what is wrong with the last one of them."""
        for part in parts:
            try:
                if part.number != self._number:
                    self._open(part)
                if self._problem is None and self._out is not None:
                    self._append(self._out, part.data)
            except OSError as error:
                self._problem = error
                self._cut()
        return self._problem

    def _open(self, part: _Part) -> None:
        self.close()
        self._number, self._end, self._problem = part.number, 0, None
        self._folder.mkdir(exist_ok=True)
        self._forget()
        # Unbuffered: so nothing is left to write, and to fail again, when it is closed after an error.
        self._out = (self._folder / f"{part.number:06d}-step-{part.version:06d}.log").open("wb", buffering=0)
        if self._to_disk:
            sync_to_disk(self._folder)

    def _forget(self) -> None:
        """Delete what no checkpoint needs."""
        kept = checkpointed(RunDirectory(self._run_dir).checkpoints)
        for file, version in _files(self._folder).values():
            if kept and version < kept[0]:
                file.unlink(missing_ok=True)

    def _append(self, out: FileIO, data: bytearray) -> None:
        file = Path(os.fsdecode(out.name))
        # A deleted file would take the records, and a restart would miss them.
        if not (file.exists() and os.path.samestat(file.stat(), os.fstat(out.fileno()))):
            raise FileNotFoundError(errno.ENOENT, "it was deleted or replaced while the run wrote it", str(file))
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                done += out.write(view[done:])
        if self._to_disk:
            os.fsync(out.fileno())
        self._end += len(data)

    def _cut(self) -> None:
        """Leave no part of a record behind."""
        if self._out is not None:
            with suppress(OSError):
                self._out.truncate(self._end)
        self.close()

    def close(self) -> None:
        if self._out is not None:
            with suppress(OSError):
                self._out.close()
        self._out = None


# -- reading ---------------------------------------------------------------------------------------------------------


def journal_folder(run_dir: Path) -> Path:
    """Where the journal of a run lies."""
    return run_dir / "journal"


def replay_journal(run_dir: Path, version: int, number: int, replay: Replay) -> tuple[JournalPlace, list[str]]:
    """Make all changes again that came after a checkpoint; where the journal goes on, and what people should know.

    A torn end is cut off, and what does not follow on the rest is deleted.

    Args:
        run_dir: the run directory.
        version: the checkpoint's.
        number: that of the first file after it.
        replay: makes the changes.

    Raises:
        RecordingError: a file is damaged, or does not fit the checkpoint.
    """
    files, notes = _files(journal_folder(run_dir)), list[str]()
    events: int | None = None
    while number in files:
        reader = _Reader(files[number][0], replay)
        head = reader.head()
        if head is not None and events is None and head.version != version:
            raise RecordingError(
                f"{reader.file} follows a checkpoint of version {head.version}, where that of version {version} was "
                "looked for: it was copied from elsewhere"
            )
        if head is None:
            break
        if events is not None and head.before != events:
            notes.append(f"{reader.file.name} and what follows is of no use: records before it could not be written")
            break
        events = head.before + reader.events()
        if reader.cut:
            notes.append(f"{reader.file} ended in the middle of a record: its last {reader.cut} bytes were cut off")
        number += 1
    for later, (file, _) in files.items():
        if later >= number:
            file.unlink(missing_ok=True)
    return JournalPlace(number, events or 0), notes


def set_journal_aside(run_dir: Path, number: int) -> str:
    """Keep a damaged journal, from this file on, for people; the names of its files."""
    names: list[str] = []
    for later, (file, _) in sorted(_files(journal_folder(run_dir)).items()):
        if later >= number:
            kept = file.with_name(f"{_DAMAGED}{file.name}")
            file.replace(kept)
            names.append(kept.name)
    return ", ".join(names)


def forget_journal(run_dir: Path) -> None:
    """Delete it: a journal that misses an incarnation of the run is of no use."""
    shutil.rmtree(journal_folder(run_dir), ignore_errors=True)


def _files(folder: Path) -> dict[int, tuple[Path, int]]:
    """By their numbers, the files and the versions of the checkpoints that they follow."""
    names = ((file, _NAME.fullmatch(file.name)) for file in folder.glob("*.log"))
    return {int(match[1]): (file, int(match[2])) for file, match in names if match is not None}


class _Reader:
    """Reads one file. `cut`: how many bytes of a torn record were taken from its end."""

    def __init__(self, file: Path, replay: Replay) -> None:
        self.file = file
        self.cut = 0
        self._replay = replay
        self._records = self._read()

    def head(self) -> JournalHead | None:
        """The first record; None: there is none."""
        for offset, record in self._records:
            try:
                return _HEADS.decode(record)
            except msgspec.DecodeError as error:
                raise self._misfit(offset, error) from error
        return None

    def events(self) -> int:
        """Make all changes again; their number."""
        count = 0
        for offset, record in self._records:
            try:
                self._replay.apply(_EVENTS.decode(record))
            except Exception as error:  # what does not fit the state can fail in any way
                raise self._misfit(offset, error) from error
            count += 1
        return count

    def _misfit(self, offset: int, error: Exception) -> RecordingError:
        return RecordingError(
            f"{self.file} does not fit the checkpoint that it follows, as when another version of Flash wrote it: at "
            f"byte {offset}, {type(error).__name__}: {error}"
        )

    def _read(self) -> Iterator[tuple[int, bytes]]:
        """The records, each with the byte at which it begins."""
        try:
            with self.file.open("rb") as source:
                yield from self._read_from(source)
        except OSError as error:
            raise RecordingError(f"{self.file} cannot be read: {error.strerror or error}") from error

    def _read_from(self, source: BinaryIO) -> Iterator[tuple[int, bytes]]:
        records, offset = read_frames(source), 0
        while True:
            try:
                record = next(records, None)
            except ValueError as error:
                if whole_frame_after(self.file, offset):
                    raise RecordingError(f"{self.file} is damaged at byte {offset}: {error}") from error
                self.cut = self.file.stat().st_size - offset
                os.truncate(self.file, offset)
                return
            if record is None:
                return
            yield offset, record
            offset += HEADER.size + len(record)
