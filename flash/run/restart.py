"""Restart of a run from its run directory: the hub's state, the records after it, and the limit of idle requeues.

- `keep_hub_state` writes the state of the hub into a checkpoint, and `restore_hub_state` reads it again with the
  journal after it. A restarted run continues from the version that it had reached. The trainer ranks start from the
  checkpoint, and train the recorded steps after it again. If records of these steps are missing, the run goes back to
  the last version that can be reached (`reach`).
- `RecordedHistory` implements `flash.hub.recovery.RunHistory`: the checkpoints and batches from which trainer ranks
  restart while the hub goes on.
- `refuse_idle_requeues` detects a job that SLURM requeues forever, because its time limit or a preemption always ends
  it before a step.

The hub and trainer rank 0 run on the same machine, and rank 0 makes the folder of the checkpoint. The hub writes its
state there in pieces and sends only size and checksum to rank 0, for the manifest. So the state passes through no
message, and the serialised state is never in memory as a whole.
"""

from __future__ import annotations

import os
import tomllib
import zlib
from collections.abc import Callable, Generator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec
from anyio.to_thread import run_sync

from flash.config.load import dump, flat, read_recorded, recorded
from flash.config.tree import Config
from flash.errors import DECODE_ERRORS, CheckpointError, ConfigError, ContractError, RecordingError, RequeueError
from flash.hub.protocol import SnapshotReply
from flash.hub.recovery import HubState, TrainerStart
from flash.hub.trainers import why_no_retraining
from flash.observe.cluster import read_cluster
from flash.observe.recorder import Recorder
from flash.observe.rundir.recording import read_batch
from flash.observe.rundir.rundir import RunDirectory, write_atomically, writing
from flash.run.journal import JournalPlace, forget_journal, journal_folder, replay_journal, set_journal_aside
from flash.samples.journal import Replay
from flash.trainer.checkpoint_files import (
    HUB_STATE,
    choose_checkpoint,
    hub_state,
    newest_complete,
    read_manifest,
    step_folder,
    temporary_of,
)
from flash.types import Batch, Published
from flash.weights.versions import decode_update

KEYS_WITHOUT_EFFECT = (
    *("run.name", "run.resume", "run.log_samples", "run.output_dir", "env.folders", "train.profile"),
    *("checkpoint.", "deadlines.", "track.", "alarms.", "simulate."),
)
"""Keys, and beginnings of keys, on which a training step does not depend. If only these have changed while a run was
stopped, its recorded batches still make the same steps. `run.steps` and `train.stream` may change, too, in the cases
that `_changed_keys` names."""
MOST_IDLE = 2
"""Largest number of consecutive incarnations of a requeued job that may begin without progress."""
REQUEUES_FILE = "requeues.json"
"""Name of the file in the run directory that holds `Requeues`."""


class RecordedHistory:
    """Checkpoints and batches of a run directory, from which trainer ranks restart while the hub goes on.

    Implements `flash.hub.recovery.RunHistory`.

    Args:
        run_dir: the run directory, which holds the checkpoints.
        recorder: recorder of the run, which holds the batches.
    """

    def __init__(self, run_dir: Path, recorder: Recorder) -> None:
        self._run_dir = run_dir
        self._recorder = recorder

    async def choose_start(self, version: int) -> TrainerStart:
        """Return the newest undamaged checkpoint, from which the trainer ranks start. If the run has none, version 0
        without a folder is returned.

        The hub calls this when all ranks restart while it goes on. The ranks train the recorded batches again from
        there up to `version`, the version that the run has reached. Reads every byte of the checkpoint, in a thread.
        Newer damaged checkpoints are renamed, and the user is notified.

        Raises:
            RecordingError: batches since the checkpoint are missing.
            CheckpointError: all checkpoints are damaged; see `choose_checkpoint`.
        """
        checkpoint, notes = await run_sync(choose_checkpoint, self._run_dir)
        for note in notes:
            self._recorder.note(note)
        held = read_manifest(checkpoint).version if checkpoint is not None else 0
        recorded = await run_sync(self._recorder.batches.steps)
        if missing := sorted(set(range(held, version)) - set(recorded)):
            steps = ", ".join(map(str, missing))
            raise RecordingError(
                f"the newest checkpoint is of version {held}, and no batch of step {steps} is recorded"
            )
        return TrainerStart(held, str(checkpoint or ""))

    async def batch(self, step: int) -> Batch:
        """Return the recorded batch that a step has trained. The hub calls this when the ranks train the step again.
        Raises RecordingError if the batch is missing or damaged."""
        return await run_sync(self._recorder.batches.of, step)

    def same_weights(self, one: Published, other: Published) -> bool:
        """Return True if the weights of two publications have equal fingerprints (checksums).

        When ranks have trained a step again, the hub compares their weights with those of the first time.
        """
        return decode_update(one.update_info).fingerprint == decode_update(other.update_info).fingerprint


