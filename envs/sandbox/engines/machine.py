"""The view of this machine from outside the containers: its load, the disk that a container uses, and leftovers.

`EngineMaker` reports the load of `MachineMeter` if its engine runs on this machine. `DockerContainers` calls the rest.

`layer_use` measures a container's own layer, and open files that it has removed. Engines can seldom limit a layer, and
their own measurement has no bound: a program that creates millions of files would keep the engine busy. This one stops
as soon as it exceeds the limit. The container changes its folders meanwhile, so each folder is opened relative to its
open parent, and no link is followed.

`kill_leftovers` and `remove_groups` remove what an engine has forgotten. A Podman that is killed in the middle of a
start and then restarted removes the container, but not its `conmon` and a first process, which waits to be started
forever. A container whose `conmon` was killed leaves its control groups. All of these name the container's id.

All functions block; run them in a thread.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec

_KIB = 1024
"""Bytes of a KiB."""
_MIB = 1 << 20
"""Bytes of a MiB."""
IDLE = (3, 4)
"""Columns of /proc/stat in which a processor did nothing: idle, and waiting for a disk."""
COUNTED = 8
"""Number of leading columns of /proc/stat that add up to all time. The time of guests is already part of them."""

ENOUGH = 50
"""Fewest ticks, mostly of 10 ms, over all processors that give a meaningful share."""

DEPTH = 256
"""Deepest folder that is measured; a deeper tree counts as over the limit. Each open folder takes a descriptor."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a folder inside a layer. The container may have replaced the folder by a link."""
CHECKS = 20
"""Most checks for leftovers of one container. A runtime that still works may start another process after a check, so
the check is repeated until no process is left."""
PAUSE_S = 0.05
"""Seconds between two checks for leftovers."""
GROUPS = ("libpod_parent/libpod-{}", "libpod_parent/libpod-conmon-{}", "docker/{}")
"""Names of a container's control groups under engines without systemd. systemd removes its own groups."""
HELPERS = ("conmon", "runc", "crun", "runsc")
"""Programs that belong to the container which their command line names."""


class MachineMeter:
    """Meter of this machine's load between one reading and the next."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        """Take the first reading. Only tests replace `proc`."""
        self._proc = proc
        self._last = self._ticks()
        """Busy time and all time, in ticks, at the last reading."""

    def read(self) -> MachineLoad:
        """Return the CPUs that were busy since the last reading, and the memory in use now."""
        cpus = os.cpu_count() or 1
        memory = memory_bytes(self._proc)
        used = memory["MemTotal"] - memory["MemAvailable"]
        return MachineLoad(self._busy(cpus), cpus, used // _MIB, memory["MemTotal"] // _MIB)

    def _busy(self, cpus: int) -> float | None:
        """Return the average number of busy processors since the last reading; None if that was too short ago.

        `cpus` is the number of all processors. A reading that is too early is ignored: the next one goes back further.
        """
        busy, total = self._ticks()
        busy_before, total_before = self._last
        if total - total_before < ENOUGH:
            return None
        self._last = busy, total
        return round(cpus * (busy - busy_before) / (total - total_before), 2)

    def _ticks(self) -> tuple[int, int]:
        """Return the busy time and all time of all processors since the machine's start, in ticks."""
        columns = [int(value) for value in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1 : COUNTED + 1]]
        total = sum(columns)
        return total - sum(columns[column] for column in IDLE), total


def memory_bytes(proc: Path = Path("/proc")) -> dict[str, int]:
    """Return the entries of /proc/meminfo by their names, in bytes. Only tests replace `proc`."""
    rows = (row.split() for row in (proc / "meminfo").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * _KIB for row in rows if row[-1] == "kB"}


class MachineLoad(msgspec.Struct, frozen=True):
    """Measured load of a host's machine, with all programs that run on it."""

    cpus_busy: float | None
    """Average number of busy CPUs since the last reading; None if that was too short ago to measure."""
    cpus: int
    """Number of the machine's CPUs."""
    memory_used_mib: int
    """Memory in use, in MiB. Memory that the kernel can free at once, like the file cache, does not count."""
    memory_mib: int
    """Memory of the machine, in MiB."""


class LayerUse(msgspec.Struct):
    """Disk use of a container, or its limit."""

    size: int = 0
    """Size in bytes."""
    entries: int = 0
    """Number of files, folders and links."""

    def over(self, most: LayerUse) -> bool:
        """Return True if either number exceeds that of `most`."""
        return self.size > most.size or self.entries > most.entries


