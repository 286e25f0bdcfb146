"""Records that a run has left on the disk, from which its trainer ranks restart, alone or with the hub.

Implements `flash.hub.recovery.RunHistory`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from anyio.to_thread import run_sync

from flash.config.load import dump, flat, read_recorded, recorded
from flash.config.tree import Config
from flash.errors import RecordingError
from flash.hub.recovery import TrainerStart
from flash.hub.trainers import why_no_retraining
from flash.observe.cluster import read_cluster
from flash.observe.recorder import Recorder
from flash.observe.rundir.recording import read_batch
from flash.observe.rundir.rundir import RunDirectory
from flash.trainer.checkpoint_files import choose_checkpoint, read_manifest
from flash.types import Batch, Published
from flash.weights.versions import decode_update

NO_STEP = (
    *("run.name", "run.resume", "run.log_samples", "run.output_dir", "env.folders", "train.profile"),
    *("checkpoint.", "deadlines.", "observe.", "track.", "alarms.", "simulate."),
)
"""Keys, and beginnings of keys, that may change while a run is stopped: the recorded batches then still make the same
steps. `run.steps` may change, too, if the learning rate does not depend on it."""


class RecordedHistory:
    """Checkpoints and batches of a run directory.

    Args:
        run_dir: the run directory, which holds the checkpoints.
        recorder: recorder of the run, which holds the batches.
    """

    def __init__(self, run_dir: Path, recorder: Recorder) -> None:
        self._run_dir = run_dir
        self._recorder = recorder

    async def choose_start(self, version: int) -> TrainerStart:
        """Return the newest complete checkpoint, from which the trainer ranks start. Reads every byte of it.

        Raises the errors of `choose_checkpoint`, too.

        Raises:
            RecordingError: batches since the checkpoint are missing.
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
        """Return the batch that a step has trained. Raises RecordingError."""
        return await run_sync(self._recorder.batches.of, step)

    def same_weights(self, one: Published, other: Published) -> bool:
        """Return True if the fingerprints of both publications are equal."""
        return decode_update(one.update_info).fingerprint == decode_update(other.update_info).fingerprint


class Reach(NamedTuple):
    """Version that trainer ranks can reach from a checkpoint."""

    version: int
    why: str = ""
    """Reason why they cannot reach a later version; empty if this is the version that the run had reached."""


def reach(config: Config, held: int, reached: int) -> Reach:
    """Return the version from which a restarted run can go on.

    The run had reached version `reached`, and its trainer ranks hold version `held`. The ranks train the steps between
    the two again. This needs the batch and the row of metrics of each step; the batches are read here. A step that
    lacks one of them, and all later steps, are generated and counted again.
    """
    if held == reached:
        return Reach(reached)
    directory = RunDirectory(config.run_dir)
    if (why := why_no_retraining(config)) is not None:
        return Reach(held, why)
    if changed := _changed(directory, config):
        return Reach(held, f"the configuration has changed since: {changed}")
    booked = _booked_steps(directory)
    for step in range(held, reached):
        if step not in booked:
            return Reach(step, f"step {step} has no row in {directory.metrics.name}")
        try:
            read_batch(directory.batches, step)
        except RecordingError as error:
            return Reach(step, str(error))
    return Reach(reached)


def booked_version(config: Config) -> int:
    """Return the version after the last step that has a row of metrics; 0 if there is none."""
    return max(_booked_steps(RunDirectory(config.run_dir)), default=-1) + 1


def is_done(config: Config) -> bool:
    """Return True if the run has made all of its steps, its last evaluation and its summary."""
    directory = RunDirectory(config.run_dir)
    cluster = read_cluster(directory)
    finished = cluster is not None and cluster.ended == "finished" and directory.has_ended()
    return finished and booked_version(config) >= config.run.steps


def _booked_steps(directory: RunDirectory) -> set[int]:
    """Return the steps that have a row of metrics. Rows without a step are skipped."""
    return {int(row["step"]) for row in directory.read_metrics() if "step" in row}


def _changed(directory: RunDirectory, config: Config) -> str:
    """Return the changed keys on which a step depends; empty if there are none."""
    try:
        had = read_recorded(directory.config)
    except (OSError, ValueError) as error:
        return f"{directory.config} cannot be read: {error}"
    before, now = (dict(flat(settings)) for settings in (had, tomllib.loads(dump(recorded(config)))))
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    constant = before.get("train.decay") == now.get("train.decay") == "constant"
    return ", ".join(key for key in keys if not key.startswith(NO_STEP) and not (constant and key == "run.steps"))
