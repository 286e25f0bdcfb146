"""launch.sh as a batch script: the same contract with a real SLURM and with the stand-in for it.

The real one is left out where it is not installed, unless FLASH_REQUIRE_SLURM is set.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest

from tests.slurm.cluster import Cluster, missing

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch.sh"

pytestmark = pytest.mark.integration

FLASH = """#!/bin/bash
echo "node $FLASH_NODE_RANK: $* at ${FLASH_RDZV_ENDPOINT-} of ${FLASH_NNODES-}"
on_term() {
    echo "node $FLASH_NODE_RANK: stopping"
    sleep "0.$((1 + 3 * FLASH_NODE_RANK))"
    echo "node $FLASH_NODE_RANK: stopped"
    exit 130
}
case $BEHAVE in
    end) exit 0 ;;
    fail) if [[ $FLASH_NODE_RANK == 1 ]]; then exit 3; fi ;;
    lose) if [[ $FLASH_NODE_RANK == 1 ]]; then exit 75; fi; sleep 1; echo "node 0: on"; exit 0 ;;
    listen) trap on_term TERM ;;
    deaf) ;;
esac
echo "node $FLASH_NODE_RANK: here"
while :; do sleep 0.05; done
"""
"""In the place of `flash`: ends at once, fails on the second node, or ends in order when it is told to."""


class Job(Protocol):
    """A batch job of two nodes."""

    def output(self) -> str:
        """What it has written so far."""
        ...

    def signal_script(self) -> None:
        """SIGTERM to the batch script alone, as before the time limit."""
        ...

    def signal_ranks(self) -> None:
        """SIGTERM to the ranks alone, as at the begin of a preemption with a grace time."""
        ...

    def cancel(self) -> None:
        """What `scancel` does: the job is told off, and everything in it gets SIGTERM."""
        ...

    def end(self) -> str:
        """How it ended: `requeued`, `cancelled`, or its exit code."""
        ...


class StandIn:
    """A batch script that runs here, with the stand-in's commands on its PATH."""

    def __init__(self, project: Path, variables: Mapping[str, str]) -> None:
        self._folder = project.parent / "stand_in"
        self._folder.mkdir()
        commands = project.parent / "bin"
        install_stand_in(commands)
        self._output = project.parent / "output.txt"
        job = {
            "SLURM_JOB_ID": "20042",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NODEID": "0",
            "SLURM_STAND_IN": str(self._folder),
            "COMMAND": str(project / "launch.sh"),
            "PATH": f"{commands}:{os.environ['PATH']}",
        }
        with self._output.open("wb") as output:
            self._script = subprocess.Popen(
                [project / "launch.sh", "mine.toml"],
                env={**os.environ, **job, **variables},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def output(self) -> str:
        return self._output.read_text()

    def signal_script(self) -> None:
        self._script.send_signal(signal.SIGTERM)

    def signal_ranks(self) -> None:
        for group in self._folder.glob("group-*"):
            os.killpg(int(group.name.removeprefix("group-")), signal.SIGTERM)

    def cancel(self) -> None:
        (self._folder / "state").write_text("CANCELLED")
        self.signal_ranks()
        self.signal_script()

    def end(self) -> str:
        code = self._script.wait(60)
        if (self._folder / "requeued").exists():
            return "requeued"
        return "cancelled" if (self._folder / "state").exists() else str(code)

    def close(self) -> None:
        for group in [self._script.pid, *(int(file.name.removeprefix("group-")) for file in self._folder.glob("g*"))]:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._script.wait()


class Real:
    """A job of a real cluster."""

    def __init__(self, cluster: Cluster, project: Path, variables: Mapping[str, str]) -> None:
        self._cluster = cluster
        self._file = project / "output.txt"
        script = str(project / "launch.sh")
        options = ("--nodes=2", f"--output={self._file}", script, "mine.toml")
        self.number = cluster.submit(*options, variables=variables, cwd=project)

    def output(self) -> str:
        return self._file.read_text() if self._file.exists() else ""

    def signal_script(self) -> None:
        self._cluster.call("scancel", "--batch", "--signal=TERM", self.number)

    def signal_ranks(self) -> None:
        self._cluster.call("scancel", "--signal=TERM", self.number)

    def cancel(self) -> None:
        self._cluster.call("scancel", self.number)

    def end(self) -> str:
        self._cluster.until(lambda: self._ended() is not None, "the job to end")
        return self._ended() or ""

    def _ended(self) -> str | None:
        job = self._cluster.job(self.number)
        if job["Restarts"] != "0":
            return "requeued"
        if job["JobState"] == "CANCELLED":
            return "cancelled"
        return job["ExitCode"].partition(":")[0] if job["JobState"] in ("COMPLETED", "FAILED") else None

    def close(self) -> None:
        with suppress(subprocess.CalledProcessError):
            self._cluster.call("scancel", "--full", "--signal=KILL", self.number)
            self._cluster.call("scancel", self.number)


def install_stand_in(folder: Path) -> None:
    """Put the stand-in's commands into a folder."""
    folder.mkdir()
    program = (Path(__file__).parent / "stand_in.py").read_text()
    for name in ("srun", "scancel", "scontrol"):
        (folder / name).write_text(f"#!{sys.executable} -S\n{program}")
        (folder / name).chmod(0o755)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    why = missing()
    if why and not os.environ.get("FLASH_REQUIRE_SLURM"):
        pytest.skip(f"no SLURM: {why}")
    with Cluster() as started:
        yield started


@pytest.fixture(params=["stand-in", "real"])
def submit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[object]:
    """Submit launch.sh in a project whose `flash` behaves as told."""
    project = tmp_path / "project"
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "flash").write_text(FLASH)
    (project / ".venv" / "bin" / "flash").chmod(0o755)
    shutil.copy(LAUNCH, project / "launch.sh")
    (project / "scripts").mkdir()
    (project / "scripts" / "install.py").touch()
    (project / "Makefile").write_text("env:\n\t@true\n")
    jobs: list[StandIn | Real] = []

    def begin(behave: str) -> Job:
        variables = {"BEHAVE": behave}
        if request.param == "real":
            jobs.append(Real(request.getfixturevalue("cluster"), project, variables))
        else:
            jobs.append(StandIn(project, variables))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def wait_for(job: Job, *lines: str) -> None:
    end = time.monotonic() + 60
    while not all(line in job.output().splitlines() for line in lines):
        assert time.monotonic() < end, f"no {lines} in:\n{job.output()}"
        time.sleep(0.05)


