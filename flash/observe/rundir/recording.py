"""The recording of a run: the exact batch of each step, one file per step, so that the step can be trained again.

`flash.observe.rundir.batches` writes it, `flash replay` and a resumed hub read it. A file is a sequence of records:
first a `RecordingHead`, then one trajectory per record. It is written under another name and renamed when it is
complete.

A record is `length u32, CRC-32 u32, msgpack`, little-endian. The journal (flash.run.journal) has the same
records.
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

from flash.errors import RecordingError
from flash.types import Batch, BatchSample, Trajectory

HEADER = struct.Struct("<II")
"""Header of a record: its length in bytes, and its CRC-32."""

_ENCODER = msgspec.msgpack.Encoder()
_SUFFIX = ".bin"
"""End of the name of a recording."""
_WRITE_BYTES = 64 << 10
"""Bytes of records after which they are written to the file."""
FORMAT = 3
"""Version of the records. Since version 2 a task has its sampling settings; since version 3 a trajectory has the tokens
that could have been sampled at each position."""
_STEP = re.compile(r"step-([0-9]+)")
"""Name of a file or folder of one step, without the end after a dot."""


class RecordingHead(msgspec.Struct, frozen=True):
    """First record of a file. The other records are trajectories."""

    step: int
    """Step that trains the batch."""
    min_version: int
    """Oldest version whose tokens the step trains."""
    trajectories: int
    """Number of records that follow."""
    earlier: list[BatchSample]
    """`Batch.earlier` of the batch."""
    format: Literal[3]
    """`FORMAT`. An older Flash must refuse the file: it would assume that each token was sampled from all tokens."""
    rounds: list[int] = []
    """`Batch.rounds` of the batch."""


def write_batch(folder: Path, batch: Batch) -> None:
    """Write a batch to the file of its step.

    It is written in parts: encoding all records in one call would block the other threads of the process.

    Raises:
        OSError: the folder cannot be written; no file of this step is left then.
    """
    file = _file(folder, batch.step)
    aside = file.with_name(file.name + ".tmp")
    try:
        with aside.open("wb") as out:
            head = RecordingHead(
                batch.step, batch.min_version, len(batch.trajectories), batch.earlier, FORMAT, batch.rounds
            )
            frame = bytearray()
            for record in (head, *batch.trajectories):
                append_frame(frame, record)
                if len(frame) > _WRITE_BYTES:
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
    return Batch(head.step, head.min_version, trajectories, head.earlier, head.rounds)


def step_named(name: str) -> int | None:
    """Return the step in a name such as `step-000012`; None if the name has another form, so Flash did not make it."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def checkpointed(folder: Path) -> list[int]:
    """Return the versions of all checkpoints, complete or not, in order."""
    named = (step_named(entry.name) for entry in folder.glob("*"))
    return sorted(version for version in named if version is not None)


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps whose batches are recorded, in order."""
    named = (step_named(file.stem) for file in folder.glob(f"*{_SUFFIX}"))
    return sorted(step for step in named if step is not None)


def forget_before(folder: Path, step: int) -> None:
    """Delete the batches of the steps before `step`: no checkpoint needs them any more."""
    for recorded in recorded_steps(folder):
        if recorded < step:
            _file(folder, recorded).unlink(missing_ok=True)


def _file(folder: Path, step: int) -> Path:
    """Return the path of the recording of a step."""
    return folder / f"step-{step:06d}{_SUFFIX}"


# -- records -----------------------------------------------------------------------------------------------------------


def append_frame(buffer: bytearray, value: Any) -> None:
    """Append a record with this value to a buffer."""
    data = _ENCODER.encode(value)
    buffer += HEADER.pack(len(data), zlib.crc32(data))
    buffer += data


def read_frames(source: BinaryIO) -> Iterator[bytes]:
    """Yield the content of each record, from the current place to the end of the file.

    Raises:
        ValueError: a record is cut off or damaged. The records before it have been yielded.
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
    """Return True if a whole record begins anywhere after byte `start`.

    The journal asks this about a damaged record at `start`. A crash damages only the end of a file. If a whole record
    follows, the damage has another cause, and records of the run are lost.
    """
    size = file.stat().st_size
    if size - start <= HEADER.size:
        return False
    with (
        file.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        return any(_whole_at(view, offset, size) for offset in range(start + 1, size - HEADER.size))


def _whole_at(view: memoryview, offset: int, size: int) -> bool:
    """Return True if a whole record begins at `offset`. `size` is the size of the file in bytes."""
    length, crc = HEADER.unpack_from(view, offset)
    begin = offset + HEADER.size
    # Records are short msgpack arrays and maps, and their first byte says so. This test skips most offsets cheaply.
    if not 0 < length <= size - begin or not 0x80 <= view[begin] <= 0x9F:
        return False
    with view[begin : begin + length] as data:
        return zlib.crc32(data) == crc
