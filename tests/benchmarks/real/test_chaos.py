"""What the chaos run takes for lost, doubled and too old, which faults it plans, and whom they hit."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
import pytest

from benchmarks.form import ROOT, Args
from benchmarks.real.chaos import (
    JobResult,
    Left,
    Trained,
    Verdict,
    add_options,
    judge,
    left_by,
    measure,
    rows,
    stretches,
    tokens_per_second,
)
from benchmarks.real.chaos_job import (
    KINDS,
    LONGEST_S,
    NAMES,
    SHORTEST_S,
    TARGET_HOSTS,
    WORKLOAD,
    Fault,
    Job,
    one_of_each,
    plan,
    role,
)
from flash.config.load import load
from flash.observe.rundir.recording import write_batch
from flash.observe.rundir.rundir import RunDirectory
from flash.types import Batch, Task, VersionRun
from tests.samples.cases import trajectory

LEDGER = {
    "issued": 8,
    "trained": 5,
    "filtered": 1,
    "given_up": 2,
    "in_flight": 0,
    "generated_tokens": 29,
    "trained_tokens": 20,
    "discarded_tokens": 9,
}


def step(number: int, tasks: list[int], *versions: VersionRun) -> Trained:
    return Trained(number, max(0, number - 1), [(task, list(versions)) for task in tasks])


SOUND = Left(
    ledger=LEDGER,
    max_age=1,
    rows=[{"step": n, "time": 100.0 + n, "trained_tokens": tokens} for n, tokens in enumerate((8, 4, 8))],
    redone=[{"step": 2, "time": 101.5, "trained_tokens": 8}],
    samples={0: 2, 1: 1, 2: 2},
    batches=[
        step(0, [0, 1], VersionRun(0, 4)),
        # One of two is wholly too old: it has been given up, and its tokens thrown away.
        Trained(1, 1, [(2, [VersionRun(1, 4)]), (3, [VersionRun(0, 4)])]),
        step(2, [4, 5], VersionRun(1, 2), VersionRun(2, 2)),
    ],
)
CLEAN = Verdict(0, 0, 0, 0, 0, 0)


def but(**changes: Any) -> Verdict:
    """The verdict on a run that is sound but for this."""
    return judge(msgspec.structs.replace(SOUND, **changes))


def booked(**changes: int) -> Verdict:
    return but(ledger={**LEDGER, **changes})


def test_a_sound_run_has_lost_and_doubled_nothing() -> None:
    assert judge(SOUND) == CLEAN


def test_a_task_that_is_in_no_book_and_in_no_batch_is_lost() -> None:
    assert booked(issued=9).tasks_lost == 1
    assert booked(given_up=1).tasks_lost == 1
    assert but(batches=SOUND.batches[:2]).tasks_lost == 2


def test_a_task_that_is_trained_again_is_doubled() -> None:
    again = but(batches=[*SOUND.batches[:2], step(2, [4, 1], VersionRun(1, 2), VersionRun(2, 2))])
    assert (again.tasks_doubled, again.tasks_lost) == (1, 1)


def test_tokens_have_one_place_in_the_books_and_are_in_a_batch_where_they_were_trained() -> None:
    assert booked(generated_tokens=30).tokens_unaccounted == 1
    assert booked(trained_tokens=21, generated_tokens=30).tokens_unaccounted == 1
    assert but(batches=[*SOUND.batches[:2], step(2, [4, 5], VersionRun(2, 3))]).tokens_unaccounted == 2


def test_tokens_that_were_trained_beyond_the_ratio_are_counted_and_those_left_out_are_not() -> None:
    old = Trained(2, 0, [(4, [VersionRun(0, 1), VersionRun(1, 3)]), (5, [VersionRun(2, 4)])])
    assert but(batches=[*SOUND.batches[:2], old]).tokens_beyond_alpha == 1
    assert but(batches=[*SOUND.batches[:2], old], max_age=2).tokens_beyond_alpha == 0
    assert but(max_age=0).tokens_beyond_alpha == 4


def test_rows_of_metrics_and_samples_are_there_once() -> None:
    assert but(rows=[*SOUND.rows, SOUND.rows[1]]).rows_doubled == 1
    assert but(rows=SOUND.rows[:1] + SOUND.rows[2:]).rows_lost == 1
    assert but(samples={0: 2, 1: 2, 2: 2}).rows_doubled == 1
    assert but(samples={0: 2, 2: 1}).rows_lost == 2


def test_of_a_run_that_has_not_ended_nobody_can_tell() -> None:
    verdict = booked(in_flight=3)
    assert verdict.tasks_lost != verdict.tasks_lost
    assert verdict.tokens_unaccounted != verdict.tokens_unaccounted


def test_time_without_a_step_counts_from_the_beginning_to_the_end() -> None:
    assert stretches([5.0, 12.0, 99.0], 0.0, 20.0, longest_s=6.0) == [7.0, 8.0]
    assert stretches([], 0.0, 20.0, longest_s=6.0) == [20.0]


def test_goodput_counts_what_was_not_done_again() -> None:
    assert tokens_per_second(SOUND.rows, 100.0, 102.0) == (4 + 8) / 2


def test_what_a_run_leaves_is_read_with_what_was_done_again(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "run", "[train]\nasync_ratio = 2.0\n")
    directory.append_metrics({"step": 0, "time": 1.0})
    directory.append_metrics({"step": 1, "time": 2.0})
    directory = RunDirectory.open(tmp_path / "run", "[train]\nasync_ratio = 2.0\n", resume_at=1)
    directory.write_ledger(LEDGER)
    made = trajectory(Task(task_id=7, group_id=0, sample_index=7, seed=1), version=0)
    write_batch(directory.batches, Batch(0, 0, [made], []))
    left = left_by(tmp_path / "run")
    assert (left.max_age, left.ledger) == (8, LEDGER)
    assert ([row["step"] for row in left.rows], [row["step"] for row in left.redone]) == ([0], [1])
    assert left.batches == [Trained(0, 0, [(7, made.versions)])]


# -- faults ----------------------------------------------------------------------------------------------------------


def test_a_plan_is_the_same_for_a_seed_and_has_all_kinds_alike() -> None:
    faults = plan(1800, seed=3)
    assert faults == plan(1800, seed=3) != plan(1800, seed=4)
    counts = Counter((fault.how, fault.target) for fault in faults)
    assert set(counts) == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 1
    for fault in faults:
        assert fault.host in TARGET_HOSTS[fault.target]
        assert (fault.seconds == 0) == (fault.how == "kill")
        assert fault.how == "kill" or SHORTEST_S <= fault.seconds <= LONGEST_S
    assert 70 <= len(faults) <= 110


def test_a_quick_plan_has_each_kind_once() -> None:
    assert Counter((fault.how, fault.target) for fault in one_of_each(5, 20.0)) == Counter(KINDS)


@pytest.mark.parametrize(
    ("command", "target"),
    [
        (b"python\0-m\0flash\0train\0a.toml\0", "launcher"),
        (b"flash.run.processes.worker hub 0 a.toml\0\0\0", "hub"),
        (b"flash.run.processes.worker trainer 0 a.toml\0\0\0", "trainer"),
        (b"flash.run.processes.worker node 0 a.toml\0\0\0", "node"),
        (b"VLLM::EngineCore\0", "core"),
        (b"VLLM::Worker\0", "worker"),
        (b"python\0-c\0from multiprocessing.resource_tracker import main\0", None),
    ],
)
def test_processes_are_told_apart_by_how_they_were_started(command: bytes, target: str) -> None:
    assert role(command) == target


class OneProcess:
    """Stands for hosts of which each runs the same process."""

    def __init__(self, pid: int, scratch: Path) -> None:
        self._pid, self._scratch = pid, scratch

    def processes(self, host: int) -> list[int]:
        return [self._pid]

    def scratch(self, host: int) -> Path:
        return self._scratch


def test_a_process_that_is_left_is_named_whatever_its_command_line_holds(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()", b"\xff"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the system shows the command line only when the program is loaded
        job = Job(cast(Any, OneProcess(process.pid, tmp_path)), "left", tmp_path)
        found = anyio.run(job.orphans, 0)
        process.kill()
    assert len(found) == len(NAMES)
    assert all(line.endswith("input() \N{REPLACEMENT CHARACTER} ") for line in found)


def test_the_workload_keeps_every_batch_and_is_no_other_run_than_the_tiny_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    injected, tiny = load([WORKLOAD], []), load([ROOT / "examples" / "tiny.toml"], [])
    assert injected.checkpoint.batches == "all"
    for section in ("model", "tiny_model", "env", "rollout", "algorithm"):
        assert getattr(injected, section) == getattr(tiny, section)


# -- the report ------------------------------------------------------------------------------------------------------


def test_the_goals_are_missed_by_one() -> None:
    injected = [Fault(100.2, "kill", "hub", 0)]
    bad = msgspec.structs.replace(
        SOUND,
        ledger={**LEDGER, "issued": 9, "generated_tokens": 30},
        rows=[*SOUND.rows, SOUND.rows[0], {"step": 4, "time": 103.0, "trained_tokens": 0}],
        batches=[*SOUND.batches, Trained(3, 0, [(0, [VersionRun(0, 1)])])],
        samples={**SOUND.samples, 3: 1},
    )
    result = JobResult(100.0, 500.0, injected, 0, failed=["x"], stuck=["x"], orphans=["x"])
    calm = JobResult(0.0, 60.0, [], 0, failed=[], stuck=[], orphans=[])
    missed = {row.metric for row in rows(result, bad, calm, calm_per_s=1.0) if row.met is False}
    assert missed == {
        *("tasks_lost", "tasks_doubled", "tokens_unaccounted", "tokens_beyond_alpha", "rows_doubled", "rows_lost"),
        *("orphans_left", "hangs", "launches_failed", "goodput"),
    }
    fine = JobResult(100.0, 102.0, injected, 0, failed=[], stuck=[], orphans=[])
    assert [row.metric for row in rows(fine, SOUND, calm, calm_per_s=8.0) if row.met is False] == []
    broken = msgspec.structs.replace(calm, failed=["x"], stuck=["x"], orphans=["x"])
    calm_missed = {row.metric for row in rows(fine, SOUND, broken, calm_per_s=8.0) if row.met is False}
    assert calm_missed == {"orphans_left", "hangs", "launches_failed"}


def test_a_time_without_a_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--seconds", "5"])
    assert "--seconds: must be at least 20" in capsys.readouterr().err


def test_a_time_that_has_no_effect_is_refused() -> None:
    with pytest.raises(SystemExit, match="--quick has no --seconds"):
        measure(Args(quick=True, own=argparse.Namespace(seconds=60.0)))
