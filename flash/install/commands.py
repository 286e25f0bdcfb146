"""A Python environment that Flash is installed into, and functions that run commands and pip there.

This module and its neighbours need only Python's standard library, because they run before anything is installed.
`flash.install.making` makes the environment of a clone, and `flash.install.packages` fills an environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

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

TAIL_LINES = 15
"""Number of last lines of a failed command's output that an error message quotes."""

NETWORK = (
    "the packages are fetched over the network. Check that there is one; behind a proxy set https_proxy, and name a "
    "mirror by PIP_INDEX_URL or `pip config set global.index-url`"
)
"""Advice for a user without a connection, as part of an error message."""


class InstallError(Exception):
    """The environment cannot be made. The message gives the reason."""


@contextmanager
def phase(name: str) -> Generator[None]:
    """Print the name of a phase before the block, and its seconds after the block, unless the block raises an error."""
    sys.stdout.write(f"  {name} … ")
    sys.stdout.flush()
    start = time.monotonic()
    yield
    sys.stdout.write(f"{time.monotonic() - start:.0f} s\n")


def variables(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables of a command: those of the caller without `MISLEADING` ones, with the options of
    `SWITCHED_OFF` off, and with `more`, which takes precedence."""
    kept = {key: value for key, value in os.environ.items() if key not in MISLEADING}
    return kept | dict.fromkeys(SWITCHED_OFF, "0") | dict(more or {})


def output(
    *command: str | Path,
    more: Mapping[str, str] | None = None,
    timeout: float | None = None,
    folder: Path | None = None,
) -> str | None:
    """Run a command and return its output; None if it fails or takes longer than `timeout` seconds.

    `more` are further environment variables, and `folder` is the working directory; None: that of this process.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=variables(more),
            timeout=timeout,
            cwd=folder,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class VirtualEnvironment(NamedTuple):
    """A virtual environment that packages are installed into. Its folder need not exist yet."""

    folder: Path
    """Folder of the environment, such as `.venv`."""

    @property
    def python(self) -> Path:
        """Interpreter of the environment."""
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        """File with the output of all commands."""
        return self.folder / "flash-install.log"

    @property
    def scratch(self) -> Path:
        """Temporary folder of pip, which is removed at the end. /tmp may be small or in memory."""
        return self.folder / "tmp"

    @property
    def home(self) -> Path:
        """Working directory of all commands: the folder above, from which relative paths in pip's settings count."""
        return self.folder.parent

    def output(
        self, *command: str | Path, more: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> str | None:
        """Run a command in `home` and return its output; None if it fails or takes longer than `timeout` seconds.

        `more` are further environment variables.
        """
        return output(*command, more=more, timeout=timeout, folder=self.home)

    def run(self, *command: str | Path, more: Mapping[str, str] | None = None) -> None:
        """Run a command in `home`, and append its output to `log`. `more` are further environment variables.

        Raises:
            InstallError: the command failed. The message has the end of its output.
        """
        with self.log.open("a+", errors="replace") as log:  # a compiler may print bytes that are no text
            start = log.tell()
            done = subprocess.run(command, stdout=log, stderr=log, cwd=self.home, env=variables(more), check=False)
            if done.returncode == 0:
                return
            log.seek(start)
            tail = "".join(log.readlines()[-TAIL_LINES:])
        message = f"{' '.join(map(str, command))[:200]}\nfailed:\n{tail}\nThe whole output is in {self.log}\n"
        if unreachable := NO_CONNECTION.search(tail):
            message += f"No connection ({unreachable[0]}): {NETWORK}\n"
        raise InstallError(
            f"{message}The same command continues from here; in an empty environment it starts from scratch."
        )

    def pip(self, *arguments: str | Path, more: Mapping[str, str] | None = None) -> None:
        """Run the pip of the environment with these arguments, and with `more` environment variables.

        Its temporary files go to `scratch`, unless `more` sets TMPDIR. Raises InstallError if it fails.
        """
        scratch = {"TMPDIR": str(self.scratch)}
        options = ("--disable-pip-version-check", "--no-input")
        self.run(self.python, "-m", "pip", *options, *arguments, more=scratch | dict(more or {}))

    def prepare(self) -> None:
        """Make the temporary folder, and let the environment have a pip. An environment that uv has made has none.

        The environment itself must exist. The caller removes the temporary folder at the end.

        Raises:
            InstallError: there is no pip, or pip's configuration files make it install into another folder.
        """
        if not self.output(self.python, "-m", "pip", "--version"):
            with phase("pip"):
                self.run(self.python, "-m", "ensurepip")
        settings = ELSEWHERE.findall(self.output(self.python, "-m", "pip", "config", "list") or "")
        if settings:
            raise InstallError(
                f"pip's configuration sets {' and '.join(settings)}, which installs packages outside of any "
                f"environment: `{self.python} -m pip config debug` names the file; or call this with "
                "PIP_CONFIG_FILE=/dev/null"
            )
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
