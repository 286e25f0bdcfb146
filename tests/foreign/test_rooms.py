"""The processes that torchrun has started together have a room of their own, however often each agent has done so."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(150)]  # starts torchrun

AGENT = """
import sys
from flash.foreign.torch import torchrun

class Overseer:
    def hanging(self, processes):
        return ()
    def failed(self, ended, restarts_left):
        return True

endpoint, *worker = sys.argv[1:]
options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=test"]
assert torchrun([*options, f"--rdzv-endpoint={endpoint}", *worker], Overseer(), 5)
"""

WORKER = """
import os, pathlib, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
with (folder / name).open("a") as file:
    file.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + " " + os.environ["FLASH_ROOM"] + "\\n")
if len((folder / name).read_text().splitlines()) == 1:
    while len(list(folder.glob("node-*"))) < 2:
        time.sleep(0.01)
    time.sleep(300 if name == "node-b" else 0)
    sys.exit(1)
"""


def test_processes_meet_in_one_room_though_one_agent_has_counted_a_restart_and_the_other_none(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", AGENT, endpoint, str(worker), str(tmp_path), name], start_new_session=True
        )
        for name in ("node-a", "node-b")
    ]
    try:
        assert [agent.wait(120) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    lives = [
        list(zip(*(line.split() for line in (tmp_path / name).read_text().splitlines()), strict=True))
        for name in ("node-a", "node-b")
    ]
    (counted, rooms), (others_counted, others_rooms) = lives
    assert (counted, others_counted) == (("0", "1"), ("0", "0"))
    assert rooms == others_rooms
    assert len(set(rooms)) == 2
