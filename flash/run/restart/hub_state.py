"""State of the hub in a checkpoint: written by the hub's process, and read again with the journal after it.

A restarted run continues from the version that it had reached. The trainer ranks start from the checkpoint, and train
the recorded steps after it again. If records of these steps are missing, the run goes back to the last version that can
be reached.

The hub and trainer rank 0 run on the same machine, and rank 0 makes the folder of the checkpoint. The hub writes its
state there in pieces and sends only size and checksum to rank 0, for the manifest. So the state passes through no
message, and the serialised state is never in memory as a whole.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Generator
from io import FileIO
from pathlib import Path

import msgspec
from anyio.to_thread import run_sync

from flash.config.tree import Config
from flash.errors import CheckpointError, ContractError, RecordingError
from flash.hub.protocol import SnapshotReply
from flash.hub.recovery import HubState, TrainerStart
from flash.observe.rundir.rundir import writing
from flash.run.restart.history import booked_version, reach
from flash.run.restart.journal import JournalPlace, forget_journal, journal_folder, replay_journal, set_journal_aside
from flash.samples.journal import Replay
from flash.trainer.checkpoint_files import HUB_STATE, hub_state, step_folder, temporary_of


async def keep_hub_state(
    run_dir: Path, written: Callable[[], None], version: int, pieces: Generator[bytearray]
) -> SnapshotReply:
    """Write the hub's state in pieces into the checkpoint that the trainer ranks are writing.

    The hub serves other requests while the pieces are written.

    Args:
        run_dir: the run directory.
        written: blocks until the records of the earlier steps are on the disk, because a run that continues from this
            checkpoint does not repeat these steps.
        version: version of the checkpoint.
        pieces: the serialised state.

    Raises:
        CheckpointError: the state cannot be written.
        FlashError: raised by `written`.
    """
    await run_sync(written)
    file = temporary_of(step_folder(run_dir, version)) / HUB_STATE
    try:
        with await run_sync(_open, file) as stream:
            size, crc32 = 0, 0
            for piece in pieces:
                crc32 = await run_sync(_write, stream, piece, crc32)
                size += len(piece)
            await run_sync(os.fsync, stream.fileno())
    except OSError as error:
        raise CheckpointError(f"the hub cannot write its state to {file}: {error}") from error
    return SnapshotReply(size, crc32)


class Restored(msgspec.Struct, frozen=True):
    """State from which a restarted hub continues."""

    state: HubState | None
    """State of the previous hub; None if the hub begins without one."""
    start: TrainerStart
    """Checkpoint and version that the trainer ranks begin with."""
    place: JournalPlace
    """Place in the journal where the hub continues it."""
    notes: list[str]
    """Messages for the user."""


NOTHING = Restored(None, TrainerStart(0, ""), JournalPlace(0, 0), [])
"""State of the hub in a new run."""


def restored(checkpoint: Path | None, config: Config) -> Restored:
    """Return the hub's state from a checkpoint and the journal after it; without a checkpoint, from the whole journal.

    Raises:
        CheckpointError: the checkpoint is damaged, or another version of Flash wrote it.
        ConfigError: the checkpoint belongs to a run of another size.
        RunDirectoryError: the journal is damaged, and cannot be set aside.
    """
    kept = None if checkpoint is None else kept_state(checkpoint, config)
    version, number = (0, 0) if kept is None else (kept.version, kept.journal)
    begin = TrainerStart(version, str(checkpoint or ""))
    replay = Replay(None if kept is None else kept.buffer, version)
    try:
        place, notes = replay_journal(config.run_dir, version, number, replay)
        until, why = reach(config, version, replay.reached)
        booked = booked_version(config)
        buffer = replay.state(until)
    except (RecordingError, ContractError) as error:
        with writing(journal_folder(config.run_dir)):
            aside = set_journal_aside(config.run_dir, number)
        start = "the beginning" if checkpoint is None else checkpoint.name
        note = (
            f"{error}. The run goes on from {start} alone, and generates again what was delivered since; kept: {aside}"
        )
        # The replay has changed the state, so it is read again.
        kept = None if checkpoint is None else kept_state(checkpoint, config)
        return Restored(kept, begin, JournalPlace(number, 0), [note])
    if config.checkpoint.journal == "off":
        forget_journal(config.run_dir)
    if buffer is None:
        if booked:
            gone = "no checkpoint is left" if checkpoint is None else f"{checkpoint.name} knows of no sample"
            notes.append(f"the run goes back from version {booked} to {version}, and does these steps again: {gone}")
        return Restored(None, begin, place, notes)
    if replay.delivered:
        notes.append(f"the journal brings back {replay.delivered} samples that were delivered after version {version}")
    if why:
        notes.append(f"the run goes back from version {replay.reached} to {until}, and does these steps again: {why}")
    elif booked > until:
        notes.append(
            f"the run goes back from version {booked} to {until}, and does these steps again: no journal tells of them"
        )
    return Restored(HubState(until, buffer, journal=0).belonging_to(config), begin, place, notes)


def kept_state(checkpoint: Path, config: Config) -> HubState:
    """Return the hub's state from a checkpoint. Raises the errors of `restored`."""
    with hub_state(checkpoint) as data:
        return HubState.restore(data, config)


def _open(file: Path) -> FileIO:
    # Unbuffered: closing the file after an error has no data to write, so it cannot fail again.
    return file.open("wb", buffering=0)


def _write(stream: FileIO, piece: bytearray, crc32: int) -> int:
    """Write one piece. Returns the checksum of all pieces so far; `crc32` is the checksum of those before."""
    written = 0
    with memoryview(piece) as view:
        while written < len(view):
            written += stream.write(view[written:])
    return zlib.crc32(piece, crc32)
