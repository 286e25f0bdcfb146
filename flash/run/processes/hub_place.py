"""Place of the hub: turns a run directory, or a host and a port, into the address and the token of the hub.

The token authenticates the job's own processes. It lies in a file of mode 0600 in the run directory, which the hosts of
a job share. Hosts without a shared run directory get the token in `FLASH_TOKEN`. The node loop with the hub makes the
token and announces the hub (`hub_token`, `announce`); all other processes of the job find both with `HubPlace.find`.

While a hub runs, the announcement `hub.json` in the run directory holds the hub's address and the name of the token's
file. It also holds a proof that the writer knows the token. All users of the folder may read the announcement. They
learn nothing there that lets them connect to the hub, and no process of the job believes what they write there.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

import msgspec

from flash.config.models import unreachable
from flash.errors import DECODE_ERRORS, ConfigError, RunDirectoryError, TransportError
from flash.observe.rundir.rundir import RunDirectory, write_atomically
from flash.transport.auth import new_token

TOKEN_VARIABLE = "FLASH_TOKEN"
"""Environment variable with the token in hexadecimal, for hosts that share no run directory."""
MIN_HEX_DIGITS = 32
"""Least length of a token in hexadecimal digits: 16 bytes, since fewer could be guessed."""
_SET_TOKEN = f"set {TOKEN_VARIABLE} to the same random hexadecimal digits on all hosts (`openssl rand -hex 32`)"
"""Advice in error messages about the file of the token."""
_TOKEN_FILE = re.compile(r"hub-[0-9a-f]{16}\.token")
"""Pattern of the token file's name."""
HUB_FILE = "hub.json"
"""Name of the file in the run directory that announces the hub."""
T = TypeVar("T")
"""Struct that `_decode` returns."""


class Announcement(msgspec.Struct, frozen=True):
    """Content of the announcement file in the run directory."""

    body: bytes
    """Address of the hub: a `HubAddress` without token, as JSON."""
    token_file: str
    """Name of the token's file in the run directory; empty if all hosts get the token in FLASH_TOKEN."""
    proof: bytes
    """HMAC-SHA256 of the body, with the token as key."""


@contextmanager
def hub_token(run_dir: Path, variable: str | None) -> Generator[tuple[bytes, str]]:
    """Make the token of a new hub. Yields the token and the name of its file, which exists while the block runs.

    The node loop with the hub calls this before it opens the hub's port. If `variable`, the value of FLASH_TOKEN, is
    not None, it is the token. Then there is no file, and the name is empty.

    Raises:
        ConfigError: `variable` is not a valid token.
        RunDirectoryError: the file cannot be written, or other users could read it.
    """
    if variable is not None:
        yield parse_token(variable), ""
        return
    token = new_token()
    # Each incarnation of the hub uses a new file name, so no host can have cached an older file of that name.
    path = run_dir / f"hub-{token_hex(8)}.token"
    try:
        _write_token(path, token)
        yield token, path.name
    finally:
        with suppress(OSError):  # a disk that has become read-only must not hide the error that ends the hub
            path.unlink(missing_ok=True)


def _write_token(path: Path, token: bytes) -> None:
    """Write the token to the file `path`, and remove the token files of earlier hubs. Raises RunDirectoryError."""
    try:
        for old in path.parent.glob("hub-*.token"):
            old.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise RunDirectoryError(
                    f"the file system of {path.parent} lets other users read the hub's token: choose another "
                    f"run.output_dir, or {_SET_TOKEN}"
                )
            file.write(token.hex())
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error}") from error


def sign(body: bytes, token: bytes, token_file: str) -> bytes:
    """Return the content of an announcement file: `body`, and a proof that its writer knows `token`. For `announce`.

    `token_file` is the name of the token's file; empty if all hosts get the token in FLASH_TOKEN.
    """
    return msgspec.json.encode(Announcement(body, token_file, _proof(body, token)))


def verify(stored: bytes, run_dir: Path, variable: str | None) -> tuple[bytes, bytes]:
    """Check the content of an announcement file, and return the announced body and the token. For `HubPlace.find`.

    Args:
        stored: content of the file.
        run_dir: the run directory, which also holds the token's file.
        variable: the value of FLASH_TOKEN; None if it is not set.

    Raises:
        ConfigError: this process has no token, or a token other than the hub's.
        TransportError: the content is not that of an announcement.
    """
    announcement = _decode(stored, Announcement)
    token = _announced_token(announcement, run_dir, variable)
    if not hmac.compare_digest(announcement.proof, _proof(announcement.body, token)):
        raise ConfigError(
            f"the hub's address is not proven by the token of this host: {TOKEN_VARIABLE} differs between the hosts, "
            "or somebody else wrote to the run directory"
        )
    return announcement.body, token


def _decode(text: bytes, kind: type[T]) -> T:
    """Return the struct that `text`, a part of an announcement, holds as JSON. Raises TransportError if it holds
    something else."""
    try:
        return msgspec.json.decode(text, type=kind)
    except DECODE_ERRORS as error:
        raise TransportError(
            f"the hub's announcement cannot be read: {error}; do all hosts run the same code?"
        ) from error


