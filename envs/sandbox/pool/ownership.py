"""Who owns a container, and whether the owner still lives: labels, and a lock that dies with its process.

Every container carries `Labels` from the moment it exists; the engine writes them together with the container, so that
no crash can separate the two. They say which service made it, and the last moment it may exist. Whether that service
still runs is told by its lock file: the kernel drops the lock with the process, also after `kill -9`.

`verdict` decides alone from these, the same in every process that can reach the engine: any survivor can clean up.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import msgspec

from flash.errors import ConfigError

PREFIX = "flash.sandbox."
"""Begins the name of every label of ours."""

MARGIN_S = 60.0
"""Seconds past its deadline after which a container of an unknown owner is removed: clocks of two machines differ."""


_FLOCK = "@hhqqi0q"
"""`struct flock`: type, whence, start, length, process."""


class Labels(msgspec.Struct, frozen=True):
    """What a container's labels say."""

    sandbox_id: str = msgspec.field(name="box")
    """The sandbox it is."""
    service: str
    """Who made it; the same after a restart of that service."""
    deadline: float
    """Unix time after which it must not exist."""
    lock: str
    """The lock file that the owner holds while it runs."""
    machine: str
    """Where that file is: the boot of the machine."""
    lease: str = ""
    """For whom it was made; "" when it was made ahead of any request."""
    owner: str = ""
    """On whose behalf."""
    run: str = ""
    """The start of the service that made it."""

    def as_dict(self) -> dict[str, str]:
        """The labels of a container."""
        return {PREFIX + name: str(value) for name, value in msgspec.to_builtins(self).items()}

    @classmethod
    def read(cls, labels: Mapping[str, str]) -> Labels | None:
        """From a container's labels; None when they are not ours, or damaged."""
        ours = {name.removeprefix(PREFIX): value for name, value in labels.items() if name.startswith(PREFIX)}
        try:
            return msgspec.convert(ours, cls, strict=False)
        except msgspec.ValidationError:
            return None


class OwnerAlive(Enum):
    """What is known of a container's owner."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"
    """It runs, or ran, on another machine."""


class OwnerVerdict(Enum):
    """What to do with a container."""

    KEEP = "keep"
    ORPHAN = "orphan"
    """Its owner is gone. To be removed unless the owner comes back within a grace."""
    REMOVE = "remove"
    """Its time is over."""


def verdict(labels: Labels, alive: OwnerAlive, now: float) -> OwnerVerdict:
    """What to do with somebody else's container at unix time `now`.

    A living owner is left alone, whatever the clock says: it keeps the deadlines itself, on a clock that does not jump.
    """
    if alive is OwnerAlive.YES:
        return OwnerVerdict.KEEP
    if alive is OwnerAlive.NO:
        return OwnerVerdict.ORPHAN
    return OwnerVerdict.REMOVE if now > labels.deadline + MARGIN_S else OwnerVerdict.KEEP


def machine() -> str:
    """This boot of this machine. Containers that outlived a boot have lost their owner with it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def owner_alive(labels: Labels, this_machine: str) -> OwnerAlive:
    """Whether the process that owns a container still runs."""
    if labels.machine != this_machine:
        return OwnerAlive.UNKNOWN
    try:
        descriptor = os.open(labels.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return OwnerAlive.NO
    except OSError:
        return OwnerAlive.UNKNOWN
    try:
        # Asked, not tried: a lock taken for a moment could make the owner's own start fail.
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
    finally:
        os.close(descriptor)
    return OwnerAlive.NO if struct.unpack(_FLOCK, found)[0] == fcntl.F_UNLCK else OwnerAlive.YES


def _whole_file(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


def runtime_folder() -> Path:
    """Where the locks of this user's services are: made on first use, readable by nobody else.

    Raises:
        ConfigError: somebody else made it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"flash-sandbox-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder} belongs to somebody else, or others may write there; remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


class OwnerLock:
    """Held while a service runs. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def __enter__(self) -> OwnerLock:
        """Take it.

        Raises:
            ConfigError: another process holds it.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Of the open file, not of the process: another part of this process can see it too.
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            raise ConfigError(f"{self.path} is held: a service with this state folder runs already") from None
        self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        """Drop it. The file stays: removing it could take it from under the next owner."""
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor = None
