"""A run on several hosts, by the documented commands."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.hosts import FaultyHosts
from tests.forked_command import ForkedCommand
from tests.integration.whole_run import CONFIG, REPOSITORY, balanced
from tests.rows import written_rows

HUB_PORT = 29500


class Job:
    """Job that begins on two hosts, with the output of each host and the files of the run."""

    def __init__(self, hosts: FaultyHosts, folder: Path, model: Path, *overrides: str, text: str = CONFIG) -> None:
        self.hosts = hosts
        self.run = folder / "run"
        self._outputs = [folder / f"{name}.txt" for name in hosts.names]
        self._train = ["train", str(folder / "config.toml"), "cluster.nodes=2", "eval.every=0", *overrides]
        (folder / "config.toml").write_text(text.format(folder=folder, model=model))

    def start(self, host: int, *command: str, **variables: str) -> ForkedCommand:
        """Start a command of Flash on a host."""
        with self._outputs[host].open("ab") as file:
            return ForkedCommand(
                ("-m", "flash", *command),
                output=file.fileno(),
                folder=REPOSITORY,
                variables=os.environ | self.hosts.variables(host) | variables,
                prepare=self.hosts.entrance(host),
            )

    def train(self, host: int) -> ForkedCommand:
        """Start this host's part of the job."""
        place = {"FLASH_NNODES": "2", "FLASH_RDZV_ENDPOINT": f"{self.hosts.names[0]}:29411"}
        return self.start(host, *self._train, FLASH_NODE_RANK=str(host), **place)

    def text(self, host: int) -> str:
        """Return the output of a host; empty if no command was started there."""
        output = self._outputs[host]
        return output.read_text() if output.exists() else ""

    def told(self) -> str:
        return "\n".join(f"{name}: {self.text(host)}" for host, name in enumerate(self.hosts.names))

    def rows(self, name: str) -> list[Any]:
        return written_rows(self.run / name)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run / "summary.json").read_text())

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < end, f"no {what}; output so far:\n{self.told()}"
            time.sleep(0.1)

    def until_said(self, host: int, words: str) -> None:
        self.until(lambda: words in self.text(host), f"words {words!r} of {self.hosts.names[host]}")

    def until_more(self, host: int, words: str, told: str) -> None:
        """Wait until a host has printed `words` more often than in its earlier output `told`."""
        more = f"more words {words!r} of {self.hosts.names[host]}"
        self.until(lambda: self.text(host).count(words) > told.count(words), more)

    def until_engines(self, number: int) -> None:
        """Wait for another step, with this number of engines."""
        seen = len(self.rows("metrics.jsonl"))
        self.until(
            lambda: any(row["engines"] == number for row in self.rows("metrics.jsonl")[seen:]),
            f"step with {number} engines",
        )

    def nothing_lost(self) -> None:
        """Check that the ledger has every task that was issued, and that none was trained twice."""
        ledger = self.summary()["ledger"]
        assert balanced(ledger), ledger
        assert ledger == json.loads((self.run / "ledger.json").read_text())
        members = Counter(sample["group_id"] for sample in self.rows("samples.jsonl"))
        assert max(members.values()) <= 4, "a group has four members"
        steps = [row["step"] for row in self.rows("metrics.jsonl")]
        assert steps == list(range(len(steps)))

    def nothing_left(self, *clean: int) -> None:
        """Check that no process is left on any host, and no temporary file on the hosts `clean`."""
        end = time.monotonic() + 10
        while any(self.hosts.processes(host) for host in range(len(self.hosts.names))):
            assert time.monotonic() < end, f"processes left behind:\n{self.told()}"
            time.sleep(0.1)
        assert [list(self.hosts.scratch(host).glob("flash-*")) for host in clean] == [[]] * len(clean)