class Reach(NamedTuple):
    """Result of `reach`: the version that trainer ranks can reach from a checkpoint."""

    version: int
    """Version from which the run goes on."""
    why: str = ""
    """Reason why they cannot reach a later version; empty if this is the version that the run had reached."""


def reach(config: Config, held: int, reached: int) -> Reach:
    """Return the version from which a restarted run can go on, and the reason if that is not `reached`.

    The restart of the hub calls this (`restore_hub_state`). The trainer ranks then train the steps from `held` up to
    the returned version again. This needs the batch and the row of metrics of each step, and the same configuration;
    the batches are read here, because one may be damaged. From the first step that lacks one of them, all steps are
    sampled, trained and counted as new ones.

    Args:
        config: configuration of the restarted run.
        held: version of the checkpoint that the ranks start from; 0 without one.
        reached: version that the run had reached, at least `held`.
    """
    if held == reached:
        return Reach(reached)
    directory = RunDirectory(config.run_dir)
    if (why := why_no_retraining(config)) is not None:
        return Reach(held, why)
    try:
        changed = _changed_keys(directory, config)
    except ConfigError as error:
        return Reach(held, f"the recorded configuration cannot be read: {error}")
    if changed:
        return Reach(held, f"the configuration has changed since: {changed}")
    with_metrics = _steps_with_metrics(directory)
    for step in range(held, reached):
        if step not in with_metrics:
            return Reach(step, f"step {step} has no row in {directory.metrics.name}")
        try:
            read_batch(directory.batches, step)
        except RecordingError as error:
            return Reach(step, str(error))
    return Reach(reached)


def version_with_metrics(config: Config) -> int:
    """Return the version that the last step with a row in metrics.jsonl has made; 0 if there is no row.

    Unlike the newest checkpoint, this also counts the steps after it.
    """
    return max(_steps_with_metrics(RunDirectory(config.run_dir)), default=-1) + 1


def is_done(config: Config) -> bool:
    """Return True if the run has made all of its steps, its last evaluation and its summary.

    A run that has ended is not done if `run.steps` of `config` is larger now. `flash train` and `flash sft` call this
    before they resume a run, and when they say how to continue one.
    """
    directory = RunDirectory(config.run_dir)
    cluster = read_cluster(directory)  # its last content says how the run ended
    finished = cluster is not None and cluster.ended == "finished" and directory.has_ended()
    return finished and version_with_metrics(config) >= config.run.steps


RunMark = tuple[int, int] | None
"""Inode and modification time (ns) of a run's config.toml, which differ for each launch; None if there is none."""


def run_mark(config: Config) -> RunMark:
    """Return the mark of the run that the run directory holds; None if it holds none, or its file cannot be examined.

    Each launch that gets as far as writing the configuration changes the mark. `flash.cli.train` compares the marks
    before and after a launch, to see if the launch has left anything to resume.
    """
    try:
        found = RunDirectory(config.run_dir).config.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _steps_with_metrics(directory: RunDirectory) -> set[int]:
    """Return the steps that have a row of metrics. Rows without a step are skipped."""
    return {int(row["step"]) for row in directory.read_metrics() if "step" in row}


def _changed_keys(directory: RunDirectory, config: Config) -> str:
    """Return the keys, separated by commas, that have changed since the run recorded its configuration and on which a
    step depends; empty if none have. Raises ConfigError if the recorded configuration cannot be read."""
    settings = read_recorded(directory.config), tomllib.loads(dump(recorded(config)))
    before, now = (dict(flat(one)) for one in settings)
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    without_effect = set[str]()
    # With another decay, the learning rate of each step depends on the number of steps.
    if before.get("train.decay") == now.get("train.decay") == "constant":
        without_effect.add("run.steps")
    # A batch that was recorded without streamed steps has one round, in which a streamed step trains it in the same
    # way.
    if before.get("train.stream") is False:
        without_effect.add("train.stream")
    return ", ".join(key for key in keys if not key.startswith(KEYS_WITHOUT_EFFECT) and key not in without_effect)


