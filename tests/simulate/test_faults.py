"""Simulated runs with faults: the laws hold, a seed gives the same run everywhere, and faulty parts are found."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from flash.cli.main import main
from flash.errors import ConfigError, FlashError
from flash.hub import protocol as p
from flash.hub.context import RunEnd
from flash.sampling import PLAIN
from flash.simulate.faults.bookkeeper import Bookkeeper, BrokenLaw
from flash.simulate.faults.cluster import Cluster
from flash.simulate.faults.parts import Disk
from flash.simulate.faults.play import play, shrink
from flash.simulate.faults.scenario import Fault, Scenario, draw, faults_of, smaller
from flash.types import Lease, Outcome, Shard, ShardSample, Span, Task, Trajectory, Turn, VersionRun

DIGEST = """
import hashlib, msgspec
from flash.simulate.faults.play import play
from flash.simulate.faults.scenario import draw
print(hashlib.sha256(msgspec.json.encode(play(draw(3)).events)).hexdigest())
"""
"""Program that prints a digest of the events of a seed."""

SMALL: dict[str, Any] = {
    "run.seed": 1,
    "run.steps": 4,
    "rollout.group_size": 2,
    "train.batch_size": 4,
    "train.async_ratio": 1.0,
    "checkpoint.journal": "fsync",
    "eval.problems": 1,
}


def scenario(*faults: Fault, **settings: Any) -> Scenario:
    """Return a small run with these faults, in which one node joins node 0."""
    return Scenario(1, SMALL | {name.replace("__", "."): value for name, value in settings.items()}, 1, {}, [*faults])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 3, 5, 6])
def test_the_laws_hold_under_the_faults_of_a_seed(seed: int) -> None:
    assert play(draw(seed)).law == ""


@pytest.mark.slow
def test_the_same_seed_gives_the_same_events() -> None:
    one, other = play(draw(3)), play(draw(3))
    assert one.faults
    assert one.events == other.events


@pytest.mark.slow
def test_events_do_not_depend_on_the_order_of_hashes() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {hashlib.sha256(msgspec.json.encode(play(draw(3)).events)).hexdigest() + "\n"}


def test_every_drawn_configuration_is_one_that_a_real_run_accepts() -> None:
    for seed in range(50):
        settings = draw(seed).settings
        assert not faults_of(settings)
        assert settings["rollout.group_size"] > 1


@pytest.mark.parametrize("wait", [0.0, 0.5, 2.0])
def test_no_row_of_a_step_before_a_checkpoint_is_lost_with_the_machine(wait: float) -> None:
    fault = Fault("lose machine of hub", 12.0, on="SnapshotRequest", wait=wait)
    assert play(scenario(fault, checkpoint__every=1)).law == ""


@pytest.mark.parametrize(
    ("faults", "settings"),
    [
        ([Fault("crash hub", 6.0, on="BatchRequest answered")], {"train__batch_size": 8}),
        ([Fault("crash hub", 4.0, on="DeliverRequest answered", wait=0.1), Fault("crash hub", 12.0)], {}),
        ([Fault("lose machine of hub", 9.0, on="Commit answered", wait=0.001)], {"checkpoint__every": 10}),
        ([Fault("interrupt", 2.0, on="BatchRequest answered")], {"train__batch_size": 8, "train__stream": True}),
        ([Fault("hang node", 8.0, seconds=100.0)], {"run__steps": 30}),
        ([Fault("drain slowly", 3.0, seconds=20.0, on="LeaseRequest answered")], {"rollout__max_concurrent": 2}),
    ],
    ids=["dealt batch", "several restarts", "lost machine", "streamed step", "hanging node", "slow drain"],
)
def test_the_laws_hold_at_moments_of_great_harm(faults: list[Fault], settings: dict[str, Any]) -> None:
    played = play(scenario(*faults, **settings))
    assert played.law == ""
    assert sum(played.faults.values()) == len(faults)


@pytest.mark.parametrize("wait", [0.0, 0.005, 0.02, 0.05])
def test_a_disk_that_fills_up_during_a_checkpoint_ends_no_run(wait: float) -> None:
    fault = Fault("full disk", 3.0, on="SnapshotRequest", wait=wait, seconds=20.0)
    assert play(scenario(fault, checkpoint__every=1)).law == ""


@pytest.mark.slow
def test_engines_are_fast_again_after_a_fault_during_which_their_process_was_killed() -> None:
    faults = [Fault("engines are slow", 3.0, seconds=9.0), Fault("crash hub", 6.0)]
    slow = scenario(*faults, run__steps=60, train__batch_size=8, train__async_ratio=0.0)
    assert play(replace(slow, nodes=0)).law == ""


# -- faulty parts ----------------------------------------------------------------------------------------------------


async def forget(function: Callable[[], OSError | None]) -> OSError | None:
    """Report a write that was not made."""
    return None


class ForgetfulCluster(Cluster):
    """A run whose journal is acknowledged, and never written."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.write_journal = forget


