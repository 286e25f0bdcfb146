"""Whole runs through the public command and from Python: real vLLM, real process groups, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.metrics_page import unlisted

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).parents[2]
CONFIG = """
[run]
name = "run"
steps = 6
output_dir = "{folder}"

[model]
path = "{model}"
dtype = "float32"
max_length = 32

[tiny_model]
layers = 2
width = 64
warm_start_steps = 40
batch_size = 64

[env]
path = "envs.arithmetic:Arithmetic"
options = {{ digits = 1 }}

[rollout]
group_size = 4
max_new_tokens = 6
breaker = 16

[engine]
max_sequences = 64
enforce_eager = true
kv_cache_gib = 0.25

[train]
batch_size = 32
learning_rate = 1e-4
max_tokens_per_microbatch = 256

[eval]
every = 3
problems = 16

[checkpoint]
every = 2

[cluster]
gpus_per_node = 0
"""


COMMAND = ("-m", "flash", "train")
FROM_PYTHON = (
    "-c",
    """if True:
    import sys, flash
    try:
        summary = flash.train(flash.load(sys.argv[1], sys.argv[2:]))
    except flash.FlashError as error:
        sys.exit(f"from python: {type(error).__name__}: {error}")
    print("from python:", summary.ledger["trained"], "samples")
    """,
)


class Run:
    """One run in a process group of its own."""

    def __init__(
        self, folder: Path, model: Path, *arguments: str, text: str = CONFIG, command: Sequence[str] = COMMAND
    ) -> None:
        self.folder = folder
        self.directory = folder / "run"
        config = folder / "config.toml"
        config.write_text(text.format(folder=folder, model=model))
        self.output = folder / "output.txt"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command, str(config), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                start_new_session=True,
                env=os.environ | {"FLASH_TEST_RUN": str(folder)},
            )

    def wait(self, seconds: float = 300) -> int:
        return self.process.wait(seconds)

    def text(self) -> str:
        return self.output.read_text()

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        file = self.directory / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    def processes(self) -> dict[int, str]:
        """Every living process that was started by this run, by its environment."""
        mark = f"FLASH_TEST_RUN={self.folder}".encode()
        found: dict[int, str] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def trainer(self) -> int:
        """The process id of trainer rank 0."""
        for pid in self.processes():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if b"LOCAL_RANK=1" in environment and b"flash.run.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError("no trainer rank is running")

    def until(self, condition: Callable[[], bool], seconds: float = 200) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it did not happen; output so far:\n{self.text()}"
            assert self.process.poll() is None, f"the run ended early:\n{self.text()}"
            time.sleep(0.05)

    def nothing_left(self) -> None:
        end = time.monotonic() + 10
        while left := self.processes():
            assert time.monotonic() < end, f"processes left behind: {left}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model; the first run makes it, the others find it."""
    return tmp_path_factory.mktemp("models") / "tiny"


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: str, text: str = CONFIG, command: Sequence[str] = COMMAND) -> Run:
        runs.append(Run(tmp_path, model, *arguments, text=text, command=command))
        return runs[-1]

    yield begin
    for run in runs:
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)
        run.process.wait(10)


def balanced(ledger: dict[str, int]) -> bool:
    return ledger["issued"] == ledger["trained"] + ledger["filtered"] + ledger["given_up"] + ledger["in_flight"]


def test_a_run_leaves_metrics_summary_plots_model_and_no_process(start: Callable[..., Run]) -> None:
    run = start()
    assert run.wait() == 0, run.text()
    assert [row["step"] for row in run.rows()] == list(range(6))
    assert [row["step"] for row in run.rows("evals.jsonl")] == [0, 3, 6]
    for file in ("metrics.jsonl", "evals.jsonl"):
        assert unlisted({name for row in run.rows(file) for name in row}, file) == []
    summary = run.summary()
    assert summary["max_age"] <= 1
    assert summary["samples"] == summary["ledger"]["trained"] == 6 * 32
    assert balanced(summary["ledger"])
    assert summary["canary_max"] <= 1e-4
    for name in (
        "plots/reward.png",
        "plots/ages.png",
        "plots/offpolicy.png",
        "plots/timeline.png",
        "model/config.json",
        "config.toml",
    ):
        assert (run.directory / name).stat().st_size > 0
    sample = json.loads((run.directory / "trajectories" / "step-000000.jsonl").read_text().splitlines()[0])
    assert re.fullmatch(r"\d\+\d=", sample["turns"][0]["observation"])
    run.nothing_left()


def test_two_trainer_ranks_train_synchronously_at_a_ratio_of_zero_from_python(start: Callable[..., Run]) -> None:
    run = start("train.async_ratio=0", "cluster.trainer_ranks=2", "run.steps=3", "eval.every=0", command=FROM_PYTHON)
    assert run.wait() == 0, run.text()
    assert f"from python: {3 * 32} samples" in run.text()
    assert run.summary()["max_age"] == 0
    assert run.summary()["ledger"]["trained"] == 3 * 32
    run.nothing_left()


def test_a_killed_trainer_rank_is_restarted_and_the_ledger_balances(start: Callable[..., Run]) -> None:
    run = start("run.steps=8")
    run.until(lambda: len(run.rows()) >= 3)
    os.kill(run.trainer(), signal.SIGKILL)
    assert run.wait() == 0, run.text()
    assert [row["step"] for row in run.rows()] == list(range(8))
    summary = run.summary()
    assert summary["restarts"] == 1
    assert summary["ledger"]["trained"] == 8 * 32
    assert balanced(summary["ledger"])
    run.nothing_left()


def test_an_interrupt_ends_everything_in_time_and_the_run_can_be_resumed(start: Callable[..., Run]) -> None:
    run = start("run.steps=1000", "checkpoint.every=1000")
    run.until(lambda: len(run.rows()) >= 2)
    begun = time.monotonic()
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(30) == 130, run.text()
    assert time.monotonic() - begun < 10
    run.nothing_left()
    done = len(run.rows())
    assert "--resume" in run.text()
    again = start(f"run.steps={done + 2}", "--resume")
    assert again.wait() == 0, again.text()
    assert [row["step"] for row in again.rows()] == list(range(done + 2))
    assert balanced(again.summary()["ledger"])


def test_an_error_that_a_restart_cannot_mend_ends_the_run_with_one_clear_line(
    start: Callable[..., Run],
) -> None:
    run = start("weights.canary_tolerance=1e-12", command=FROM_PYTHON)
    assert run.wait() == 1
    assert "from python: WeightsError: engine 0, version 0: the canary's log-prob" in run.text()
    lines = [line for line in run.text().splitlines() if line.startswith("flash: error")]
    assert len(lines) == 1
    assert "WeightsError: engine 0, version 0: the canary's log-prob at position" in lines[0]
    assert "Traceback" not in run.text()
    assert json.loads((run.directory / "error.json").read_text())["error"] == "WeightsError"
    run.nothing_left()


def test_an_environment_that_only_fails_ends_the_run_with_its_own_reason(start: Callable[..., Run]) -> None:
    no_tiny_model = re.sub(r"\[tiny_model\].*?(?=\[env\])", "", CONFIG, flags=re.DOTALL)
    run = start("env.path=tests.integration.broken_env:BrokenEnv", text=no_tiny_model)
    assert run.wait() != 0
    assert "BrokenEnv always fails" in run.text()
    assert "Traceback" not in run.text()
