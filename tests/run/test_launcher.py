"""How torchrun is started, and what is said after an interrupt."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import ConfigError
from flash.run.launcher import launch, resume_command, torchrun_arguments


def make_config(**tables: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "fake"},
        "env": {"path": "fake:Fake"},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(base | tables, Config)


def test_torchrun_waits_longer_than_the_run_needs_to_leave_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    run = pytest.importorskip("torch.distributed.run")
    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    seen: list[int] = []
    monkeypatch.setattr(run, "run", lambda options: seen.append(run.config_from_args(options)[0].shutdown_timeout))
    assert launch(make_config(deadlines={"shutdown": 300}), ["a.toml"], []) == 0
    assert seen == [330]


def test_a_job_of_another_size_than_the_configuration_says_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.nodes = 1, but this job has 2 node\(s\)"):
        torchrun_arguments(make_config(), {"FLASH_NNODES": "2"})


def test_the_command_that_continues_a_run_has_its_overrides() -> None:
    overrides = ["run.name=mine", "algorithm.options={cap = 2}", "run.resume=true"]
    assert resume_command(["a.toml"], overrides) == (
        "flash train a.toml run.name=mine 'algorithm.options={cap = 2}' --resume"
    )
