"""Measurement of a container's disk use from outside: its own layer, and open files that it has removed.

Engines can seldom limit a container's layer, and their own measurement has no bound: a program that creates millions of
files would keep the engine busy. This measurement stops as soon as it exceeds the limit. The container changes its
folders meanwhile, so each folder is opened relative to its open parent, and no link is followed. All functions block;
run them in a thread.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

DEPTH = 256
"""Deepest folder that is measured; a deeper tree counts as over the limit. Each open folder takes a descriptor."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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

    With `holes`, sparse files count with their full length, as they would take in an archive.
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
    linked: set[int] = set()
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
    """Return the processes of the control group of `pid`."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for root in ("/sys/fs/cgroup", f"/sys/fs/cgroup/{controllers}"):
            with suppress(OSError):
                if path != "/":
                    return [int(word) for word in Path(f"{root}{path}/cgroup.procs").read_text().split()]
    return []
