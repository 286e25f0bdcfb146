"""The hub's state goes into a checkpoint and back, piece by piece."""

from __future__ import annotations

import os
import resource
import zlib
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from flash.errors import CheckpointError, RunDirectoryError
from flash.hub.recovery import HubState
from flash.run.restart import keep_hub_state, read_hub_state
from flash.trainer.checkpoint_files import (
    HUB_STATE,
    MANIFEST,
    FileEntry,
    Manifest,
    move_into_place,
    step_folder,
    temporary_of,
)
from flash.transport.frames import SLICE_BYTES, encoded_pieces
from tests.hub.test_recovery import make_config
from tests.samples.cases import finish_all, lease_all, make_buffer, trajectory

pytestmark = pytest.mark.anyio


def at_once() -> None:
    """Wait for no records: nothing is recorded beside the state."""


def large_state() -> HubState:
    """Return a state of several slices: a few megabytes of finished samples."""
    buffer = make_buffer(batch=16, group=4)
    leases = lease_all(buffer, 0)
    for lease in leases[:16]:
        buffer.deliver(lease.lease_id, trajectory(lease.task, 0, tokens=100_000))
    finish_all(buffer, leases[16:], 0)
    return HubState(3, buffer.samples.snapshot(), journal=0)


async def test_a_state_of_many_pieces_is_read_back_equal_with_the_reported_size_and_checksum(
    tmp_path: Path,
) -> None:
    state, folder = large_state(), step_folder(tmp_path, 3)
    temporary_of(folder).mkdir(parents=True)
    lengths: list[int] = []

    def watched() -> Generator[bytearray]:
        """Yield the pieces of the state, and note their lengths."""
        for piece in encoded_pieces(state):
            lengths.append(len(piece))
            yield piece

    kept = await keep_hub_state(tmp_path, at_once, 3, watched())
    whole = msgspec.msgpack.encode(state)
    assert (kept.size, kept.crc32) == (len(whole), zlib.crc32(whole))
    assert len(lengths) > 5
    assert max(lengths) < 4 * SLICE_BYTES
    entry = FileEntry(HUB_STATE, kept.size, kept.crc32)
    (temporary_of(folder) / MANIFEST).write_bytes(msgspec.json.encode(Manifest(3, 0, [entry])))
    move_into_place(temporary_of(folder), folder)
    assert read_hub_state(folder, make_config()) == state


async def test_a_state_that_cannot_be_written_is_reported_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"the hub cannot write its state to .*\.tmp-step-000003/hub\.bin: .*No such"
    ):
        await keep_hub_state(tmp_path, at_once, 3, encoded_pieces(large_state()))
    temporary_of(step_folder(tmp_path, 3)).mkdir(parents=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file may not grow beyond this: writes fail in the middle, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLICE_BYTES, hard))
    try:
        with pytest.raises(CheckpointError, match=r"hub\.bin: .*File too large"):
            await keep_hub_state(tmp_path, at_once, 3, encoded_pieces(large_state()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    assert not [target for link in links if link.is_symlink() and str(tmp_path) in (target := os.readlink(link))]


async def test_a_checkpoint_waits_for_the_records_of_earlier_steps_and_fails_with_them(tmp_path: Path) -> None:
    aside = temporary_of(step_folder(tmp_path, 3))
    aside.mkdir(parents=True)

    def full() -> None:
        raise RunDirectoryError("cannot write samples.jsonl: No space left on device")

    with pytest.raises(RunDirectoryError, match=r"cannot write samples\.jsonl"):
        await keep_hub_state(tmp_path, full, 3, encoded_pieces(large_state()))
    assert list(aside.iterdir()) == []
