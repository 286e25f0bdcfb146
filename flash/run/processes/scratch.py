"""Temporary folder of the job on one machine: sockets, the configuration, and temporary files of libraries.

The folder is removed at the end of the job. If the job was killed, the next launch on the machine removes the folder,
once the folder's lock shows that no process needs it.
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
"""Beginning of the folder's name."""
VARIABLE = "FLASH_SCRATCH"
"""Environment variable with the path of the folder, for the processes of the job."""
LONGEST = 64
"""Largest length of the folder's path in bytes, so that the paths of sockets in it fit. vLLM adds 37 bytes to it, and
Linux allows 107."""
LOCK = "lock"
"""Name of the lock file in the folder."""
SHARED = re.compile(r" /dev/shm/((?:psm_|sem\.mp-)\S+)$", re.MULTILINE)
"""Pattern of a shared-memory block or semaphore of Python's multiprocessing in a line of /proc/PID/maps."""
SHARED_MEMORY = "shared-memory"
"""Name of the file that lists the names that the job's engines use in /dev/shm. Nothing else distinguishes them from
the names of other jobs."""


@contextmanager
def scratch_folder(beside: Path | None = None) -> Generator[Path]:
    """Create a temporary folder for the processes that are started in the block, and remove it with its contents.

    The folder lies in `beside`, or else in Python's folder for temporary files, or in /tmp if its path would be too
    long.
    """
    base = str(beside or tempfile.gettempdir())
    short = base if len(os.fsencode(base)) < LONGEST - 20 else "/tmp"
    remove_abandoned(Path(short))
    # Locked before it gets its final name, under which other launches look for abandoned folders.
    folder = Path(tempfile.mkdtemp(prefix=".flash-new-", dir=short))
    with exclusive(folder / LOCK, wait_s=0):
        folder = folder.rename(folder.with_name(folder.name.replace(".flash-new-", PREFIX)))
        variables = {
            VARIABLE: str(folder),
            "TMPDIR": str(folder),
            # Compiled kernels are worth keeping, so their cache stays where torch puts it by default.
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
    """Keep the folder as long as this process lives, even if the launcher dies."""
    share(Path(os.environ[VARIABLE]) / LOCK)


def remember_shared_memory(core: int) -> None:
    """Record the names in /dev/shm that an engine's process group uses, so that they are removed with the job.

    Called again, the function adds new names. `core` is the process id of the engine's core, which leads the group. If
    the disk is full, the names are not recorded, and the engine continues.
    """
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if os.getpgid(int(process.name)) == core:
                found.update(SHARED.findall((process / "maps").read_text()))
    with suppress(OSError), (Path(os.environ[VARIABLE]) / SHARED_MEMORY).open("a+") as file:
        file.seek(0)
        # A single write, because several engines may start at the same time.
        file.write("".join(f"{name}\n" for name in sorted(found - set(file.read().splitlines()))))


def remove_abandoned(base: Path) -> None:
    """Remove the folders that killed jobs of this user have left in `base`."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another launch removes it at the same time, or we have no permission
            if folder.stat().st_uid == os.getuid() and (folder / LOCK).is_file() and is_free(folder / LOCK):
                _remove(folder)


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        for name in (folder / SHARED_MEMORY).read_text().splitlines():
            Path("/dev/shm", Path(name).name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
