"""Entry point of `flash` and of `python -m flash`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

GRACE_S = 1.0
"""Seconds that each remaining thread has to end after the command has ended."""


def run(command: Callable[[], int] | None = None) -> None:
    """Run the command and end the process, even if a blocking environment or agent still runs in a thread.

    At exit, Python waits for all threads. A thread that was abandoned at its deadline may never end, so the process
    then ends without it. While the command is imported and after it has ended, an interrupt (SIGINT) ends the process
    without a traceback.
    """
    # False if the process ignores SIGINT, like a background process of a shell script.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if command is None:
        from flash.cli.main import main as command
    try:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = command()
        if heeded:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:  # A second interrupt, while the command was ending because of the first one.
        code = 128 + signal.SIGINT
    others = [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    for thread in others:
        thread.join(GRACE_S)
    if any(thread.is_alive() for thread in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
