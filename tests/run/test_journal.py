"""The journal in files: what was acknowledged comes back, whatever the disk and a crash make of the rest."""

from __future__ import annotations

import resource
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path

import anyio
import msgspec
import pytest

from flash.config.load import dump
from flash.config.tree import Config
from flash.errors import ConfigError, RecordingError, RunDirectoryError
from flash.hub.recovery import HubState, TrainerStart
from flash.observe.rundir.rundir import RunDirectory
from flash.run.journal import FileJournal, JournalPlace, journal_folder, replay_journal, set_journal_aside
from flash.run.restart import NOTHING, Restored, restore_hub_state
from flash.samples.buffer import SampleBuffer
from flash.samples.journal import Replay
from flash.samples.store import BufferState
from flash.trainer.checkpoint_files import HUB_STATE, MANIFEST, FileEntry, Manifest, crc32_of, step_folder
from flash.types import Batch, Lease
from tests.full_disk import small_disk
from tests.hub.test_recovery import make_config
from tests.samples.cases import finish_all, lease_all, make_buffer

pytestmark = pytest.mark.anyio


def config_of(run_dir: Path, journal: str = "write") -> Config:
    """Return a configuration of a run in `run_dir`, with steps of two groups of two samples. `journal`:
    `checkpoint.journal`."""
    run = {"name": run_dir.name, "output_dir": str(run_dir.parent)}
    return make_config(run=run, train={"batch_size": 4}, rollout={"group_size": 2}, checkpoint={"journal": journal})


def buffer_of(journal: FileJournal, state: BufferState | None = None, step: int = 0) -> SampleBuffer:
    """Return a buffer of samples of version `step` that writes a journal."""
    return make_buffer(alpha=1, batch=4, group=2, state=state, step=step, journal=journal)


class Incarnation:
    """Buffer of samples of one process of the hub, which writes its journal."""

    def __init__(self, run_dir: Path, kept: Restored | None = None, *, to_disk: bool = False) -> None:
        state = None if kept is None else kept.state
        version, buffer = (0, None) if state is None else (state.version, state.buffer)
        place = JournalPlace(0, 0) if kept is None else kept.place
        self.notes: list[str] = []
        self.run_dir = run_dir
        self.journal = FileJournal(run_dir, version, place, to_disk=to_disk, note=self.notes.append)
        self.buffer = buffer_of(self.journal, buffer, version)
        self._held: list[Lease] = []

    def deliver(self, number: int, version: int = 0) -> None:
        """Lease all tasks that may be leased, and deliver samples of `version` for the first `number` open leases."""
        self._held += lease_all(self.buffer, version)
        finish_all(self.buffer, self._held[:number], version)
        del self._held[:number]

    def step(self, step: int) -> None:
        """Sample and train one step."""
        self.deliver(100, step)
        assert self.buffer.next_round(step) is not None
        self.buffer.commit(step)

    def checkpoint(self, version: int) -> Path:
        """Write a checkpoint that has only the hub's part, and return its folder."""
        folder = step_folder(self.run_dir, version)
        folder.mkdir(parents=True)
        state = HubState(version, self.buffer.samples.snapshot(), self.journal.begin(version))
        (folder / HUB_STATE).write_bytes(msgspec.msgpack.encode(state))
        entry = FileEntry(HUB_STATE, (folder / HUB_STATE).stat().st_size, crc32_of(folder / HUB_STATE))
        (folder / MANIFEST).write_bytes(msgspec.json.encode(Manifest(version, 0, [entry])))
        return folder


@asynccontextmanager
async def written(incarnation: Incarnation) -> AsyncGenerator[Incarnation]:
    """Run the journal while the block runs. At the end all records are written, and then the journal is cancelled, as
    when the hub's process dies."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(incarnation.journal.run)
        yield incarnation
        with anyio.fail_after(20):
            await incarnation.journal.written()
        tasks.cancel_scope.cancel()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return an empty run directory."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def files(run_dir: Path) -> list[str]:
    """Return the sorted names of the journal's files."""
    return sorted(file.name for file in journal_folder(run_dir).iterdir())


