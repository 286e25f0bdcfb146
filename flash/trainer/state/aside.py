"""Folders that appear whole or not at all: put together beside the place that they will have, then renamed."""

from __future__ import annotations

import glob
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ASIDE = ".making-"
"""In the name of the folder in which another is put together."""


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A new folder beside `path` that takes its place when the block ends well, and vanishes when it does not.

    What stands beside the new folder, in its parent, vanishes in either case.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}{ASIDE}", dir=path.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new
        if path.exists():
            path.rename(Path(scratch) / "old")
        new.rename(path)


def remove_leftovers(path: Path) -> None:
    """Remove what processes have left beside `path` that were killed while they put a folder there.

    To be called while no other process is about to.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}{ASIDE}*"):
        shutil.rmtree(left, ignore_errors=True)
