"""`flash export`: the folder that it writes, and arguments that it refuses before it writes anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flash.cli.main import main, parse
from flash.errors import ConfigError

CONFIG = """
run = { name = "a-run", resume = true }
model = { path = "outputs/models/gone" }
env = { path = "envs.arithmetic:Arithmetic" }
cluster = { gpus_per_node = 0 }
"""


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """Return the directory of a run that has left a model. The model with which it began is gone."""
    (tmp_path / "ended" / "model").mkdir(parents=True)
    (tmp_path / "ended" / "config.toml").write_text(CONFIG)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "ended" / "model" / name).write_text("{}")
    return tmp_path / "ended"


def test_the_model_of_a_run_that_has_ended_is_written(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert main(["export", str(ended), str(folder)]) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert capsys.readouterr().out.startswith(f"{folder}: the weights of {ended / 'model'}, ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ended", "mine"]


def test_weights_are_written_in_the_precision_of_the_model_that_the_run_began_with_or_as_asked(tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "ended"
    for folder, stored in ((base, torch.bfloat16), (run / "model", torch.float32)):
        folder.mkdir(parents=True)
        save_file(
            {"w": torch.ones(4, dtype=stored), "count": torch.ones(1, dtype=torch.int64)}, folder / "model.safetensors"
        )
        (folder / "config.json").write_text(json.dumps({"torch_dtype": str(stored).removeprefix("torch.")}))
    (run / "config.toml").write_text(CONFIG.replace("outputs/models/gone", str(base)))
    for options, dtype in (([], "bfloat16"), (["--dtype", "float16"], "float16"), (["--dtype", "float32"], "float32")):
        folder = tmp_path / f"as {dtype}"
        assert main(["export", str(run), str(folder), *options]) == 0
        tensors = load_file(folder / "model.safetensors")
        assert (tensors["w"].dtype, tensors["count"].dtype) == (getattr(torch, dtype), torch.int64)
        described = json.loads((folder / "config.json").read_text())
        assert described.get("dtype", described.get("torch_dtype")) == dtype


def test_a_source_that_is_no_run_and_a_target_with_files_are_refused(ended: Path, tmp_path: Path) -> None:
    refused = (
        ((ended, ended), f"cannot write {ended}: there are files in it"),
        ((ended / "model", tmp_path / "new"), f"{ended / 'model'} is no run directory"),
        ((tmp_path / "gone", tmp_path / "new"), f"there is no run {tmp_path / 'gone'}; {tmp_path} has ended"),
    )
    for words, why in refused:
        arguments = parse(["export", *map(str, words)])
        with pytest.raises(ConfigError) as error:
            arguments.run(arguments)
        assert str(error.value).startswith(why)
    assert not (tmp_path / "new").exists()


def test_merge_is_refused_for_a_run_without_adapters(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(ended), str(tmp_path / "new"), "--merge"]) == 2
    assert capsys.readouterr().err == (
        f"flash: error: --merge has no effect on {ended}, which was trained without [lora]: leave it out, the whole "
        "model is written anyway\n"
    )
    assert not (tmp_path / "new").exists()
