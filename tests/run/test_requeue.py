"""Jobs that SLURM requeues go on as long as they make progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import RequeueError
from flash.observe.recorder import Recorder
from flash.run.restart import refuse_idle_requeues
from flash.trainer.checkpoint_files import MANIFEST, Manifest
from flash.types import Batch, Task
from tests.samples.cases import trajectory


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the configuration of a run that is job 7 of SLURM."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    tree: dict[str, Any] = {
        "run": {"name": "mine", "output_dir": str(tmp_path), "log_samples": 0},
        "model": {"path": "fake"},
        "env": {"path": "fake:Fake"},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(tree, Config)


def write_checkpoint(config: Config, version: int) -> None:
    """Write an empty checkpoint of a version."""
    folder = config.run_dir / "checkpoints" / f"step-{version:06d}"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_bytes(msgspec.json.encode(Manifest(version, 0, [])))


def test_a_job_that_gets_further_in_each_incarnation_is_requeued_for_ever(config: Config) -> None:
    for version in range(20):
        write_checkpoint(config, version)
        refuse_idle_requeues(config)


def test_a_job_that_never_gets_to_a_checkpoint_is_stopped(config: Config) -> None:
    for _ in range(3):
        refuse_idle_requeues(config)
    with pytest.raises(RequeueError, match=r"requeued job 7 3 times without progress: .* has no step yet"):
        refuse_idle_requeues(config)


def test_a_job_that_stays_at_a_version_is_stopped(config: Config) -> None:
    write_checkpoint(config, 4)
    for _ in range(3):
        refuse_idle_requeues(config)
    with pytest.raises(RequeueError, match="is still at version 4"):
        refuse_idle_requeues(config)


def test_progress_in_between_starts_the_count_again(config: Config) -> None:
    for version in (1, 2, 3):
        write_checkpoint(config, version)
        for _ in range(3):
            refuse_idle_requeues(config)


class NoText:
    """Tokenizer that shows no texts."""

    def token_texts(self, token_ids: object) -> list[str]:
        return []


def train(config: Config, steps: int) -> None:
    """Write the files of an incarnation that is stopped after `steps` steps, before a checkpoint."""
    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=0, restarts=0) as recorder:
        for step in range(steps):
            recorder.batch(Batch(step, 0, [trajectory(Task(step, step, 0, 0), 0)], []))
            recorder.directory.append_metrics({"step": step})


@pytest.mark.parametrize("journal", ["write", "off"])
def test_steps_since_the_checkpoint_are_progress_where_the_next_incarnation_has_them(
    config: Config, journal: Any
) -> None:
    config = msgspec.structs.replace(config, checkpoint=msgspec.structs.replace(config.checkpoint, journal=journal))
    for steps in range(4):
        train(config, steps)
        if steps < 3 or journal == "write":
            refuse_idle_requeues(config)
        else:
            with pytest.raises(RequeueError, match="has no step yet"):
                refuse_idle_requeues(config)


def test_a_job_that_is_submitted_again_has_all_its_incarnations(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        refuse_idle_requeues(config)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    for _ in range(3):
        refuse_idle_requeues(config)


@pytest.mark.parametrize("content", [b'{"job', b'{"job": "\xff", "version": 0, "idle": 9}'])
def test_a_damaged_count_is_begun_again(content: bytes, config: Config) -> None:
    refuse_idle_requeues(config)
    (config.run_dir / "requeues.json").write_bytes(content)
    refuse_idle_requeues(config)
