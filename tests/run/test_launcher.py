"""Launches: their place in the job, their first line, and the files that they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import ConfigError, RanksGoneError
from flash.observe.rundir.rundir import RunDirectory
from flash.run.processes.hub_place import HubPlace
from flash.run.processes.launch_state import ErrorMarker, refuse_several, use_torchrun_variables
from flash.run.processes.launcher import HubLoop, describe_start, leave_in_order, place_in_job, resume_command
from flash.run.processes.rendezvous import hub_place


def make_config(**tables: dict[str, Any]) -> Config:
    """Return a small configuration without GPUs, with changed tables."""
    base: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "fake"},
        "env": {"path": "fake:Fake"},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(base | tables, Config)


def test_the_processes_that_are_about_to_start_are_named() -> None:
    assert describe_start(make_config(), 0) == "starting processes for 1 trainer rank and 1 engine"


def test_one_process_of_torchrun_per_node_is_a_node_of_the_job() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "RANK": "1"}
    environment = torchrun | {"MASTER_ADDR": "node7", "MASTER_PORT": "4711"}
    use_torchrun_variables(environment)
    assert place_in_job(make_config(cluster={"nodes": 2}), environment) == 1
    assert environment["FLASH_RDZV_ENDPOINT"] == "node7:4711"
    said = torchrun | {"FLASH_NNODES": "1"}
    use_torchrun_variables(said)
    assert said == torchrun | {"FLASH_NNODES": "1"}, "what people have set themselves stays"
    with pytest.raises(ConfigError, match="--nproc-per-node=1"):
        use_torchrun_variables(torchrun | {"LOCAL_WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("variables", "times"),
    [
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "started 4 times (SLURM_STEP_NUM_TASKS = 4)"),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "41233"},
            "started 4 times (SLURM_STEP_NUM_TASKS = 4)",
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "4", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "41233"},
            "started 4 times (PMI_SIZE = 4)",
        ),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "started 2 times (OMPI_COMM_WORLD_SIZE = 2)"),
    ],
)
def test_a_command_that_was_started_several_times_starts_no_run(variables: dict[str, str], times: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_several(variables)
    assert times in str(refused.value)


@pytest.mark.parametrize(
    "variables",
    [
        {"FLASH_NNODES": "2", "RANK": "1", "WORLD_SIZE": "2"},
        {"FLASH_NNODES": "1", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "41233"},
        {"WORLD_SIZE": "8"},
        {"RANK": "x", "WORLD_SIZE": "x"},
    ],
)
def test_a_node_of_a_job_and_a_command_that_was_started_once_may_start_a_run(variables: dict[str, str]) -> None:
    refuse_several(variables)


def test_a_job_of_another_size_than_the_configuration_says_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.nodes = 1, but this job has 2 node\(s\)"):
        place_in_job(make_config(), {"FLASH_NNODES": "2"})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("FLASH_NNODES", "two", "expected a number"),
        ("FLASH_TOKEN", "secret", "expected at least 32 hexadecimal digits"),
    ],
)
def test_a_variable_with_an_invalid_value_is_refused_before_anything_starts(name: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} .*{why}"):
        place_in_job(make_config(), {name: value})


def test_the_others_find_the_hub_in_the_run_directory_or_by_its_port() -> None:
    job = {"FLASH_NNODES": "2", "FLASH_NODE_RANK": "1", "FLASH_RDZV_ENDPOINT": "node7:4711"}
    config = make_config(cluster={"nodes": 2, "hub": ":29500"})
    assert hub_place(config, job) == HubPlace(run_dir=str(config.run_dir.absolute()))
    assert hub_place(config, job | {"FLASH_TOKEN": "ab" * 32}) == HubPlace(host="node7", port=29500)
    with pytest.raises(ConfigError, match="FLASH_RDZV_ENDPOINT = 'node7', expected HOST:PORT"):
        place_in_job(config, job | {"FLASH_RDZV_ENDPOINT": "node7"})


def test_a_node_beyond_the_job_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"FLASH_NODE_RANK = 2, expected one from 0 to 1"):
        place_in_job(make_config(cluster={"nodes": 2}), {"FLASH_NNODES": "2", "FLASH_NODE_RANK": "2"})


def test_the_command_that_continues_a_run_has_its_overrides() -> None:
    overrides = ["run.name=mine", "algorithm.options={cap = 2}", "run.resume=true"]
    assert resume_command(["flash", "train", "--resume", "a.toml", *overrides]) == (
        "flash train a.toml run.name=mine 'algorithm.options={cap = 2}' --resume"
    )


def test_an_error_that_finds_no_room_in_the_run_directory_still_ends_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    full = tmp_path / "run"
    full.write_text("in the way")
    for here, stands in ((None, False), (scratch, True)):
        monkeypatch.delenv("FLASH_SCRATCH", raising=False)
        if here is not None:
            monkeypatch.setenv("FLASH_SCRATCH", str(here))
        ErrorMarker(full, "7.1").write(ConfigError("wrong"))
        assert ErrorMarker(full, "7.1").exists() is stands
        assert not ErrorMarker(full, "8.1").exists()
    assert len(caplog.records) == 1
    assert [file.name for file in scratch.iterdir()] == ["error.json"]


def test_a_run_that_failed_leaves_a_summary_with_its_error_and_no_address_of_its_hub(tmp_path: Path) -> None:
    config = make_config(run={"name": "test", "output_dir": str(tmp_path)})
    marker, loop = ErrorMarker(config.run_dir, "7.1"), HubLoop(config, tmp_path / "run.toml")
    leave_in_order(config, marker, loop)
    assert not config.run_dir.exists(), "nothing was begun"
    directory = RunDirectory.open(config.run_dir, "")
    directory.append_metrics({"step": 0, "failures": 2})
    directory.write_ledger({"trained": 64})
    (config.run_dir / "hub.json").write_text("{}")
    marker.write(RanksGoneError("no restart is left"))
    leave_in_order(config, marker, loop)
    summary = json.loads(directory.summary.read_bytes())
    told = [summary[key] for key in ("steps", "samples", "failures", "error")]
    assert told == [1, 64, 2, "no restart is left"]
    assert not (config.run_dir / "hub.json").exists()
    marker.write(RanksGoneError("another one"))
    leave_in_order(config, marker, loop)
    assert json.loads(directory.summary.read_bytes()) == summary, "what the hub has left stays"


def test_damaged_counts_do_not_hide_the_error_of_a_run(tmp_path: Path) -> None:
    config = make_config(run={"name": "test", "output_dir": str(tmp_path)})
    directory = RunDirectory.open(config.run_dir, "")
    directory.ledger.write_text('{"trained')
    leave_in_order(config, ErrorMarker(config.run_dir, "7.1"), HubLoop(config, tmp_path / "run.toml"))
    assert not directory.summary.exists()


@pytest.mark.integration
def test_a_node_without_trainers_leaves_the_file_that_the_batch_script_looks_for(tmp_path: Path) -> None:
    program = """if True:
        import sys, msgspec
        from flash.config.tree import Config
        from flash.run.processes.launcher import launch
        launch(msgspec.json.decode(sys.argv[1], type=Config))
    """
    config = make_config(
        run={"name": "test", "output_dir": str(tmp_path)},
        cluster={"gpus_per_node": 0, "nodes": 2},
        deadlines={"rendezvous": 0.1},
    )
    job = {"FLASH_NNODES": "2", "FLASH_NODE_RANK": "1", "FLASH_RDZV_ENDPOINT": "127.0.0.1:4711"}
    command = [sys.executable, "-c", program, msgspec.json.encode(config).decode()]
    environment = os.environ | job | {"FLASH_SPARE_NODE": str(tmp_path / "spare")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert "for the hub of" in ended.stderr
    assert (tmp_path / "spare").exists()
