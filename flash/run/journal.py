"""Journal in files: `journal/000003-step-000020.log` in the run directory, one file from each checkpoint to the next.

The journal has the events of samples since a checkpoint: what was leased, delivered and trained. The hub records each
event in a `FileJournal`. When a run starts again, `flash.run.restart.restore_hub_state` calls `replay_journal`, which
applies the events to the state of the checkpoint.

A file is a sequence of records (`flash.observe.rundir.recording`): a `JournalHead`, followed by events
(`flash.samples.journal`). Files are numbered over all incarnations of a run, and each checkpoint stores the number of
the file that follows it. A crash can leave an incomplete record at the end of a file; it is cut off. A damaged record
with others behind it is an error. Files from before the oldest checkpoint are deleted.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from io import FileIO
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

import anyio
import msgspec
from anyio.to_thread import run_sync

from flash.errors import DECODE_ERRORS, RecordingError, RunDirectoryError
from flash.observe.rundir.recording import HEADER, append_frame, checkpointed, read_frames, whole_frame_after
from flash.observe.rundir.rundir import RunDirectory
from flash.samples.journal import Event, Replay
from flash.trainer.checkpoint_files import sync_to_disk

_NAME = re.compile(r"([0-9]{6,})-step-([0-9]{6,})\.log")
"""Pattern of a file's name. The groups are the number of the file and the version of the checkpoint before it."""
_DAMAGED = "damaged-"
"""Beginning of the names of damaged files, which are kept so that people can examine them."""


InThread = Callable[[Callable[[], OSError | None]], Awaitable[OSError | None]]
"""Function that calls a blocking function in a thread, and returns the result of the function."""


class JournalHead(msgspec.Struct, frozen=True, array_like=True):
    """First record of a file of the journal."""

    version: int
    """Version of the checkpoint that the file follows."""
    before: int
    """Number of the run's events in all files before this one. A missing file is noticed by this number."""


_HEADS = msgspec.msgpack.Decoder(JournalHead)
"""Decoder of the first record of a file."""
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
"""Decoder of all other records."""


class JournalPlace(NamedTuple):
    """Place where a restarted hub continues the journal, found by `replay_journal`."""

    number: int
    """Number of the next file."""
    events: int
    """Number of events in the files before it."""


# -- writing ---------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """Records to be appended to one file of the journal. The first part of a file makes the file."""

    number: int
    """Number of the file."""
    version: int
    """Version of the checkpoint that the file follows."""
    data: bytearray
    """Records, each with its length in front. `FileJournal.record` appends to it until it is written."""


class FileJournal:
    """Writer of a journal. The owner runs `run` as a task; `flash.run.node_loop` does.

    The hub records events with `record`, and calls `begin` at each checkpoint. Events that are recorded during a write
    belong to the next write. So a slow disk delays only requests that wait for `written`. A full disk delays nothing:
    the user gets a message, and the writer tries again at the next checkpoint.

    Args:
        run_dir: the run directory.
        version: version from which the run continues.
        place: place where the journal is continued.
        to_disk: True to force each write to the disk, so that it survives a crash of the machine.
        note: called with messages for the user.
        in_thread: calls a function that writes, without blocking the event loop. None: a thread of the journal's own.
    """

    def __init__(
        self,
        run_dir: Path,
        version: int,
        place: JournalPlace,
        *,
        to_disk: bool,
        note: Callable[[str], None],
        in_thread: InThread | None = None,
    ) -> None:
        self._files = _Files(run_dir, to_disk)
        self._note = note
        # The thread has a limit of its own: other users of threads, such as a slow environment, must not delay the
        # journal.
        self._in_thread: InThread = in_thread or partial(run_sync, limiter=anyio.CapacityLimiter(1))
        self._failing = False
        """True if the last write has failed."""
        self._next_number = place.number
        """Number of the next file."""
        self._recorded = self._written = place.events
        """Numbers of the run's events that were recorded, and that were written."""
        self._parts: list[_Part] = []
        """Data for the next write. The last part is that of the present file."""
        self._wake = anyio.Event()
        """Event that is set when an event was recorded, and replaced by a new one before each write."""
        self._progress = anyio.Event()
        """Event that is set after each write, and then replaced by a new one; set for good when `run` has ended."""
        self._closed = False
        """True when `run` has ended, so that nothing more is written."""
        self.begin(version)

    def record(self, event: Event) -> None:
        """Record an event: only in memory; `run` writes it. Implements `flash.samples.journal.Journal`.

        The hub's buffer of samples calls this for each change of its state, in the order of the changes.
        """
        append_frame(self._parts[-1].data, event)
        self._recorded += 1
        self._wake.set()

    def begin(self, version: int) -> int:
        """Start a new file, for the events after the checkpoint of `version`, and return the number of the file.

        Implements `flash.samples.journal.Journal`. The hub calls this when it saves its state into a checkpoint, and
        the constructor for the first file of this process. The next write makes the file.
        """
        part = _Part(self._next_number, version, bytearray())
        append_frame(part.data, JournalHead(version, self._recorded))
        self._parts.append(part)
        self._next_number += 1
        return part.number

    async def written(self) -> None:
        """Wait until all events that are recorded now are written, or a write has failed.

        Implements `flash.samples.journal.Journal`. The hub calls this before it acknowledges results of a node, gives a
        batch to the ranks, or acknowledges a step. So a crash does not make it forget them.

        Raises:
            RunDirectoryError: `run` has ended, so that the events will never be written.
        """
        recorded = self._recorded
        while self._written < recorded:
            if self._closed:
                raise RunDirectoryError("the journal was closed before its last events were written")
            await self._progress.wait()

    async def run(self) -> None:
        """Write recorded events to the files, until cancelled.

        Consumes recorded events. Waits for some, then for the disk. Unblocked by `record`. Produces files, and wakes
        the callers of `written`. A cancellation waits for the end of a running write, so the file is closed after it.
        """
        try:
            while True:
                await self._wake.wait()
                self._wake = anyio.Event()
                parts, recorded = self._parts, self._recorded
                # Events that are recorded during the write continue the same file.
                self._parts = [_Part(parts[-1].number, parts[-1].version, bytearray())]
                problem = await self._in_thread(partial(self._files.write, parts))
                self._report(problem, parts[-1].version)
                # Also after an error: callers of `written` must not wait for a full disk.
                self._written = recorded
                self._progress.set()
                self._progress = anyio.Event()
        finally:
            self._files.close()
            # A caller of `written` may be shielded from the cancellation that has ended this task. It would wait
            # forever, and keep the process from ending.
            self._closed = True
            self._progress.set()

    def _report(self, problem: OSError | None, version: int) -> None:
        """Report the first failure of a series of writes to the user, and the first success after it.

        Args:
            problem: the error of the last write; None if it succeeded.
            version: version of the checkpoint that the written file follows.
        """
        if problem is not None and not self._failing:
            self._note(
                f"the journal cannot be written: {problem}. The run goes on, and the next checkpoint tries again; a "
                "restart before that would generate again what is delivered from now on"
            )
        elif problem is None and self._failing:
            self._note(f"the journal is written again, since the checkpoint of version {version}")
        self._failing = problem is not None