def test_each_node_trains_once_and_all_meet_at_the_first(submit) -> None:
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


def test_a_node_that_fails_ends_the_job_with_its_code_and_no_requeue(submit) -> None:
    job = submit("fail")
    code = job.end()
    assert code not in ("0", "requeued")
    assert "stopp" not in job.output()
    assert "requeueing" not in job.output()


def test_a_node_without_trainers_that_is_lost_for_good_ends_no_job(submit) -> None:
    job = submit("lose")
    assert job.end() == "0"
    assert "node 0: on" in job.output().splitlines()


@pytest.mark.parametrize("way", ["signal_script", "signal_ranks"])
def test_a_job_that_is_asked_to_end_lets_all_ranks_finish_and_is_requeued(submit, way: str) -> None:
    job = submit("listen")
    wait_for(job, "node 0: here", "node 1: here")
    getattr(job, way)()
    assert job.end() == "requeued"
    lines = job.output().splitlines()
    for node in (0, 1):
        assert lines.count(f"node {node}: stopping") == 1
        assert lines.count(f"node {node}: stopped") == 1


def test_a_job_that_is_cancelled_is_not_requeued(submit) -> None:
    job = submit("listen")
    wait_for(job, "node 0: here", "node 1: here")
    job.cancel()
    assert job.end() == "cancelled"
    assert "requeueing" not in job.output()


def test_a_rank_that_does_not_listen_yet_is_requeued_too(submit) -> None:
    job = submit("deaf")
    wait_for(job, "node 0: here", "node 1: here")
    job.signal_script()
    assert job.end() == "requeued"


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
