"""Runs on several hosts, by the documented commands, over a wire that is cut.

The hosts' names sort the other way round than their numbers, as text.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.cluster.hosts import FaultyHosts
from tests.cluster.job import HUB_PORT, Job
from tests.forked_command import ForkedCommand
from tests.integration.whole_run import REPOSITORY

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


ADDRESS = """
from flash.run.processes.rendezvous import advertised_host
from tests.run.test_launcher import make_config
print(advertised_host(make_config()))
"""


def test_a_run_of_one_node_is_reached_from_others_where_slurm_has_started_it(
    hosts: FaultyHosts, tmp_path: Path
) -> None:
    def address(**variables: str) -> str:
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}.txt"
        variables |= os.environ | {"FLASH_NODE_RANK": "0"}
        with output.open("wb") as file:
            command = ForkedCommand(
                ("-c", ADDRESS),
                output=file.fileno(),
                folder=REPOSITORY,
                variables=variables,
                prepare=hosts.entrance(0),
            )
        assert command.wait(300) == 0, output.read_text()  # the first command waits for the imports of the server
        return output.read_text().strip()

    assert address(FLASH_RDZV_ENDPOINT=f"{hosts.names[0]}:29411") == hosts.address(0)
    assert address(FLASH_RDZV_ENDPOINT="a-name-that-leads-nowhere:29411") == "127.0.0.1"
    assert address() == "127.0.0.1"


def test_a_host_of_engines_is_cut_off_drained_and_lost_and_joins_again_while_the_trainers_go_on(
    hosts: FaultyHosts, tmp_path: Path, model: Path
) -> None:
    """The first node has the hub whatever its name."""
    job = Job(
        *(hosts, tmp_path, model, "run.steps=5000", "checkpoint.every=5000"),
        # Large batches make a step long enough that an engine on a busy machine fetches each version before the trainer
        # has dropped it. An engine that comes too late restarts, and then the drained node has no engine to take along.
        "train.batch_size=128",
        *("deadlines.request=8", f"cluster.hub=:{HUB_PORT}"),
    )
    trainer, rollouts = (job.train(host) for host in range(2))
    job.until_engines(2)
    assert "[starting engines and trainers " in job.text(0)
    assert "[starting engines and trainers " not in job.text(1)

    # For longer than deadlines.request: both sides name whom they waited for, and go on once they may.
    hosts.cut(1)
    job.until_said(0, "node 1 has been silent for 8 s, and the others do its work")
    job.until_said(1, f"the hub at {hosts.address(0)}:{HUB_PORT} is gone: waited 8 s for the reply to")
    job.until_engines(1)
    hosts.heal(1)
    job.until_engines(2)

    node = re.findall(r"node (\d+) of run: ", job.text(1))[-1]
    assert job.start(0, "drain", str(job.run), node).wait(60) == 0, job.told()
    assert rollouts.wait(60) == 0, job.told()
    job.until_said(0, f"node {node} has left, and 1 of 2 engines with it: the other 1 do its work")
    job.until_engines(1)

    (token,) = job.run.glob("hub-*.token")
    job.start(1, "join", "--hub", f"{hosts.names[0]}:{HUB_PORT}", FLASH_TOKEN=token.read_text())
    job.until_engines(2)
    node = re.findall(r"node (\d+) of run: ", job.text(1))[-1]
    told = job.text(0)
    hosts.lose_power(1)
    job.until_more(0, f"node {node} has been silent for 8 s", told)
    job.until_engines(1)

    trainer.send_signal(signal.SIGINT)
    assert trainer.wait(60) == 130, job.told()
    assert job.summary()["restarts"] == 0
    assert "start again" not in job.text(0)
    job.nothing_lost()
    job.nothing_left(0)
