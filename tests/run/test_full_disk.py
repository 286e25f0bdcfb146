"""The disk of the run directory fills up at a drawn byte: the run stops with a clear error, and nothing is lost."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from anyio.to_thread import run_sync

from flash.config.tree import Config
from flash.errors import FlashError
from flash.hub.recovery import HubState, TrainerStart
from flash.observe.recorder import Recorder
from flash.observe.rundir.recording import recorded_steps
from flash.run.journal import FileJournal
from flash.run.restart import NOTHING, Restored, keep_hub_state, restore_hub_state
from flash.samples.batches import gather
from flash.samples.buffer import SampleBuffer
from flash.trainer.checkpoint_files import (
    HUB_STATE,
    MANIFEST,
    FileEntry,
    Manifest,
    choose_checkpoint,
    make_empty,
    move_into_place,
    prune,
    step_folder,
    sync_to_disk,
    temporary_of,
)
from flash.transport.frames import encoded_pieces
from flash.waiting import unwrapped_group
from tests.full_disk import PAGE, SmallDisk, small_disk
from tests.run.test_journal import buffer_of, config_of
from tests.samples.cases import finish_all, lease_all

pytestmark = pytest.mark.anyio

STEPS = 9
"""Number of steps of the run."""
EVERY = 3
"""Steps from one checkpoint to the next."""
SIZE = 4 << 20
"""Bytes of the disk."""


class Words:
    """Tokenizer for the recorder, which shows the same text for each token."""

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return ["word"] * len(token_ids)


class Incarnation:
    """Writer of a first node's files in one incarnation of a run: all but the ranks' part of a checkpoint."""

    def __init__(self, config: Config, kept: Restored, *, resumed: bool) -> None:
        version, state = (0, None) if kept.state is None else (kept.state.version, kept.state.buffer)
        self.config = config
        self.run_dir = config.run_dir
        self.version = version
        self.recorder = Recorder(config, Words(), now=lambda: 0.0, resume_at=version if resumed else None, restarts=0)
        self.notes: list[str] = []
        self.journal = FileJournal(self.run_dir, version, kept.place, to_disk=False, note=self.notes.append)
        self.buffer: SampleBuffer = buffer_of(self.journal, state, version)

    async def to(self, last: int, disk: SmallDisk, fills: tuple[int, int] | None) -> None:
        """Train up to version `last`. `fills`: the step at which the disk fills up, and the bytes that are free then;
        None: it does not fill up."""
        async with unwrapped_group() as tasks:
            tasks.start_soon(self.journal.run)
            with self.recorder:
                while self.version < last:
                    if fills is not None and self.version == fills[0]:
                        disk.leave(fills[1])
                    await self.step()
                    if self.version % EVERY == 0:
                        await self.checkpoint()
                self.recorder.ledger(self.buffer.samples.totals())
            tasks.cancel_scope.cancel()

    async def step(self) -> None:
        """Sample and train one step, and record it like the first node."""
        step = self.version
        if not self.buffer.has_round(step):
            finish_all(self.buffer, lease_all(self.buffer, step), step)
        groups = self.buffer.next_round(step)
        assert groups is not None
        self.recorder.batch(gather(groups, step, max(0, step - 1)))
        self.buffer.commit(step)
        self.version += 1
        self.recorder.step({"step": step, "reward": 0.5})
        await self.journal.written()

    async def checkpoint(self) -> None:
        """Write a checkpoint of the present version, which has only the hub's state, and delete old ones."""
        folder = step_folder(self.run_dir, self.version)
        aside = temporary_of(folder)
        self.recorder.ledger(self.buffer.samples.totals())
        state = HubState(self.version, self.buffer.samples.snapshot(), self.journal.begin(self.version))
        try:
            make_empty(aside)
            kept = await keep_hub_state(self.run_dir, self.recorder.written, self.version, encoded_pieces(state))
            manifest = Manifest(self.version, 0, [FileEntry(HUB_STATE, kept.size, kept.crc32)])
            (aside / MANIFEST).write_bytes(msgspec.json.encode(manifest))
            sync_to_disk(aside / MANIFEST)
            move_into_place(aside, folder)
        except (OSError, FlashError):
            shutil.rmtree(aside)
            raise
        prune(self.run_dir, keep=2)


@pytest.mark.parametrize("seed", range(20))
async def test_a_disk_that_fills_at_any_byte_loses_nothing(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    with small_disk(tmp_path / "disk", SIZE) as disk:
        config = config_of(disk.path / "run")
        incarnation = Incarnation(config, NOTHING, resumed=False)
        told = ""
        try:
            await incarnation.to(STEPS, disk, (dice.randrange(STEPS), dice.randrange(30) * PAGE))
        except (OSError, FlashError) as error:
            told = str(error)
        disk.clear()
        assert not told or "No space left on device" in told
        assert [file for file in config.run_dir.rglob("*") if "tmp" in file.name] == []
        checkpoint, damaged = await run_sync(choose_checkpoint, config.run_dir)
        kept = await run_sync(restore_hub_state, checkpoint, config)
        assert damaged == []
        assert not [note for note in kept.notes if "damaged" in note]
        assert kept.start == TrainerStart(kept.start.version, str(checkpoint or ""))
        reached = whole_since(kept.start.version, incarnation)
        again = Incarnation(config, kept, resumed=True)
        if not incarnation.notes:  # the journal has all that was written beside it, but perhaps the last commit
            assert again.version >= min(incarnation.version - 1, reached)
        recorded, rows = again.recorder.batches.steps(), again.recorder.directory.read_metrics()
        assert set(range(kept.start.version, again.version)) <= set(recorded)
        assert [row["step"] for row in rows] == list(range(again.version))
        await again.to(STEPS, disk, None)
        all_is_there(again)


def whole_since(version: int, incarnation: Incarnation) -> int:
    """Return the first step from `version` on of which a row of metrics or the batch is missing."""
    directory = incarnation.recorder.directory
    rows, batches = {row["step"] for row in directory.read_metrics()}, set(recorded_steps(directory.batches))
    return next(step for step in range(version, STEPS + 1) if step not in rows & batches)


def all_is_there(incarnation: Incarnation) -> None:
    """Check that rows and samples of all steps are there, each once."""
    directory = incarnation.recorder.directory
    assert [row["step"] for row in directory.read_metrics()] == list(range(STEPS))
    assert [sample.step for sample in directory.read_samples()] == [step for step in range(STEPS) for _ in range(4)]
    assert incarnation.notes == []
    incarnation.buffer.samples.check()
