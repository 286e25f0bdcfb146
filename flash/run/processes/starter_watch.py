"""Watches the process that started this one, and ends this one when that process is gone, for example after `kill -9`.

On the first node, the end of the launcher of `flash train` counts as an interrupt: the run writes a checkpoint and ends
in order. A process that does not end in time is killed with its process group. On any other node all processes are
killed at once, and the other nodes go on without them; trainer ranks, too, are killed at once. If torchrun started the
launcher, the end of torchrun sends SIGTERM to the launcher.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress

LAUNCHER = "FLASH_LAUNCHER"
"""Environment variable that names the launch to all of its processes: process id of the launcher, a dot, and the time
of its start in Unix nanoseconds."""


def begin_launch() -> str:
    """Make this process the launcher of all processes that it starts, and return the name of the launch."""
    os.environ[LAUNCHER] = name = f"{os.getpid()}.{time.time_ns()}"
    return name


def end_with_torchrun() -> None:
    """Send SIGTERM to this launcher when torchrun ends, if torchrun started it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # If torchrun has already ended, the parent is another process, and the end of torchrun is not noticed.
        descriptor = os.pidfd_open(os.getppid())
        threading.Thread(target=_terminate_after, args=(descriptor,), daemon=True).start()


def _terminate_after(descriptor: int) -> None:
    select.select([descriptor], [], [])  # readable when the process ends
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_launcher(grace_s: float, *, speaks: bool) -> None:
    """Interrupt this process when its launcher is gone, and kill it `grace_s` seconds later; 0: kill it at once.

    If the launcher is gone before it can be watched, this process exits at once. If `speaks` is True, it prints a line
    about the end of the launcher; one process of a node does that.
    """
    starter = int(os.environ[LAUNCHER].partition(".")[0])
    try:
        descriptor = os.pidfd_open(starter)
    except ProcessLookupError:
        descriptor = -1
    if descriptor < 0 or select.select([descriptor], [], [], 0)[0]:
        os._exit(1)
    watching = threading.Thread(target=_watch, args=(starter, descriptor, grace_s, speaks), daemon=True)
    watching.start()


def _watch(starter: int, descriptor: int, grace_s: float, speaks: bool) -> None:
    # Readable when the process ends. PR_SET_PDEATHSIG would not do: it fires when the thread that started us ends, and
    # prints nothing.
    select.select([descriptor], [], [])
    if speaks:
        what = "leaving a checkpoint for --resume, and ending" if grace_s else "ending this node's part"
        with suppress(OSError):  # the reader of the output may have ended with the launcher
            sys.stderr.write(f"flash: process {starter}, which started this run, is gone: {what}\n")
            sys.stderr.flush()
    if grace_s:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
    os.killpg(os.getpgrp(), signal.SIGKILL)