class _Files:
    """Files of a journal, for writing. Only the thread that `FileJournal.run` waits for uses this object.

    Args:
        run_dir: the run directory.
        to_disk: True to force each write to the disk.
    """

    def __init__(self, run_dir: Path, to_disk: bool) -> None:
        self._run_dir = run_dir
        self._folder = journal_folder(run_dir)
        self._to_disk = to_disk
        self._number = -1
        """Number of the present file."""
        self._out: FileIO | None = None
        """Present file; None before the first write, and after an error."""
        self._end = 0
        """Size of the present file in bytes, without an incomplete record."""
        self._problem: OSError | None = None
        """Error after which nothing more is written to this file, because a file must not have a gap."""

    def write(self, parts: list[_Part]) -> OSError | None:
        """Append data to the files. Returns the error of the file that was written last; None if it has none.

        An error ends the writing of its file, so all later calls for this file write nothing and return the same error;
        the next file is tried again. `FileJournal.run` calls this in a thread.
        """
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
        """Make the file of `part`, and delete files that are of no use any more. Raises OSError.

        `write` calls this for the first part of each file.
        """
        self.close()
        self._number, self._end, self._problem = part.number, 0, None
        self._folder.mkdir(exist_ok=True)
        self._delete_old_files()
        # Unbuffered: closing the file after an error has no data to write, so it cannot fail again.
        self._out = (self._folder / f"{part.number:06d}-step-{part.version:06d}.log").open("wb", buffering=0)
        if self._to_disk:
            sync_to_disk(self._folder)

    def _delete_old_files(self) -> None:
        """Delete the files from before the oldest checkpoint, which no restart can need. Called when a file is made,
        which happens at each checkpoint."""
        kept = checkpointed(RunDirectory(self._run_dir).checkpoints)
        for file, version in _files(self._folder).values():
            if kept and version < kept[0]:
                file.unlink(missing_ok=True)

    def _append(self, out: FileIO, data: bytearray) -> None:
        """Write data to the end of the present file, and to the disk if `to_disk` is set. Raises OSError."""
        file = Path(os.fsdecode(out.name))
        # A user may delete or replace the file. Records that go to a deleted file would be lost without an error.
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
        """Cut off an incomplete record that a failed write has left, and close the file. Errors are ignored: a restart
        cuts off an incomplete record, too (`_Reader`)."""
        if self._out is not None:
            with suppress(OSError):
                self._out.truncate(self._end)
        self.close()

    def close(self) -> None:
        """Close the present file, if there is one. Errors are ignored: an unbuffered file has nothing left to write."""
        if self._out is not None:
            with suppress(OSError):
                self._out.close()
        self._out = None


# -- reading ---------------------------------------------------------------------------------------------------------


def journal_folder(run_dir: Path) -> Path:
    """Return the folder of a run's journal."""
    return run_dir / "journal"