def test_a_journal_that_is_not_written_is_found() -> None:
    crash = Fault("crash hub", 0.0, on="Commit", wait=1.0)
    faulty = scenario(crash, checkpoint__every=10)
    assert play(faulty).law == ""
    assert play(faulty, make=ForgetfulCluster).law.startswith("nothing acknowledged is lost")


class ForgetfulDisk(Disk):
    """A disk that loses the journal with its machine, also what was forced to it."""

    def lose_unsynced(self, *, synced_journal: bool) -> None:
        """Lose a part of the journal, too, although each write to it was forced to the disk."""
        super().lose_unsynced(synced_journal=False)


class ForgetfulMachineCluster(Cluster):
    """A run on a machine whose disk is a `ForgetfulDisk`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.disk = ForgetfulDisk(random.Random(1), self.config.run_dir, machine_fails=True)
        self.write_journal = self.disk.write


def test_a_journal_that_is_lost_with_the_machine_is_found() -> None:
    faulty = scenario(Fault("lose machine of hub", 12.0), checkpoint__every=10)
    assert play(faulty).law == ""
    assert play(faulty, make=ForgetfulMachineCluster).law.startswith("nothing acknowledged is lost")


class SpinningCluster(Cluster):
    """A run with a task that never waits."""

    async def launch(self, resumes: bool) -> RunEnd | FlashError:
        """Never wait and never end."""
        while True:
            pass


def test_a_task_that_never_waits_is_found() -> None:
    played = play(scenario(), make=SpinningCluster, most_cpu_s=0.2)
    assert played.law.startswith("every run ends: a task runs without a pause")


def trajectory(task: Task, version: int, token: int = 0) -> Trajectory:
    """Return a sample of one response token, which `version` has sampled."""
    turn, tokens = Turn("", "", 0.0, 0.0, 0.0, 0.0), bytes(4) + token.to_bytes(4, "little")
    return Trajectory(task, Outcome.OK, 0.0, tokens, [Span(1, 2)], bytes(4), [VersionRun(version, 1)], [turn])


@pytest.fixture
def book(tmp_path: Path) -> Bookkeeper:
    """Return the bookkeeper of a run whose hub has just begun."""
    small = scenario()
    book = Bookkeeper(lambda: 0.0)
    book.hub_begins(small.config(str(tmp_path)), 0, [])
    return book


def lease(number: int, task: Task) -> tuple[p.LeaseRequest, p.LeaseReply]:
    """Return the request of node 1 for a lease, and the reply that gives it the lease with this number."""
    return p.LeaseRequest(1, 1), p.LeaseReply([Lease(number, task, 0)], done=False)


TASK = Task(7, 3, 0, 3, "train", 0, "", PLAIN)


def test_a_sample_that_is_leased_again_after_its_acknowledgement_is_found(book: Bookkeeper) -> None:
    delivery = p.DeliverRequest(1, [p.EndedLease(5, trajectory(TASK, 0))], 0)
    book.replied(*lease(5, TASK))
    book.sent("node 1", delivery)
    book.answered("node 1", delivery, p.Ack())
    with pytest.raises(BrokenLaw, match="nothing acknowledged is lost: task 7"):
        book.replied(*lease(6, TASK))


@pytest.mark.parametrize(("journal", "is_lost"), [("fsync", True), ("write", False)])
def test_a_sample_may_be_lost_with_the_machine_unless_it_was_forced_to_the_disk(
    tmp_path: Path, journal: str, is_lost: bool
) -> None:
    small = scenario(checkpoint__journal=journal)
    book = Bookkeeper(lambda: 0.0)
    book.hub_begins(small.config(str(tmp_path)), 0, [])
    delivery = p.DeliverRequest(1, [p.EndedLease(5, trajectory(TASK, 0))], 0)
    book.replied(*lease(5, TASK))
    book.sent("node 1", delivery)
    book.answered("node 1", delivery, p.Ack())
    book.machine_failed()
    book.hub_begins(small.config(str(tmp_path)), 0, [])
    with pytest.raises(BrokenLaw, match="task 7 was delivered") if is_lost else nullcontext():
        book.replied(*lease(6, TASK))


@pytest.mark.parametrize(("journal", "is_lost"), [("off", False), ("write", True)])
def test_an_acknowledgement_may_arrive_when_the_next_hub_has_lost_the_result(
    tmp_path: Path, journal: str, is_lost: bool
) -> None:
    small = scenario(checkpoint__journal=journal)
    book = Bookkeeper(lambda: 0.0)
    book.hub_begins(small.config(str(tmp_path)), 0, [])
    delivery = p.DeliverRequest(1, [p.EndedLease(5, trajectory(TASK, 0))], 0)
    book.replied(*lease(5, TASK))
    book.sent("node 1", delivery)
    book.replied(delivery, p.Ack())
    book.hub_begins(small.config(str(tmp_path)), 0, [])
    book.answered("node 1", delivery, p.Ack())
    with pytest.raises(BrokenLaw, match="task 7 was delivered") if is_lost else nullcontext():
        book.replied(*lease(6, TASK))


def test_a_batch_with_other_samples_than_before_a_restart_is_found(book: Bookkeeper, tmp_path: Path) -> None:
    def deal(sample: Trajectory) -> None:
        """Deliver a sample, and give it to the rank as the batch of step 0."""
        book.sent("node 1", p.DeliverRequest(1, [p.EndedLease(5, sample)], 0))
        shard = Shard(0, -4, [ShardSample(0, sample)], [], 0, 0)
        book.answered("rank 0", p.BatchRequest(0, 0, []), p.BatchReply(shard, may_save=True))

    deal(trajectory(TASK, 0, token=1))
    book.hub_begins(scenario().config(str(tmp_path)), 0, [])
    with pytest.raises(BrokenLaw, match="a step has one batch: sample 7 of step 0 was dealt with other tokens"):
        deal(trajectory(TASK, 0, token=2))


@pytest.mark.parametrize(("bound", "min_version"), [(None, -5), (None, -1), (1, -4)])
def test_a_batch_with_another_age_limit_is_found(tmp_path: Path, bound: int | None, min_version: int) -> None:
    book = Bookkeeper(lambda: 0.0)
    book.hub_begins(scenario(train__max_token_age=bound).config(str(tmp_path)), 0, [])
    shard = Shard(0, min_version, [], [], 0, 0)
    with pytest.raises(BrokenLaw, match=f"no token is older than allowed: step 0 trains version {min_version}"):
        book.answered("rank 0", p.BatchRequest(0, 0, []), p.BatchReply(shard, may_save=True))


def test_a_lease_may_reach_a_hanging_node_after_its_task_was_trained(book: Bookkeeper) -> None:
    book.replied(*lease(5, TASK))
    book.befalls(Fault("hang node", 0.0), 40.0, "node 1")
    book.replied(*lease(6, TASK))
    book.sent("node 2", p.DeliverRequest(2, [p.EndedLease(6, trajectory(TASK, 0))], 0))
    shard = Shard(0, -4, [ShardSample(0, trajectory(TASK, 0))], [], 0, 0)
    book.answered("rank 0", p.BatchRequest(0, 0, []), p.BatchReply(shard, may_save=True))
    book.answered("rank 0", p.Commit(0, {}), p.Ack())
    book.answered("node 1", *lease(5, TASK))
    assert book.broken is None


def test_a_lease_for_a_node_that_leaves_is_found(tmp_path: Path) -> None:
    seconds = count()
    book = Bookkeeper(lambda: float(next(seconds)))
    book.hub_begins(scenario().config(str(tmp_path)), 0, [])
    book.replied(*lease(5, TASK))
    book.replied(p.Leave(1), p.Ack())
    with pytest.raises(BrokenLaw, match="a node that leaves gets no lease: 1"):
        book.replied(*lease(6, TASK))


@pytest.mark.parametrize(("hung_s", "is_stalled"), [(100.0, True), (60.0, False)])
def test_a_run_that_stops_while_a_node_hangs_is_found(book: Bookkeeper, hung_s: float, is_stalled: bool) -> None:
    book.befalls(Fault("hang node", 0.0), hung_s, "node 1")
    with pytest.raises(BrokenLaw, match="the others do the work of a node that hangs") if is_stalled else nullcontext():
        book.node_continues("node 1", hung_s)


def test_a_task_with_two_leases_is_found(book: Bookkeeper) -> None:
    book.replied(*lease(5, TASK))
    with pytest.raises(BrokenLaw, match="a task has one lease: 7"):
        book.replied(*lease(6, TASK))


def test_a_token_that_is_older_than_its_lease_is_found(book: Bookkeeper) -> None:
    late = p.LeaseReply([Lease(5, TASK, 2)], done=False)
    book.replied(p.LeaseRequest(1, 1), late)
    with pytest.raises(BrokenLaw, match="no token is older than its lease allows: 1 < 2"):
        book.sent("node 1", p.DeliverRequest(1, [p.EndedLease(5, trajectory(TASK, 1))], 0))


def test_an_error_without_a_cause_is_found(book: Bookkeeper) -> None:
    with pytest.raises(BrokenLaw, match="every error has a cause: ConfigError"):
        book.hub_ended(ConfigError("wrong"), killed=False)


# -- smaller scenarios and the command -------------------------------------------------------------------------------


def test_a_failing_scenario_is_made_smaller() -> None:
    faults = [Fault("join", 1.0), Fault("crash hub", 2.0, passes=3), Fault("drain", 3.0)]
    big = replace(draw(0), faults=faults, nodes=3, domains={"a": 1.0, "b": 1.0})
    small = shrink(big, lambda one: any(fault.kind == "crash hub" for fault in one.faults))
    assert small.faults == [Fault("crash hub", 2.0)]
    assert (small.nodes, small.domains, small.settings["run.steps"]) == (0, {}, 1)
    assert len(small.settings) == 4
    assert not any(candidate.faults for candidate in smaller(small))


@pytest.mark.slow
def test_the_command_plays_a_seed_and_writes_its_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    assert main(["simulate", "--faults", "--seed", "3", "--trace", str(trace)]) == 0
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert events[-1]["what"] == "end"
    assert main(["simulate", "--faults", "--seeds", "1", "--from", "3"]) == 0
    last, same = capsys.readouterr().out.splitlines()
    assert last == same
    assert last.startswith("1 seed; faults: ")
    assert last.endswith("failed: 0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a configuration file"),
        (["--seeds", "3"], "--seeds is an option of --faults"),
        (["--faults", "run.toml"], "--faults draws its own configurations: leave run.toml out"),
        (["--faults", "--sweep", "async_ratio=0,1"], "leave --sweep out"),
        (["--faults", "--seed", "1", "--seeds", "2"], "leave --seeds and --from out"),
        (["--faults", "--trace", "x.jsonl"], "name its seed with --seed"),
        (["--faults", "--seeds", "0"], "--seeds: expected at least 1, got 0"),
        (["--faults", "--seed", "-1"], "--seed: expected at least 0, got -1"),
        (["--faults", "--seed", "2147483648"], "--seed: expected at most 2147483647, got 2147483648"),
        (["--faults", "--from", "2147483648"], "--from: expected at most 2147483647, got 2147483648"),
        (
            ["--faults", "--from", "2147483647", "--seeds", "2"],
            "--seeds: expected at most 1 from seed 2147483647, got 2",
        ),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err
