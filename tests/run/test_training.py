"""What `flash.train` tells of a configuration that is unwise, and of a run that failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flash.config.load import load
from flash.errors import ConfigError, FlashError, WeightsError
from flash.run.training import error_left, train

CONFIG = """
run.name = "test"
model.path = "Qwen/Qwen3-0.6B"
env.path = "envs.arithmetic:Arithmetic"
cluster.gpus_per_node = 0
train.learning_rate = 0.5
"""


def test_what_is_unwise_is_told_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_NNODES", "2")
    (tmp_path / "run.toml").write_text(CONFIG)
    for name, text in {
        "config.json": "{}",
        "tokenizer.json": "{}",
        "model.safetensors": "\2" + 7 * "\0" + "{}",
    }.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="this job has 2 node"):
        train(load(tmp_path / "run.toml", [f"run.output_dir={tmp_path}", f"model.path={tmp_path}"]))
    out, err = capfd.readouterr()
    assert "flash: warning: `train.learning_rate`: 0.5 is far above" in err
    assert out == ""


def leave(folder: Path, time: float) -> None:
    row = {"launch": "x/1", "error": "WeightsError", "message": "engine 0 differs", "time": time}
    (folder / "error.json").write_text(json.dumps(row))


def test_the_error_that_a_run_has_left_is_of_its_own_class(tmp_path: Path) -> None:
    leave(tmp_path, time=20.0)
    error = error_left(tmp_path, since=10.0)
    assert type(error) is WeightsError
    assert str(error) == "engine 0 differs"


def test_the_error_of_an_earlier_launch_is_not_told_again(tmp_path: Path) -> None:
    leave(tmp_path, time=5.0)
    error = error_left(tmp_path, since=10.0)
    assert type(error) is FlashError
    assert "its output above" in str(error)


def test_without_an_error_or_with_half_of_one_the_output_is_pointed_to(tmp_path: Path) -> None:
    assert "its output above" in str(error_left(tmp_path, since=0.0))
    (tmp_path / "error.json").write_text('{"launch"')
    assert "its output above" in str(error_left(tmp_path, since=0.0))