def _announced_token(announcement: Announcement, run_dir: Path, variable: str | None) -> bytes:
    """Return the token of the announced hub, from FLASH_TOKEN or from the announced file.

    `run_dir`, `variable` and the errors are those of `verify`. The token is not compared with the hub's here.
    """
    if variable is not None:
        return parse_token(variable)
    if not announcement.token_file:
        raise ConfigError(
            f"the first host has {TOKEN_VARIABLE} set, and this one has not: set it to the same on all hosts"
        )
    # Another user may have written the announcement. Its file name must not lead to a file outside the run directory.
    if _TOKEN_FILE.fullmatch(announcement.token_file) is None:
        raise TransportError(f"the hub's announcement names {announcement.token_file!r} as the file of its token")
    path = run_dir / announcement.token_file
    try:
        return bytes.fromhex(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the hub's token cannot be read ({error}): all hosts must see the same run.output_dir, as the same user; "
            f"where they do not, {_SET_TOKEN}"
        ) from error


def parse_token(text: str) -> bytes:
    """Return the token that `text`, the value of FLASH_TOKEN, holds.

    Raises:
        ConfigError: `text` is not a valid token.
    """
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) * 2 < MIN_HEX_DIGITS:
        raise ConfigError(
            f"{TOKEN_VARIABLE} is no token: expected at least {MIN_HEX_DIGITS} hexadecimal digits, as `openssl "
            "rand -hex 32` makes them"
        )
    return token


def _proof(body: bytes, token: bytes) -> bytes:
    """Return the HMAC-SHA256 of `body` with the token as key, the proof that the writer of `body` knows the token."""
    # The prefix keeps this proof apart from the proofs with which peers authenticate connections by the same token.
    return hmac.digest(token, b"hub" + body, "sha256")


class HubAddress(msgspec.Struct, frozen=True):
    """Address and token with which a peer connects to the hub."""

    host: str
    """Name or address of the hub's machine."""
    port: int
    """TCP port of the hub."""
    token: bytes
    """Token of the run; empty in the announcement, which all users may read."""


class HubPlace(msgspec.Struct, frozen=True):
    """Place where a hub can be found: either a run directory that announces it, or a host and a port.

    A launcher gives the place to its processes, so that they find the hub, and later its successors.
    """

    run_dir: str = ""
    """Path of the run directory; empty if host and port are given."""
    host: str = ""
    """Name or address of the hub's machine; empty if the run directory is given."""
    port: int = 0
    """TCP port of the hub; 0 if the run directory is given."""

    def __str__(self) -> str:
        """Return the place for messages: the run directory, or HOST:PORT."""
        return self.run_dir or f"{self.host}:{self.port}"

    @property
    def announced(self) -> bool:
        """True if a hub may be there: a host and a port are given, or the run directory announces a hub."""
        # Unlike `Path.exists`, this is False where the folder may not be entered.
        return not self.run_dir or os.path.exists(os.path.join(self.run_dir, HUB_FILE))

    def find(self, variable: str | None) -> HubAddress:
        """Return the hub's address and token. `variable` is the value of FLASH_TOKEN; None if it is not set.

        Raises:
            ConfigError: there is no hub, no token for it, or another token than the hub's.
            TransportError: the announcement in the run directory was not written by a hub with the same code.
        """
        if self.run_dir:
            folder = Path(self.run_dir)
            body, token = verify(_announcement(folder), folder, variable)
            return msgspec.structs.replace(_decode(body, HubAddress), token=token)
        if variable is None:
            raise ConfigError(
                f"{TOKEN_VARIABLE} is not set: the hub at {self} is joined with the token that was given to its run"
            )
        return HubAddress(self.host, self.port, parse_token(variable))


def announce(run_dir: Path, address: HubAddress, token_file: str) -> None:
    """Write the hub's address, without the token, to the run directory, where other processes find it.

    The node loop with the hub calls this once the hub listens. `token_file` is the second result of `hub_token`.
    """
    open_part = msgspec.json.encode(msgspec.structs.replace(address, token=b""))
    write_atomically(run_dir / HUB_FILE, sign(open_part, address.token, token_file))


def withdraw(run_dir: Path) -> None:
    """Delete the announcement of the hub from the run directory. The node loop with the hub calls this when it ends,
    and the launcher in case the node loop was killed."""
    # A disk that has become read-only must not hide the error that ends the hub.
    with suppress(OSError):
        (run_dir / HUB_FILE).unlink(missing_ok=True)


def _announcement(folder: Path) -> bytes:
    """Return the content of the announcement in the run directory `folder`.

    Raises:
        ConfigError: there is none. The message has the reason, such as that the run has ended.
    """
    try:
        return (folder / HUB_FILE).read_bytes()
    except OSError:
        pass  # the code below finds the reason
    run = RunDirectory(folder)
    if (why := unreachable(str(run.config))) is not None:
        raise ConfigError(f"{folder} cannot be read: {why}")
    if not run.config.is_file():
        raise ConfigError(f"{folder} is no run directory: expected the folder run.output_dir/run.name of a running job")
    if run.summary.is_file():
        raise ConfigError(f"no hub runs for {folder}, since the run has ended; `flash train … --resume` continues it")
    raise ConfigError(f"no hub runs for {folder}: the job of the run was stopped, or has only just started")
