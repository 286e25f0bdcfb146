"""`flash train` before its processes run."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from flash.cli.train import how_to_continue
from flash.config.tree import Config
from flash.observe.rundir.rundir import RunDirectory
from flash.run.restart import run_mark
from tests.observe.clusters import cluster

CONFIG = """
run = { name = "a-run", output_dir = "FOLDER" }
model = { path = "FOLDER/models/tiny", max_length = 32 }
rollout = { max_new_tokens = 8 }
tiny_model = { layers = 1, width = 32, batch_size = 2, warm_start_steps = 1000000 }
env = { path = "envs.arithmetic:Arithmetic" }
cluster = { gpus_per_node = 0 }
"""


@pytest.mark.slow
def test_a_sigterm_while_the_model_is_made_keeps_the_model_so_far_and_leaves_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    command = [sys.executable, "-m", "flash", "train", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    assert "supervised step 50/" in process.stdout.readline()
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "tiny model: interrupted after " in output
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"tiny", ".tiny.lock"}


def test_an_interrupted_run_can_be_continued_unless_it_has_nothing_left_to_do(tmp_path: Path) -> None:
    tree = tomllib.loads(CONFIG.replace("FOLDER", str(tmp_path))) | {"train": {"batch_size": 8}}
    tree["run"]["steps"] = 2
    config = msgspec.convert(tree, Config)
    command = ["flash", "train", "run.toml"]
    go_on = "go on with: flash train run.toml --resume"
    directory = RunDirectory.open(config.run_dir, "")
    directory.append_metrics({"step": 0})
    directory.append_metrics({"step": 1})
    directory.summary.write_text("{}")
    told: list[str] = []
    for ended in ("interrupted", "finished"):
        picture = cluster(1.0, None, ended=ended)
        directory.cluster.write_bytes(msgspec.json.encode(picture))
        told.append(how_to_continue(config, command, None))
    assert told == [go_on, f"the run in {config.run_dir} has nothing left to do"]
    longer = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=3))
    assert how_to_continue(longer, command, None) == go_on


def test_a_run_that_had_not_started_is_not_continued(tmp_path: Path) -> None:
    config = msgspec.convert(tomllib.loads(CONFIG.replace("FOLDER", str(tmp_path))), Config)
    command = ["flash", "train", "run.toml", "run.name=a b"]
    nothing = "the run had not started yet, so nothing is kept; start it with: flash train run.toml 'run.name=a b'"
    assert how_to_continue(config, command, run_mark(config)) == nothing
    RunDirectory.open(config.run_dir, "")
    assert how_to_continue(config, command, None).endswith(" --resume")
    earlier = run_mark(config)
    assert how_to_continue(config, command, earlier) == nothing, "it would go on with an earlier run"
    RunDirectory.open(config.run_dir, "")
    assert how_to_continue(config, command, earlier).endswith(" --resume")
    resumed = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, resume=True))
    assert how_to_continue(resumed, [*command, "--resume"], run_mark(config)).endswith(" --resume")
