"""The folder of the environment, and commands in it with their output in a log."""

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
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "flash-installed"
LOG = VENV / "flash-install.log"

SCRATCH = VENV / "tmp"
"""Where pip unpacks: /tmp may be small, or be memory. Removed at the end."""

MISLEADING = {"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"} | {
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_REQUIREMENT")
}
"""Variables that pip does not get: other packages would count as installed, or ours would land elsewhere. Where Python
is told not to write byte code, every start of an engine would compile vLLM again."""

SWITCHED_OFF = ("PIP_USER", "PIP_REQUIRE_HASHES", "PIP_NO_DEPS", "PIP_DRY_RUN", "PIP_IGNORE_INSTALLED")
"""Options of pip that a user may have switched on for all calls, here or in pip's files, and that fail ours."""

ELSEWHERE = re.compile(r"^(\w+\.(?:target|prefix|root|python))=", re.MULTILINE)
"""The options in pip's files for which there is no such switch, as `pip config list` shows them."""


NO_CONNECTION = re.compile(
    "Temporary failure in name resolution|Name or service not known|No address associated with hostname|"
    "Network is unreachable|No route to host|Connection refused|Connection timed out|Cannot connect to proxy|"
    "ConnectTimeoutError|NewConnectionError|NameResolutionError|ProxyError"
)
"""What pip writes of an index that it cannot reach; in its last lines it only says that there is no such version."""

NETWORK = (
    "the packages are fetched over the network. Check that there is one; behind a proxy set https_proxy, and name a "
    "mirror by PIP_INDEX_URL or `pip config set global.index-url`"
)
"""What to do about it."""


class InstallError(Exception):
    """The environment cannot be made; the message says why."""


@contextmanager
def phase(name: str) -> Generator[None]:
    """Name what is going on, and say how long it took."""
    sys.stdout.write(f"  {name} … ")
    sys.stdout.flush()
    start = time.monotonic()
    yield
    sys.stdout.write(f"{time.monotonic() - start:.0f} s\n")


def variables(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a command: the caller's, less what would make pip do something else."""
    kept = {key: value for key, value in os.environ.items() if key not in MISLEADING}
    return kept | dict.fromkeys(SWITCHED_OFF, "0") | dict(more or {})


def output(*command: str | Path, more: Mapping[str, str] | None = None, timeout: float | None = None) -> str | None:
    """What a command prints; None where it fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=variables(more), timeout=timeout, cwd=ROOT
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def run(*command: str | Path, more: Mapping[str, str] | None = None) -> None:
    """Run one command with its output in `LOG`.

    Raises:
        InstallError: it failed; carries the end of its output.
    """
    with LOG.open("a+") as log:
        start = log.tell()
        done = subprocess.run(command, stdout=log, stderr=log, cwd=ROOT, env=variables(more), check=False)
        if done.returncode == 0:
            return
        log.seek(start)
        tail = "".join(log.readlines()[-15:])
    said = f"{' '.join(map(str, command))[:200]}\nfailed:\n{tail}\nThe whole output is in {LOG}\n"
    if unreachable := NO_CONNECTION.search(tail):
        said += f"No connection ({unreachable[0]}): {NETWORK}\n"
    raise InstallError(f"{said}The same command continues from here; `rm -rf {VENV}` begins anew.")


def pip(*arguments: str | Path, more: Mapping[str, str] | None = None) -> None:
    """Run the environment's own pip."""
    scratch = {"TMPDIR": str(SCRATCH)}
    run(PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments, more=scratch | dict(more or {}))
