"""Whole runs through the public command and from Python, from their start to their end: real vLLM, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flash.cli.main import main
from flash.config.load import load
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.samples import read_samples, sampled_steps
from flash.run.models import model_folder
from tests.forked_command import ForkedCommand
from tests.integration.whole_run import CONFIG, FROM_PYTHON, NO_TINY_MODEL, REPOSITORY, Run, all_trained, balanced
from tests.metrics_page import unlisted

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

ARITHMETIC = """path = "envs.arithmetic:Arithmetic"
options = {{ digits = 1 }}
"""
AGENT = CONFIG.replace(
    ARITHMETIC,
    f"""path = "envs.agent:Agent"

[env.options]
function = "tests.integration.branching_agent:solve"

[env.options.tasks]
{ARITHMETIC}""",
)
"""The same problems, through a program that only knows the OpenAI API, and whose conversations have branches."""


def test_a_run_trains_an_agent_of_the_official_client(start: Callable[..., Run]) -> None:
    run = start(text=AGENT)
    assert run.wait() == 0, run.text()
    summary = run.summary()
    all_trained(run, 6 * 32)
    assert summary["samples"] == summary["ledger"]["trained"]
    assert [row["failures"] for row in run.rows()] == [0] * 6
    assert [row["branches"] for row in run.rows()] == [3] * 6
    mismatches = [row["mismatch_k3_age_0"] for row in run.rows() if "mismatch_k3_age_0" in row]
    assert max(mismatches) < 1e-6, "a branch is trained as the engine saw it"
    assert [row["samples"] for row in run.rows("evals.jsonl")] == [16] * 3
    run.nothing_left()


def test_a_run_leaves_metrics_summary_plots_model_and_no_process(
    start: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(real=True)
    assert run.wait() == 0, run.text()
    assert [row["step"] for row in run.rows()] == list(range(6))
    assert [row["step"] for row in run.rows("evals.jsonl")] == [0, 3, 6]
    assert unlisted({name for row in run.rows() for name in row}) == []
    assert unlisted({name for row in run.rows("evals.jsonl") for name in row}, "evaluation") == []
    summary = run.summary()
    assert summary["max_age"] <= 4
    all_trained(run, 6 * 32)
    assert summary["samples"] == summary["ledger"]["trained"]
    assert summary["canary_error"] <= 1e-4
    for name in (
        "plots/reward.png",
        "plots/offpolicy.png",
        "plots/timeline.png",
        "model/config.json",
        "config.toml",
    ):
        assert (run.directory / name).stat().st_size > 0
    directory = RunDirectory(run.directory)
    assert len(sampled_steps(directory)) == summary["steps"]
    sample, *_ = read_samples(directory, 0)
    assert re.fullmatch(r"\d\+\d=", sample.turns[0].observation)
    values = sample.values
    assert values.logprobs == pytest.approx(values.sampled_logprobs, abs=1e-3)
    assert len(values.uses) == len(values.advantages) == len(values.entropies) == len(values.logprobs) > 0
    told = re.findall(r"^\[([a-z ]+)", run.text(), re.MULTILINE)
    beginning = ["starting processes for ", "starting engines and trainers ", "first evaluation", "training"]
    assert [text for text in dict.fromkeys(told) if text in beginning] == beginning
    assert "Triton" not in run.text()
    run.nothing_left()
    evaluated_alike(run)
    trained_again_alike(run, capsys)


def trained_again_alike(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded batches make the run's last weights again, and other ones with another objective."""
    capsys.readouterr()
    assert main(["replay", str(run.directory)]) == 0
    same = capsys.readouterr().out
    assert "training steps 4 to 5 again" in same
    assert "version 6: every weight equals the checkpoint's (step-000006)" in same
    assert main(["replay", str(run.directory), "algorithm.objective=cispo", "--to-step", "6"]) == 0
    assert "version 6: weights differ from the checkpoint's (step-000006) by at most" in capsys.readouterr().out


def evaluated_alike(run: Run) -> None:
    """A run, evaluated afterwards, does as well as its model did when it evaluated it; its checkpoint is that model."""
    checkpoint, row = run.directory / "checkpoints" / "step-000006", run.rows("evals.jsonl")[-1]
    config = load([run.folder / "config.toml"], [])
    with model_folder(str(run.directory), config) as exported:
        assert exported == str(run.directory / "model")
    written = run.folder / "exported"
    assert main(["export", str(checkpoint), str(written)]) == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (written, Path(exported)))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    result, output = run.folder / "eval.json", run.folder / "eval.txt"
    command = ("-m", "flash", "eval", str(run.directory), "--json", str(result))
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # short enough for the names of sockets
        variables = os.environ | {"FLASH_TEST_RUN": str(run.folder), "TMPDIR": temporary}
        with output.open("wb") as file:
            again = ForkedCommand(command, output=file.fileno(), folder=REPOSITORY, variables=variables)
        assert again.wait(200) == 0, output.read_text()
        left = [path.name for path in Path(temporary).iterdir() if not path.name.startswith("torchinductor_")]
        assert left == []
    found = json.loads(result.read_text())
    assert {name: row[name] for name in ("mean_reward", "problems", "samples", "missing")}.items() <= found.items()
    assert [one["mean"] for one in found["best_of"]] == [row["mean_reward"]]
    assert f"{row['mean_reward']:.3f}" in output.read_text().splitlines()[-1]
    run.nothing_left()


