"""Trainer ranks on two hosts outlive the hub on one of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.job import HUB_PORT, Job

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPS = 8


def processes(job: Job, host: int, kind: str) -> set[int]:
    """Workers of a kind on a host."""
    found = job.hosts.processes(host)
    return {pid for pid in found if f"flash.run.worker\0{kind}\0" in Path(f"/proc/{pid}/cmdline").read_text()}


def test_trainer_ranks_on_two_hosts_go_on_with_the_next_hub(hosts: Hosts, tmp_path: Path, model: Path) -> None:
    overrides = ("cluster.trainer_nodes=2", f"cluster.hub_port={HUB_PORT}", f"run.steps={STEPS}")
    job = Job(hosts, tmp_path, model, *overrides)
    commands = [job.train(host) for host in range(2)]
    job.until(lambda: len(job.rows("metrics.jsonl")) >= 2, "two steps")
    ranks = [processes(job, host, "trainer") for host in range(2)]
    assert [len(each) for each in ranks] == [1, 1]

    (hub,) = processes(job, 0, "node")
    os.kill(hub, signal.SIGKILL)
    job.until_said(0, "the trainer ranks have outlived the hub, and go on at version ")
    assert [processes(job, host, "trainer") for host in range(2)] == ranks

    assert [command.wait(200) for command in commands] == [0, 0], job.told()
    job.nothing_lost()
    assert len(job.rows("metrics.jsonl")) == STEPS
    assert job.summary()["trainer_restarts"] == 0, job.told()
    job.nothing_left(0, 1)
