"""The process of a command ends with it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading, time
from flash import __main__ as entry

def command():
    print("told")
    threading.Thread(target=time.sleep, args=({seconds},)).start()
    return 3

entry.main = command
entry.run()
"""


def test_a_thread_that_never_comes_back_does_not_keep_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(seconds=600)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (3, "told\n")


def test_a_thread_that_ends_is_waited_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(seconds=0.1)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (3, "told\n")
