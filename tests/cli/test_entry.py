"""The process of a command ends when the command ends, and on an interrupt at any time without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading, time
from flash import __main__ as entry

def command():
    print("told")
    threading.Thread(target=time.sleep, args=({seconds},)).start()
    return 3

entry.run(command)
"""


def test_a_thread_that_never_ends_does_not_keep_the_process_alive() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(seconds=600)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (3, "told\n")


def test_a_thread_that_ends_is_waited_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(seconds=0.1)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (3, "told\n")


INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"
WHEN = {
    "while it is imported": f"""
class Finder:
    def find_spec(self, name, *_):
        if name == "flash.cli.main":
            {INTERRUPT}
sys.meta_path.insert(0, Finder())
entry.run()""",
    "while an interrupt ends it": f"""
def command():
    try:
        {INTERRUPT}
    finally:
        {INTERRUPT}
entry.run(command)""",
    "after two interrupts have ended it": f"""
def command():
    threading.Timer(0.2, lambda: {INTERRUPT}).start()
    try:
        {INTERRUPT}
    finally:
        {INTERRUPT}
entry.run(command)""",
    "after its end": f"""
def command():
    threading.Timer(0.2, lambda: {INTERRUPT}).start()
    return 3
entry.run(command)""",
}


@pytest.mark.parametrize("when", WHEN)
def test_an_interrupt_at_any_time_ends_it_without_a_traceback(when: str) -> None:
    program = f"import os, signal, sys, threading\nfrom flash import __main__ as entry\n{WHEN[when]}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (-signal.SIGINT, 130)
    assert (done.stdout, done.stderr) == ("", "")