@pytest.mark.parametrize("to_disk", [False, True])
async def test_a_run_without_a_checkpoint_goes_on_with_all_that_was_delivered(run_dir: Path, to_disk: bool) -> None:
    async with written(Incarnation(run_dir, to_disk=to_disk)) as incarnation:
        incarnation.deliver(3)
    kept = restore_hub_state(None, config_of(run_dir))
    assert kept.state is not None
    assert kept.state.version == 0
    assert kept.notes == ["the journal brings back 3 samples that were delivered after version 0"]
    assert kept.state.buffer.ledger == incarnation.buffer.samples.ledger
    # Its next incarnation is read after this one, and so on.
    async with written(Incarnation(run_dir, kept)) as second:
        second.deliver(2)
    assert files(run_dir) == ["000000-step-000000.log", "000001-step-000000.log"]
    again = restore_hub_state(None, config_of(run_dir))
    assert again.state is not None
    assert again.place.number == 2
    assert again.state.buffer.ledger == second.buffer.samples.ledger
    second.buffer.samples.check()


async def test_a_checkpoint_begins_a_file_and_those_before_the_oldest_checkpoint_go(run_dir: Path) -> None:
    async with written(Incarnation(run_dir)) as incarnation:
        incarnation.step(0)
        await incarnation.journal.written()
        first = incarnation.checkpoint(1)
        incarnation.step(1)
        await incarnation.journal.written()
        second = incarnation.checkpoint(2)
        incarnation.step(2)
    assert files(run_dir) == ["000001-step-000001.log", "000002-step-000002.log"]
    for checkpoint, version in ((first, 1), (second, 2)):
        kept = restore_hub_state(checkpoint, config_of(run_dir))
        assert kept.state is not None
        assert {formed.step for formed in kept.state.buffer.formed} == set(range(version, 3))
        assert kept.state.buffer.ledger.trained == 4 * version
        assert kept.state.buffer.ledger.generated_tokens == incarnation.buffer.samples.ledger.generated_tokens
        assert kept.place.number == 3


async def test_a_run_goes_on_from_the_version_that_it_had_and_its_ranks_from_the_checkpoint(run_dir: Path) -> None:
    config = config_of(run_dir)
    directory = RunDirectory.open(run_dir, dump(config), resume_at=0)
    async with written(Incarnation(run_dir)) as incarnation:
        incarnation.step(0)
        await incarnation.journal.written()
        checkpoint = incarnation.checkpoint(1)
        for step in range(1, 4):
            incarnation.step(step)
    for step in range(1, 3):
        directory.append_metrics({"step": step})
        directory.write_batch(Batch(step, 0, [], []), keep_all=True)
    kept = restore_hub_state(checkpoint, config)
    assert kept.state is not None
    assert (kept.state.version, kept.start) == (3, TrainerStart(1, str(checkpoint)))
    assert kept.notes[-1] == (
        "the run goes back from version 4 to 3, and does these steps again: step 3 has no row in metrics.jsonl"
    )
    assert {formed.step for formed in kept.state.buffer.formed} == {3}
    assert kept.state.buffer.ledger.trained == 3 * 4
    # The next incarnation, too, ends before there is another checkpoint.
    async with written(Incarnation(run_dir, kept)) as second:
        second.step(3)
        second.deliver(2, 4)
    directory.append_metrics({"step": 3})
    directory.write_batch(Batch(3, 0, [], []), keep_all=True)
    kept = restore_hub_state(checkpoint, config)
    assert kept.state is not None
    assert (kept.state.version, kept.start) == (4, TrainerStart(1, str(checkpoint)))
    assert kept.state.buffer.formed == []
    assert kept.state.buffer.ledger.trained == 4 * 4
    assert kept.state.buffer.ledger.generated_tokens == second.buffer.samples.ledger.generated_tokens
    assert files(run_dir)[-1] == "000002-step-000003.log"
    # A batch that is damaged meanwhile is formed again from the journal, though two incarnations have passed.
    (directory.batches / "step-000001.bin").write_bytes(b"")
    kept = restore_hub_state(checkpoint, config)
    assert kept.state is not None
    assert kept.state.version == 1
    assert {formed.step for formed in kept.state.buffer.formed} == {1, 2, 3}
    assert kept.state.buffer.ledger.trained == 4


async def test_a_journal_that_is_cut_at_any_byte_ends_with_the_last_whole_event(run_dir: Path) -> None:
    async with written(Incarnation(run_dir)) as incarnation:
        incarnation.step(0)
        incarnation.deliver(2, 1)
    (file,) = journal_folder(run_dir).iterdir()
    whole = file.read_bytes()
    books = [(0, 0, 0)]
    for end in range(0, len(whole), 23):
        file.write_bytes(whole[:end])
        replay = Replay(None, 0)
        place, notes = replay_journal(run_dir, 0, 0, replay)
        assert len(notes) == (file.exists() and file.stat().st_size < end)
        state = replay.state(until=0)
        if state is not None:
            assert place.number == 1
            assert file.read_bytes() == whole[: file.stat().st_size]
            books.append((state.ledger.issued, 0, state.ledger.generated_tokens))
    assert books == sorted(books)
    assert books[-1][2] > 0