async def keep_hub_state(
    run_dir: Path, wait_for_records: Callable[[], None], version: int, pieces: Generator[bytearray]
) -> SnapshotReply:
    """Write the hub's state in pieces into the checkpoint that the trainer ranks are writing.

    The hub calls this when rank 0 asks for its state (`flash.hub.recovery.Persistence.save_state`), and serves other
    requests while the pieces are written. Returns size and checksum for the manifest of the checkpoint.

    Args:
        run_dir: the run directory.
        wait_for_records: blocks until the records of the earlier steps are on the disk, because a run that continues
            from this checkpoint does not repeat these steps.
        version: version of the checkpoint.
        pieces: the serialised state.

    Raises:
        CheckpointError: the state cannot be written.
        FlashError: raised by `wait_for_records`.
    """
    await run_sync(wait_for_records)
    file = temporary_of(step_folder(run_dir, version)) / HUB_STATE  # rank 0 has made this folder
    try:
        # Unbuffered: closing the file after an error has no data to write, so it cannot fail again.
        with await run_sync(lambda: file.open("wb", buffering=0)) as stream:
            size, crc32 = 0, 0
            for piece in pieces:  # the event loop serves other requests between two pieces
                crc32 = await run_sync(_write, stream, piece, crc32)
                size += len(piece)
            await run_sync(os.fsync, stream.fileno())
    except OSError as error:
        raise CheckpointError(f"the hub cannot write its state to {file}: {error}") from error
    return SnapshotReply(size, crc32)


class Restored(msgspec.Struct, frozen=True):
    """Result of `restore_hub_state`: the state from which a restarted hub continues."""

    state: HubState | None
    """State of the previous hub; None if the hub begins without one."""
    start: TrainerStart
    """Checkpoint and version that the trainer ranks begin with."""
    place: JournalPlace
    """Place in the journal where the hub continues it."""
    notes: list[str]
    """Messages for the user."""


NOTHING = Restored(None, TrainerStart(0, ""), JournalPlace(0, 0), [])
"""Restored state of a new run: there is none."""


def restore_hub_state(checkpoint: Path | None, config: Config) -> Restored:
    """Return the hub's state from a checkpoint and the journal after it; without a checkpoint, from the whole journal.

    The first node calls this before it makes the hub, if the run resumes or the process of the hub restarts. A damaged
    journal is set aside, and the run goes on from the checkpoint alone. The run also goes back if its last steps cannot
    be trained again (`reach`). In both cases a note says which work is repeated.

    Args:
        checkpoint: the newest complete checkpoint; None if there is none.
        config: configuration of the restarted run.

    Raises:
        CheckpointError: the checkpoint is damaged, or another version of Flash wrote it.
        ConfigError: the checkpoint belongs to a run of another size.
        RunDirectoryError: the journal is damaged, and cannot be set aside.
    """
    kept = None if checkpoint is None else read_hub_state(checkpoint, config)
    # Version of the checkpoint, and number of the first file of the journal after it.
    version, number = (0, 0) if kept is None else (kept.version, kept.journal)
    trainer_start = TrainerStart(version, str(checkpoint or ""))
    replay = Replay(None if kept is None else kept.buffer, version)
    try:
        # `version`: of the checkpoint; `replay.reached`: at the end of the journal; `until`: from which the run goes
        # on; `counted`: after the last row of metrics, which may be later than the journal.
        place, notes = replay_journal(config.run_dir, version, number, replay)
        until, why = reach(config, version, replay.reached)
        counted = version_with_metrics(config)
        buffer = replay.state(until)
    except (RecordingError, ContractError) as error:
        with writing(journal_folder(config.run_dir)):
            aside = set_journal_aside(config.run_dir, number)
        start = "the beginning" if checkpoint is None else checkpoint.name
        note = (
            f"{error}. The run goes on from {start} alone, and samples that were delivered since are generated again; "
            f"the damaged files are kept as {aside}"
        )
        # The replay has changed the state, so it is read again.
        kept = None if checkpoint is None else read_hub_state(checkpoint, config)
        return Restored(kept, trainer_start, JournalPlace(number, 0), [note])
    # From now on the journal would lack this incarnation, so a later restart could not use it.
    if config.checkpoint.journal == "off":
        forget_journal(config.run_dir)
    if buffer is None:  # neither the checkpoint nor the journal has a state of the samples
        if counted:
            gone = "no checkpoint is left" if checkpoint is None else f"{checkpoint.name} knows of no sample"
            notes.append(f"the run goes back from version {counted} to {version}, and does these steps again: {gone}")
        return Restored(None, trainer_start, place, notes)
    if replay.delivered:
        notes.append(f"the journal brings back {replay.delivered} samples that were delivered after version {version}")
    if why:
        notes.append(f"the run goes back from version {replay.reached} to {until}, and does these steps again: {why}")
    elif counted > until:
        notes.append(
            f"the run goes back from version {counted} to {until}, and does these steps again: no journal has them"
        )
    # `journal` has a meaning only in a checkpoint; the hub goes on at `place`.
    return Restored(HubState(until, buffer, journal=0).belonging_to(config), trainer_start, place, notes)


