"""launch.sh as a batch script: the same contract with a real SLURM and with the stand-in for it.

The real one is left out where it is not installed, unless FLASH_REQUIRE_SLURM is set.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.jobs import Job, Real, StandIn, install_stand_in, make_project

Submit = Callable[..., Job]

pytestmark = pytest.mark.integration

FLASH = """#!/bin/bash
echo "node $FLASH_NODE_RANK: $* at ${FLASH_RDZV_ENDPOINT-} of ${FLASH_NNODES-}"
on_term() {
    echo "node $FLASH_NODE_RANK: stopping"
    sleep "0.$((1 + 3 * FLASH_NODE_RANK))"
    echo "node $FLASH_NODE_RANK: stopped"
    if [[ $WHAT == join ]]; then exit 0; fi
    exit 130
}
WHAT=$1
case $BEHAVE in
    end) exit 0 ;;
    fail) if [[ $FLASH_NODE_RANK == 1 ]]; then exit 3; fi ;;
    killed)
        if [[ $FLASH_NODE_RANK == "${SPARE-}" ]]; then touch "$FLASH_SPARE_NODE"; fi
        if [[ $FLASH_NODE_RANK == 1 ]]; then kill -9 $$; fi
        sleep 1; echo "node 0: on"; exit 0 ;;
    lose) if [[ $FLASH_NODE_RANK == 1 ]]; then exit 75; fi; sleep 1; echo "node 0: on"; exit 0 ;;
    listen) trap on_term TERM ;;
    deaf) ;;
esac
echo "node $FLASH_NODE_RANK: here"
while :; do sleep 0.05; done
"""
"""Stands in for `flash`: ends at once, fails or is killed on the second node, or ends in order when it is told to."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    why = missing()
    if why and not os.environ.get("FLASH_REQUIRE_SLURM"):
        pytest.skip(f"no SLURM: {why}")
    with Cluster() as started:
        yield started


@pytest.fixture(params=["stand-in", "real"])
def submit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Submit]:
    """Submit launch.sh in a project whose `flash` behaves as told."""
    project = make_project(tmp_path, FLASH)
    with ExitStack() as stack:

        def begin(behave: str, *arguments: str, **variables: str) -> Job:
            command = ("sbatch", "--nodes=2", "launch.sh", *(arguments or ("mine.toml",)))
            if request.param == "stand-in":
                return stack.enter_context(StandIn(project, command, {"BEHAVE": behave, **variables}))
            cluster = request.getfixturevalue("cluster")
            return stack.enter_context(closing(Real(cluster, project, command, {"BEHAVE": behave, **variables})))

        yield begin


def wait_for(job: Job, *lines: str) -> None:
    end = time.monotonic() + 60
    while not all(line in job.output().splitlines() for line in lines):
        assert time.monotonic() < end, f"no {lines} in:\n{job.output()}"
        time.sleep(0.05)


def test_each_node_trains_once_and_all_meet_at_the_first(submit: Submit) -> None:
    job = submit("end")
    assert job.end() == "0"
    lines = sorted(line for line in job.output().splitlines() if line.startswith("node "))
    assert [line.split(" at ")[0] for line in lines] == [
        "node 0: train mine.toml cluster.nodes=2",
        "node 1: train mine.toml cluster.nodes=2",
    ]
    (place,) = {line.split(" at ")[1] for line in lines}
    assert place.startswith(("node7:", "a:"))
    assert place.endswith(" of 2")


def test_a_node_that_fails_ends_the_job_with_its_code_and_no_requeue(submit: Submit) -> None:
    job = submit("fail")
    code = job.end()
    assert code not in ("0", "requeued")
    assert "stopp" not in job.output()
    assert "requeueing" not in job.output()


def test_a_node_without_trainers_that_is_lost_for_good_ends_no_job(submit: Submit) -> None:
    job = submit("lose")
    assert job.end() == "0"
    assert "node 0: on" in job.output().splitlines()


