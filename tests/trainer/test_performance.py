"""The profile of a trainer rank's steps."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from flash.config.learning import TrainConfig
from flash.trainer.performance import StepProfiler
from tests.trainer.trainer_cases import make_config, random_shard, trainer_at

pytestmark = pytest.mark.filterwarnings("ignore")


def events_of(file: Path) -> list[dict[str, Any]]:
    """The events of a written trace."""
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_the_profile_of_a_step_names_its_operators(
    tmp_path: Path, tied_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = make_config(tied_model, train={"profile": "0:0"}).train.profiled_steps
    profiler, trainer = StepProfiler(steps, tmp_path, 0, cuda=False), trainer_at(0, tied_model)
    profiler.begin_step(0)
    trainer.train_step(random_shard())
    with caplog.at_level(logging.INFO, "flash"):
        profiler.begin_step(1)
    file = tmp_path / "profile" / "rank-0.json.gz"
    assert f"the profile is written to {file}: open it at https://ui.perfetto.dev" in caplog.text
    names = {event["name"] for event in events_of(file)}
    assert {"step 0", "aten::mm", "aten::embedding"} <= names
    assert any(name.startswith("Optimizer.step") for name in names)
    assert [one.name for one in file.parent.iterdir()] == [file.name]


def test_the_named_steps_are_recorded_and_no_others(tmp_path: Path) -> None:
    profiler = StepProfiler(TrainConfig(profile="2:3").profiled_steps, tmp_path, 1, cuda=False)
    file = tmp_path / "profile" / "rank-1.json.gz"
    for step in range(4):
        profiler.begin_step(step)
        assert not file.exists()
    for step in range(4, 6):
        profiler.begin_step(step)
    profiler.close()
    assert {event["name"] for event in events_of(file)} >= {"step 2", "step 3"}
    assert not {"step 1", "step 4"} & {event["name"] for event in events_of(file)}


def test_an_early_end_leaves_the_steps_until_then(tmp_path: Path) -> None:
    profiler = StepProfiler(range(1, 9), tmp_path, 0, cuda=False)
    profiler.begin_step(5)
    profiler.close()
    profiler.close()
    assert "step 5" in {event["name"] for event in events_of(tmp_path / "profile" / "rank-0.json.gz")}


def test_a_trace_that_cannot_be_written_is_only_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file in the place of the folder")
    profiler = StepProfiler(range(1), tmp_path, 0, cuda=False)
    profiler.begin_step(0)
    profiler.begin_step(1)
    assert "the profile of trainer rank 0 was not written to" in caplog.text


def test_without_the_key_nothing_is_recorded(tmp_path: Path) -> None:
    profiler = StepProfiler(TrainConfig().profiled_steps, tmp_path, 0, cuda=False)
    profiler.begin_step(0)
    profiler.begin_step(1)
    profiler.close()
    assert not [*tmp_path.iterdir()]
