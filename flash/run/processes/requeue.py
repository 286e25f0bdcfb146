"""Notices a job that SLURM requeues for ever: one whose time limit, or the next preemption, always comes before a step.

Each incarnation of a requeued job leaves in `requeues.json` of the run directory at which version it began.
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
"""Incarnations of a requeued job, one after the other, that may begin where the one before began."""

FILE = "requeues.json"


class Requeues(msgspec.Struct, frozen=True):
    """What the incarnations of a job have come to."""

    job: str
    version: int
    """At which the newest incarnation began; −1 with neither a checkpoint nor a step."""
    idle: int
    """Incarnations in a row that began where the one before began."""


def refuse_idle_requeues(config: Config) -> None:
    """Count this incarnation of a requeued job. The caller is the only launch of the run.

    Raises:
        RequeueError: as many incarnations before it as there may be have brought the run nowhere.
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
    """The version at which this incarnation begins: what was trained after a checkpoint counts where it is kept."""
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
