"""The recording of a run: what each step trained, exactly, one file per step, so that it can be trained again.

A file is a sequence of records (`flash.observe.rundir.frames`): first a `RecordingHead`, then one trajectory per
record. It is written aside and renamed: a file of that name was whole once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

import msgspec

from flash.errors import RecordingError
from flash.observe.rundir.frames import append_frame, read_frames
from flash.types import Batch, BatchSample, Trajectory

_SUFFIX = ".bin"
_AT_ONCE = 64 << 10
"""Bytes."""
FORMAT = 3
"""Of the records; since 2 a task says how it was sampled, since 3 a trajectory which tokens could have been."""
_STEP = re.compile(r"step-([0-9]+)")


class RecordingHead(msgspec.Struct, frozen=True):
    """The first record of a file."""

    step: int
    min_version: int
    trajectories: int
    """How many records follow."""
    earlier: list[BatchSample]
    format: Literal[3]
    """`FORMAT`; who knows an older one would take these samples for sampled from all tokens."""


def write_batch(folder: Path, batch: Batch) -> None:
    """Write a batch, some records at a time: one call for all would keep the other threads of the process waiting.

    Raises:
        OSError: the folder cannot be written; no file of this step is left then.
    """
    file = _file(folder, batch.step)
    aside = file.with_name(file.name + ".tmp")
    try:
        with aside.open("wb") as out:
            head = RecordingHead(batch.step, batch.min_version, len(batch.trajectories), batch.earlier, FORMAT)
            frame = bytearray()
            for record in (head, *batch.trajectories):
                append_frame(frame, record)
                if len(frame) > _AT_ONCE:
                    out.write(frame)
                    frame.clear()
            out.write(frame)
            out.flush()
            os.fsync(out.fileno())
        aside.replace(file)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def read_batch(folder: Path, step: int) -> Batch:
    """Read a batch back.

    Raises:
        RecordingError: it is missing or damaged, or another version of Flash wrote it.
    """
    file = _file(folder, step)
    try:
        with file.open("rb") as source:
            records = read_frames(source)
            head = msgspec.msgpack.decode(next(records), type=RecordingHead)
            decoder = msgspec.msgpack.Decoder(Trajectory)
            trajectories = [decoder.decode(record) for record in records]
    except OSError as error:
        raise RecordingError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, StopIteration) as error:
        raise RecordingError(
            f"{file} is damaged, or another version of Flash wrote it: {str(error) or 'it is empty'}; "
            f"step {step} cannot be trained again from it"
        ) from error
    if head.step != step:
        raise RecordingError(f"{file} is the batch of another step: it was recorded as that of step {head.step}")
    if head.trajectories != len(trajectories):
        raise RecordingError(f"{file} is damaged: it holds {len(trajectories)} of {head.trajectories} trajectories")
    return Batch(head.step, head.min_version, trajectories, head.earlier)


def step_named(name: str) -> int | None:
    """The step that something in a run directory is called after, `step-000012`; None: others have put it there."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def checkpointed(folder: Path) -> list[int]:
    """The versions of which there are checkpoints, whole or not, in order."""
    named = (step_named(entry.name) for entry in folder.glob("*"))
    return sorted(version for version in named if version is not None)


def recorded_steps(folder: Path) -> list[int]:
    """The steps whose batches are there, in order."""
    named = (step_named(file.stem) for file in folder.glob(f"*{_SUFFIX}"))
    return sorted(step for step in named if step is not None)


def forget_before(folder: Path, step: int) -> None:
    """Delete the batches of earlier steps."""
    for recorded in recorded_steps(folder):
        if recorded < step:
            _file(folder, recorded).unlink(missing_ok=True)


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}{_SUFFIX}"
