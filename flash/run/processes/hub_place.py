"""Place of the hub: turns a run directory, or a host and a port, into the address and the token of the hub.

While a hub runs, the file `hub.json` in the run directory holds the hub's address with a proof of the token, and the
name of the file that holds the token.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from flash.errors import ConfigError
from flash.observe.rundir.rundir import RunDirectory, write_atomically
from flash.run.processes.token import VARIABLE, parse_token, sign, verify

HUB_FILE = "hub.json"
"""Name of the file in the run directory that announces the hub."""


class HubAddress(msgspec.Struct, frozen=True):
    """Address and token with which a peer connects to the hub."""

    host: str
    port: int
    token: bytes


class HubPlace(msgspec.Struct, frozen=True):
    """Place of a hub: either a run directory, or a host and a port."""

    run_dir: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return self.run_dir or f"{self.host}:{self.port}"

    @property
    def announced(self) -> bool:
        """True if a hub may be there: a host and a port are given, or the run directory announces a hub."""
        return not self.run_dir or (Path(self.run_dir) / HUB_FILE).exists()

    def find(self, given: str | None) -> HubAddress:
        """Return the hub's address and token. `given` is the value of FLASH_TOKEN; None if it is not set.

        Raises:
            ConfigError: there is no hub, or no token for it.
            TransportError: the announcement in the run directory was not written by a hub.
        """
        if self.run_dir:
            folder = Path(self.run_dir)
            body, token = verify(_announcement(folder), folder, given)
            return msgspec.structs.replace(msgspec.json.decode(body, type=HubAddress), token=token)
        if given is None:
            raise ConfigError(
                f"{VARIABLE} is not set: the hub at {self} is joined with the token that was given to its run"
            )
        return HubAddress(self.host, self.port, parse_token(given))


def announce(run_dir: Path, address: HubAddress, token_file: str) -> None:
    """Write the hub's address, without the token, to the run directory, where other processes find it."""
    open_part = msgspec.json.encode(msgspec.structs.replace(address, token=b""))
    write_atomically(run_dir / HUB_FILE, sign(open_part, address.token, token_file))


def withdraw(run_dir: Path) -> None:
    """Delete the announcement of the hub from the run directory, because the hub is about to end."""
    # A disk that has become read-only must not hide the error that ends the hub.
    with suppress(OSError):
        (run_dir / HUB_FILE).unlink(missing_ok=True)


def _announcement(folder: Path) -> bytes:
    try:
        return (folder / HUB_FILE).read_bytes()
    except OSError:
        pass  # the code below finds the reason
    run = RunDirectory(folder)
    if not run.config.is_file():
        raise ConfigError(f"{folder} is no run directory: expected the folder run.output_dir/run.name of a running job")
    if run.summary.is_file():
        raise ConfigError(f"no hub runs for {folder}, whose run has ended; `flash train … --resume` can go on with one")
    raise ConfigError(f"no hub runs for {folder}: its job has been stopped, or is only starting")
