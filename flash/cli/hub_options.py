"""How the commands that speak to a running job name it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flash.errors import ConfigError

if TYPE_CHECKING:
    from flash.run.processes.hub_place import HubPlace


def add_hub_option(parser: argparse.ArgumentParser) -> None:
    """The other way beside the run directory."""
    parser.add_argument("--hub", metavar="HOST:PORT", help="the hub, instead of RUN_DIR; FLASH_TOKEN is its token")


def hub_place(hub: str | None, folders: list[str]) -> HubPlace:
    """Where the hub is. Raises ConfigError: not exactly one place is named."""
    from flash.run.processes.hub_place import HubPlace

    if len(folders) + (hub is not None) != 1:
        named = f", got {' and '.join(folders)}" if folders else ""
        raise ConfigError(f"expected one run directory, such as outputs/quickstart, or --hub HOST:PORT{named}")
    if hub is None:
        return HubPlace(run_dir=str(Path(folders[0]).absolute()))
    host, _, port = hub.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--hub: expected HOST:PORT, got {hub}")
    return HubPlace(host=host.strip("[]"), port=int(port))
