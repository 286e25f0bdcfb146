"""Detection of a job that SLURM requeues forever, because its time limit or a preemption always ends it before a step.

Each incarnation of a requeued job writes the version at which it began to `requeues.json` in the run directory.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from flash.config.tree import Config
from flash.errors import RequeueError
from flash.observe.rundir.rundir import write_atomically
from flash.run.restart.history import booked_version, reach
from flash.trainer.checkpoint_files import newest_complete, read_manifest

MOST_IDLE = 2
"""Largest number of consecutive incarnations of a requeued job that may begin without progress."""

FILE = "requeues.json"
"""Name of the file in the run directory."""


class Requeues(msgspec.Struct, frozen=True):
    """Progress of the incarnations of a requeued job."""

    job: str
    version: int
    """Version at which the newest incarnation began; −1 if there was neither a checkpoint nor a step."""
    idle: int
    """Number of consecutive incarnations that began at the version of the one before, or earlier."""


def refuse_idle_requeues(config: Config) -> None:
    """Count this incarnation of a requeued job. No other launch of the run may be active.

    Raises:
        RequeueError: more than MOST_IDLE consecutive incarnations began without progress.
    """
    file = config.run_dir / FILE
    job = os.environ.get("SLURM_JOB_ID", "")
    version = _begins_at(config)
    before = _read(file)
    went_nowhere = before is not None and before.job == job and version <= before.version
    idle = before.idle + 1 if before is not None and went_nowhere else 0
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


def _begins_at(config: Config) -> int:
    """Return the version at which this incarnation begins.

    Steps after the newest checkpoint count if the journal allows the run to repeat them.
    """
    checkpoint = newest_complete(config.run_dir)
    version = -1 if checkpoint is None else read_manifest(checkpoint).version
    if config.checkpoint.journal == "off":
        return version
    held = max(version, 0)
    reached = booked_version(config)
    return reach(config, held, reached).version if reached > held else version


def _read(file: Path) -> Requeues | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Requeues)
    except (OSError, msgspec.DecodeError):
        return None
