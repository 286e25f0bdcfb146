"""Paths of the environment, and functions that run commands and pip in it, with their output in a log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""Root of the repository."""
VENV = ROOT / ".venv"
"""Folder of the environment."""
PYTHON = VENV / "bin" / "python"
"""Interpreter of the environment."""
STAMP = VENV / "flash-installed"
"""File with the fingerprint of a finished environment."""
LOG = VENV / "flash-install.log"
"""File with the output of all commands."""

SCRATCH = VENV / "tmp"
"""Temporary folder of pip, which is removed at the end. /tmp may be small or in memory."""

MISLEADING = {"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"} | {
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_REQUIREMENT")
}
"""Environment variables that commands do not get. With them, other packages would count as installed, or pip would
install into another folder. Without byte code, every start of an engine would compile vLLM's modules again."""

SWITCHED_OFF = ("PIP_USER", "PIP_REQUIRE_HASHES", "PIP_NO_DEPS", "PIP_DRY_RUN", "PIP_IGNORE_INSTALLED")
"""Options of pip that make this installation fail. A user may have set them for all calls, by variables or in files."""

ELSEWHERE = re.compile(r"^(\w+\.(?:target|prefix|root|python))=", re.MULTILINE)
"""Pattern of options in the output of `pip config list` that install elsewhere and that no variable can switch off."""

NO_CONNECTION = re.compile(
    "Temporary failure in name resolution|Name or service not known|No address associated with hostname|"
    "Network is unreachable|No route to host|Connection refused|Connection timed out|Cannot connect to proxy|"
    "ConnectTimeoutError|NewConnectionError|NameResolutionError|ProxyError"
)
"""Messages of pip about an index that it cannot reach. They are searched because the last lines of pip's output only
report that there is no such version."""

NETWORK = (
    "the packages are fetched over the network. Check that there is one; behind a proxy set https_proxy, and name a "
    "mirror by PIP_INDEX_URL or `pip config set global.index-url`"
)
"""Advice for a user without a connection, as part of an error message."""


class InstallError(Exception):
    """The environment cannot be made. The message gives the reason."""


@contextmanager
def phase(name: str) -> Generator[None]:
    """Print the name of a phase before the block, and its seconds after the block."""
    sys.stdout.write(f"  {name} … ")
    sys.stdout.flush()
    start = time.monotonic()
    yield
    sys.stdout.write(f"{time.monotonic() - start:.0f} s\n")


def variables(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables of a command: those of the caller without misleading ones, and `more`."""
    kept = {key: value for key, value in os.environ.items() if key not in MISLEADING}
    return kept | dict.fromkeys(SWITCHED_OFF, "0") | dict(more or {})


def output(*command: str | Path, more: Mapping[str, str] | None = None, timeout: float | None = None) -> str | None:
    """Run a command in `ROOT` and return its output; None if it fails or takes longer than `timeout` seconds."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=variables(more),
            timeout=timeout,
            cwd=ROOT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def run(*command: str | Path, more: Mapping[str, str] | None = None) -> None:
    """Run a command in `ROOT` with its output in `LOG`.

    Raises:
        InstallError: the command failed. The message has the end of its output.
    """
    with LOG.open("a+", errors="replace") as log:  # a compiler may print bytes that are no text
        start = log.tell()
        done = subprocess.run(command, stdout=log, stderr=log, cwd=ROOT, env=variables(more), check=False)
        if done.returncode == 0:
            return
        log.seek(start)
        tail = "".join(log.readlines()[-15:])
    message = f"{' '.join(map(str, command))[:200]}\nfailed:\n{tail}\nThe whole output is in {LOG}\n"
    if unreachable := NO_CONNECTION.search(tail):
        message += f"No connection ({unreachable[0]}): {NETWORK}\n"
    raise InstallError(f"{message}The same command continues from here; after `rm -rf {VENV}` it starts from scratch.")


def pip(*arguments: str | Path, more: Mapping[str, str] | None = None) -> None:
    """Run the pip of the environment. Raises InstallError if it fails."""
    scratch = {"TMPDIR": str(SCRATCH)}
    run(PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments, more=scratch | dict(more or {}))
