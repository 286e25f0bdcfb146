"""Recorded batches come back as they were, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash.errors import ConfigError, RecordingError
from flash.observe.recording import forget_before, read_batch, recorded_steps, write_batch
from flash.observe.rundir import RunDirectory
from flash.run.replay import plan
from flash.types import Batch, BatchSample, Task
from tests.hub.cases import trajectory


def a_batch(step: int = 3) -> Batch:
    made = [trajectory(Task(index, index // 2, index % 2, 7), 2, 5 + index) for index in range(4)]
    return Batch(step, 1, made, [BatchSample(9, 0.5, 1, 3, False, [0.5])])


def test_a_batch_comes_back_as_it_was(tmp_path: Path) -> None:
    for step in (3, 12):
        write_batch(tmp_path, a_batch(step))
    assert recorded_steps(tmp_path) == [3, 12]
    assert read_batch(tmp_path, 12) == a_batch(12)
    forget_before(tmp_path, 12)
    assert recorded_steps(tmp_path) == [12]
    assert not list(tmp_path.glob("*.tmp"))


def test_no_byte_can_change_unseen(tmp_path: Path) -> None:
    write_batch(tmp_path, a_batch())
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(RecordingError, match="step-000003"):
            read_batch(tmp_path, 3)
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        with pytest.raises(RecordingError, match="step-000003"):
            read_batch(tmp_path, 3)


def test_a_batch_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"step-000005\.bin: No such file"):
        read_batch(tmp_path, 5)


def test_batches_before_the_oldest_checkpoint_go_unless_all_are_kept(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "run", "")
    for step in range(4):
        directory.write_batch(a_batch(step), keep_all=False)
    assert recorded_steps(directory.batches) == [0, 1, 2, 3]
    for name in ("step-000002", "step-000004", ".tmp-step-000001", "step-000001.replaced", "damaged-step-000000"):
        (directory.checkpoints / name).mkdir()
    directory.write_batch(a_batch(4), keep_all=True)
    assert recorded_steps(directory.batches) == [0, 1, 2, 3, 4]
    directory.write_batch(a_batch(5), keep_all=False)
    assert recorded_steps(directory.batches) == [2, 3, 4, 5]


def test_batches_that_a_resumed_run_trains_again_are_moved_aside(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "run", "")
    for step in range(4):
        directory.write_batch(a_batch(step), keep_all=True)
    again = RunDirectory.open(tmp_path / "run", "", resume_at=2)
    assert recorded_steps(again.batches) == [0, 1]
    assert recorded_steps(again.earlier / "001" / "batches") == [2, 3]


def test_what_others_put_beside_batches_and_checkpoints_is_no_step_and_stays_where_it_is(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "run", "")
    for step in range(4):
        directory.write_batch(a_batch(step), keep_all=True)
    strange = {"step-foo.bin", "step-1x2.bin", "notes.bin", "step-2 copy1.bin"}
    for name in strange:
        (directory.batches / name).touch()
    (directory.checkpoints / "step-0x1").mkdir()
    (directory.checkpoints / "step-000002").mkdir()
    assert recorded_steps(directory.batches) == [0, 1, 2, 3]
    directory.write_batch(a_batch(4), keep_all=False)
    assert recorded_steps(directory.batches) == [2, 3, 4]
    again = RunDirectory.open(tmp_path / "run", "", resume_at=3)
    assert recorded_steps(again.batches) == [2]
    assert {file.name for file in again.batches.iterdir()} == {"step-000002.bin", *strange}


def test_a_replay_says_what_it_lacks(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "run", "")
    with pytest.raises(ConfigError, match="holds no recorded batches"):
        plan(directory.path, None, None)
    for step in (1, 2, 5):
        directory.write_batch(a_batch(step), keep_all=True)
    with pytest.raises(ConfigError, match="batches of steps 1 to 2, 5, and no checkpoint before any"):
        plan(directory.path, None, None)
    for step in (0, 3):
        directory.write_batch(a_batch(step), keep_all=True)
    course = plan(directory.path, None, None)
    assert (course.first, course.last, course.checkpoint) == (0, 4, None)
    with pytest.raises(ConfigError, match=r"--from-step: .*\(0\); got 2"):
        plan(directory.path, 2, None)
    with pytest.raises(ConfigError, match=r"--to-step: expected 1 to 4 .* got 5"):
        plan(directory.path, 0, 5)
