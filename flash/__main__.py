"""Entry point of the command `flash` and of `python -m flash`: runs the command line and ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

GRACE_S = 1.0
"""Seconds that each remaining thread has to end after the command has ended. After that the process ends without
waiting."""


def run(command: Callable[[], int] | None = None) -> None:
    """Run a command and end the process with its exit code, even if code of the user still blocks a thread.

    At exit, Python waits for all threads. A thread that was abandoned at its deadline, with an environment or agent
    that does not return, may never end. The process then ends without waiting for that thread. While the command is
    imported and after it has ended, an interrupt (SIGINT) ends the process without a traceback.

    `command`: the function to run, for tests. None: the command line.
    """
    # False if the process ignores SIGINT, like a background process of a shell script. Such a process must go on
    # ignoring SIGINT.
    handles_sigint = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles_sigint:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if command is None:
        from flash.cli.main import main as command
    try:
        if handles_sigint:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = command()
        if handles_sigint:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        # A second interrupt came while the command was ending because of the first one.
        code = 128 + signal.SIGINT
        if handles_sigint:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Threads of Python that are not daemons would hold the process at its exit.
    threads = [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    for thread in threads:
        thread.join(GRACE_S)
    if any(thread.is_alive() for thread in threads):
        # `os._exit` does not wait for threads, and does not flush the streams either.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
