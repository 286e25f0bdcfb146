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
import torch
from safetensors.torch import load_file

from flash.config.load import load
from flash.observe.rundir import RunDirectory
from flash.observe.sample_files import read_samples, sampled_steps
from flash.run.models import model_folder
from tests.metrics_page import unlisted
from tests.rows import written_rows

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


NO_TINY_MODEL = re.sub(r"\[tiny_model\].*?(?=\[env\])", "", CONFIG, flags=re.DOTALL)
"""For runs whose environment is another one than the model was made for."""

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

TIMES = r"^time$|_s$|_share$|_per_second$|^trainer_restarts$|^failures(_cancelled)?$"
"""Names of what differs between two runs that are equal in all they train. A few of the shares do."""

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
        return written_rows(self.directory / name)

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

    def trainer(self, rank: int = 0) -> int:
        """The process id of a trainer rank."""
        return self.process_of("flash.run.worker trainer", rank)

    def node_loop(self) -> int:
        """The process id of the node loop."""
        return self.process_of("flash.run.worker node", 0)

    def agent(self) -> int:
        """The process id of the trainer ranks' agent."""
        (pid,) = (pid for pid, command in self.processes().items() if "-m flash.run.trainers " in command)
        return pid

    def process_of(self, command: str, local: int) -> int:
        """The process id of torchrun's process with this command and local rank."""
        for pid, line in self.processes().items():
            if f"-m {command} " in line and self.variable(pid, "LOCAL_RANK") == str(local):
                return pid
        raise AssertionError(f"no `{command}` with LOCAL_RANK={local} is running")

    def core(self) -> int:
        """The process id of the engine's core, which has started: its title has overwritten its environment."""
        threads = Path(f"/proc/{self.node_loop()}/task").iterdir()
        children = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
        (core,) = (pid for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"VLLM::EngineCore"))
        return core

    def variable(self, pid: int, name: str) -> str:
        """A variable of a process's environment."""
        variables = dict(line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if line)
        return variables[name]

    def until(self, condition: Callable[[], bool], seconds: float = 200, every: float = 0.05) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it did not happen; output so far:\n{self.text()}"
            assert self.process.poll() is None, f"the run ended early:\n{self.text()}"
            time.sleep(every)

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


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what depends on how long something took."""
    return [{name: value for name, value in row.items() if not re.search(TIMES, name)} for row in rows]


def balanced(ledger: dict[str, int]) -> bool:
    return ledger["issued"] == ledger["trained"] + ledger["filtered"] + ledger["given_up"] + ledger["in_flight"]


def outlived(run: Run) -> int:
    """How often trainer ranks have gone on with the next hub."""
    assert "cannot go on" not in run.text()
    return len(re.findall(r"the trainer ranks have outlived the hub, and go on at version \d+", run.text()))


def given_up(ledger: dict[str, int]) -> set[str]:
    """Why samples were given up."""
    return {name.removeprefix("given_up_") for name, count in ledger.items() if name.startswith("given_up_") and count}


def test_a_run_trains_an_agent_of_the_official_client(start: Callable[..., Run]) -> None:
    run = start(text=AGENT)
    assert run.wait() == 0, run.text()
    summary = run.summary()
    # An agent that is late for its group may be trained past, which is rare.
    stale = summary["ledger"].get("given_up_stale", 0)
    assert summary["samples"] == summary["ledger"]["trained"] == 6 * 32 - stale
    assert stale < 4, "less than a group"
    assert balanced(summary["ledger"])
    assert [row["failures"] for row in run.rows()] == [0] * 6
    assert [row["branches"] for row in run.rows()] == [3] * 6
    mismatches = [row["mismatch_k3_age_0"] for row in run.rows() if "mismatch_k3_age_0" in row]
    assert max(mismatches) < 1e-6, "a branch is trained as the engine saw it"
    assert [row["samples"] for row in run.rows("evals.jsonl")] == [16] * 3
    run.nothing_left()


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
    trained_again_alike(run)


def test_a_run_with_two_small_critics_ends_with_what_its_batches_make_again(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(
        *("algorithm.objective=asyppo", "algorithm.entropy_bonus=0.001", "train.updates_per_batch=2"),
        f"critic={{path='{tmp_path / 'critic'}', tiny_layers=1, clip='none', learning_rate=1e-2, warmup_steps=1}}",
        *("run.steps=4", "eval.every=0"),
    )
    assert run.wait() == 0, run.text()
    rows = run.rows()
    assert [row["critic_warmup"] for row in rows] == [1.0, 0.0, 0.0, 0.0]
    assert rows[0]["deviation_max"] == 0.0
    assert rows[-1]["deviation_mean"] > 0.0
    assert 0.8 <= rows[-1]["learned_mean"] < 1.0
    assert unlisted({name for row in rows for name in row}) == []
    replay = (sys.executable, "-m", "flash", "replay", str(run.directory))
    again = subprocess.run(replay, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "version 4: every weight equals the checkpoint's (step-000004), bit for bit" in again
    run.nothing_left()


def trained_again_alike(run: Run) -> None:
    """The recorded batches make the run's last weights again, bit for bit, and other ones with another objective."""
    replay = (sys.executable, "-m", "flash", "replay", str(run.directory))
    (same, other) = (
        subprocess.run([*replay, *more], capture_output=True, text=True, check=True, timeout=120).stdout
        for more in ((), ("algorithm.objective=cispo", "--to-step", "6"))
    )
    assert "training steps 4 to 5 again" in same
    assert "version 6: every weight equals the checkpoint's (step-000006), bit for bit" in same
    assert "version 6: weights differ from the checkpoint's (step-000006) by at most" in other


