"""Files of a run directory from which trainer ranks start again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from flash.config.load import dump
from flash.config.tree import Config
from flash.errors import RecordingError
from flash.hub.recovery import TrainerStart
from flash.observe.recorder import Recorder
from flash.run.restart import Reach, RecordedHistory, reach, version_with_metrics
from flash.trainer.checkpoint_files import MANIFEST, Manifest, step_folder
from flash.types import Batch, Canary, Published, Task
from flash.weights.versions import UpdateInfo, encode_update
from tests.samples.cases import trajectory

pytestmark = pytest.mark.anyio


class NoText:
    """Tokenizer that shows no texts."""

    def token_texts(self, token_ids: object) -> list[str]:
        return []


def make_config(folder: Path) -> Config:
    """Return a configuration whose run directory is `folder/run`."""
    tables = {
        "run": {"name": "run", "output_dir": str(folder), "log_samples": 0},
        "model": {"path": "none"},
        "env": {"path": "none:None"},
        "cluster": {"gpus_per_node": 0},
    }
    return msgspec.convert(tables, Config)


def checkpoint(folder: Path, version: int) -> Path:
    """Write an empty checkpoint of a version, and return its folder."""
    path = step_folder(folder / "run", version)
    path.mkdir(parents=True)
    (path / MANIFEST).write_bytes(msgspec.json.encode(Manifest(version, 0, [])))
    return path


async def test_ranks_start_from_the_newest_checkpoint_and_get_the_batches_recorded_since(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as recorder:
        past = RecordedHistory(config.run_dir, recorder)
        assert await past.choose_start(0) == TrainerStart(0, "")
        batches = [Batch(step, 0, [trajectory(Task(step, step, 0, 0), 0)], []) for step in range(3)]
        for batch in batches:
            recorder.batch(batch)
        assert await past.choose_start(3) == TrainerStart(0, "")
        path = checkpoint(tmp_path, 2)
        assert await past.choose_start(3) == TrainerStart(2, str(path))
        assert await past.batch(2) == batches[2]


async def test_a_batch_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as recorder:
        past = RecordedHistory(config.run_dir, recorder)
        recorder.batch(Batch(1, 0, [], []))
        with pytest.raises(
            RecordingError, match="newest checkpoint is of version 0, and no batch of step 0 is recorded"
        ):
            await past.choose_start(2)
        file = recorder.directory.batches / "step-000001.bin"
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(RecordingError, match=r"step-000001\.bin is damaged"):
            await past.batch(1)


def record(recorder: Recorder, steps: int) -> None:
    """Record the batches and the rows of metrics of `steps` steps."""
    for step in range(steps):
        recorder.batch(Batch(step, 0, [trajectory(Task(step, step, 0, 0), 0)], []))
        recorder.directory.append_metrics({"step": step})


def changed(config: Config, table: str, **values: Any) -> Config:
    """Return the configuration with other values in one table."""
    return msgspec.structs.replace(config, **{table: msgspec.structs.replace(getattr(config, table), **values)})


def test_a_run_goes_on_from_the_version_that_it_had(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as recorder:
        record(recorder, 4)
    for held in range(5):
        assert reach(config, held, 4) == Reach(4)
    assert reach(changed(config, "run", resume=True), 0, 4) == Reach(4)


def test_a_run_goes_back_to_the_first_step_that_cannot_be_trained_again_and_says_why(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as recorder:
        record(recorder, 4)
    assert reach(config, 1, 5) == Reach(4, "step 4 has no row in metrics.jsonl")
    file = recorder.directory.batches / "step-000002.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    version, why = reach(config, 1, 4)
    assert version == 2
    assert "step-000002.bin is damaged" in why
    assert reach(config, 3, 4) == Reach(4)
    file.unlink()
    assert reach(config, 1, 4).version == 2
    file.write_bytes(whole)
    assert reach(config, 1, 4) == Reach(4)


def test_rows_of_metrics_without_a_step_are_skipped(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as recorder:
        recorder.directory.append_metrics({"tokens": 1})
        assert version_with_metrics(config) == 0
        record(recorder, 2)
    assert version_with_metrics(config) == 2
    assert reach(config, 0, 2) == Reach(2)
    assert reach(config, 0, 3) == Reach(2, "step 2 has no row in metrics.jsonl")


@pytest.mark.parametrize(
    ("table", "values", "why"),
    [
        ("train", {"learning_rate": 0.5}, "the configuration has changed since: train.learning_rate"),
        ("checkpoint", {"batches": "none"}, 'checkpoint.batches = "none" leaves nothing to train again'),
    ],
)
def test_a_run_of_another_configuration_goes_back_to_its_checkpoint(
    tmp_path: Path, table: str, values: dict[str, Any], why: str
) -> None:
    config = make_config(tmp_path)
    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as recorder:
        record(recorder, 4)
    assert reach(changed(config, table, **values), 1, 4) == Reach(1, why)
    recorder.directory.config.write_text("[run")
    why = reach(config, 1, 4).why
    assert "the recorded configuration cannot be read: " in why
    assert "config.toml is not valid TOML" in why
    assert reach(config, 4, 4) == Reach(4)


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (False, None, ""),  # the default of a run that was recorded before steps were streamed by default
        (False, True, ""),
        (None, False, "the configuration has changed since: train.stream"),
        (True, False, "the configuration has changed since: train.stream"),
    ],
)
def test_steps_that_were_not_streamed_can_be_trained_again_as_streamed_ones(
    tmp_path: Path, before: bool | None, now: bool | None, why: str
) -> None:
    config = make_config(tmp_path)
    with Recorder(changed(config, "train", stream=before), NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as it:
        record(it, 4)
    assert reach(changed(config, "train", stream=now), 1, 4) == (Reach(1, why) if why else Reach(4))


def test_a_removed_key_counts_as_a_change_only_with_another_value_than_its_default(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as recorder:
        record(recorder, 4)
    file = recorder.directory.config
    recorded = file.read_text(encoding="utf-8")
    file.write_text(recorded.replace("[rollout]", '[rollout]\nselection = "uniform"\nsession_s = 0.0'))
    assert reach(config, 1, 4) == Reach(4)
    file.write_text(recorded.replace("[rollout]", '[rollout]\nselection = "pass_rate"'))
    assert reach(config, 1, 4) == Reach(1, "the configuration has changed since: rollout.selection")


def test_a_run_that_is_made_longer_goes_on_where_it_was_unless_its_learning_rate_follows_from_its_end(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path)
    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as recorder:
        record(recorder, 4)
    longer = changed(changed(config, "run", steps=7), "deadlines", step=1.0)
    longer = changed(changed(longer, "alarms", reactions={"lag": "off"}), "track", project="other")
    assert reach(longer, 1, 4) == Reach(4)
    decays = changed(config, "train", decay="linear")
    recorder.directory.config.write_text(dump(decays))
    assert reach(decays, 1, 4) == Reach(4)
    assert reach(changed(decays, "run", steps=7), 1, 4).why.endswith("since: run.steps")


async def test_weights_are_the_same_where_their_fingerprints_are(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    def published(port: int, *sums: int) -> Published:
        """Return a publication of weights with this port and these checksums."""
        return Published(1, "tcp", encode_update(UpdateInfo({"port": port}, list(sums))), Canary([1], []))

    with Recorder(config, NoText(), now=lambda: 0.0, resume_at=None, restarts=0) as recorder:
        past = RecordedHistory(config.run_dir, recorder)
        assert past.same_weights(published(1, 5, 6), published(2, 5, 6))
        assert not past.same_weights(published(1, 5, 6), published(1, 5, 7))
