"""Entry point of `flash` and of `python -m flash`."""

from __future__ import annotations

import os
import sys
import threading

from flash.cli.main import main

GRACE_S = 1.0
"""For threads that are about to end."""


def run() -> None:
    """Run the command and end the process, whatever a blocking environment or agent still does.

    Python waits for its threads. One that was given up, since its deadline had passed, may never come back.
    """
    code = main()
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
