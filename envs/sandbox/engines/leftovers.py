"""Processes of containers that their engine has forgotten.

Podman that is killed in the middle of a start does not know, once it is back, that the container had processes already:
it removes the container, and leaves its `conmon` and a first process that waits to be started, for ever. They name the
container's id: in the control group, or in the command line.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

LOOKS = 20
PAUSE_S = 0.05
"""A runtime that is at work may start another process meanwhile: looks until there are none, and between them."""
HELPERS = ("conmon", "runc", "crun", "runsc")
"""Programs that belong to the container which their command line names."""


def kill_leftovers(ids: Collection[str]) -> int:
    """Kill the processes of removed containers of this machine; how many there were."""
    killed: set[int] = set()
    for _ in range(LOOKS):
        found = find_leftovers(ids)
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        time.sleep(PAUSE_S)
    return len(killed)


def find_leftovers(ids: Collection[str], proc: Path = Path("/proc")) -> list[int]:
    """The processes that belong to one of these containers. `proc` is replaced in tests."""
    found: list[int] = []
    for entry in os.scandir(proc):
        if not entry.name.isdigit():
            continue
        try:
            group = Path(entry.path, "cgroup").read_text("utf-8", "replace")
            words = Path(entry.path, "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue  # It has ended meanwhile.
        helper = Path(words[0]).name in HELPERS
        # No command line: a zombie, which is nobody's to kill.
        if words[0] and any(id in group or (helper and id in words) for id in ids):
            found.append(int(entry.name))
    return found
