"""The recorder: what takes long is written by a thread, in order, and its errors are told."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import RunDirectoryError
from flash.observe.recorder import Recorder
from flash.types import Batch, Task
from tests.hub.cases import trajectory

WAIT_S = 10.0
"""Longest wait for the other thread."""


class Slow:
    """A tokenizer that tells when it is asked, and answers when it may."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may = threading.Event()

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        self.asked.set()
        assert self.may.wait(WAIT_S)
        return [str(token) for token in token_ids]


def make_recorder(folder: Path, tokenizer: Slow) -> Recorder:
    config = msgspec.convert(
        {
            "run": {"name": "run", "output_dir": str(folder), "log_samples": 1},
            "model": {"path": "none"},
            "env": {"path": "none:None"},
            "cluster": {"gpus_per_node": 0},
        },
        Config,
    )
    return Recorder(config, tokenizer, now=lambda: 0.0, resume_at=None, restarts=0)


def test_the_loop_goes_on_while_samples_are_written_and_all_are_there_at_the_end(tmp_path: Path) -> None:
    tokenizer = Slow()
    with make_recorder(tmp_path, tokenizer) as recorder:
        for step in range(3):
            recorder.batch(Batch(step, 0, [trajectory(Task(step, step, 0, 0), 0)], []))
        assert tokenizer.asked.wait(WAIT_S)
        assert not list(recorder.directory.trajectories.iterdir())
        tokenizer.may.set()
    assert len(list(recorder.directory.trajectories.iterdir())) == 3
    assert [sample.step for sample in recorder.directory.read_samples()] == [0, 1, 2]


def test_samples_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    tokenizer = Slow()
    tokenizer.may.set()
    recorder = make_recorder(tmp_path, tokenizer)
    shutil.rmtree(recorder.directory.path)
    with pytest.raises(RunDirectoryError), recorder:
        recorder.batch(Batch(0, 0, [trajectory(Task(0, 0, 0, 0), 0)], []))


def test_pictures_that_find_no_room_are_told_and_the_run_has_ended_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Slow()
    tokenizer.may.set()
    with make_recorder(tmp_path, tokenizer) as recorder:
        recorder.step({"step": 0, "reward": 0.5, "time": 1.0})
        shutil.rmtree(recorder.directory.plots)
        recorder.directory.plots.write_text("in the way")
        recorder.finish({"issued": 0}, interrupted=False)
    assert recorder.directory.summary.exists()
    told = "".join(capsys.readouterr())
    assert "cannot write" in told
    assert f"`flash plot {recorder.directory.path}` draws them at any time" in " ".join(told.split())
