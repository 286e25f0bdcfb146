"""Whole runs of which something dies or hangs, through the public command: real vLLM, real process groups."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forked_command import run_forked
from tests.full_disk import small_disk
from tests.integration.whole_run import CONFIG, FROM_PYTHON, NO_TINY_MODEL, Run, all_trained, balanced, make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

MAKE = """
import sys
from pathlib import Path
from flash.config.load import load
from flash.run.models import make_missing_models

make_missing_models(load([Path(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, made: not every run here could make it."""
    folder = tmp_path_factory.mktemp("models")
    config = folder / "config.toml"
    config.write_text(CONFIG.format(folder=folder, model=folder / "tiny"))
    code, told = run_forked(("-c", MAKE, str(config)), folder / "output.txt")
    assert code == 0, told
    return folder / "tiny"


EQUAL = (
    *("train.async_ratio=0", "cluster.trainer_ranks=2", "run.steps=4", "env.path=beside_the_config:Mine"),
    *("eval.every=0", "eval.temperature=1"),
)
"""A run whose weights are the same each time, whatever dies of it."""


def put_module(folder: Path) -> None:
    (folder / "beside_the_config.py").write_text("from envs.arithmetic import Arithmetic as Mine")


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Such a run, finished, of which nothing has died."""
    folder = tmp_path_factory.mktemp("undisturbed")
    make_model(model, folder / "first")
    put_module(folder)
    run = Run(folder, model, *EQUAL, text=NO_TINY_MODEL, command=FROM_PYTHON)
    assert run.wait() == 0, run.text()
    assert f"from python: {4 * 32} samples" in run.text()
    assert run.summary()["max_age"] == 0
    assert run.summary()["ledger"]["trained"] == 4 * 32
    run.nothing_left()
    return run


TIMES = r"^time$|_s$|_share$|_per_second$|^(memory_gib|mfu|trainer_restarts)$|^failures(_cancelled)?$"
"""Names of the metrics that may differ between two runs that train the same: times, memory, restarts, some shares."""


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without these metrics."""
    return [{name: value for name, value in row.items() if not re.search(TIMES, name)} for row in rows]


def test_two_trainer_ranks_come_to_the_same_weights_at_a_ratio_of_zero_whenever_they_or_the_hub_die(
    start: Callable[..., Run], tmp_path: Path, undisturbed: Run
) -> None:
    put_module(tmp_path)
    again = start(*EQUAL, text=NO_TINY_MODEL)
    writing = again.directory / "checkpoints" / ".tmp-step-000002"
    again.until(lambda: "[first evaluation" in again.text())
    core, loop = again.core(), again.node_loop()
    # Between a commit and its publication, in a checkpoint, and before the last step; or about there.
    moments = ((0, lambda: len(again.rows()) == 1), (1, writing.exists))
    for number, (rank, moment) in enumerate(moments, start=1):
        killed = again.trainer(rank)
        again.until(moment, every=0.002)
        os.kill(killed, signal.SIGKILL)
        again.until(lambda number=number: again.text().count("the trainer ranks are back at version") == number)
        assert (again.core(), again.node_loop()) == (core, loop)
    # While the third step is booked, or about there, and in the middle of the fourth: the ranks end with the hub.
    again.until(lambda: len(again.rows()) == 3, every=0.002)
    ranks = [again.trainer(0), again.trainer(1)]
    os.kill(loop, signal.SIGKILL)
    formed = again.directory / "batches" / "step-000003.bin"
    again.until(formed.exists, every=0.002)
    assert not {again.trainer(0), again.trainer(1)} & {*ranks}
    os.kill(again.node_loop(), signal.SIGKILL)
    assert again.wait() == 0, again.text()
    assert "other weights than before" not in again.text()
    assert "Traceback" not in again.text()
    summary = again.summary()
    assert (summary["restarts"], summary["trainer_restarts"], summary["engine_restarts"]) == (2, 2, 0)
    # What was in hand when the hub died is made again.
    assert summary["ledger"] | {"retried_cancelled": 0} == undisturbed.summary()["ledger"] | {"retried_cancelled": 0}
    rows, expected = again.rows("metrics.jsonl"), undisturbed.rows("metrics.jsonl")
    # The next hub books a step that the one before it had not booked, and may have no engine yet.
    for step in (2, 3):
        rows[step] |= {name: expected[step][name] for name in ("engines", "canary_error")}
    assert untimed(rows) == untimed(expected)
    assert untimed(again.rows("evals.jsonl")) == untimed(undisturbed.rows("evals.jsonl"))
    assert len(again.rows("samples.jsonl")) == 4 * 32
    weights = [folder / "model" / "model.safetensors" for folder in (undisturbed.directory, again.directory)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    again.nothing_left()


def test_a_killed_engine_comes_back_in_its_place_and_nothing_else_starts_again(start: Callable[..., Run]) -> None:
    # What admission lets start before the engine dies is enough for two steps more, and not for the rest.
    run = start("run.steps=8", "deadlines.request=3", "weights.backend=gloo")
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
    all_trained(run, 8 * 32)
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
    done = len(run.rows())
    run.until(lambda: len(run.rows()) > done)
    assert [row["step"] for row in run.rows()] == list(range(len(run.rows())))
    assert (run.core(), run.node_loop()) == (core, hub)
    os.kill(run.trainer(0), signal.SIGKILL)
    assert run.wait(60) == 2, run.text()
    why, how_on = run.text().splitlines()[-2:]
    assert "no restart is left of cluster.max_restarts = 1" in why
    assert how_on.endswith("--resume")
    assert run.summary()["error"] in why
    assert run.summary()["steps"] == len(run.rows())
    assert balanced(run.summary()["ledger"])
    assert "Traceback" not in run.text()
    assert "Connection closed" not in run.text()
    assert "all other processes" not in run.text()
    run.nothing_left()


def test_trainer_ranks_that_hang_are_killed_and_come_back_alone_with_the_same_weights(
    start: Callable[..., Run], tmp_path: Path, undisturbed: Run
) -> None:
    put_module(tmp_path)
    again = start(*EQUAL, "deadlines.collective=10", "deadlines.step=25", text=NO_TINY_MODEL)
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
        assert named in again.text()
    assert again.wait() == 0, again.text()
    assert "a collective may take 10 s (deadlines.collective)" in again.text()
    assert "the run has waited 25 s (deadlines.step) for the trainer ranks to " in again.text()
    assert "other weights than before" not in again.text()
    assert "Traceback" not in again.text()
    assert "was killed by signal" not in again.text()
    summary = again.summary()
    assert (summary["restarts"], summary["trainer_restarts"]) == (0, 2)
    assert summary["ledger"] == undisturbed.summary()["ledger"]
    assert untimed(again.rows()) == untimed(undisturbed.rows())
    weights = [folder / "model" / "model.safetensors" for folder in (undisturbed.directory, again.directory)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    again.nothing_left()


def test_a_killed_node_loop_loses_nothing_that_was_delivered_or_trained(start: Callable[..., Run]) -> None:
    run = start("run.steps=8", "checkpoint.every=1000")
    run.until(lambda: len(run.rows()) >= 3)
    killed = run.node_loop()
    os.kill(killed, signal.SIGSTOP)
    before = run.rows()
    trained = run.rows("samples.jsonl")
    os.kill(killed, signal.SIGKILL)
    assert run.wait() == 0, run.text()
    assert f"flash: the node loop (process {killed}) was killed by signal 9 (SIGKILL)" in run.text()
    assert re.search(r"the journal brings back \d+ samples that were delivered after version 0", run.text())
    assert [row["step"] for row in run.rows()] == list(range(8))
    # It may have died between the record of a step and its row, or the other way round.
    back = re.search(r"the trainer ranks are back at version (\d+)", run.text())
    assert back is not None
    kept = int(back[1])
    assert len(before) - 1 <= kept <= len(before)
    assert run.rows()[:kept] == before[:kept], "a row was written again"
    assert [row for row in run.rows("samples.jsonl") if row["step"] < kept] == [
        row for row in trained if row["step"] < kept
    ]
    all_trained(run, 8 * 32)
    assert (run.summary()["restarts"], run.summary()["trainer_restarts"]) == (1, 0)
    run.nothing_left()


def test_a_run_directory_that_becomes_read_only_ends_the_run_at_once_with_an_error_that_names_it(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 256 << 20) as disk:
        run = start(f"run.output_dir={disk.path}", "run.steps=500", "eval.every=0")
        run.directory = disk.path / "run"
        run.until(lambda: len(run.rows()) > 1)
        # A second mount of the same folder: the disk itself has files that are open for writing.
        subprocess.run(["mount", "--bind", str(disk.path), str(disk.path)], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(disk.path)], check=True)
            assert run.wait() == 2
        finally:
            subprocess.run(["umount", "--lazy", str(disk.path)], check=True)
    assert "start again" not in run.text(), run.text()
    *_, error = (line for line in run.text().splitlines() if line.startswith("flash: error: "))
    assert f"cannot write {run.directory}" in error
    assert "Read-only file system" in error