def read_hub_state(checkpoint: Path, config: Config) -> HubState:
    """Return the hub's state from a checkpoint. Raises CheckpointError and ConfigError as `restore_hub_state` does."""
    with hub_state(checkpoint) as data:
        return HubState.restore(data, config)


def _write(stream: FileIO, piece: bytearray, crc32: int) -> int:
    """Write one piece of the hub's state, in a thread of `keep_hub_state`. Returns the checksum of all pieces so far.

    `crc32` is the checksum of the pieces before. Raises OSError.
    """
    written = 0  # an unbuffered file may write only a part at once
    with memoryview(piece) as view:
        while written < len(view):
            written += stream.write(view[written:])
    return zlib.crc32(piece, crc32)


class Requeues(msgspec.Struct, frozen=True):
    """Content of the file `requeues.json`: the progress of a job that SLURM has requeued.

    An *incarnation* is here one start of the job by SLURM.
    """

    job: str
    """Number of the job in SLURM."""
    version: int
    """Version at which the newest incarnation began; −1 if there was neither a checkpoint nor a step."""
    idle: int
    """Number of consecutive incarnations that began at the version of the one before, or earlier."""


def refuse_idle_requeues(config: Config) -> None:
    """Count this start of a requeued job, and refuse it if the job makes no progress.

    The launcher of the first node calls this before it starts processes, if SLURM has started the job again. Without
    this limit, a job that is always stopped before it completes a step would use a cluster forever. The caller holds
    the lock of the run directory, because this function writes to it.

    Raises:
        RequeueError: more than MOST_IDLE consecutive incarnations began without progress.
        CheckpointError: the manifest of the newest checkpoint cannot be read.
        RunDirectoryError, OSError: the file of the count cannot be written.
    """
    file = config.run_dir / REQUEUES_FILE
    job = os.environ.get("SLURM_JOB_ID", "")
    version = _first_version(config)
    before = _read_requeues(file)
    no_progress = before is not None and before.job == job and version <= before.version
    idle = before.idle + 1 if before is not None and no_progress else 0
    if idle > MOST_IDLE:
        raise RequeueError(
            f"SLURM has requeued job {job} {idle} times without progress: {config.run_dir} "
            f"{'has no step yet' if version < 0 else f'is still at version {version}'}. Each time the job was stopped "
            "before it could start, train a step and keep it: give it more time (--time, or a partition that preempts "
            "less), more of it for its end (--signal=B:TERM@SECONDS, deadlines.shutdown), or lower checkpoint.every; "
            "then submit it again with run.resume=true"
        )
    config.run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(file, msgspec.json.encode(Requeues(job, version, idle)))


def _first_version(config: Config) -> int:
    """Return the version at which this start of the job begins; −1 if there is neither a checkpoint nor a step.

    Steps after the newest checkpoint count if the journal allows the run to go on after them (`reach`). Raises
    CheckpointError if the manifest of that checkpoint cannot be read.
    """
    checkpoint = newest_complete(config.run_dir)
    version = -1 if checkpoint is None else read_manifest(checkpoint).version
    if config.checkpoint.journal == "off":
        return version
    held = max(version, 0)
    reached = version_with_metrics(config)
    return reach(config, held, reached).version if reached > held else version


def _read_requeues(file: Path) -> Requeues | None:
    """Return the record of the starts before this one from `requeues.json`; None if there is none, if it is damaged, or
    if it cannot be read. The count then begins at 0."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Requeues)
    except (OSError, *DECODE_ERRORS):
        return None
