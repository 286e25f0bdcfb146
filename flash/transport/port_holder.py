"""Who listens at a port of this machine, as far as /proc shows it to us."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

TABLES = ("tcp", "tcp6")
"""Of /proc/net."""
LISTENS = "0A"
"""The state of a socket that does, there."""
LONGEST_COMMAND = 60
"""Characters of a command that are shown: its first words, and not the options of somebody's service."""


def port_holder(port: int) -> str:
    """The process that listens at a port, with its number and its command."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if any(str(file.readlink()) in sockets for file in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                command = shlex.join(filter(None, words))
                shown = command if len(command) <= LONGEST_COMMAND else f"{command[:LONGEST_COMMAND]}…"
                return f"process {process.name} ({shown})"
    return "a process of another user or container"


def _inodes(port: int) -> set[str]:
    """Of the sockets that listen at a port."""
    found: set[str] = set()
    for table in TABLES:
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                if state == LISTENS and int(local.rpartition(":")[2], 16) == port:
                    found.add(inode)
    return found
