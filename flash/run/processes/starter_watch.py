"""What ends a process of a job when the one that started it is gone: nothing else would, after `kill -9`.

On the first node the end of the launcher of `flash train` is treated as an interrupt: the run leaves a checkpoint and
ends in order. Whoever does not manage that in time is killed, with the process group that it is in. On another node
all are killed at once, for the others to go on without it; so are its trainer ranks. Where torchrun has started the
launcher, its end is a SIGTERM to that.
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
"""The variable that names the launch to all that it starts: the launcher's process id, a dot, and when it began."""


def begin_launch() -> str:
    """Let this process be a launcher, and what it starts end with it; the name of its launch."""
    os.environ[LAUNCHER] = name = f"{os.getpid()}.{time.time_ns()}"
    return name


def end_with_torchrun() -> None:
    """Interrupt this launcher once torchrun is gone, if that has started it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # It may be gone already: then the parent is another one, and nobody tells.
        descriptor = os.pidfd_open(os.getppid())
        threading.Thread(target=_terminate_after, args=(descriptor,), daemon=True).start()


def _terminate_after(descriptor: int) -> None:
    select.select([descriptor], [], [])  # readable when the process ends
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_launcher(grace_s: float, *, speaks: bool) -> None:
    """Interrupt this process once the one that started it is gone, and kill it `grace_s` later; one of a node speaks.

    Without a grace it is killed at once. When the other is gone before it can be watched, this one ends at once, too.
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
    # Readable when the process ends. Not PR_SET_PDEATHSIG: that ends with the thread that started us, and says nothing.
    select.select([descriptor], [], [])
    if speaks:
        what = "leaving a checkpoint for --resume, and ending" if grace_s else "ending this node's part"
        with suppress(OSError):  # who read it may have gone with the starter: this process ends all the same
            sys.stderr.write(f"flash: process {starter}, which started this run, is gone: {what}\n")
            sys.stderr.flush()
    if grace_s:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
    os.killpg(os.getpgrp(), signal.SIGKILL)