def layer_use(folder: Path, pid: int, most: LayerUse, *, holes: bool = False) -> LayerUse:
    """Measure the layer in `folder` of the container whose first process is `pid`, until it exceeds `most`.

    Args:
        folder: folder of the layer on this machine: the upper folder of its overlay file system.
        pid: id of the container's first process; 0 if the container does not run.
        most: limits at which the measurement stops.
        holes: True to count sparse files with their full length, which they would have in an archive.

    Raises:
        OSError: the folder cannot be opened. A folder that is gone has no use.
    """
    use = LayerUse()
    with suppress(FileNotFoundError):
        _add_tree(os.open(folder, _FOLDER), use, most, holes=holes)
    # Removed files that a program keeps open take disk too, but no name leads to them.
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        devices = {os.stat(f"/proc/{pid}/root").st_dev, folder.stat().st_dev}
        for each in _processes(pid):
            _add_removed(each, devices, use, most)
    return use


def _add_tree(top: int, use: LayerUse, most: LayerUse, *, holes: bool) -> None:
    """Add the use of the open folder `top` to `use`, until it exceeds `most`. Closes the folder.

    A file with several names counts once. A tree deeper than `DEPTH` counts as over the limit. With `holes`, a sparse
    file counts with its full length. Raises OSError if `top` cannot be listed.
    """
    linked: set[int] = set()
    """Inode numbers of counted files that have several names."""
    opened = [(top, os.scandir(top))]
    try:
        while opened and not use.over(most):
            here, names = opened[-1]
            entry = next(names, None)
            if entry is None:
                names.close()
                os.close(here)
                opened.pop()
                continue
            use.entries += 1
            try:
                status = os.stat(entry.name, dir_fd=here, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    if len(opened) >= DEPTH:
                        use.entries = most.entries + 1
                        return
                    below = os.open(entry.name, _FOLDER, dir_fd=here)
                    opened.append((below, os.scandir(below)))
            except OSError:
                continue  # The container has removed or replaced it.
            if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                if status.st_ino in linked:
                    continue
                linked.add(status.st_ino)
            use.size += max(status.st_size if holes else 0, 512 * status.st_blocks)
    finally:
        for here, names in opened:
            names.close()
            os.close(here)


def _add_removed(pid: int, devices: set[int], use: LayerUse, most: LayerUse) -> None:
    """Add to `use` the files that a process keeps open although they are removed, until it exceeds `most`.

    `devices` are the file systems of the layer: open files of other ones take none of its disk.
    """
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as names:
        for entry in names:
            if use.over(most):
                return
            with suppress(OSError):
                status = entry.stat()
                if stat.S_ISREG(status.st_mode) and not status.st_nlink and status.st_dev in devices:
                    use.size += 512 * status.st_blocks
                    use.entries += 1


def _processes(pid: int) -> list[int]:
    """Return the ids of the processes in the control group of `pid`, which are those of its container.

    Empty if the container has no group of its own. Raises FileNotFoundError or ProcessLookupError if `pid` is gone.
    """
    # Each line is "number:controllers:path". Version 2 of control groups has one line without controllers; version 1
    # has one file system for each set of controllers.
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for root in ("/sys/fs/cgroup", f"/sys/fs/cgroup/{controllers}"):
            with suppress(OSError):
                if path != "/":
                    return [int(word) for word in Path(f"{root}{path}/cgroup.procs").read_text().split()]
    return []


def kill_leftovers(ids: Collection[str]) -> int:
    """Kill the processes that the engine left of removed containers on this machine. Returns their number.

    They belong to a start that did not end. `ids` are the full ids of the containers, which the processes name.
    """
    killed: set[int] = set()
    for _ in range(CHECKS):
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
    """Return the ids of the processes that belong to one of these containers, given by their full `ids`.

    Only tests replace `proc`.
    """
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
    """Remove one control group, the folder `folder`. Tries again while a process of it is ending, for at most 1 s.

    A group that cannot be removed stays.
    """
    for _ in range(CHECKS):
        try:
            return os.rmdir(folder)
        except FileNotFoundError:
            return  # The engine has removed it already.
        except OSError:
            time.sleep(PAUSE_S)  # One of its processes has not ended yet, or this user may not remove it.
