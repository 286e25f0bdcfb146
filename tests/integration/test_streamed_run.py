"""Whole runs that train a batch while it is still sampled: real vLLM, real process groups."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flash.cli.main import main
from flash.observe.rundir.recording import read_batch
from flash.observe.rundir.rundir import RunDirectory
from tests.integration.whole_run import Run, balanced

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SLOW = """
from pathlib import Path
import anyio
from envs.arithmetic import Arithmetic

class Mine(Arithmetic):
    async def reset(self, seed):
        # Every third problem begins late, so that the other groups of its batch can be trained meanwhile.
        await anyio.sleep(1.0 if seed % 3 == 0 else 0.0)
        while seed % 3 == 0 and Path(__file__).with_name("hold").exists():
            await anyio.sleep(0.02)
        return await super().reset(seed)
"""
STEPS = 6
STREAMED = ("train.stream=true", f"run.steps={STEPS}", "env.path=beside_the_config:Mine", "eval.every=0")


def test_a_streamed_run_trains_the_samples_of_an_unstreamed_one_to_the_same_weights(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    runs: list[Run] = []
    for name in ("streamed", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "beside_the_config.py").write_text(SLOW)
    arguments = ("train.async_ratio=0", "cluster.trainer_ranks=2", *STREAMED)
    (tmp_path / "beside_the_config.py").write_text(SLOW)
    for name, streams in (("streamed", "true"), ("whole", "false")):
        runs.append(start(*arguments, f"train.stream={streams}", f"run.name={name}"))
        runs[-1].directory = tmp_path / name
        assert runs[-1].wait() == 0, runs[-1].text()
    streamed, whole = runs
    share = [row["streamed_share"] for row in streamed.rows()]
    assert all(value == 0 for value in (row["streamed_share"] for row in whole.rows()))
    assert sum(share) / STEPS > 0.2, share
    samples = [
        sorted((row["step"], row["group_id"], row["reward"], *row["turns"][0][:2]) for row in run.rows("samples.jsonl"))
        for run in runs
    ]
    assert samples[0] == samples[1]
    weights = [load_file(run.directory / "model" / "model.safetensors") for run in runs]
    for name, tensor in weights[0].items():
        # The order of the groups changes the sums of float32 by rounding.
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-4, atol=1e-5, msg=name)
    assert streamed.summary()["ledger"] == whole.summary()["ledger"]


@pytest.mark.parametrize("ratio", [0, 1])
def test_a_streamed_run_trains_each_sample_once_whatever_dies_in_the_middle_of_a_step(
    start: Callable[..., Run], tmp_path: Path, ratio: int
) -> None:
    (tmp_path / "beside_the_config.py").write_text(SLOW)
    run = start(f"train.async_ratio={ratio}", "cluster.trainer_ranks=2", *STREAMED, "cluster.max_restarts=20")
    dice = random.Random(ratio)
    victims = {
        "a rank": lambda: run.trainer(dice.randrange(2)),
        "the hub": run.node_loop,
        "the engine": run.core,
    }
    for name in dice.sample(sorted(victims), len(victims)):
        before = len(run.rows())
        run.until(lambda before=before: len(run.rows()) > before)
        # The groups that begin at once are dealt after about 0.2 s, and the late ones are complete after about 1.2 s.
        time.sleep(dice.uniform(0.2, 1.0))
        os.kill(victims[name](), signal.SIGKILL)
    assert run.wait() == 0, run.text()
    # vLLM may log a traceback of its own when its engine is killed. Its lines begin with the process and the level.
    assert "\nTraceback" not in run.text()
    assert "other weights than before" not in run.text()
    assert [row["step"] for row in run.rows()] == list(range(STEPS))
    ledger = run.summary()["ledger"]
    assert balanced(ledger), ledger
    assert ledger["in_flight"] == 0
    assert ledger["trained"] == STEPS * 32, ledger
    groups = {(row["group_id"], row["step"]): 0 for row in run.rows("samples.jsonl")}
    members = Counter(row["group_id"] for row in run.rows("samples.jsonl"))
    assert len(groups) == len(members) == STEPS * 32 // 4
    assert set(members.values()) == {4}
    run.nothing_left()


def trained_at(run: Run) -> list[float]:
    """Return the times at which ranks began to train a round."""
    return [span.start for span in RunDirectory(run.directory).read_spans() if span.name == "train"]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_run_that_was_interrupted_in_the_middle_of_a_step_is_resumed_and_replayed_to_the_same_weights(
    start: Callable[..., Run], tmp_path: Path, capsys: pytest.CaptureFixture[str], minibatches: int
) -> None:
    """With two minibatches, the interrupt can come after an update, and the resumed run then trains steps again."""
    (tmp_path / "beside_the_config.py").write_text(SLOW)
    overrides = (
        *("train.async_ratio=0", f"train.minibatches={minibatches}", "algorithm.objective=decoupled_ppo"),
        *("algorithm.options={proximal='ewma'}", "checkpoint.every=1000", "eval.every=0"),
        *("train.stream=true", "env.path=beside_the_config:Mine"),
    )
    run = start(*overrides, "run.steps=1000")
    run.until(lambda: len(run.rows()) >= 2)
    hold = tmp_path / "hold"
    hold.touch()
    # In this step or the next one the late groups are held, and a rank has trained a round of the others.
    run.until(lambda: any(begun > run.rows()[-1]["time"] for begun in trained_at(run)))
    time.sleep(0.5)  # further rounds are likely to be trained, and with them the first minibatch
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text()
    hold.unlink()
    done = len(run.rows())
    saved = [int(path.name.removeprefix("step-")) for path in (run.directory / "checkpoints").glob("step-*")]
    # After an update in the middle of a step, no checkpoint can be written. On a slow machine the late groups may have
    # begun before they were held: then the step is finished, and a checkpoint is written.
    saves = minibatches == 1 or "writing a checkpoint" in run.text()
    assert saved == ([done] if saves else []), run.text()
    resumed = start(*overrides, f"run.steps={done + 2}", "--resume")
    assert resumed.wait() == 0, resumed.text()
    assert "Traceback" not in resumed.text()
    assert "other weights than before" not in resumed.text()
    assert [row["step"] for row in resumed.rows()] == list(range(done + 2))
    ledger = resumed.summary()["ledger"]
    assert balanced(ledger), ledger
    assert ledger["trained"] == (done + 2) * 32, ledger
    assert max(len(read_batch(run.directory / "batches", step).rounds) for step in range(done, done + 2)) > 1
    assert main(["replay", str(run.directory)]) == 0
    made = f"version {done + 2}: every weight equals the checkpoint's (step-{done + 2:06d})"
    assert made in capsys.readouterr().out
    resumed.nothing_left()
