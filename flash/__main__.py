"""Entry point of `flash` and of `python -m flash`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

GRACE_S = 1.0
"""For threads that are about to end."""


def run(command: Callable[[], int] | None = None) -> None:
    """Run the command and end the process, whatever a blocking environment or agent still does.

    Python waits for its threads. One that was given up, since its deadline had passed, may never come back.
    Before the command heeds it and after its end, an interrupt ends the process without a word.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in the background of a script
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
    except KeyboardInterrupt:  # a second one, while the first ended the command
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
