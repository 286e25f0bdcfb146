"""What tests start on this machine beside their own processes: hosts, a cluster. It ends with them, however they end.

Each has a folder, named after the process that owns it. A keeper, a process of its own, waits for the end of the one or
the other, then kills all that runs for the folder and removes it. What was killed together with its keeper is removed
when the next one begins.

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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

PLACE = Path("/tmp")
"""Not TMPDIR: the paths of the sockets in a folder have at most 107 characters, which pytest's folders may exceed."""
SPACES = Path("/run/netns")
"""Network namespaces; those of a folder are named `FOLDER-…`."""
NAME = re.compile(r"flash-[a-z]+-(\d+)-[a-z0-9_]{8}")
"""A folder: what it is for, its owner's process id, and chance."""
DYING_S = 10.0
"""Longest wait for killed processes to be gone."""


class Kept(ABC):
    """Runs from `with` to its end, in a folder of its own.

    Args:
        kind: a word for the folder's name.
    """

    def __init__(self, kind: str) -> None:
        remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=f"flash-{kind}-{os.getpid()}-", dir=PLACE))
        self._keeper = subprocess.Popen(
            [sys.executable, "-S", __file__, str(self.folder)], stdin=subprocess.PIPE, start_new_session=True
        )

    def __enter__(self) -> Self:
        try:
            self.begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def begin(self) -> None:
        """Start what it is made of."""

    def close(self) -> None:
        """End all of it, and remove the folder."""
        self._keeper.communicate()


def remove_abandoned() -> None:
    """Remove what processes that are gone have left."""
    names = [path.name for path in PLACE.glob("flash-*")]
    if SPACES.is_dir():
        names += [path.name.rpartition("-")[0] for path in SPACES.iterdir()]
    for name in sorted(set(names)):
        owned = NAME.fullmatch(name)
        if owned is not None and not Path("/proc", owned[1]).exists():
            remove(PLACE / name)


def remove(folder: Path) -> None:
    """Kill what runs for a folder, and remove it with its network namespaces."""
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
    """All that runs in a folder's network namespaces, or names the folder in a variable of its environment."""
    return {*_named(folder), *(pid for space in spaces(folder) for pid in processes_in(space))}


def processes_in(space: str) -> list[int]:
    """All that runs in a network namespace."""
    found: list[int] = []
    with suppress(OSError):  # it is gone
        wanted = (SPACES / space).stat().st_ino
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if (entry / "ns/net").stat().st_ino == wanted:
                    found.append(int(entry.name))
    return found


def spaces(folder: Path) -> list[str]:
    """The network namespaces of a folder."""
    return sorted(path.name for path in SPACES.glob(f"{folder.name}-*"))


def _named(folder: Path) -> Iterable[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if f"={folder}/".encode() in (entry / "environ").read_bytes():
                yield int(entry.name)


def main() -> None:
    """The keeper."""
    sys.stdin.buffer.read()
    remove(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
