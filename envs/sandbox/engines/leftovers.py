"""Removal of processes and control groups of containers that their engine has forgotten.

A Podman that is killed in the middle of a start and then restarted does not know that the container already has
processes. It removes the container, but not its `conmon` and a first process, which waits to be started forever. Both
have the container's id in their control group or in their command line. A container whose `conmon` was killed leaves
its control groups, one for each controller, whose names contain the id too.
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
"""Seconds between two checks, of which there are at most `LOOKS`. A runtime that still works may start another process
after a check, so the check is repeated until no process is left."""
GROUPS = ("libpod_parent/libpod-{}", "libpod_parent/libpod-conmon-{}", "docker/{}")
"""Names of a container's control groups under engines without systemd. systemd removes its own groups."""
HELPERS = ("conmon", "runc", "crun", "runsc")
"""Programs that belong to the container which their command line names."""


def kill_leftovers(ids: Collection[str]) -> int:
    """Kill the processes of removed containers of this machine. Returns their number."""
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
    """Return the processes that belong to one of these containers. Only tests replace `proc`."""
    found: list[int] = []
    for entry in os.scandir(proc):
        if not entry.name.isdigit():
            continue
        try:
            group = Path(entry.path, "cgroup").read_text("utf-8", "replace")
            words = Path(entry.path, "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue  # The process has ended meanwhile.
        helper = Path(words[0]).name in HELPERS
        # A process without a command line is a zombie, which cannot be killed.
        if words[0] and any(id in group or (helper and id in words) for id in ids):
            found.append(int(entry.name))
    return found


def remove_groups(id: str, root: Path = Path("/sys/fs/cgroup")) -> int:
    """Remove the control groups of a removed container of this machine. Returns their number.

    Only tests replace `root`.
    """
    if not root.is_dir():
        return 0  # The engine runs in a virtual machine on this machine.
    places = [root, *(Path(entry.path) for entry in os.scandir(root) if entry.is_dir())]
    groups = [group for place in places for form in GROUPS if (group := place / form.format(id)).is_dir()]
    for group in groups:
        for folder, _, _ in os.walk(group, topdown=False):
            _remove_group(folder)
    return len(groups)


def _remove_group(folder: str) -> None:
    for _ in range(LOOKS):
        try:
            return os.rmdir(folder)
        except FileNotFoundError:
            return  # The engine has removed it already.
        except OSError:
            time.sleep(PAUSE_S)  # One of its processes has not ended yet, or this user may not remove it.