def evaluated_alike(run: Run) -> None:
    """A run, evaluated afterwards, does as well as its model did when it evaluated it; its checkpoint is that model."""
    checkpoint, row = run.directory / "checkpoints" / "step-000006", run.rows("evals.jsonl")[-1]
    config = load([run.folder / "config.toml"], [])
    with model_folder(str(run.directory), config) as exported:
        assert exported == str(run.directory / "model")
    written = run.folder / "exported"
    command = (sys.executable, "-m", "flash", "export", str(checkpoint), str(written))
    subprocess.run(command, check=True, timeout=200, env=os.environ | {"FLASH_TEST_RUN": str(run.folder)})
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (written, Path(exported)))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    result = run.folder / "eval.json"
    command = (sys.executable, "-m", "flash", "eval", str(run.directory), "--json", str(result))
    variables = os.environ | {"FLASH_TEST_RUN": str(run.folder)}
    again = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200, env=variables)
    found = json.loads(result.read_text())
    assert {name: row[name] for name in ("mean_reward", "problems", "samples", "missing")}.items() <= found.items()
    assert [one["mean"] for one in found["best_of"]] == [row["mean_reward"]]
    assert f"{row['mean_reward']:.3f}" in again.stdout.splitlines()[-1]
    run.nothing_left()


