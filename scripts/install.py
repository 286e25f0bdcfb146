"""Make `.venv`, the environment that Flash runs in: `python3 scripts/install.py`, or `make env`.

Needs nothing but Python's standard library. A second call returns at once while what the environment depends on is
unchanged (`environment.fingerprint`); after a call that was interrupted the next one continues.

This file is read by any Python, also by those that are too old for the others: it has to say so.
"""

import sys

OLDEST_PYTHON = (3, 11)


def too_old(oldest):
    """Why this Python is not taken; empty: it is."""
    if sys.version_info >= oldest:
        return ""
    found, wanted = (".".join(map(str, version[:2])) for version in (sys.version_info, oldest))
    return (
        "Flash needs Python " + wanted + " or newer; " + sys.executable + " is " + found + ". "
        "Name another one: make env PYTHON=/path/to/python3.12, or PYTHON=/path/to/python3.12 ./launch.sh"
    )


def start(oldest=OLDEST_PYTHON):
    """Make the environment, or leave it as it is when it is current; the exit code."""
    if too_old(oldest):
        sys.stderr.write("error: " + too_old(oldest) + "\n")
        return 1
    import environment

    try:
        return environment.main()
    except (environment.InstallError, OSError) as error:
        sys.stdout.write("\n")
        sys.stderr.write("error: " + str(error) + "\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted: the same command continues from here\n")
        return 130


if __name__ == "__main__":
    sys.exit(start())
