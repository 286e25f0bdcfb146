"""Processes that follow their node loop: real ones, killed for real."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

# Process in the role of the node loop: it starts the code of its argument, and prints the id of that process.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), flush=True)
child.wait()
"""
# Process in the role of an engine: it follows the process whose id it is given, prints a line, and waits.
CHILD = """
import os, sys, threading
from flash.weights.engine_process import follow
follow(int(sys.argv[1]))
print(flush=True)
threading.Event().wait()
"""


def ended(descriptor: int) -> bool:
    """Return True if the process behind a pidfd ends within 20 seconds."""
    return bool(select.select([descriptor], [], [], 20)[0])


@pytest.mark.integration
def test_a_killed_node_loop_takes_its_followers_with_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        follower = int(parent.stdout.readline())
        descriptor = os.pidfd_open(follower)
        parent.send_signal(signal.SIGKILL)
        parent.wait(20)
    assert ended(descriptor)
    os.close(descriptor)


@pytest.mark.integration
def test_a_process_whose_node_loop_is_already_gone_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(20)
    follower = subprocess.run([sys.executable, "-c", CHILD, str(gone.pid)], timeout=20, check=False)
    assert follower.returncode == 1
