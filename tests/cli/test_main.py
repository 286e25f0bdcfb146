"""The command line: what is read from where."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash.cli.main import main

CONFIG = """
run = { name = "a-run" }
model = { path = "owner/model" }
env = { path = "envs.arithmetic:Arithmetic" }
cluster = { gpus_per_node = 0 }
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "run.toml").write_text(CONFIG)
    return str(tmp_path / "run.toml")


@pytest.mark.parametrize("order", [["--dry-run", "{}", "{}"], ["{}", "--dry-run", "{}"], ["{}", "{}", "--dry-run"]])
def test_files_and_overrides_stand_before_or_behind_options(
    config: str, order: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = iter([config, "run.steps=7"])
    arguments = [next(words) if word == "{}" else word for word in order]
    assert main(["train", *arguments]) == 0
    assert "steps = 7" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["train", "{}", "--dryrun"], ["plot", "folder", "train.steps=1"]])
def test_an_unknown_argument_is_refused_by_name(
    config: str, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([word.format(config) for word in wrong])
    assert f"unrecognized arguments: {wrong[-1]}" in capsys.readouterr().err
