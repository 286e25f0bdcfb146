"""Processes and control groups of containers that their engine has forgotten.

Podman that is killed in the middle of a start does not know, once it is back, that the container had processes already:
it removes the container, and leaves its `conmon` and a first process that waits to be started, for ever. They name the
container's id: in the control group, or in the command line. And a container whose `conmon` was killed leaves its
control groups, one for each controller, which are named after it as well.
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
GROUPS = ("libpod_parent/libpod-{}", "libpod_parent/libpod-conmon-{}", "docker/{}")
"""Where engines without systemd, which removes its own, make control groups of a container."""
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


def remove_groups(id: str, root: Path = Path("/sys/fs/cgroup")) -> int:
    """Remove the control groups of a removed container of this machine; how many there were. `root` is for tests."""
    if not root.is_dir():
        return 0  # The engine runs in a virtual machine of this one.
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
            return  # Its engine was faster.
        except OSError:
            time.sleep(PAUSE_S)  # A process of it is still dying; or it is not ours to remove.
