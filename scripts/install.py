"""Make `.venv`, the environment that Flash runs in: `python3 scripts/install.py`, or `make env`.

This script needs only Python's standard library. A later call returns at once if everything that the environment
depends on is unchanged (`environment.fingerprint`). After an interrupted call, the next one continues.

Unlike the other scripts, this file must also work with a Python that is too old for Flash, to report that as an error.
"""

import sys

OLDEST_PYTHON = (3, 11)


def too_old(oldest):
    """Return an error message if this Python is older than `oldest`, else an empty text."""
    if sys.version_info >= oldest:
        return ""
    found, wanted = (".".join(map(str, version[:2])) for version in (sys.version_info, oldest))
    return (
        "Flash needs Python " + wanted + " or newer; " + sys.executable + " is " + found + ". "
        "Name another one: make env PYTHON=/path/to/python3.12, or PYTHON=/path/to/python3.12 ./launch.sh"
    )


def start(oldest=OLDEST_PYTHON):
    """Make the environment, unless it is up to date. Returns the exit code."""
    if too_old(oldest):
        sys.stderr.write("error: " + too_old(oldest) + "\n")
        return 1
    # The output may lack some characters of our lines, as in a locale of Latin-1, or of a path that is not UTF-8.
    sys.stdout.reconfigure(errors="backslashreplace")
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