def test_an_interrupt_while_there_is_no_hub_ends_the_ranks_that_wait_for_one(start: Callable[..., Run]) -> None:
    run = start("run.steps=1000", "cluster.trainer_ranks=2", "deadlines.shutdown=60")
    run.until(lambda: len(run.rows()) >= 1)
    os.kill(run.node_loop(), signal.SIGKILL)
    run.until(lambda: "with its engines and the trainer ranks" in run.text())
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text()
    run.nothing_left()


def test_a_killed_launcher_takes_its_run_along_before_another_has_it_which_an_interrupt_ends_in_time_to_be_resumed(
    start: Callable[..., Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two small critics and rhythm, which are resumed too: its batches make again what it ends with."""
    overrides = (
        *("algorithm.objective=asyppo", "algorithm.entropy_bonus=0.001", "train.updates_per_batch=2"),
        f"critic={{path='{tmp_path / 'critic'}', clip='none', learning_rate=1e-2, warmup_steps=1}}",
        "algorithm.rhythm={credit='coupled', top=0.4, nearest=1, farthest=4}",
        *("checkpoint.every=1000", "eval.every=0"),
    )
    run = start(*overrides, "run.steps=1000")
    run.until(lambda: len(run.rows()) >= 2)
    scratch = run.scratch()
    second = start()
    assert second.wait() == 2
    assert f"{run.directory} is in use by process {run.process.pid} on " in second.text()
    assert run.directory.is_dir()
    assert not run.directory.with_name("run.1").exists()
    run.process.kill()

    again = start(*overrides, "run.steps=1000", "--resume")
    again.until(lambda: "continuing" in again.text())
    assert f"process {run.process.pid}, which started this run, is gone" in again.text()
    done = max(int(path.name.removeprefix("step-")) for path in (run.directory / "checkpoints").iterdir())
    assert f"continuing {run.directory} from version {done}" in again.text()
    again.until(lambda: len(again.rows()) > done)
    told = len(again.text())
    os.killpg(again.process.pid, signal.SIGINT)
    assert again.wait(30) == 130, again.text()
    again.nothing_left()
    assert not scratch.exists()
    assert "--resume" in again.text()[told:]
    assert "signal" not in again.text()[told:]

    done = len(again.rows())
    assert [row["step"] for row in again.rows()] == list(range(done))
    last = start(*overrides, f"run.steps={done + 1}", "--resume")
    assert last.wait() == 0, last.text()
    rows = last.rows()
    assert [row["step"] for row in rows] == list(range(done + 1))
    assert balanced(last.summary()["ledger"])
    assert [row["critic_warmup"] for row in rows] == [1.0] + [0.0] * done
    assert rows[0]["deviation_max"] == 0.0
    assert rows[-1]["deviation_mean"] > 0.0
    assert 0.8 <= rows[-1]["learned_mean"] < 1.0
    assert all(0 < row["rhythm_share"] < 1 for row in rows)
    assert unlisted({name for row in rows for name in row}) == []
    assert main(["replay", str(run.directory)]) == 0
    made = f"version {done + 1}: every weight equals the checkpoint's (step-{done + 1:06d})"
    assert made in capsys.readouterr().out
    last.nothing_left()


def test_an_error_that_a_restart_cannot_mend_ends_the_run_with_one_clear_line(
    start: Callable[..., Run],
) -> None:
    run = start("weights.canary_tolerance=1e-12", command=FROM_PYTHON)
    assert run.wait() == 1
    assert "from python: WeightsError: engine 0, version 0: the canary's log-probs differ" in run.text()
    lines = [line for line in run.text().splitlines() if line.startswith("flash: error")]
    assert len(lines) == 1
    assert "WeightsError: engine 0, version 0: the canary's log-probs differ by" in lines[0]
    assert "Traceback" not in run.text()
    assert "gone without an error message" not in run.text(), "the ranks have ended with the run"
    assert json.loads((run.directory / "error.json").read_text())["error"] == "WeightsError"
    run.nothing_left()


def test_an_environment_that_only_fails_ends_the_run_with_its_own_reason(start: Callable[..., Run]) -> None:
    run = start("env.path=tests.integration.broken_env:BrokenEnv", text=NO_TINY_MODEL)
    assert run.wait() == 2
    assert "BrokenEnv always fails" in run.text()
    assert "Traceback" not in run.text()
