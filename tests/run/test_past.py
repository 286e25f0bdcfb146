"""What a run directory gives to trainer ranks that start again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import RecordingError
from flash.hub.past import Start
from flash.observe.recorder import Recorder
from flash.run.past import RecordedPast
from flash.trainer.stored import MANIFEST, Manifest, step_folder
from flash.types import Batch, Canary, Published, Task
from flash.weights.update import UpdateInfo, encode_update
from tests.hub.cases import trajectory

pytestmark = pytest.mark.anyio


class NoText:
    def token_texts(self, token_ids: object) -> list[str]:
        return []


def make_config(folder: Path) -> Config:
    tables = {
        "run": {"name": "run", "output_dir": str(folder), "log_samples": 0},
        "model": {"path": "none"},
        "env": {"path": "none:None"},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(tables, Config)


def checkpoint(folder: Path, version: int) -> Path:
    path = step_folder(folder / "run", version)
    path.mkdir(parents=True)
    (path / MANIFEST).write_bytes(msgspec.json.encode(Manifest(version, 0, [])))
    return path


async def test_ranks_start_from_the_newest_checkpoint_and_are_given_what_was_recorded_since(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as recorder:
        past = RecordedPast(config.run_dir, recorder)
        assert await past.start(0) == Start(0, "")
        batches = [Batch(step, 0, [trajectory(Task(step, step, 0, 0), 0)], []) for step in range(3)]
        for batch in batches:
            recorder.batch(batch)
        assert await past.start(3) == Start(0, "")
        path = checkpoint(tmp_path, 2)
        assert await past.start(3) == Start(2, str(path))
        assert await past.batch(2) == batches[2]


async def test_a_batch_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as recorder:
        past = RecordedPast(config.run_dir, recorder)
        recorder.batch(Batch(1, 0, [], []))
        with pytest.raises(
            RecordingError, match="newest checkpoint is of version 0, and no batch of step 0 is recorded"
        ):
            await past.start(2)
        file = recorder.directory.batches / "step-000001.bin"
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(RecordingError, match=r"step-000001\.bin is damaged"):
            await past.batch(1)


async def test_weights_are_the_same_where_their_fingerprints_are(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    def published(port: int, *sums: int) -> Published:
        return Published(1, "tcp", encode_update(UpdateInfo({"port": port}, list(sums))), Canary([1], []))

    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as recorder:
        past = RecordedPast(config.run_dir, recorder)
        assert past.same_weights(published(1, 5, 6), published(2, 5, 6))
        assert not past.same_weights(published(1, 5, 6), published(1, 5, 7))