def test_a_node_without_trainers_whose_process_is_killed_is_named_and_ends_no_job(submit: Submit) -> None:
    job = submit("killed", SPARE="1")
    assert job.end() == "0"
    assert "node 0: on" in job.output().splitlines()
    assert re.search(
        r"^node 1 \((b|node8)\): flash train was killed by signal 9; the run goes on without", job.output(), re.M
    )


def test_a_node_with_trainers_whose_process_is_killed_is_named_and_ends_the_job(submit: Submit) -> None:
    job = submit("killed")
    assert job.end() not in ("0", "requeued")
    assert "node 0: on" not in job.output().splitlines()
    assert re.search(
        r"^node 1 \((b|node8)\): flash train was killed by signal 9, which ends the job", job.output(), re.M
    )


@pytest.mark.parametrize("way", ["signal_script", "signal_ranks"])
def test_a_job_that_is_asked_to_end_lets_all_ranks_finish_and_is_requeued(submit: Submit, way: str) -> None:
    job = submit("listen")
    wait_for(job, "node 0: here", "node 1: here")
    getattr(job, way)()
    assert job.end() == "requeued"
    lines = job.output().splitlines()
    for node in (0, 1):
        assert lines.count(f"node {node}: stopping") == 1
        assert lines.count(f"node {node}: stopped") == 1


def test_a_job_that_is_cancelled_is_not_requeued(submit: Submit) -> None:
    job = submit("listen")
    wait_for(job, "node 0: here", "node 1: here")
    job.cancel()
    assert job.end() == "cancelled"
    assert "requeueing" not in job.output()


def test_a_rank_that_does_not_listen_yet_is_requeued_too(submit: Submit) -> None:
    job = submit("deaf")
    wait_for(job, "node 0: here", "node 1: here")
    job.signal_script()
    assert job.end() == "requeued"


JOIN = ("join", "outputs/mine", "engine.count=2")


def test_a_job_of_nodes_that_join_runs_flash_join_on_each_and_trains_nothing(submit: Submit) -> None:
    job = submit("end", *JOIN)
    assert job.end() == "0"
    lines = sorted(line.split(" at ")[0] for line in job.output().splitlines() if line.startswith("node "))
    assert lines == [f"node {node}: join outputs/mine engine.count=2" for node in (0, 1)]


def test_a_node_that_has_joined_and_is_lost_ends_none_of_the_others_and_the_job_tells_of_it(submit: Submit) -> None:
    job = submit("lose", *JOIN)
    assert job.end() == "75"
    assert "node 0: on" in job.output().splitlines()


@pytest.mark.parametrize(
    ("way", "end"), [("signal_script", "requeued"), ("signal_ranks", "0"), ("cancel", "cancelled")]
)
def test_nodes_that_have_joined_leave_in_order_whoever_asks_and_come_back_after_the_time_limit_alone(
    submit: Submit, way: str, end: str
) -> None:
    job = submit("listen", *JOIN)
    wait_for(job, "node 0: here", "node 1: here")
    getattr(job, way)()
    assert job.end() == end
    lines = job.output().splitlines()
    assert [lines.count(f"node {node}: {word}") for node in (0, 1) for word in ("stopping", "stopped")] == [1, 1, 1, 1]


def test_srun_kills_its_tasks_when_it_is_signalled_itself(cluster: Cluster, tmp_path: Path) -> None:
    """What makes launch.sh go through scancel: a SIGTERM of srun's never reaches the tasks."""
    folder = tmp_path / "stand_in"
    folder.mkdir()
    install_stand_in(tmp_path / "bin")
    program = "trap 'echo stopped; exit 1' TERM; echo here; while :; do sleep 0.05; done"
    command = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "bash", "-c", program)
    stand_in = subprocess.Popen(
        [tmp_path / "bin" / "srun", *command],
        env=os.environ | {"SLURM_STAND_IN": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for srun in (stand_in, cluster.start("srun", *command)):
        assert srun.stdout is not None
        while not srun.stdout.readline().startswith("here"):
            pass
        srun.terminate()
        output, _ = srun.communicate(timeout=60)
        assert "stopped" not in output
        assert srun.returncode == 137