def replay_journal(run_dir: Path, version: int, number: int, replay: Replay) -> tuple[JournalPlace, list[str]]:
    """Apply the events after a checkpoint to `replay`. Returns the place where the journal is continued, and messages
    for the user. `flash.run.restart.restore_hub_state` calls this when a run starts again.

    Changes the files: an incomplete record at the end of a file, which a crash has left, is cut off. Files that do not
    continue the ones before them are deleted, because a gap is between them. So is a file without a whole first record.

    Args:
        run_dir: the run directory.
        version: version of the checkpoint.
        number: number of the first file after the checkpoint.
        replay: applies the events.

    Raises:
        RecordingError: a file is damaged, or does not fit the checkpoint.
    """
    files, notes = _files(journal_folder(run_dir)), list[str]()
    events: int | None = None  # number of the run's events so far; None before the first file
    while number in files:
        reader = _Reader(files[number][0], replay)
        head = reader.head()
        # Later files may follow later checkpoints that were damaged or deleted.
        if head is not None and events is None and head.version != version:
            raise RecordingError(
                f"{reader.file} follows a checkpoint of version {head.version}; expected version {version}: it was "
                "copied from elsewhere"
            )
        if head is None:  # the crash came before the first record was written
            break
        if events is not None and head.before != events:
            notes.append(f"{reader.file.name} and later files are of no use: records before them could not be written")
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
    """Rename the files of a damaged journal from file `number` on, so that people can examine them.

    The restarted run then begins a new journal with the same numbers. Files that were renamed before are kept, too.
    `flash.run.restart.restore_hub_state` calls this if `replay_journal` has failed. Returns the new names, separated by
    commas. Raises OSError.
    """
    names: list[str] = []
    for later, (file, _) in sorted(_files(journal_folder(run_dir)).items()):
        if later >= number:
            # After a restart the numbers are used again, so an earlier damaged file can have the same name.
            free = (f"{_DAMAGED}{file.name}{f'.{again}' if again > 1 else ''}" for again in count(1))
            kept = next(path for path in map(file.with_name, free) if not path.exists())
            file.rename(kept)
            names.append(kept.name)
    return ", ".join(names)


def forget_journal(run_dir: Path) -> None:
    """Delete the journal of a run that goes on without one (`checkpoint.journal = "off"`). A later restart could not
    use it, because it would lack the events of this incarnation."""
    shutil.rmtree(journal_folder(run_dir), ignore_errors=True)


def _files(folder: Path) -> dict[int, tuple[Path, int]]:
    """Return a dict from the number of each file of the journal to its path and its checkpoint's version. Files with
    other names, such as damaged ones, are left out."""
    names = ((file, _NAME.fullmatch(file.name)) for file in folder.glob("*.log"))
    return {int(match[1]): (file, int(match[2])) for file, match in names if match is not None}


class _Reader:
    """Reader of one file, for `replay_journal`. Call `head` first, then `events`.

    Args:
        file: path of the file.
        replay: applies the events.
    """

    def __init__(self, file: Path, replay: Replay) -> None:
        self.file = file
        self.cut = 0
        """Number of bytes of an incomplete record that were cut off at the end of the file. Known after `events`."""
        self._replay = replay
        self._records = self._read()

    def head(self) -> JournalHead | None:
        """Return the first record; None if the file has no whole record. Raises RecordingError."""
        for offset, record in self._records:  # `return` takes only the first; `events` goes on with the same iterator
            try:
                return _HEADS.decode(record)
            except DECODE_ERRORS as error:
                raise self._misfit(offset, error) from error
        return None

    def events(self) -> int:
        """Apply all remaining records as events, and return their number. Raises RecordingError."""
        count = 0
        for offset, record in self._records:
            try:
                self._replay.apply(_EVENTS.decode(record))
            except Exception as error:  # an event that does not fit the state can raise any error
                raise self._misfit(offset, error) from error
            count += 1
        return count

    def _misfit(self, offset: int, error: Exception) -> RecordingError:
        """Return the error for a whole record at byte `offset` that cannot be decoded or applied; `error` says why."""
        return RecordingError(
            f"{self.file} does not fit the checkpoint that it follows; perhaps another version of Flash wrote it: at "
            f"byte {offset}, {type(error).__name__}: {error}"
        )

    def _read(self) -> Iterator[tuple[int, bytes]]:
        """Yield the records, each with its offset in bytes. Raises RecordingError if the file cannot be read."""
        try:
            with self.file.open("rb") as source:
                yield from self._read_from(source)
        except OSError as error:
            raise RecordingError(f"{self.file} cannot be read: {error.strerror or error}") from error

    def _read_from(self, source: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield the records of the open file. Cuts off an incomplete record at its end, and sets `cut`."""
        records, offset = read_frames(source), 0
        while True:
            try:
                record = next(records, None)
            except ValueError as error:
                # A crash leaves an incomplete record only at the end. If a whole record follows, the disk is damaged,
                # and cutting the file off here would lose records.
                if whole_frame_after(self.file, offset):
                    raise RecordingError(f"{self.file} is damaged at byte {offset}: {error}") from error
                self.cut = self.file.stat().st_size - offset
                os.truncate(self.file, offset)
                return
            if record is None:
                return
            yield offset, record
            offset += HEADER.size + len(record)
