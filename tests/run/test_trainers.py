"""The trainer ranks' agent, as its launcher keeps it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import RanksGoneError
from flash.run.processes import trainers
from flash.run.processes.error_marker import ErrorMarker
from flash.run.processes.trainers import TrainersBeside
from tests.run.test_join import Job


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


class Leaving(TrainersBeside):
    """Agents that end as one does whose nodes do not meet again: with the code of an error that was told."""

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
        return self._process


@pytest.mark.anyio
async def test_an_agent_that_ends_for_good_ends_the_run_with_an_error_that_no_node_loop_starts_again_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASH_TOKEN", raising=False)
    monkeypatch.setenv("FLASH_NODE_RANK", "0")
    job = Job(tmp_path)

    def leave() -> None:
        with Leaving(job.config, [], ErrorMarker(job.config.run_dir, "launch")) as beside:
            beside._thread.join(10)
            assert beside.failed

    gone = pytest.RaisesExc(RanksGoneError, match="the trainer ranks of node 0 cannot go on")
    with pytest.RaisesGroup(gone, flatten_subgroups=True):
        async with job.hub() as hub, anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, leave)
            with anyio.fail_after(10):
                await hub.run()
    assert RanksGoneError.fatal