async def test_a_damaged_record_is_named_and_the_run_goes_on_from_the_checkpoint_alone(run_dir: Path) -> None:
    async with written(Incarnation(run_dir)) as incarnation:
        incarnation.step(0)
        await incarnation.journal.written()
        checkpoint = incarnation.checkpoint(1)
        incarnation.step(1)
    file = journal_folder(run_dir) / "000001-step-000001.log"
    whole = file.read_bytes()
    for place in range(0, len(whole) * 3 // 4, 101):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        state = HubState.restore((checkpoint / HUB_STATE).read_bytes(), config_of(run_dir))
        with pytest.raises(RecordingError, match=r"000001-step-000001\.log is damaged at byte \d+: "):
            replay_journal(run_dir, 1, state.journal, Replay(state.buffer, 1))
    before = HubState.restore((checkpoint / HUB_STATE).read_bytes(), config_of(run_dir))
    kept = restore_hub_state(checkpoint, config_of(run_dir))
    assert kept.state == before
    assert "goes on from step-000001 alone" in kept.notes[0]
    assert "damaged-000001-step-000001.log" in files(run_dir)
    async with written(Incarnation(run_dir, kept)) as second:
        second.step(1)
    again = restore_hub_state(checkpoint, config_of(run_dir))
    assert again.state is not None
    assert again.state.buffer.ledger.generated_tokens == second.buffer.samples.ledger.generated_tokens


async def test_a_file_of_another_checkpoint_in_the_journals_place_is_reported_and_set_aside(run_dir: Path) -> None:
    async with written(Incarnation(run_dir)) as incarnation:
        incarnation.step(0)
        await incarnation.journal.written()
        incarnation.checkpoint(1)
        incarnation.step(1)
        await incarnation.journal.written()
        checkpoint = incarnation.checkpoint(2)
        incarnation.step(2)
    first, second = (journal_folder(run_dir) / name for name in files(run_dir))
    second.write_bytes(first.read_bytes())
    kept = restore_hub_state(checkpoint, config_of(run_dir))
    assert kept.state is not None
    assert kept.state.version == 2
    (note,) = kept.notes
    assert f"{second} follows a checkpoint of version 1; expected version 2" in note
    assert f"damaged-{second.name}" in files(run_dir)


async def test_steps_that_the_journal_has_lost_are_reported_before_they_are_done_again(run_dir: Path) -> None:
    directory = RunDirectory.open(run_dir, dump(config_of(run_dir)), resume_at=0)
    async with written(Incarnation(run_dir)) as incarnation:
        incarnation.step(0)
        await incarnation.journal.written()
        checkpoint = incarnation.checkpoint(1)
        incarnation.step(1)
    for step in range(2):
        directory.append_metrics({"step": step})
    (journal_folder(run_dir) / "000001-step-000001.log").unlink()
    kept = restore_hub_state(checkpoint, config_of(run_dir))
    assert kept.notes == ["the run goes back from version 2 to 1, and does these steps again: no journal has them"]


async def test_a_journal_that_cannot_be_read_is_set_aside(run_dir: Path) -> None:
    (journal_folder(run_dir) / "000000-step-000000.log").mkdir(parents=True)
    kept = restore_hub_state(None, config_of(run_dir))
    assert kept.state is None
    assert "000000-step-000000.log cannot be read: Is a directory. The run goes on from the beginning" in kept.notes[0]
    assert files(run_dir) == ["damaged-000000-step-000000.log"]


def test_damaged_files_of_one_name_are_all_kept(run_dir: Path) -> None:
    folder = journal_folder(run_dir)
    folder.mkdir(parents=True)
    name = "000001-step-000001.log"
    kept = [f"damaged-{name}", f"damaged-{name}.2", f"damaged-{name}.3"]
    for damaged in kept:
        (folder / name).write_text(damaged)
        assert set_journal_aside(run_dir, 1) == damaged
    assert {file.name: file.read_text() for file in folder.iterdir()} == {damaged: damaged for damaged in kept}


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_journal_that_is_deleted_or_replaced_in_mid_run_is_reported_once_and_the_next_checkpoint_begins_another(
    run_dir: Path, replaced: bool
) -> None:
    incarnation = Incarnation(run_dir)
    async with written(incarnation):
        incarnation.deliver(1)
        await incarnation.journal.written()
        file = journal_folder(run_dir) / "000000-step-000000.log"
        file.unlink()
        if replaced:
            file.write_text("other")
        for _ in range(2):
            incarnation.deliver(1)
            await incarnation.journal.written()
        (told,) = incarnation.notes
        assert f"cannot be written: [Errno 2] it was deleted or replaced while the run wrote it: '{file}'" in told
        checkpoint = incarnation.checkpoint(1)
        incarnation.deliver(1)
        await incarnation.journal.written()
    assert incarnation.notes[1:] == ["the journal is written again, since the checkpoint of version 1"]
    kept = restore_hub_state(checkpoint, config_of(run_dir))
    assert kept.state is not None
    assert kept.state.buffer.ledger.generated_tokens == incarnation.buffer.samples.ledger.generated_tokens


async def test_a_full_disk_is_reported_once_and_the_next_checkpoint_begins_another_journal(run_dir: Path) -> None:
    incarnation = Incarnation(run_dir)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with written(incarnation):
        incarnation.deliver(1)
        await incarnation.journal.written()
        known = deepcopy(incarnation.buffer.samples.ledger)
        file = journal_folder(run_dir) / "000000-step-000000.log"
        size = file.stat().st_size
        # A file may not grow beyond this: writes fail in the middle, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
        try:
            for _ in range(2):
                incarnation.deliver(1)
                await incarnation.journal.written()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        incarnation.deliver(1)
        await incarnation.journal.written()
        assert len(incarnation.notes) == 1
        assert "the journal cannot be written: " in incarnation.notes[0]
        assert file.stat().st_size == size, "a record was torn, or written behind a gap"
        checkpoint = incarnation.checkpoint(0)
        incarnation.deliver(1)
        await incarnation.journal.written()
        assert incarnation.notes[1:] == ["the journal is written again, since the checkpoint of version 0"]
    kept = restore_hub_state(checkpoint, config_of(run_dir))
    assert kept.state is not None
    assert kept.state.buffer.ledger.generated_tokens == incarnation.buffer.samples.ledger.generated_tokens
    # Without the newest checkpoint what lies behind the gap is of no use.
    state = restore_hub_state(None, config_of(run_dir))
    assert state.state is not None
    assert state.state.buffer.ledger == known
    assert any("are of no use" in note for note in state.notes)


async def test_a_folder_that_cannot_be_written_ends_nothing(run_dir: Path) -> None:
    journal_folder(run_dir).write_text("in the way")
    async with written(Incarnation(run_dir)) as incarnation:
        incarnation.deliver(2)
    assert len(incarnation.notes) == 1


async def test_a_torn_journal_on_a_disk_that_is_read_only_is_one_clear_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        run_dir = disk.path / "run"
        run_dir.mkdir()
        async with written(Incarnation(run_dir)) as incarnation:
            incarnation.deliver(2)
        with (journal_folder(run_dir) / "000000-step-000000.log").open("ab") as file:
            file.write(b"torn")
        disk.read_only()
        with pytest.raises(RunDirectoryError, match="Read-only file system"):
            restore_hub_state(None, config_of(run_dir))


async def test_a_journal_that_is_switched_off_is_used_once_more_and_then_gone(run_dir: Path) -> None:
    async with written(Incarnation(run_dir)) as incarnation:
        incarnation.deliver(2)
    kept = restore_hub_state(None, config_of(run_dir, "off"))
    assert kept.state is not None
    assert kept.state.buffer.ledger == incarnation.buffer.samples.ledger
    assert not journal_folder(run_dir).exists()
    assert restore_hub_state(None, config_of(run_dir)) == NOTHING


async def test_a_journal_of_a_run_of_another_size_is_refused(run_dir: Path) -> None:
    async with written(Incarnation(run_dir)) as incarnation:
        incarnation.deliver(1)
    other = make_config(run={"name": "run", "output_dir": str(run_dir.parent)}, train={"batch_size": 8})
    with pytest.raises(ConfigError, match=r"train\.batch_size: .*got 8"):
        restore_hub_state(None, other)


async def test_waiting_for_a_closed_journal_is_an_error(tmp_path: Path) -> None:
    one = Incarnation(tmp_path / "run")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.journal.run)
        tasks.cancel_scope.cancel()  # before its first write
    with anyio.fail_after(5), pytest.raises(RunDirectoryError, match="was closed"):
        await one.journal.written()
