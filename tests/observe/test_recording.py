"""Recorded batches are read back unchanged, or refused."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from flash.config.load import dump, given, load
from flash.config.tree import Config
from flash.errors import ConfigError, RecordingError
from flash.observe.rundir.recording import (
    append_frame,
    forget_before,
    read_batch,
    read_frames,
    recorded_steps,
    write_batch,
)
from flash.observe.rundir.rundir import RunDirectory
from flash.run.replay import plan, refuse_idle
from flash.trainer.checkpoint_files import MANIFEST, FileEntry, Manifest, step_folder
from flash.types import Batch, BatchSample, Task
from tests.samples.cases import trajectory


def a_batch(step: int = 3) -> Batch:
    """Return the batch of a step: two groups of two samples, and a sample that was trained earlier."""
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


def test_a_file_of_before_tasks_said_how_they_were_sampled_is_refused(tmp_path: Path) -> None:
    """Otherwise its samples would count as sampled at temperature 1."""
    write_batch(tmp_path, a_batch())
    (file,) = tmp_path.iterdir()
    with file.open("rb") as source:
        head, *rest = read_frames(source)
    frame = bytearray()
    append_frame(frame, {name: value for name, value in msgspec.msgpack.decode(head).items() if name != "format"})
    for record in rest:
        append_frame(frame, msgspec.Raw(record))
    file.write_bytes(frame)
    with pytest.raises(RecordingError, match="another version of Flash wrote it"):
        read_batch(tmp_path, 3)


def test_a_file_that_is_empty_or_of_another_step_is_called_so(tmp_path: Path) -> None:
    write_batch(tmp_path, a_batch(12))
    (tmp_path / "step-000012.bin").rename(tmp_path / "step-000003.bin")
    with pytest.raises(RecordingError, match="the batch of another step: it was recorded as that of step 12"):
        read_batch(tmp_path, 3)
    (tmp_path / "step-000003.bin").write_bytes(b"")
    with pytest.raises(RecordingError, match="wrote it: it is empty; step 3"):
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
    assert course.left_out == "steps 5"
    assert plan(directory.path, None, 3).left_out == ""
    with pytest.raises(ConfigError, match=r"--from-step: .*\(0\); got 2"):
        plan(directory.path, 2, None)
    with pytest.raises(ConfigError, match=r"--to-step: expected 1 to 4 .* got 5"):
        plan(directory.path, 0, 5)


def test_a_replay_says_what_is_wrong_with_the_checkpoint_that_it_needs(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "run", "")
    directory.write_batch(a_batch(4), keep_all=True)
    folder = step_folder(directory.path, 4)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("garbage")
    damaged = f"{folder / MANIFEST} is damaged: JSON is malformed"
    with pytest.raises(ConfigError, match=f"and no checkpoint before any of them; {re.escape(damaged)}"):
        plan(directory.path, None, None)
    for entry, fault in (
        (FileEntry("state", 7, 0), "3 bytes, written as 7"),
        (FileEntry("gone", 1, 0), "No such file"),
    ):
        (folder / MANIFEST).write_bytes(msgspec.json.encode(Manifest(4, 0, [entry])))
        (folder / "state").write_text("abc")
        with pytest.raises(ConfigError, match=f"{re.escape(str(folder / entry.path))} is damaged: .*{fault}"):
            plan(directory.path, None, None)
    directory.write_batch(a_batch(0), keep_all=True)
    with pytest.raises(ConfigError, match=r"--from-step: .*\(0\); got 4; .*gone is damaged"):
        plan(directory.path, 4, None)


@pytest.mark.parametrize(
    ("overrides", "idle"),
    [
        (["train.learning_rate=0.5", "algorithm.objective=cispo", "run.seed=3", "model.path=other"], []),
        (["train.batch_size=16", "engine.count=1"], ["train.batch_size"]),
        (["train.batch_size=8"], []),
        (["engine.count=2", "env.options.digits=1"], ["engine.count", "env.options.digits"]),
    ],
)
def test_settings_that_a_replay_does_not_follow_are_refused_by_name(
    tmp_path: Path, overrides: list[str], idle: list[str]
) -> None:
    tree = {
        "run": {"name": "run"},
        "model": {"path": "owner/model"},
        "env": {"path": "envs.arithmetic:Arithmetic", "options": {"digits": 2}},
        "train": {"batch_size": 8},
        "cluster": {"gpus_per_node": 0},
    }
    file = tmp_path / "config.toml"
    file.write_text(dump(msgspec.convert(tree, Config)))
    config, named = load(file, overrides), given([], overrides)
    if not idle:
        refuse_idle(file, config, named)
        return
    with pytest.raises(ConfigError) as error:
        refuse_idle(file, config, named)
    assert re.findall("`(.*)`: has no effect on a replay", str(error.value)) == idle
