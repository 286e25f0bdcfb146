"""The trainer ranks' agent, as its launcher keeps it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flash.config.tree import Config
from flash.run import trainers
from flash.run.error_marker import ErrorMarker
from flash.run.trainers import TrainersBeside


def test_an_agent_that_the_system_does_not_start_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tree: dict[str, Any] = {
        "run": {"name": "mine", "output_dir": str(tmp_path)},
        "model": {"path": "fake"},
        "env": {"path": "fake:Fake"},
        "cluster": {"gpus_per_node": 0, "max_restarts": 1},
    }
    config = msgspec.convert(tree, Config)
    config.run_dir.mkdir()
    sent: list[tuple[int, int]] = []

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setenv("FLASH_NODE_RANK", "0")
    monkeypatch.setattr(trainers, "RETRY_S", 0.0)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    marker = ErrorMarker(config.run_dir, "launch")
    with TrainersBeside(config, [], marker) as beside:
        beside._thread.join(10)
        assert beside.failed
    said = "the agent of the trainer ranks cannot be started: [Errno 12] Cannot allocate memory"
    assert f"{said}; it starts again, and the trainer ranks with it (restart 1 of 1)" in capfd.readouterr().err
    assert marker.message() == f"{said}; no restart is left of cluster.max_restarts = 1"
    assert sent == [(os.getpid(), signal.SIGTERM)]
