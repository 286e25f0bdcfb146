"""What a test that was killed leaves on the machine: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.rig.hosts import Hosts
from benchmarks.rig.kept import processes, remove, remove_abandoned, spaces

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.integration

OWNER = """
import time
from pathlib import Path
from benchmarks.rig.hosts import Hosts

def cmdline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""

with Hosts("one") as hosts:
    program = "env -i setsid sleep 1000 & exec sleep 1000"
    hosts.start(0, ["sh", "-c", program], output=Path("/dev/null"), cwd=Path("/"), variables={})
    while b"".join(cmdline(pid) for pid in hosts.processes(0)).count(b"sleep\\0001000") < 2:
        time.sleep(0.05)
    print(hosts.folder, flush=True)
    time.sleep(1000)
"""
"""Has a host with two processes, one of which knows nothing of it, and says its folder."""


class Owner:
    """A test that is under way."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.folder = Path(self._process.stdout.readline().strip())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def kill_with_keeper(self) -> None:
        """As a container's end does."""
        pid = self._process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"kept.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
        self.kill()

    def close(self) -> None:
        self.kill()
        remove(self.folder)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def left(self) -> list[object]:
        folder = [self.folder] if self.folder.exists() else []
        return [*processes(self.folder), *spaces(self.folder), *folder]


@pytest.fixture
def owner(hosts: Hosts) -> Iterator[Owner]:
    """Only where there can be hosts at all."""
    one = Owner()
    yield one
    one.close()


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_what_runs_on_a_host_ends_with_a_test_that_is_killed(owner: Owner) -> None:
    assert len(owner.left()) > 4
    owner.kill()
    until(lambda: not owner.left(), f"left: {owner.left()}")


def test_the_next_test_removes_what_was_killed_together_with_its_keeper_and_nothing_of_living_ones(
    owner: Owner, hosts: Hosts
) -> None:
    owner.kill_with_keeper()
    assert len(owner.left()) > 4
    remove_abandoned()
    assert owner.left() == []
    assert len(spaces(hosts.folder)) == 3
    assert hosts.folder.is_dir()
