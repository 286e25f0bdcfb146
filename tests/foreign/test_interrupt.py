"""Signals to torchrun: the first is passed on and waited for, a Ctrl-C after it kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

LAUNCHER = """
import signal, sys
from flash.foreign.torch import Interrupted, torchrun

class Deaf:
    def hanging(self, processes):
        return ()
    def failed(self, ended, restarts_left):
        return True

before = signal.getsignal(signal.SIGTERM)
try:
    torchrun(["--standalone", "--nproc-per-node=1", f"--log-dir={sys.argv[1]}", f"{sys.argv[1]}/worker.py"], Deaf(), 60)
except Interrupted as interrupt:
    print(f"at once: {interrupt.at_once}, {signal.getsignal(signal.SIGTERM) == before}", flush=True)
"""
WORKER = """
import os, signal, time
from pathlib import Path

heard = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *told: heard.append(told))
folder = Path(__file__).parent
(folder / "pid").write_text(str(os.getpid()))
while not (folder / "end").exists():
    time.sleep(0.01)
    if heard:
        (folder / "heard").write_text(str(len(heard)))
"""


def until(condition: Path) -> str:
    end = time.monotonic() + 60
    while not condition.exists() or not condition.read_text():
        assert time.monotonic() < end, f"no {condition}"
        time.sleep(0.01)
    return condition.read_text()


@pytest.fixture
def launcher(tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    variables = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_kills_what_the_first_signal_was_to_end(
    launcher: subprocess.Popen[str], tmp_path: Path, first: signal.Signals
) -> None:
    worker = int(until(tmp_path / "pid"))
    launcher.send_signal(first)
    until(tmp_path / "heard")
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=30)
    assert said == "at once: True, True\n"
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_other_signals_that_come_again_cut_nothing_short(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    until(tmp_path / "pid")
    launcher.send_signal(signal.SIGTERM)
    until(tmp_path / "heard")
    for _ in range(3):
        launcher.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert launcher.poll() is None
    (tmp_path / "end").touch()
    said, _ = launcher.communicate(timeout=30)
    assert said == "at once: False, True\n"
    assert (tmp_path / "heard").read_text() == "1"
