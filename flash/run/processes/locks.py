"""Locks between launches: who may write a run directory, whether the owner of a temporary folder still lives, and
who makes first what all of them need.

A launcher holds the first byte of the lock's file, alone; each process that it started shares the second, so that what
a killed launcher left behind counts until it has ended. The kernel releases both when a process dies, however it dies.

These are `fcntl.lockf`'s locks: unlike `flock`'s they never pass to forked children, and network file systems know
them. They go when a process closes *any* descriptor of the file, so each process opens a lock's file once.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from flash.errors import RunDirectoryError

log = logging.getLogger("flash")

LAUNCHER, PROCESSES = 0, 1
"""The bytes of a lock's file."""

BUSY = (errno.EACCES, errno.EAGAIN)
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_shared: list[int] = []
"""Descriptors that hold this process's shared locks to its end."""


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lock, as written into its file."""

    pid: int
    host: str
    since: float
    """Unix seconds."""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class Busy(Exception):
    """Somebody else has the lock; the message says who."""


@contextmanager
def exclusive(path: Path, wait_s: float) -> Generator[None]:
    """Be the one launcher while the block runs, after waiting for what an earlier one has left behind.

    Raises:
        Busy: another launcher lives, or processes of an earlier one still do after `wait_s`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _lock(descriptor, LAUNCHER, fcntl.LOCK_EX | fcntl.LOCK_NB):
            raise Busy(_holder(descriptor))
        if not (_lock(descriptor, PROCESSES, fcntl.LOCK_EX | fcntl.LOCK_NB) or _others_end(descriptor, wait_s)):
            raise Busy(f"processes that were started by {_holder(descriptor)}, and outlived it")
        _lock(descriptor, PROCESSES, fcntl.LOCK_UN)
        _sign(descriptor)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def in_turn(path: Path, doing: str, wait_s: float) -> Generator[None]:
    """Be the only process in such a block, after waiting for the one that is in it.

    Raises:
        Busy: it still is after `wait_s`.
    """
    # Other users may share the folder.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not _lock(descriptor, LAUNCHER, fcntl.LOCK_EX | fcntl.LOCK_NB):
            log.warning("waiting up to %g s for %s, which is %s", wait_s, _holder(descriptor), doing)
            if not _gets(descriptor, LAUNCHER, wait_s):
                raise Busy(_holder(descriptor))
        _sign(descriptor)
        yield
    finally:
        os.close(descriptor)


def share(path: Path) -> None:
    """Count as one of the launcher's processes until this process ends."""
    with suppress(FileNotFoundError):  # a folder that has been removed by hand protects nothing
        # A shared lock needs no right to write, which a disk that has failed does not give any more.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        _shared.append(descriptor)
        _lock(descriptor, PROCESSES, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_free(path: Path) -> bool:
    """Whether neither a launcher nor a process of one lives; never to be asked of a lock that this process holds."""
    try:
        with exclusive(path, wait_s=0):
            return True
    except Busy:
        return False


def run_lock(run_dir: Path) -> Path:
    """The lock of a run directory. It lies beside it, since a new run moves an older one of its name away."""
    return run_dir.with_name(f".{run_dir.name}.lock")


def in_use(run_dir: Path) -> bool:
    """Whether a launch of this run lives, or a process of one. Leaves nothing behind."""
    path = run_lock(run_dir)
    try:
        return path.exists() and not is_free(path)
    except OSError:  # not a file of ours: whoever wants the run directory is told
        return False


@contextmanager
def exclusive_run(run_dir: Path, wait_s: float) -> Generator[None]:
    """Be the only launch that writes a run directory while the block runs.

    Raises:
        RunDirectoryError: another launch writes it, or the output folder cannot be written.
    """
    path = run_lock(run_dir)
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive(path, wait_s))
        except Busy as holder:
            raise RunDirectoryError(
                f"{run_dir} is in use by {holder}: wait for its end or end it, or give this run another run.name"
            ) from None
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write {path}: {error.strerror}; check that run.output_dir names a folder you may write to"
            ) from error
        yield


def _lock(descriptor: int, byte: int, how: int) -> bool:
    """Whether a byte could be locked. A file system without locks protects nothing, and is told of once."""
    try:
        fcntl.lockf(descriptor, how, 1, byte)
    except OSError as error:
        if error.errno in BUSY:
            return False
        if error.errno not in UNSUPPORTED:
            raise
        if byte == LAUNCHER:
            log.warning("no locks on this file system (%s): two launches of a run would not notice", error.strerror)
    return True


def _others_end(descriptor: int, seconds: float) -> bool:
    """Whether what a killed launcher left behind ends in time."""
    if seconds == 0:
        return False
    log.warning("waiting up to %g s for the processes that a killed launcher left behind", seconds)
    return _gets(descriptor, PROCESSES, seconds)


def _gets(descriptor: int, byte: int, seconds: float) -> bool:
    """Whether a byte can be locked in time. In a thread, since lockf knows no deadline."""
    ours = threading.Event()

    def wait() -> None:
        with suppress(OSError):  # we gave up, and closed the file
            fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, byte)
            ours.set()

    threading.Thread(target=wait, daemon=True).start()
    return ours.wait(seconds)


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, msgspec.json.encode(Holder(os.getpid(), socket.gethostname(), time.time())), 0)


def _holder(descriptor: int) -> str:
    try:
        return str(msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Holder))
    except msgspec.DecodeError:
        return "another process that has only just begun"
