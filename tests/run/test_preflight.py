"""Checks before a run: they find what would stop it before any of its work."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from flash.cli.main import main
from flash.config.check import advise
from flash.config.decode import refuse
from flash.config.load import dump
from flash.config.tree import Config
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.trackers.trackers import not_installed
from flash.run.checks.preflight import changes_without_effect, start_problems
from flash.run.models import make_missing_models
from flash.run.processes.locks import run_lock
from flash.trainer.checkpoint_files import MANIFEST, step_folder

TINY = {"layers": 1, "width": 32, "warm_start_steps": 1}
"""Settings of a tiny model."""


def make_config(folder: Path, **tables: dict[str, Any]) -> Config:
    """Return a configuration of a run whose model exists, in `folder`."""
    model = folder / "policy"
    model.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    save_file({}, model / "model.safetensors")
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "output_dir": str(folder / "outputs"), "steps": 10},
        "model": {"path": str(model)},
        "env": {"path": "envs.arithmetic:Arithmetic"},
        "train": {"batch_size": 8},
        "rollout": {"group_size": 4},
        "cluster": {"gpus_per_node": 0},
    }
    for name, table in tables.items():
        tree[name] = tree.get(name, {}) | table
    return msgspec.convert(tree, Config)


def problem(config: Config) -> str:
    """Return the message about the problems that would stop the run."""
    found = start_problems(config)
    assert found
    return str(refuse(found))


def test_a_run_that_can_be_started_leaves_no_trace(tmp_path: Path) -> None:
    assert start_problems(make_config(tmp_path, cluster={"hub": "127.0.0.1:0"})) == []
    assert list(tmp_path.iterdir()) == [tmp_path / "policy"]


@pytest.mark.skipif(not os.access("/proc", os.W_OK), reason="permissions alone refuse this user")
def test_an_output_folder_that_takes_no_files_whatever_its_permissions_say_is_refused(tmp_path: Path) -> None:
    assert problem(make_config(tmp_path, run={"output_dir": "/proc/runs"})) == (
        "`run.output_dir`: no file can be written in /proc: No such file or directory; "
        "name a folder that can be written"
    )


def test_only_the_first_node_writes_the_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_NODE_RANK", "1")
    assert start_problems(make_config(tmp_path, run={"output_dir": "/proc/runs"})) == []


def test_a_machine_without_a_place_for_temporary_files_is_refused(tmp_path: Path) -> None:
    """A limit of the shell forbids files of any size, so no folder for temporary files is found."""
    file = tmp_path / "run.toml"
    file.write_text(dump(make_config(tmp_path)))
    shell = ["sh", "-c", 'ulimit -f 0 && exec "$@"', "sh"]
    command = [*shell, sys.executable, "-m", "flash", "train", str(file), "--dry-run"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert refused.returncode == 2
    assert "`TMPDIR`: no folder for temporary files can be written: No usable temporary " in refused.stderr


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_hub_host_that_leads_nowhere_is_refused(tmp_path: Path, nodes: int) -> None:
    told = problem(make_config(tmp_path, cluster={"hub": "no such host:0", "nodes": nodes}))
    assert told.startswith("`cluster.hub`: ")
    assert "no such host" in told


@pytest.mark.parametrize("host", ["büro..x", "ü" * 70, "a" * 300])
@pytest.mark.parametrize("port", [0, 29511])
def test_a_text_that_no_host_can_have_as_its_name_is_refused_once(tmp_path: Path, host: str, port: int) -> None:
    for nodes in (1, 2):
        cluster = {"hub": f"{host}:{port}", "nodes": nodes}
        (found,) = start_problems(make_config(tmp_path, cluster=cluster))
        assert found.key == "cluster.hub"
        assert host in found.message


def test_in_a_job_of_one_node_the_hub_host_is_this_machine(tmp_path: Path) -> None:
    # An address for documentation (RFC 5737), which no machine has.
    assert "cannot listen at 192.0.2.1:0" in problem(make_config(tmp_path, cluster={"hub": "192.0.2.1:0"}))
    assert start_problems(make_config(tmp_path, cluster={"hub": "192.0.2.1:0", "nodes": 2})) == []


def test_a_hub_port_that_is_taken_is_refused_with_who_has_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = problem(make_config(tmp_path, cluster={"hub": f":{port}"}))
        assert told.startswith(f"`cluster.hub`: port {port} of 127.0.0.1 is in use by process {os.getpid()} (")
        assert told.endswith("); wait for its end or end it, or choose another port (0 takes any free one)")
        assert (
            start_problems(make_config(tmp_path, cluster={"hub": f":{port}", "nodes": 2})) == []
        )  # the first node's hub says it
    assert start_problems(make_config(tmp_path, cluster={"hub": f":{port}"})) == []


def test_a_port_that_this_very_run_has_is_no_reason_against_its_resumption(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = make_config(tmp_path, cluster={"hub": f":{taken.getsockname()[1]}"})
        lock = run_lock(config.run_dir)
        lock.parent.mkdir()
        opened = "open(sys.argv[1], 'a').close(); share(Path(sys.argv[1]))"
        holder = f"import sys; from flash.run.processes.locks import *; {opened}"
        words = [sys.executable, "-c", f"{holder}; print(flush=True); sys.stdin.read()", str(lock)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            assert start_problems(config) == []
            process.communicate()
        assert "`cluster.hub`" in problem(config)


def test_a_model_whose_files_are_cut_off_or_missing_is_refused(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(1000, np.float32)}, weights)
    (tmp_path / "tokenizer.json").write_text("{}")
    config = make_config(tmp_path, model={"path": str(tmp_path)})
    assert start_problems(config) == []
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    assert f"{tmp_path / 'model-2.safetensors'} is missing, damaged or cut off (" in problem(config)
    index.write_text("[]")
    assert f"{index} cannot be read" in problem(config)
    index.unlink()
    os.truncate(weights, 2000)
    told = problem(config)
    assert told.startswith(f"`model.path`: {weights} is missing, damaged or cut off (")
    assert told.endswith("; copy or fetch the model again")


def test_a_model_folder_without_weights_or_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert problem(make_config(tmp_path, model={"path": str(folder)})) == (
        f"`model.path`: the folder {folder} holds no weights: expected a Hugging Face model, with *.safetensors or "
        "*.bin"
    )
    save_file({}, folder / "model.safetensors")
    assert f"the folder {folder} holds no tokenizer" in problem(make_config(tmp_path, model={"path": str(folder)}))
    (folder / "tokenizer_config.json").write_text("{}")
    assert f"the folder {folder} holds no tokenizer" in problem(make_config(tmp_path, model={"path": str(folder)}))
    (folder / "tokenizer.json").write_text("{}")
    assert start_problems(make_config(tmp_path, model={"path": str(folder)})) == []


@pytest.mark.parametrize(
    ("key", "tables"),
    [
        ("model.path", {"model": {"path": "a--b"}}),
        ("critic.path", {"critic": {"path": "a--b"}}),
        ("algorithm.kl.reference", {"algorithm": {"kl": {"coefficient": 0.1, "reference": "a--b"}}}),
    ],
)
def test_a_hub_id_that_leads_to_no_model_is_refused(tmp_path: Path, key: str, tables: dict[str, Any]) -> None:
    assert problem(make_config(tmp_path, **tables)).startswith(f"`{key}`: there is no folder a--b here, and it can be")


def test_a_folder_of_somebody_else_in_the_place_of_a_tiny_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    assert start_problems(make_config(tmp_path, model={"path": str(folder)}, tiny_model=TINY)) == []
    (folder / "chapter.tex").touch()
    told = problem(make_config(tmp_path, model={"path": str(folder)}, tiny_model=TINY))
    assert told.startswith(f"`model.path`: {folder} exists and is no tiny model of ours")


def left(config: Config, steps: int) -> None:
    """Write the configuration and the metrics of a run of `steps` steps."""
    directory = RunDirectory.open(config.run_dir, dump(config))
    for step in range(steps):
        directory.append_metrics({"step": step})


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        (
            {"train": {"batch_size": 16}},
            "`train.batch_size`: the run in {} was made with 8, got 16. Groups that are not finished",
        ),
        ({"rollout": {"group_size": 2}}, "`rollout.group_size`: the run in {} was made with 4, "),
        ({"rollout": {"extra_per_group": 1}}, "`rollout.extra_per_group`: the run in {} was made with 0, "),
        (
            {"tiny_model": {**TINY, "width": 64}},
            "`tiny_model.width`: the run in {} was made with 32, got 64. The weights",
        ),
        (
            {"run": {"steps": 5}},
            "`run.steps`: the run in {} has made 6 steps already; expected at least as many, got 5",
        ),
    ],
)
def test_a_run_that_goes_on_otherwise_than_it_can_is_refused(
    tmp_path: Path, tables: dict[str, dict[str, Any]], told: str
) -> None:
    tiny = {"tiny_model": TINY, "model": {"path": str(tmp_path / "tiny")}}
    left(make_config(tmp_path, **tiny), steps=6)
    resumed = {**tiny, **tables, "run": {"resume": True, **tables.get("run", {})}}
    assert told.format(tmp_path / "outputs" / "run") in problem(make_config(tmp_path, **resumed))
    assert start_problems(make_config(tmp_path, **(tiny | tables))) == []  # a new run may be of any size


def test_changes_without_effect_are_reported_once_there_are_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left(make_config(tmp_path), steps=6)
    (other := tmp_path / "other").mkdir()
    resumed = make_config(tmp_path, run={"resume": True}, model={"path": str(other)})
    assert changes_without_effect(resumed) == []
    checkpoint = step_folder(resumed.run_dir, 6)
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).write_text('{"version": 6, "skipped_steps": 0, "files": []}')
    advise(resumed, changes_without_effect(resumed))
    told = "`model.path`: The weights of the newest checkpoint stay. The newly named model gives only the tokenizer"
    assert told in capsys.readouterr().err
    assert changes_without_effect(make_config(tmp_path, run={"resume": True})) == []
    assert changes_without_effect(make_config(tmp_path, model={"path": str(other)})) == []
    adapted = make_config(tmp_path, run={"resume": True}, model={"path": str(other)}, lora={})
    (told,) = (problem.message for problem in changes_without_effect(adapted) if problem.key == "model.path")
    assert told == (
        "The adapters of the newest checkpoint stay. They fit only the model beside which they were trained, which the "
        "trainer checks."
    )


def checkpoint_of(config: Config, *extras: str) -> Path:
    """Write a checkpoint of version 6 with these parts beside the policy, and return its folder."""
    folder = step_folder(config.run_dir, 6)
    folder.mkdir(parents=True, exist_ok=True)
    names = ", ".join(f'"{name}"' for name in extras)
    (folder / MANIFEST).write_text(f'{{"version": 6, "skipped_steps": 0, "files": [], "extras": [{names}]}}')
    return folder


@pytest.mark.parametrize(
    ("extras", "tables", "told"),
    [
        ([], {"algorithm": {"objective": "ppo"}, "critic": {}}, "was written without a critic"),
        ([], {"algorithm": {"objective": "decoupled_ppo", "options": {"proximal": "ewma"}}}, "without an average of"),
        (["ewma"], {}, "holds an average of the policy's weights"),
        (["critic"], {"algorithm": {"objective": "asyppo"}, "critic": {}}, "holds 1 critics, and this run"),
        (["critic"], {"algorithm": {"objective": "ppo"}, "critic": {}}, ""),
        (["rhythm"], {}, ""),
    ],
)
def test_a_checkpoint_with_other_parts_than_the_run_is_refused_before_any_work(
    tmp_path: Path, extras: list[str], tables: dict[str, dict[str, Any]], told: str
) -> None:
    left(make_config(tmp_path), steps=6)
    checkpoint_of(make_config(tmp_path), *extras)
    problems = [p.message for p in start_problems(make_config(tmp_path, run={"resume": True}, **tables))]
    assert [told in message for message in problems] == [True] * bool(told)


def test_adapters_that_were_trained_with_another_alpha_are_refused_before_any_work(tmp_path: Path) -> None:
    left(make_config(tmp_path, lora={"alpha": 16.0}), steps=6)
    folder = checkpoint_of(make_config(tmp_path), "lora")
    text = (folder / MANIFEST).read_text()
    for alpha, told in (
        ("", ""),
        (', "alpha": 16.0', ""),
        (', "alpha": 32.0', "with lora.alpha = 32: expected"),
    ):
        (folder / MANIFEST).write_text(text[:-1] + alpha + "}")
        resumed = make_config(tmp_path, run={"resume": True}, lora={"alpha": 16.0})
        problems = [(one.key, told in one.message) for one in start_problems(resumed)]
        assert problems == [("lora.alpha", True)] * bool(told)


def test_a_folder_without_anything_of_a_run_is_none_to_go_on_with(tmp_path: Path) -> None:
    resumed = make_config(tmp_path, run={"resume": True})
    resumed.run_dir.mkdir(parents=True)
    assert "there is no run to continue: nothing of one is left in" in problem(resumed)


def test_a_run_of_which_no_checkpoint_is_whole_is_refused_before_any_work(tmp_path: Path) -> None:
    left(make_config(tmp_path), steps=6)
    (checkpoint_of(make_config(tmp_path)) / MANIFEST).write_text("{")
    assert "no checkpoint of" in problem(make_config(tmp_path, run={"resume": True}))
    shutil.rmtree(step_folder(make_config(tmp_path).run_dir, 6))
    assert start_problems(make_config(tmp_path, run={"resume": True})) == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "there is no configuration file "),
        (b"[run]\nsteps = = 3\n", "config.toml is not valid TOML: Invalid value (at line 2, column 9). "),
        (b"\xff", "config.toml is not UTF-8 text"),
        (b"x = " + b"[" * 3000 + b"]" * 3000, "config.toml is not valid TOML: "),
        (b"x = " + b"[" * 300 + b"]" * 300, "config.toml: expected tables and lists at most "),
    ],
)
def test_a_run_with_a_checkpoint_but_without_readable_recorded_settings_is_refused_before_any_work(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    left(make_config(tmp_path), steps=6)
    checkpoint_of(make_config(tmp_path))
    resumed = make_config(tmp_path, run={"resume": True}, train={"batch_size": 16})
    recorded = resumed.run_dir / "config.toml"
    recorded.unlink()
    if content is not None:
        recorded.write_bytes(content)
    (found,) = start_problems(resumed)
    assert found.key == "run.resume"
    assert str(recorded) in found.message
    assert told in found.message
    assert recorded.exists() == (content is not None), "a refused run writes nothing"
    assert start_problems(make_config(tmp_path)) == []  # a new run sets the folder aside


def test_a_tiny_model_is_not_made_again_for_a_run_that_goes_on(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"tiny_model": TINY, "model": {"path": str(tmp_path / "tiny")}}
    env = {"path": "envs.arithmetic:Arithmetic", "options": {"digits": 1}}
    config = make_config(tmp_path, **tables, env=env)
    make_missing_models(config)
    before = (tmp_path / "tiny" / "model.safetensors").read_bytes()
    left(config, steps=6)
    checkpoint_of(config)
    resumed = make_config(tmp_path, **tables, run={"resume": True}, env={**env, "options": {"digits": 2}})
    assert start_problems(resumed) == []
    make_missing_models(resumed)
    assert (tmp_path / "tiny" / "model.safetensors").read_bytes() == before
    other = make_config(tmp_path, **tables, run={"resume": True}, env={**env, "options": {"operators": "*"}})
    assert "the environment has other characters than the tiny model" in problem(other)


def test_a_run_whose_count_of_hubs_is_damaged_is_refused_before_anything_starts(tmp_path: Path) -> None:
    left(make_config(tmp_path), steps=6)
    (tmp_path / "outputs" / "run" / "hub-lives").write_text("x")
    resumed = make_config(tmp_path, run={"resume": True})
    assert "hub-lives, which counts the run's hubs, cannot be read" in problem(resumed)
    (tmp_path / "outputs" / "run" / "hub-lives").unlink()
    assert start_problems(resumed) == []


def test_a_run_without_recorded_settings_has_its_steps_and_its_count_of_hubs_checked(tmp_path: Path) -> None:
    left(make_config(tmp_path), steps=6)
    (tmp_path / "outputs" / "run" / "config.toml").unlink()
    (tmp_path / "outputs" / "run" / "hub-lives").write_text("x")
    hubs, steps = start_problems(make_config(tmp_path, run={"resume": True, "steps": 3}))
    assert "hub-lives" in hubs.message
    assert "has made 6 steps already; expected at least as many, got 3" in steps.message


@pytest.mark.parametrize("steps", [6, 20])
def test_a_run_goes_on_to_its_end_or_beyond(tmp_path: Path, steps: int) -> None:
    left(make_config(tmp_path), steps=6)
    assert start_problems(make_config(tmp_path, run={"resume": True, "steps": steps})) == []


def test_the_command_refuses_such_a_run_with_a_dry_run_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump(make_config(tmp_path, cluster={"hub": "no such host:0"})))
    for options in ([], ["--dry-run"]):
        assert main(["train", str(file), *options]) == 2
        assert f"`cluster.hub` ({file}): cannot listen at no such host" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [tmp_path / "policy", file]


def test_a_tracker_that_is_not_installed_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not_installed("trackio") is None:
        pytest.skip("trackio is installed")
    config = make_config(tmp_path, track={"to": ["trackio"]})
    assert "`track.to`: `trackio` is not installed here: `pip install trackio`" in problem(config)
    monkeypatch.setenv("FLASH_NODE_RANK", "1")
    assert start_problems(config) == []  # trackers are told by the first node


def test_problems_of_the_keys_and_of_the_machine_are_reported_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump(make_config(tmp_path, cluster={"hub": "no such host:0"})))
    wrong = ["train.batch_size=7", "model.path=a--b", f"run.output_dir={'x' * 300}", f"critic.path={'y' * 300}"]
    assert main(["train", str(file), *wrong, "--dry-run"]) == 2
    told = capsys.readouterr().err
    for key in ("train.batch_size", "model.path", "run.output_dir", "critic.path"):
        assert told.count(f"  - `{key}` (setting): ") == 1
    assert main(["train", str(file), "train.batch_size=7", "--dry-run"]) == 2
    assert "2 problems:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "tables"),
    [
        ("env.path", {"env": {"path": "__main__:Mine"}}),
        ("env.options", {"env": {"options": {"tasks": {"path": "__main__:Mine"}}}}),
        ("algorithm.objective", {"algorithm": {"objective": "__main__:Mine"}}),
    ],
)
def test_a_class_of_the_program_that_starts_the_run_is_refused(tmp_path: Path, key: str, tables: Any) -> None:
    found = problem(make_config(tmp_path, **tables))
    assert f"`{key}`: __main__:Mine is defined in the program that starts the run" in found
    assert "name it `my_code:Mine`" in found
