"""A recorded configuration names the same models and modules when it is read from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from flash.config.load import dump, load, recorded
from flash.config.models import hub_models
from flash.config.tree import Config

CONFIG = """
run = { name = "a-run" }
model = { path = "models/mine" }
env = { path = "my_recorded_env:Mine" }
critic = { path = "critics/mine" }
algorithm = { advantage = "gae", kl = { coefficient = 0.1, reference = "owner/name" } }
cluster = { gpus_per_node = 0 }
"""
MODULE = "class Mine:" + "".join(f"\n    def {name}(self): ..." for name in ("reset", "step", "close"))


@pytest.mark.usefixtures("imports")
def test_a_recorded_configuration_is_read_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for model in ("models/mine", "critics/mine"):
        (project / model).mkdir(parents=True)
        (project / model / "config.json").write_text("{}")
    (project / "my_recorded_env.py").write_text(MODULE)
    (project / "run.toml").write_text(CONFIG)
    imported = list(sys.path)
    monkeypatch.chdir(project)
    config = recorded(load("run.toml"))
    assert config.run_dir == project / "outputs" / "a-run"
    assert config.model.path == str(project / "models" / "mine")
    assert config.critic is not None
    assert config.critic.path == str(project / "critics" / "mine")
    assert config.algorithm.kl is not None
    assert config.algorithm.kl.reference == "owner/name"
    assert str(project) in config.env.folders
    assert recorded(config) == config

    (elsewhere / "config.toml").write_text(dump(config))
    del sys.modules["my_recorded_env"]
    sys.path[:] = imported
    monkeypatch.chdir(elsewhere)
    assert load("config.toml") == config


def test_a_model_that_the_run_makes_is_no_hub_id_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = {
        "run": {"name": "a-run"},
        "model": {"path": "tiny"},
        "tiny_model": {},
        "env": {"path": "envs.arithmetic:Arithmetic"},
        "critic": {"path": "small"},
        "algorithm": {"kl": {"coefficient": 0.1, "reference": "tiny"}, "teacher": {"path": "owner/name"}},
    }
    config = msgspec.convert(tables, Config)
    assert hub_models(config) == {"algorithm.teacher.path": "owner/name"}
    found = recorded(config)
    assert (found.model.path, found.algorithm.teacher) == (str(tmp_path / "tiny"), config.algorithm.teacher)
    assert found.critic is not None
    assert found.critic.path == str(tmp_path / "small")


def test_a_recorded_configuration_is_read_as_utf_8_in_every_locale(tmp_path: Path) -> None:
    program = """if True:
        import sys
        from pathlib import Path
        from flash.config.load import load_checked
        from flash.run.replay import refuse_idle
        file = Path(sys.argv[1])
        refuse_idle(file, load_checked(file), [])
    """
    file = tmp_path / "config.toml"
    tables = {"run": {"name": "x", "output_dir": "größe"}, "model": {"path": "m"}, "env": {"path": "e:E"}}
    file.write_text(dump(msgspec.convert(tables, Config)), encoding="utf-8")
    ascii_locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", program, str(file)]
    ended = subprocess.run(command, env=os.environ | ascii_locale, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.usefixtures("imports")
def test_the_folder_of_a_call_from_python_is_recorded_as_the_run_directory_which_keeps_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / ".call-abc"
    folder.mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "my_recorded_env.py").write_text(MODULE)
    text = 'run.name = "a-run"\nmodel.path = "model"\nenv.path = "my_recorded_env:Mine"\ncluster.gpus_per_node = 0\n'
    (folder / "run.toml").write_text(text)
    folders = recorded(load(folder / "run.toml")).env.folders
    assert str(tmp_path / "outputs" / "a-run") in folders
    assert str(folder) not in folders
