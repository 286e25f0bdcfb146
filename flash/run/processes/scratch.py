"""The job's folder for temporary files on a machine: sockets, the configuration, whatever libraries leave there.

It is removed at the job's end. What a killed job has left is removed by the next launch on the machine: the folder's
lock tells whether anybody still needs it.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from flash.run.processes.locks import exclusive, is_free, share

PREFIX = "flash-job-"
VARIABLE = "FLASH_SCRATCH"
"""Tells the job's processes where its folder is."""
LONGEST = 64
"""Bytes in the path of a folder whose sockets still have names that fit: vLLM's add 37 to it, of the 107 that Linux
takes."""
LOCK = "lock"
SHARED = re.compile(r" /dev/shm/((?:psm_|sem\.mp-)\S+)$", re.MULTILINE)
"""Shared memory and semaphores of Python's multiprocessing, among the lines of a process's maps."""
SHARED_MEMORY = "shared-memory"
"""Lists what the job's engines keep in /dev/shm, which nobody else could tell from what others keep there."""


@contextmanager
def scratch_folder(beside: Path | None = None) -> Generator[Path]:
    """Give the processes started in the block a temporary folder of their own, and remove it with what is in it.

    It lies in `beside`, or else where Python has its temporary files.
    """
    base = str(beside or tempfile.gettempdir())
    short = base if len(os.fsencode(base)) < LONGEST - 20 else "/tmp"
    remove_abandoned(Path(short))
    # Locked before it has the name by which others look for it.
    folder = Path(tempfile.mkdtemp(prefix=".flash-new-", dir=short))
    with exclusive(folder / LOCK, wait_s=0):
        folder = folder.rename(folder.with_name(folder.name.replace(".flash-new-", PREFIX)))
        variables = {
            VARIABLE: str(folder),
            "TMPDIR": str(folder),
            # Compiled kernels are worth keeping: this is where torch looks for them without us.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get(
                "TORCHINDUCTOR_CACHE_DIR", os.path.join(base, f"torchinductor_{getpass.getuser()}")
            ),
        }
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield folder
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            _remove(folder)


def join_scratch_folder() -> None:
    """Let the folder live as long as this process, even if its launcher does not."""
    share(Path(os.environ[VARIABLE]) / LOCK)


def remember_shared_memory(core: int) -> None:
    """Note what an engine's processes, the group of its core, keep in /dev/shm: it ends with the job.

    Called again, it notes what has come since. What cannot be noted, since the disk is full, costs no engine.
    """
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.getpgid(int(process.name)) == core:
                found.update(SHARED.findall((process / "maps").read_text()))
    with suppress(OSError), (Path(os.environ[VARIABLE]) / SHARED_MEMORY).open("a+") as file:
        file.seek(0)
        # One write: several engines may start at once.
        file.write("".join(f"{name}\n" for name in sorted(found - set(file.read().splitlines()))))


def remove_abandoned(base: Path) -> None:
    """Remove the folders of this user's jobs that were killed."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another launch removes it at the same time, or it is not ours to remove
            if folder.stat().st_uid == os.getuid() and (folder / LOCK).is_file() and is_free(folder / LOCK):
                _remove(folder)


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        for name in (folder / SHARED_MEMORY).read_text().splitlines():
            Path("/dev/shm", Path(name).name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
