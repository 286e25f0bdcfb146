"""Runs on several hosts, by the documented commands, over a wire that is cut.

The hosts' names sort the other way round than their numbers, as text.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Hosts
from tests.integration.test_run import CONFIG, REPOSITORY, balanced

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

HUB_PORT = 29500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model; the first run makes it, the other finds it."""
    return tmp_path_factory.mktemp("models") / "tiny"


class Job:
    """A job on two hosts: what each prints, and what the run writes."""

    def __init__(self, hosts: Hosts, folder: Path, model: Path, *overrides: str) -> None:
        self.hosts = hosts
        self.run = folder / "run"
        self._outputs = [folder / f"{name}.txt" for name in hosts.names]
        self._train = ["train", str(folder / "config.toml"), "cluster.nodes=2", "eval.every=0", *overrides]
        (folder / "config.toml").write_text(CONFIG.format(folder=folder, model=model))

    def start(self, host: int, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """A command of flash's on a host."""
        variables["PYTHONPATH"] = str(REPOSITORY)
        flash = [sys.executable, "-m", "flash", *command]
        return self.hosts.start(host, flash, output=self._outputs[host], cwd=REPOSITORY, variables=variables)

    def train(self, host: int) -> subprocess.Popen[bytes]:
        """What every host of a job is started with."""
        place = {"FLASH_NNODES": "2", "FLASH_RDZV_ENDPOINT": f"{self.hosts.names[0]}:29411"}
        return self.start(host, *self._train, FLASH_NODE_RANK=str(host), **place)

    def text(self, host: int) -> str:
        return self._outputs[host].read_text()

    def told(self) -> str:
        return "\n".join(f"{name}: {self.text(host)}" for host, name in enumerate(self.hosts.names))

    def rows(self, name: str) -> list[Any]:
        file = self.run / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run / "summary.json").read_text())

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < end, f"no {what}; output so far:\n{self.told()}"
            time.sleep(0.1)

    def until_said(self, host: int, words: str) -> None:
        self.until(lambda: words in self.text(host), f"words {words!r} of {self.hosts.names[host]}")

    def until_engines(self, number: int) -> None:
        """Wait for another step, with so many engines."""
        seen = len(self.rows("metrics.jsonl"))
        self.until(
            lambda: any(row["engines"] == number for row in self.rows("metrics.jsonl")[seen:]),
            f"step with {number} engines",
        )

    def nothing_lost(self) -> None:
        """Every task that was issued is in the books, and none was trained twice."""
        ledger = self.summary()["ledger"]
        assert balanced(ledger), ledger
        assert ledger == json.loads((self.run / "ledger.json").read_text())
        members = Counter(sample["group_id"] for sample in self.rows("samples.jsonl"))
        assert max(members.values()) <= 4, "a group has four members"
        steps = [row["step"] for row in self.rows("metrics.jsonl")]
        assert steps == list(range(len(steps)))

    def nothing_left(self, *clean: int) -> None:
        """No process on any host, and no temporary files on those that had time to remove them."""
        end = time.monotonic() + 10
        while any(self.hosts.processes(host) for host in range(2)):
            assert time.monotonic() < end, f"processes left behind:\n{self.told()}"
            time.sleep(0.1)
        assert [list(self.hosts.scratch(host).glob("flash-*")) for host in clean] == [[]] * len(clean)


def test_a_host_of_engines_is_cut_off_drained_and_lost_and_joins_again_while_the_trainers_go_on(
    hosts: Hosts, tmp_path: Path, model: Path
) -> None:
    """The first node has the hub whatever its name."""
    job = Job(
        *(hosts, tmp_path, model, "run.steps=5000", "checkpoint.every=5000"),
        *("deadlines.request=8", f"cluster.hub_port={HUB_PORT}"),
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

    node = re.findall(r"node (\d+) makes samples", job.text(1))[-1]
    assert job.start(0, "drain", str(job.run), node).wait(60) == 0, job.told()
    assert rollouts.wait(60) == 0, job.told()
    job.until_said(0, f"node {node} has left, and 1 of 2 engines with it: the other 1 do its work")
    job.until_engines(1)

    (token,) = job.run.glob("hub-*.token")
    job.start(1, "join", "--hub", f"{hosts.names[0]}:{HUB_PORT}", FLASH_TOKEN=token.read_text())
    job.until_engines(2)
    node = re.findall(r"node (\d+) makes samples", job.text(1))[-1]
    said = job.text(0).count(f"node {node} has been silent for 8 s")
    hosts.lose_power(1)
    job.until(lambda: job.text(0).count(f"node {node} has been silent for 8 s") > said, "word of the lost host")
    job.until_engines(1)

    trainer.send_signal(signal.SIGINT)
    assert trainer.wait(60) == 130, job.told()
    assert job.summary()["restarts"] == 0
    assert "start again" not in job.text(0)
    job.nothing_lost()
    job.nothing_left(0)
