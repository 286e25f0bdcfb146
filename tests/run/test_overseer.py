"""Which of a node's processes hang: those that are still there a while after the hub has called their lives over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flash.foreign.torch import LINGER_S
from flash.run.processes.overseer import Overseer, RanksOverseer


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def overseer(clock: Clock) -> RanksOverseer:
    return RanksOverseer(lambda ended, restarts_left: None, clock)


def test_a_process_that_does_not_end_with_its_life_hangs_and_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    ranks = overseer(clock)
    assert list(ranks.hanging([7, 8])) == []
    ranks.over([7])
    clock.seconds = LINGER_S
    assert list(ranks.hanging([7, 8])) == []
    ranks.over([7])  # told again, with the news of another rank
    clock.seconds += 1
    assert list(ranks.hanging([7, 8])) == [7]
    assert capfd.readouterr().err == "flash: process 7 of the trainer ranks hangs, and is killed\n"
    ranks.over([7])
    clock.seconds += 100
    assert list(ranks.hanging([7, 8])) == []


def test_a_number_that_is_given_to_a_later_process_condemns_nobody() -> None:
    clock = Clock()
    ranks = overseer(clock)
    ranks.over([7])
    assert list(ranks.hanging([8])) == []
    clock.seconds = 100
    assert list(ranks.hanging([7])) == []


def test_the_process_of_a_node_loop_never_counts_as_hanging() -> None:
    assert list(Overseer(lambda ended, restarts_left: None).hanging([7])) == []


AGENT = """
import sys
from flash.foreign.torch import torchrun

class Overseer:
    def hanging(self, processes):
        (one,) = processes
        from pathlib import Path
        return [one] if Path(f"/proc/{one}/stat").read_text().split()[2] == "T" else []
    def failed(self, ended, restarts_left):
        print("failed", [each.exit_code for each in ended], restarts_left, flush=True)
        return True

print(torchrun(["--standalone", "--nproc-per-node=1", "--max-restarts=1", sys.argv[1]], Overseer(), 1), flush=True)
"""

WORKER = """
import os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.integration  # starts torchrun
def test_a_stopped_process_is_killed_and_starts_again_and_its_signal_is_not_told_as_anothers(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(worker)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as agent:
        try:
            told, _ = agent.communicate(timeout=100)
        finally:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert told.splitlines() == ["failed [] 1", "True"]
