"""The hub's state in a checkpoint: written by the hub's own process, and read back by it, with the journal after it.

The run goes on from the version that it had: the checkpoint is what the trainer ranks start from, to train again what
is recorded since. Where that is not there, it goes back so far that it is.

Trainer rank 0 shares the machine with the hub and has made the folder; it is told size and checksum, for the manifest.
So the state passes through no message, and lies in no memory as a whole beside what it is made of.
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
from flash.samples.replay import Replay
from flash.trainer.checkpoint_files import HUB_STATE, hub_state, step_folder, temporary_of


async def keep_hub_state(
    run_dir: Path, written: Callable[[], None], version: int, pieces: Generator[bytearray]
) -> SnapshotReply:
    """Write a state, in pieces, into the checkpoint that the trainer ranks are writing. Others are served meanwhile.

    Args:
        run_dir: the run directory.
        written: blocks until what is recorded of the steps before lies there: nobody does them again who goes on from
            the checkpoint.
        version: the checkpoint's.
        pieces: the state.

    Raises:
        CheckpointError: it cannot be written.
        FlashError: of `written`.
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
    """What a hub goes on from."""

    state: HubState | None
    """None: nothing was ever begun."""
    start: TrainerStart
    """What the trainer ranks begin with."""
    place: JournalPlace
    """Where its journal goes on."""
    notes: list[str]
    """What people should know."""


NOTHING = Restored(None, TrainerStart(0, ""), JournalPlace(0, 0), [])
"""Of a new run."""


def restored(checkpoint: Path | None, config: Config) -> Restored:
    """What a checkpoint kept of the hub, and the journal after it; without a checkpoint, all of the journal.

    Raises:
        CheckpointError: the checkpoint is damaged, or another version of Flash wrote it.
        ConfigError: it belongs to a run of another size.
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
        # Read again: the replay has changed it.
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
    """What a checkpoint kept of the hub. Errors as of `restored`."""
    with hub_state(checkpoint) as data:
        return HubState.restore(data, config)


def _open(file: Path) -> FileIO:
    # Unbuffered: so nothing is left to write, and to fail again, when it is closed after an error.
    return file.open("wb", buffering=0)


def _write(stream: FileIO, piece: bytearray, crc32: int) -> int:
    """The checksum of all so far."""
    written = 0
    with memoryview(piece) as view:
        while written < len(view):
            written += stream.write(view[written:])
    return zlib.crc32(piece, crc32)
