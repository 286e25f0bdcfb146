"""The recording of a run: the exact batch of each step, one file per step, so that the step can be trained again.

`flash.observe.rundir.batches` writes it in the recorder's thread. A resumed hub, `flash replay` and `flash rhythm` read
it. A file is a sequence of records: first a `RecordingHead`, then one `Trajectory` per record. It is written under
another name and renamed when it is complete.

A record is stored in a *frame*: its length (u32), its CRC-32 (u32), and the record in msgpack, all little-endian. The
journal (`flash.run.journal`) has frames of the same form.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from flash.errors import DECODE_ERRORS, RecordingError
from flash.types import Batch, BatchSample, Trajectory

HEADER = struct.Struct("<II")
"""Header of a frame: the length of its record in bytes, and the CRC-32 of the record."""

_ENCODER = msgspec.msgpack.Encoder()
_SUFFIX = ".bin"
"""End of the name of a recording."""
_WRITE_BYTES = 64 << 10
"""Bytes of frames that `write_batch` collects before it writes them to the file."""
FORMAT = 3
"""Version of the format of recordings. Since version 2 a task has its sampling settings; since version 3 a trajectory
has the tokens that could have been sampled at each position."""
_STEP = re.compile(r"step-([0-9]+)")
"""Name of a file or folder of one step, without the end after a dot."""


class RecordingHead(msgspec.Struct, frozen=True):
    """First record of a recording. The other records are trajectories, in the order of `Batch.trajectories`."""

    step: int
    """Step that trains the batch."""
    min_version: int
    """Oldest version whose tokens the step trains."""
    trajectories: int
    """Number of records that follow."""
    earlier: list[BatchSample]
    """Samples that earlier steps have trained, of groups that are continued in this batch (`Batch.earlier`)."""
    format: Literal[3]
    """`FORMAT`. Any other number is refused: the records of another version mean something else."""
    rounds: list[int] = []
    """Number of samples of each round of the step; empty if it has one round (`Batch.rounds`)."""


def write_batch(folder: Path, batch: Batch) -> None:
    """Write a batch to the file of its step in `folder`, the `batches/` of a run directory.

    When this returns, the file is complete and on disk.

    Raises:
        OSError: the folder cannot be written, or the disk is full. The incomplete file is deleted then.
    """
    file = batch_file(folder, batch.step)
    aside = file.with_name(file.name + ".tmp")
    try:
        with aside.open("wb") as out:
            head = RecordingHead(
                batch.step, batch.min_version, len(batch.trajectories), batch.earlier, FORMAT, batch.rounds
            )
            # One record after the other: encoding them all in one call would block the other threads of the process.
            frames = bytearray()
            for record in (head, *batch.trajectories):
                append_frame(frames, record)
                if len(frames) > _WRITE_BYTES:
                    out.write(frames)
                    frames.clear()
            out.write(frames)
            out.flush()
            os.fsync(out.fileno())
        aside.replace(file)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def read_batch(folder: Path, step: int) -> Batch:
    """Return the batch of a step from its file in `folder`, the `batches/` of a run directory.

    Raises:
        RecordingError: the file is missing or damaged, or another version of Flash wrote it.
    """
    file = batch_file(folder, step)
    try:
        with file.open("rb") as source:
            records = read_frames(source)
            head = msgspec.msgpack.decode(next(records), type=RecordingHead)
            decoder = msgspec.msgpack.Decoder(Trajectory)
            trajectories = [decoder.decode(record) for record in records]
    except OSError as error:
        raise RecordingError(f"cannot read {file}: {error.strerror or error}") from error
    except (*DECODE_ERRORS, ValueError, StopIteration) as error:  # `next` raises StopIteration for an empty file
        raise RecordingError(
            f"{file} is damaged, or another version of Flash wrote it: {str(error) or 'it is empty'}; "
            f"step {step} cannot be trained again from it"
        ) from error
    if head.step != step:
        raise RecordingError(f"{file} is the batch of another step: it was recorded as that of step {head.step}")
    if head.trajectories != len(trajectories):
        raise RecordingError(f"{file} is damaged: it holds {len(trajectories)} of {head.trajectories} trajectories")
    return Batch(head.step, head.min_version, trajectories, head.earlier, head.rounds)


def step_named(name: str) -> int | None:
    """Return the step in a name such as `step-000012`; None if the name has another form.

    A file of another form in a folder of steps was not written by Flash, and the callers leave it alone.
    """
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def checkpointed(folder: Path) -> list[int]:
    """Return the versions of all checkpoints in `folder`, complete or not, in order.

    Their folders are named like steps. The journal and the recorder keep what the oldest of these checkpoints needs.
    """
    named = (step_named(entry.name) for entry in folder.glob("*"))
    return sorted(version for version in named if version is not None)


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps whose batches are recorded in `folder`, in order."""
    named = (step_named(file.stem) for file in folder.glob(f"*{_SUFFIX}"))
    return sorted(step for step in named if step is not None)


def forget_before(folder: Path, step: int) -> None:
    """Delete the batches of the steps before `step`, the version of the oldest checkpoint.

    A run that is resumed from a checkpoint of version n makes step n first, and so needs no earlier batch.
    """
    for recorded in recorded_steps(folder):
        if recorded < step:
            batch_file(folder, recorded).unlink(missing_ok=True)


def batch_file(folder: Path, step: int) -> Path:
    """Return the path of the recording of a step."""
    return folder / f"step-{step:06d}{_SUFFIX}"


# -- frames ------------------------------------------------------------------------------------------------------------


def append_frame(buffer: bytearray, record: Any) -> None:
    """Append a record to a buffer, in a frame."""
    data = _ENCODER.encode(record)
    buffer += HEADER.pack(len(data), zlib.crc32(data))
    buffer += data


def read_frames(source: BinaryIO) -> Iterator[bytes]:
    """Yield each record in msgpack, without its header, from the current place to the end of the file.

    Raises:
        ValueError: a frame is cut off or damaged. The records before it have been yielded.
    """
    while header := source.read(HEADER.size):
        if len(header) < HEADER.size:
            raise ValueError("a record is cut off")
        length, crc = HEADER.unpack(header)
        # No record that Flash writes is empty. A lost write leaves zeros, which would look like empty records.
        if length == 0:
            raise ValueError("a record is empty")
        data = source.read(length)
        if len(data) < length:
            raise ValueError("a record is cut off")
        if zlib.crc32(data) != crc:
            raise ValueError(f"the checksum of a record of {length} bytes is wrong")
        yield data


def whole_frame_after(file: Path, start: int) -> bool:
    """Return True if a whole frame begins anywhere after byte `start`.

    The journal calls this if the frame at byte `start` is damaged. A crash damages only the end of a file. If a whole
    frame follows, the damage has another cause, and records of the run are lost.
    """
    size = file.stat().st_size
    if size - start <= HEADER.size:
        return False
    # The length in the damaged header is no guide to the next frame, so every byte is tried as a start.
    with (
        file.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        return any(_whole_at(view, offset, size) for offset in range(start + 1, size - HEADER.size))


def _whole_at(view: memoryview, offset: int, size: int) -> bool:
    """Return True if a whole frame begins at byte `offset` of a file. `view` is its content, `size` its bytes."""
    length, crc = HEADER.unpack_from(view, offset)
    begin = offset + HEADER.size
    # A record is a msgpack map or array of at most 15 elements, so its first byte is from 0x80 to 0x9F. This test skips
    # most offsets cheaply.
    if not 0 < length <= size - begin or not 0x80 <= view[begin] <= 0x9F:
        return False
    with view[begin : begin + length] as data:
        return zlib.crc32(data) == crc
