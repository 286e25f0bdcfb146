"""Values of the argument `--model`: a model folder, a run, a checkpoint or a hub id."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import ConfigError
from flash.observe.rundir.rundir import RunDirectory
from flash.run.models import chosen_model, model_folder
from flash.trainer import checkpoint_files

CONFIG = msgspec.convert({"run": {"name": "run"}, "model": {"path": "owner/model"}, "env": {"path": "m:Env"}}, Config)
"""Configuration of a run whose model is on a hub."""


def test_a_name_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    for step in ("step-000003", "step-000006"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    named = tmp_path / "checkpoints" / "6"
    with pytest.raises(ConfigError) as error, model_folder(str(named), CONFIG):
        pass
    there = f"{tmp_path / 'checkpoints'} has step-000003, step-000006"
    assert str(error.value) == f"there is no model, checkpoint or run {named}; {there}"


def test_a_folder_counts_before_its_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").touch()
    (tmp_path / "run" / "checkpoints" / "step-000003").mkdir(parents=True)
    with model_folder(str(tmp_path / "run"), CONFIG) as found:
        assert found == str(tmp_path / "run" / "model")


def test_a_hub_id_that_leads_to_no_model_is_refused_before_it_is_loaded() -> None:
    assert chosen_model("owner/model") == "owner/model"
    with pytest.raises(ConfigError, match="there is no folder a--b here"), model_folder("a--b", CONFIG):
        pass


def test_a_run_without_an_exported_model_means_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    whole = checkpoint_files.Manifest(version=3, skipped_steps=0, files=[])
    torn = checkpoint_files.Manifest(version=6, skipped_steps=0, files=[checkpoint_files.FileEntry("gone", 1, 0)])
    for manifest in (whole, torn):
        folder = checkpoint_files.step_folder(tmp_path, manifest.version)
        folder.mkdir(parents=True)
        (folder / checkpoint_files.MANIFEST).write_bytes(msgspec.json.encode(manifest))
    newest = str(checkpoint_files.step_folder(tmp_path, 3))
    assert chosen_model(str(tmp_path)) == newest
    assert chosen_model(newest) == newest


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file", "is a file; expected the folder of a model, a checkpoint or a run"),
        ("starting", "the run {} has left no whole checkpoint and no model yet"),
        ("other", "is neither a model (it has no config.json) nor a checkpoint nor a run"),
    ],
)
def test_a_path_that_holds_no_model_is_refused_with_its_kind(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    RunDirectory.open(tmp_path / "starting", "")
    with pytest.raises(ConfigError) as error, model_folder(str(tmp_path / name), CONFIG):
        pass
    assert why.format(tmp_path / name) in str(error.value)
