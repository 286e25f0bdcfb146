"""Base class for hosts and clusters that tests start on this machine, which end with the test however it ends.

Each has a folder, named after the process that owns it. A keeper, a process of its own, waits for the end of the owner,
then kills all processes of the folder and removes it. If the keeper was killed too, the next owner removes the folder
when it begins.

As a program it is the keeper: `python -S benchmarks/rig/kept.py FOLDER` waits for the end of its input. It needs
nothing but Python.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

PLACE = Path("/tmp")
"""Place of the folders. Not TMPDIR: socket paths have at most 107 characters, which pytest's folders may exceed."""
SPACES = Path("/run/netns")
"""Folder of network namespaces; those of a kept folder are named `FOLDER-…`."""
NAME = re.compile(r"flash-[a-z]+-(\d+)-[a-z0-9_]{8}")
"""Name of a folder: its kind, its owner's process id, and random characters. The owner is the process that has made the
folder."""
DYING_S = 10.0
"""Longest wait for killed processes to be gone."""


class Kept(ABC):
    """A group of processes that exists from `with` to its end, with a folder of its own.

    Args:
        kind: a word for the folder's name.
    """

    def __init__(self, kind: str) -> None:
        remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=f"flash-{kind}-{os.getpid()}-", dir=PLACE))
        # The pipe closes when this process ends, however it ends. A session of its own spares the keeper Ctrl-C. With
        # `-S` it does not look for installed packages, so that it starts faster.
        self._keeper = subprocess.Popen(
            [sys.executable, "-S", __file__, str(self.folder)], stdin=subprocess.PIPE, start_new_session=True
        )

    def __enter__(self) -> Self:
        """Call `begin`, and return the object. If `begin` raises, everything that has started is ended."""
        try:
            self.begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all processes, and remove the folder."""
        self.close()

    @abstractmethod
    def begin(self) -> None:
        """Start the processes. Subclasses implement this.

        The keeper finds a process by a path in `folder` in an environment variable, or by a network namespace.
        """

    def close(self) -> None:
        """End all processes, and remove the folder."""
        self._keeper.communicate()  # closes its input, on which it removes the folder, and waits for its end


def remove_abandoned() -> None:
    """Remove the folders whose owners are gone. Each new `Kept` calls this first."""
    names = [path.name for path in PLACE.glob("flash-*")]
    if SPACES.is_dir():
        names += [path.name.rpartition("-")[0] for path in SPACES.iterdir()]
    for name in sorted(set(names)):
        owned = NAME.fullmatch(name)
        if owned is not None and not Path("/proc", owned[1]).exists():
            remove(PLACE / name)


def remove(folder: Path) -> None:
    """Kill the processes of a folder, wait at most DYING_S for their end, and remove it with its network namespaces."""
    end = time.monotonic() + DYING_S
    while (pids := processes(folder)) and time.monotonic() < end:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for space in spaces(folder):
        subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def processes(folder: Path) -> set[int]:
    """Return the ids of the processes in a folder's network namespaces, and of those that have a path in the folder as
    the value of an environment variable."""
    found = {pid for space in spaces(folder) for pid in processes_in(space)}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if f"={folder}/".encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
    return found


def processes_in(space: str) -> list[int]:
    """Return the ids of the processes in a network namespace; none if it does not exist."""
    found: list[int] = []
    with suppress(OSError):  # it is gone
        wanted = (SPACES / space).stat().st_ino
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if (entry / "ns/net").stat().st_ino == wanted:
                    found.append(int(entry.name))
    return found


def spaces(folder: Path) -> list[str]:
    """Return the names of a folder's network namespaces. `folder` may be gone: only its name counts."""
    return sorted(path.name for path in SPACES.glob(f"{folder.name}-*"))


if __name__ == "__main__":
    sys.stdin.buffer.read()  # returns when the owner has ended, or has closed the pipe
    remove(Path(sys.argv[1]))