def test_the_example_of_rhythm_runs_to_its_end_and_is_resumed_with_its_heads(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    text = (REPOSITORY / "examples" / "rhythm.toml").read_text().replace("{", "{{").replace("}", "}}")
    overrides = (
        *("run.name=run", f"run.output_dir={tmp_path}", f"model.path={tmp_path}/model", "checkpoint.every=1"),
        *("tiny_model.warm_start_steps=40", "eval.problems=16", "algorithm.rhythm.heads=first"),
    )
    run = start(*overrides, "run.steps=3", text=text)
    assert run.wait() == 0, run.text()
    assert [row["step"] for row in run.rows()] == [0, 1, 2]
    assert all(0 < row["rhythm_share"] < 1 for row in run.rows())
    assert all(unlisted(row) == [] for row in run.rows())
    run.nothing_left()

    resumed = start(*overrides, "run.steps=4", "run.resume=true", text=text)
    assert resumed.wait() == 0, resumed.text()
    assert [row["step"] for row in resumed.rows()] == [0, 1, 2, 3]


def test_two_trainer_ranks_come_to_the_same_weights_at_a_ratio_of_zero_whenever_they_or_the_hub_die(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "beside_the_config.py").write_text("from envs.arithmetic import Arithmetic as Mine")
    overrides = (
        "train.async_ratio=0",
        "cluster.trainer_ranks=2",
        "run.steps=4",
        "eval.every=0",
        "eval.temperature=1",
        "env.path=beside_the_config:Mine",
    )
    run = start(*overrides, text=NO_TINY_MODEL, command=FROM_PYTHON)
    assert run.wait() == 0, run.text()
    assert f"from python: {4 * 32} samples" in run.text()
    assert run.summary()["max_age"] == 0
    assert run.summary()["ledger"]["trained"] == 4 * 32
    run.nothing_left()
    told = len(run.text())
    again = start(*overrides, "run.name=again", text=NO_TINY_MODEL)
    again.directory = run.folder / "again"
    writing = again.directory / "checkpoints" / ".tmp-step-000002"
    again.until(lambda: "[first evaluation" in again.text()[told:])
    core, loop = again.core(), again.node_loop()
    # Between a commit and its publication, in a checkpoint, and before the last step; or about there.
    moments = ((0, lambda: len(again.rows()) == 1), (1, writing.exists))
    for number, (rank, moment) in enumerate(moments, start=1):
        killed = again.trainer(rank)
        again.until(moment, every=0.002)
        os.kill(killed, signal.SIGKILL)
        again.until(lambda number=number: again.text().count("the trainer ranks are back at version") == number)
        assert (again.core(), again.node_loop()) == (core, loop)
    # While the third step is booked, or about there, and in the middle of the fourth: the ranks outlive both.
    ranks = [again.trainer(0), again.trainer(1)]
    again.until(lambda: len(again.rows()) == 3, every=0.002)
    os.kill(loop, signal.SIGKILL)
    again.until(lambda: outlived(again) == 1)
    formed = again.directory / "batches" / "step-000003.bin"
    again.until(formed.exists, every=0.002)
    assert [again.trainer(0), again.trainer(1)] == ranks
    os.kill(again.node_loop(), signal.SIGKILL)
    again.until(lambda: outlived(again) == 2)
    assert [again.trainer(0), again.trainer(1)] == ranks
    assert again.wait() == 0, again.text()
    assert "not the weights that they had" not in again.text()
    assert "Traceback" not in again.text()
    summary = again.summary()
    assert (summary["restarts"], summary["trainer_restarts"], summary["engine_restarts"]) == (2, 2, 0)
    # What was in hand when the hub died is made again.
    assert summary["ledger"] | {"retried_cancelled": 0} == run.summary()["ledger"] | {"retried_cancelled": 0}
    rows, expected = again.rows("metrics.jsonl"), run.rows("metrics.jsonl")
    # The next hub books a step that the one before it had not booked, and may have no engine yet.
    for step in (2, 3):
        rows[step] |= {name: expected[step][name] for name in ("engines", "canary_max")}
    assert untimed(rows) == untimed(expected)
    assert untimed(again.rows("evals.jsonl")) == untimed(run.rows("evals.jsonl"))
    assert len(again.rows("samples.jsonl")) == 4 * 32
    weights = [folder / "model" / "model.safetensors" for folder in (run.directory, again.directory)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    again.nothing_left()


def test_a_killed_engine_comes_back_in_its_place_and_nothing_else_starts_again(start: Callable[..., Run]) -> None:
    # What admission lets start before the engine dies is enough for two steps more, and not for the rest.
    run = start("run.steps=8", "deadlines.request=3")
    run.until(lambda: len(run.rows()) >= 1)
    core = run.core()
    # Nor does anything when the hub is stopped for longer than a message takes.
    os.kill(run.node_loop(), signal.SIGSTOP)
    time.sleep(6)
    os.kill(run.node_loop(), signal.SIGCONT)
    run.until(lambda: len(run.rows()) >= 2)
    os.kill(core, signal.SIGKILL)
    assert run.wait() == 0, run.text()
    assert f"engine 0 is dead: its process {core} was killed by signal 9 (SIGKILL)" in run.text()
    assert "It starts again in 1 s (1 of 3 restarts in a row)" in run.text()
    assert "engine 0 is back after " in run.text()
    summary = run.summary()
    assert (summary["restarts"], summary["engine_restarts"], summary["failures"]) == (0, 1, 0)
    assert summary["ledger"]["issued"] == summary["ledger"]["trained"] == 8 * 32
    run.nothing_left()


def test_lost_trainer_ranks_come_back_alone_until_their_restarts_are_used_up(start: Callable[..., Run]) -> None:
    run = start("run.steps=1000", "cluster.trainer_ranks=2", "cluster.max_restarts=1", "checkpoint.every=10")
    run.until(lambda: len(run.rows()) >= 3)
    hub, killed, core = run.node_loop(), run.trainer(1), run.core()
    # The other rank waits in a collective for this one; when that fails, a hub that is busy reads both ends at once.
    os.kill(killed, signal.SIGSTOP)
    time.sleep(2)
    os.kill(hub, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    time.sleep(1)
    os.kill(hub, signal.SIGCONT)

    def back(times: int) -> bool:
        words = re.findall(r"the trainer ranks are back at version \d+ after .* again(.*)", run.text())
        assert set(words) <= {"", ": the same weights as before"}
        return len(words) == times

    run.until(lambda: back(1))
    assert f"flash: trainer rank 1 (process {killed}) was killed by signal 9 (SIGKILL), perhaps because" in run.text()
    assert "the trainer ranks start again (restart 1 of 1)" in run.text()
    agent = run.agent()
    os.kill(agent, signal.SIGKILL)
    run.until(lambda: back(2))
    assert f"the agent of the trainer ranks (process {agent}) was killed by signal 9 (SIGKILL)" in run.text()
    done = len(run.rows())
    run.until(lambda: len(run.rows()) > done)
    assert [row["step"] for row in run.rows()] == list(range(len(run.rows())))
    assert (run.core(), run.node_loop()) == (core, hub)
    os.kill(run.agent(), signal.SIGKILL)
    assert run.wait(60) == 1, run.text()
    assert "no restart is left of cluster.max_restarts = 1" in run.text().splitlines()[-1]
    assert "Traceback" not in run.text()
    assert "Connection closed" not in run.text()
    assert "all other processes" not in run.text()
    run.nothing_left()


def test_trainer_ranks_that_hang_are_killed_and_come_back_alone_with_the_same_weights(
    start: Callable[..., Run],
) -> None:
    overrides = (
        "train.async_ratio=0",
        "cluster.trainer_ranks=2",
        "run.steps=4",
        "eval.every=0",
        "deadlines.collective=20",
        "deadlines.step=40",
    )
    run = start(*overrides)
    assert run.wait() == 0, run.text()
    told = len(run.text())
    again = start(*overrides, "run.name=again")
    again.directory = run.folder / "again"
    again.until(lambda: len(again.rows()) == 1, every=0.002)
    core, loop = again.core(), again.node_loop()
    # One rank, whose absence the other one's collective tells; then both, of which nothing is heard any more.
    for number, hanging in enumerate(([1], [0, 1]), start=1):
        pids = [again.trainer(rank) for rank in hanging]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        again.until(lambda number=number: again.text().count("the trainer ranks are back at version") == number)
        assert not {*pids} & {*again.processes()}
        assert (again.core(), again.node_loop()) == (core, loop)
        named = f"trainer rank 1 (process {pids[-1]} on node 0) hangs: it has been silent for "
        assert named in again.text()[told:]
    assert again.wait() == 0, again.text()
    assert "a collective may take 20 s (deadlines.collective)" in again.text()
    assert "the run has waited 40 s (deadlines.step) for the trainer ranks to " in again.text()
    assert "not the weights that they had" not in again.text()
    assert "Traceback" not in again.text()
    assert "was killed by signal" not in again.text()
    summary = again.summary()
    assert (summary["restarts"], summary["trainer_restarts"]) == (0, 2)
    assert summary["ledger"] == run.summary()["ledger"]
    assert untimed(again.rows()) == untimed(run.rows())
    weights = [folder / "model" / "model.safetensors" for folder in (run.directory, again.directory)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    again.nothing_left()


def test_a_killed_node_loop_loses_nothing_that_was_delivered_or_trained(start: Callable[..., Run]) -> None:
    run = start("run.steps=8", "checkpoint.every=1000")
    run.until(lambda: len(run.rows()) >= 3)
    killed, rank = run.node_loop(), run.trainer()
    os.kill(killed, signal.SIGSTOP)
    before = run.rows()
    trained = run.rows("samples.jsonl")
    os.kill(killed, signal.SIGKILL)
    run.until(lambda: outlived(run) == 1)
    assert run.trainer() == rank
    assert run.wait() == 0, run.text()
    assert f"flash: the node loop (process {killed}) was killed by signal 9 (SIGKILL)" in run.text()
    assert re.search(r"the journal brings back \d+ samples that were delivered after version 0", run.text())
    assert [row["step"] for row in run.rows()] == list(range(8))
    # It may have died between the record of a step and its row, or the other way round.
    back = re.search(r"the trainer ranks have outlived the hub, and go on at version (\d+)", run.text())
    assert back is not None
    kept = int(back[1])
    assert "trainer ranks are back" not in run.text(), "a step was trained again"
    assert len(before) - 1 <= kept <= len(before)
    assert run.rows()[:kept] == before[:kept], "a row was written again"
    assert [row for row in run.rows("samples.jsonl") if row["step"] < kept] == [
        row for row in trained if row["step"] < kept
    ]
    ledger = run.summary()["ledger"]
    # Members of a group wait for one that the hub had not got; the others may train past them, which is rare.
    assert given_up(ledger) <= {"stale"}
    assert ledger.get("given_up_stale", 0) < 4, "less than a group"
    assert ledger["trained"] + ledger.get("given_up_stale", 0) == 8 * 32
    assert (run.summary()["restarts"], run.summary()["trainer_restarts"]) == (1, 0)
    assert balanced(ledger)
    run.nothing_left()


def test_an_interrupt_ends_everything_in_time_and_the_run_can_be_resumed(start: Callable[..., Run]) -> None:
    run = start("run.steps=1000", "checkpoint.every=1000")
    run.until(lambda: len(run.rows()) >= 2)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(30) == 130, run.text()
    run.nothing_left()
    done = len(run.rows())
    assert "--resume" in run.text()
    assert "signal" not in run.text()
    again = start(f"run.steps={done + 2}", "--resume")
    assert again.wait() == 0, again.text()
    assert [row["step"] for row in again.rows()] == list(range(done + 2))
    assert balanced(again.summary()["ledger"])


def test_an_interrupt_while_there_is_no_hub_ends_the_ranks_that_wait_for_one(start: Callable[..., Run]) -> None:
    run = start("run.steps=1000", "cluster.trainer_ranks=2", "deadlines.shutdown=60")
    run.until(lambda: len(run.rows()) >= 1)
    os.kill(run.node_loop(), signal.SIGKILL)
    run.until(lambda: "the trainer ranks wait for it" in run.text())
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text()
    run.nothing_left()


def test_a_killed_launcher_takes_its_run_along_in_order_and_only_then_lets_another_have_it(
    start: Callable[..., Run],
) -> None:
    run = start("run.steps=1000", "checkpoint.every=1000")
    run.until(lambda: len(run.rows()) >= 2)
    scratch = Path(run.variable(run.trainer(), "FLASH_SCRATCH"))
    second = start()
    assert second.wait() == 2
    assert f"{run.directory} is in use by process {run.process.pid} on " in second.text()
    assert run.directory.is_dir()
    assert not run.directory.with_name("run.1").exists()
    run.process.kill()
    again = start(f"run.steps={len(run.rows()) + 20}", "--resume")
    again.until(lambda: "continuing" in again.text())
    assert f"process {run.process.pid}, which started this run, is gone" in again.text()
    done = max(int(path.name.removeprefix("step-")) for path in (run.directory / "checkpoints").iterdir())
    assert f"continuing {run.directory} from version {done}" in again.text()
    os.killpg(again.process.pid, signal.SIGINT)
    assert again.wait(60) == 130, again.text()
    assert [row["step"] for row in again.rows()] == list(range(len(again.rows())))
    again.nothing_left()
    assert not scratch.exists()


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
    run = start("env.path=tests.integration.broken_env:BrokenEnv", text=NO_TINY_MODEL)
    assert run.wait() != 0
    assert "BrokenEnv always fails" in run.text()
    assert "Traceback" not in run.text()
