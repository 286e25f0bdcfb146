"""A small disk of a test's own, which fills up for real."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = 4096
"""Bytes by which a tmpfs gives room."""


class SmallDisk:
    """A file system in memory; `ballast` takes up its room."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def leave(self, room: int) -> None:
        """Fill it up to so many bytes."""
        free = shutil.disk_usage(self.path).free
        with self._ballast.open("ab") as file:
            os.posix_fallocate(file.fileno(), self._ballast.stat().st_size, max(PAGE, free - room))

    def read_only(self) -> None:
        """Take nothing more, as a kernel does with a disk that has failed. No file may be open for writing."""
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)

    def clear(self) -> None:
        """Free what the ballast took."""
        self._ballast.unlink()


@contextmanager
def small_disk(folder: Path, size: int) -> Generator[SmallDisk]:
    """A disk of so many bytes at this folder, for the length of the block. Skips the test where none can be mounted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
