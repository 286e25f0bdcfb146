"""How torchrun is started on a node, what is said of processes that fail, and after an interrupt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import ConfigError, PeerLostError
from flash.foreign.torch import Ended
from flash.run.processes.agents import ENDED_WITH_PEER, STANDALONE, Role, run_agent, tell
from flash.run.processes.error_marker import ErrorMarker
from flash.run.processes.hub_place import HUB_FILE, HubPlace, withdraw
from flash.run.processes.launcher import ALONE, describe_start, place_in_job, resume_command
from flash.run.processes.overseer import Overseer
from flash.run.processes.rendezvous import hub_place
from flash.run.processes.trainers import rendezvous_options


def make_config(**tables: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "fake"},
        "env": {"path": "fake:Fake"},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(base | tables, Config)


def untold() -> Overseer:
    """Of processes that do not fail."""
    return Overseer(lambda ended, restarts_left: None)


def test_torchrun_waits_longer_than_the_run_needs_to_leave_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pytest.importorskip("torch.distributed.run")
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "FLASH_SCRATCH"):
        monkeypatch.setenv(name, "0")
    seen: list[int] = []
    monkeypatch.setattr(run, "run", lambda options: seen.append(run.config_from_args(options)[0].shutdown_timeout))
    config = make_config(deadlines={"shutdown": 300})
    assert run_agent(config, "node", ALONE, ["a.toml"], untold()) == 0
    assert seen == [330]


def test_a_closed_terminal_is_left_to_whoever_started_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    run = pytest.importorskip("torch.distributed.run")
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "FLASH_SCRATCH"):
        monkeypatch.setenv(name, "0")
    seen: list[str] = []
    monkeypatch.setattr(run, "run", lambda options: seen.append(run.config_from_args(options)[0].signals_to_handle))
    assert run_agent(make_config(), "node", ALONE, ["a.toml"], untold()) == 0
    assert seen == ["SIGINT,SIGTERM,SIGQUIT"]


def test_what_is_about_to_start_is_said() -> None:
    assert describe_start(make_config()) == "starting processes for 1 trainer rank and 1 engine"


def test_nodes_that_do_not_meet_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pytest.importorskip("torch.distributed.run")
    from torch.distributed import DistStoreError  # pyright: ignore[reportPrivateImportUsage]

    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "FLASH_SCRATCH"):
        monkeypatch.setenv(name, "0")

    def fail(options: object) -> None:
        raise DistStoreError("wait timeout after 60000ms, keys: /MASTER_ADDR")

    monkeypatch.setattr(run, "run", fail)
    with pytest.raises(PeerLostError, match=r"the nodes with trainers did not meet: DistStoreError: wait timeout"):
        run_agent(make_config(), "trainer", ALONE, ["a.toml"], untold())


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
def test_a_variable_that_is_not_what_it_has_to_be_is_refused_before_anything_starts(
    name: str, value: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} .*{why}"):
        place_in_job(make_config(), {name: value})


def test_only_trainer_ranks_meet() -> None:
    job = {"FLASH_NNODES": "3", "FLASH_NODE_RANK": "0", "FLASH_RDZV_ENDPOINT": "node7:4711"}
    assert {*STANDALONE} < {*rendezvous_options(make_config(cluster={"nodes": 3}), job)}
    options = rendezvous_options(make_config(cluster={"nodes": 3, "trainer_nodes": 2, "trainer_ranks": 4}), job)
    assert "--nnodes=2" in options
    assert "--rdzv-endpoint=node7:4711" in options
    assert "--nproc-per-node=4" in options


def test_the_others_find_the_hub_in_the_run_directory_or_by_its_port() -> None:
    job = {"FLASH_NNODES": "2", "FLASH_NODE_RANK": "1", "FLASH_RDZV_ENDPOINT": "node7:4711"}
    config = make_config(cluster={"nodes": 2, "hub_port": 29500})
    assert hub_place(config, job) == HubPlace(run_dir=str(config.run_dir.absolute()))
    assert hub_place(config, job | {"FLASH_TOKEN": "ab" * 32}) == HubPlace(host="node7", port=29500)
    with pytest.raises(ConfigError, match="FLASH_RDZV_ENDPOINT = 'node7', expected HOST:PORT"):
        place_in_job(config, job | {"FLASH_RDZV_ENDPOINT": "node7"})


def test_a_node_beyond_the_job_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"FLASH_NODE_RANK = 2, expected one from 0 to 1"):
        place_in_job(make_config(cluster={"nodes": 2}), {"FLASH_NNODES": "2", "FLASH_NODE_RANK": "2"})


@pytest.mark.parametrize(
    ("role", "process", "words", "follows"),
    [
        (
            "node",
            Ended(0, 7, -9),
            "the node loop (process 7) was killed by signal 9 (SIGKILL), perhaps because memory ran out",
            "the node loop starts again, with its engines and the trainer ranks (restart 2 of 3)",
        ),
        (
            "trainer",
            Ended(1, 8, -11),
            "trainer rank 1 (process 8) was killed by signal 11 (SIGSEGV)",
            "the trainer ranks start again (restart 2 of 3)",
        ),
        (
            "node",
            Ended(0, 9, 3),
            "the node loop (process 9) ended with exit code 3",
            "the node loop starts again, with its engines and the trainer ranks (restart 2 of 3)",
        ),
    ],
)
def test_a_process_that_fails_is_named_with_what_ended_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], role: Role, process: Ended, words: str, follows: str
) -> None:
    tell(make_config(), role, ErrorMarker(tmp_path, "7.1"), [process], restarts_left=2)
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith(f"flash: {words}")
    assert second == f"flash: {follows}"


@pytest.mark.parametrize(
    ("role", "ended", "words"),
    [
        ("node", Ended(0, 7, -9), "the node loop (process 7) was killed by signal 9"),
        ("trainer", Ended(0, 7, -9), "trainer rank 0 (process 7) was killed by signal 9"),
        ("trainer", Ended(0, 7, 1), "the trainer ranks have failed; no restart is left of cluster.max_restarts = 3"),
    ],
)
def test_a_last_restart_that_is_used_up_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], role: Role, ended: Ended, words: str
) -> None:
    tell(make_config(), role, ErrorMarker(tmp_path, "7.1"), [ended], restarts_left=0)
    assert "no restart is left of cluster.max_restarts = 3" in capfd.readouterr().err
    assert words in json.loads((tmp_path / "error.json").read_text())["message"]


def with_a_hub(folder: Path) -> Config:
    """A run whose hub has its announcement out."""
    config = make_config(run={"name": "t", "output_dir": str(folder)})
    config.run_dir.mkdir()
    (config.run_dir / HUB_FILE).touch()
    return config


def test_a_process_that_has_said_why_it_ends_is_not_named_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = [Ended(0, 7, 1), Ended(1, 8, 1)]
    tell(with_a_hub(tmp_path), "trainer", ErrorMarker(tmp_path, "7.1"), ended, restarts_left=3)
    assert capfd.readouterr().err == "flash: the trainer ranks start again (restart 1 of 3)\n"


@pytest.mark.parametrize(
    ("ended", "counts"),
    [
        ([Ended(0, 7, ENDED_WITH_PEER), Ended(1, 8, ENDED_WITH_PEER)], False),
        ([Ended(0, 7, -9), Ended(1, 8, ENDED_WITH_PEER)], True),
        ([Ended(0, 7, 1)], True),
        ([], True),
    ],
)
def test_ranks_that_end_with_another_process_use_up_no_restart_of_theirs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], ended: list[Ended], counts: bool
) -> None:
    assert tell(with_a_hub(tmp_path), "trainer", ErrorMarker(tmp_path, "7.1"), ended, restarts_left=1) == counts
    assert bool(capfd.readouterr().err) == counts


def test_trainer_ranks_that_end_with_the_hub_after_an_interrupt_are_not_said_to_start_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, marker = with_a_hub(tmp_path), ErrorMarker(tmp_path, "7.1")
    withdraw(config.run_dir)
    tell(config, "trainer", marker, [Ended(0, 7, 1)], restarts_left=3)
    assert capfd.readouterr().err == ""
    tell(config, "trainer", marker, [Ended(0, 7, -11)], restarts_left=3)  # a crash is told all the same
    assert "killed by signal 11" in capfd.readouterr().err


def test_what_follows_an_error_that_ends_the_run_is_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    marker = ErrorMarker(tmp_path, "7.1")
    marker.write(ConfigError("wrong"))
    tell(make_config(), "node", marker, [Ended(0, 7, 1)], restarts_left=2)
    assert capfd.readouterr().err == ""


def test_the_command_that_continues_a_run_has_its_overrides() -> None:
    overrides = ["run.name=mine", "algorithm.options={cap = 2}", "run.resume=true"]
    assert resume_command(["flash", "train", "--resume", "a.toml", *overrides]) == (
        "flash train a.toml run.name=mine 'algorithm.options={cap = 2}' --resume"
    )


def test_a_node_loop_without_the_hub_starts_again_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_NODE_RANK", "1")
    tell(make_config(), "node", ErrorMarker(tmp_path, "7.1"), [Ended(0, 7, 1)], restarts_left=3)
    assert capfd.readouterr().err == "flash: the node loop of this node starts again (restart 1 of 3)\n"


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
        assert ErrorMarker(full, "7.1").stands() is stands
        assert not ErrorMarker(full, "8.1").stands()
    assert len(caplog.records) == 1
    assert [file.name for file in scratch.iterdir()] == ["error.json"]
