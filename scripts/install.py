"""Make `.venv`, the environment of a clone: `python3 scripts/install.py`, or `make env`.

This script needs only Python's standard library, and so does `flash.install`, which it calls. A later call returns at
once if everything that the environment depends on is unchanged (`flash.install.making.fingerprint`). After an
interrupted call, the next one continues.

Unlike the other scripts, this file must also work with a Python that is too old for Flash, to report that as an error.
"""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""Root folder of the clone."""
OLDEST_PYTHON = (3, 11)
"""Oldest Python that Flash runs with."""


def too_old(oldest):
    """Return an error message if this Python is older than `oldest`, a pair such as (3, 11); else an empty text."""
    if sys.version_info >= oldest:
        return ""
    found, wanted = (".".join(map(str, version[:2])) for version in (sys.version_info, oldest))
    return (
        "Flash needs Python " + wanted + " or newer; " + sys.executable + " is " + found + ". "
        "Name another one: make env PYTHON=/path/to/python3.12, or PYTHON=/path/to/python3.12 ./launch.sh"
    )


def start(oldest=OLDEST_PYTHON):
    """Make the environment, unless it is up to date. Returns the exit code: 0, 1 after an error, 130 after Ctrl-C.

    `oldest` is the oldest Python that Flash runs with; tests replace it.
    """
    if too_old(oldest):
        sys.stderr.write("error: " + too_old(oldest) + "\n")
        return 1
    sys.path.insert(0, ROOT)
    from pathlib import Path

    from flash.install import making

    return making.report(lambda: making.make_clone(Path(ROOT)))


if __name__ == "__main__":
    sys.exit(start())
