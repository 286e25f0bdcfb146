"""Locks between the launches on a file system.

A launch is one execution of a command that starts processes; its first process is the launcher. The locks decide which
launch may write a run directory, whether the owner of a temporary folder is alive, and which process makes a model that
several processes need.

A launcher holds an exclusive lock on the first byte of the lock file. Each process that it started holds a shared lock
on the second byte, so processes that a killed launcher left behind count until they have ended. The kernel releases
both locks when a process dies, whatever the cause.

These are the locks of `fcntl.lockf`. Unlike the locks of `flock`, they are never inherited by forked children, and
network file systems support them. A process loses them when it closes *any* descriptor of the file, so each process
opens a lock file once.
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

from flash.errors import DECODE_ERRORS, RunDirectoryError

log = logging.getLogger("flash")

LAUNCHER, PROCESSES = 0, 1
"""Offsets of the two bytes in a lock file that are locked: by the launcher, and by the processes that it started."""

BUSY = (errno.EACCES, errno.EAGAIN)
"""errno values of a lock that another process holds."""
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""errno values of a file system that has no locks."""

_shared: list[int] = []
"""Descriptors of this process's shared locks. They stay open until the process ends."""


class Holder(msgspec.Struct, frozen=True):
    """Process that holds a lock, as it is written into the lock file."""

    pid: int
    """Process id."""
    host: str
    """Name of the process's machine."""
    since: float
    """Time at which it got the lock, in Unix seconds."""

    def __str__(self) -> str:
        """Return a phrase for messages, such as `process 4711 on node1, since 2026-01-31 12:00:00`."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class Busy(Exception):
    """Error of a lock that another process holds. The message is a phrase for that process."""


@contextmanager
def exclusive(path: Path, wait_s: float) -> Generator[None]:
    """Hold the launcher's lock while the block runs. Wait first until the processes of a killed launcher have ended.

    Launchers lock a run directory (`exclusive_run`) and their scratch folder in this way. The lock file then names this
    process, for the error messages of others.

    Args:
        path: path of the lock file, which is made if it does not exist.
        wait_s: seconds to wait for processes of a killed launcher; 0: do not wait.

    Raises:
        Busy: another launcher is alive, or processes of an earlier one are still alive after `wait_s` seconds.
        OSError: the lock file cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _lock(descriptor, LAUNCHER, fcntl.LOCK_EX | fcntl.LOCK_NB):
            raise Busy(_holder(descriptor))
        if not (_lock(descriptor, PROCESSES, fcntl.LOCK_EX | fcntl.LOCK_NB) or _wait_for_others(descriptor, wait_s)):
            raise Busy(f"processes that were started by {_holder(descriptor)}, and outlived it")
        # The exclusive lock has only shown that no process of an earlier launch is alive. The processes of this launch
        # will share the second byte.
        _lock(descriptor, PROCESSES, fcntl.LOCK_UN)
        _write_holder(descriptor)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def in_turn(path: Path, activity: str, wait_s: float) -> Generator[None]:
    """Hold the lock while the block runs, so that one process at a time runs it. Waits for another holder first.

    Processes that make the same model folder use this (`flash.run.fetch.model_lock`).

    Args:
        path: path of the lock file.
        activity: phrase for the work of the holder in a log message, such as `making the model outputs/tiny`.
        wait_s: seconds to wait for another holder.

    Raises:
        Busy: another process still holds the lock after `wait_s` seconds.
        OSError: the lock file cannot be written.
    """
    # Processes of other users may need the same lock, so the umask alone decides who may write the file.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not _lock(descriptor, LAUNCHER, fcntl.LOCK_EX | fcntl.LOCK_NB):
            log.warning("waiting up to %g s for %s, which is %s", wait_s, _holder(descriptor), activity)
            if not _wait_for_lock(descriptor, LAUNCHER, wait_s):
                raise Busy(_holder(descriptor))
        _write_holder(descriptor)
        yield
    finally:
        os.close(descriptor)


def share(path: Path) -> None:
    """Hold the shared lock of the launcher's processes until this process ends.

    Each process that a launcher starts calls this, so that it still counts if the launcher is killed: the next launch
    waits for it, and no launch removes its scratch folder. `path` is the lock file of the run directory, or of the
    scratch folder.
    """
    with suppress(FileNotFoundError):  # a user has removed the folder, so no lock is needed
        # Opened for reading only, which suffices for a shared lock: a disk that has become read-only permits no more.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        _shared.append(descriptor)
        # This fails only if the launcher has died and the next one takes the lock. Then this process is about to end.
        _lock(descriptor, PROCESSES, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_free(path: Path) -> bool:
    """Return True if no launcher that holds the lock of the file `path`, and no process of one, is alive.

    Takes the lock for a moment, so a launcher that wants it at the same time may be refused. Raises OSError if the file
    cannot be opened.
    """
    try:
        # Closing the descriptor at the end of `exclusive` would also release a lock that this process holds on the same
        # file, so callers must hold none.
        with exclusive(path, wait_s=0):
            return True
    except Busy:
        return False


def run_lock(run_dir: Path) -> Path:
    """Return the path of a run directory's lock file.

    It lies beside the directory, which a new run of that name may move.
    """
    return run_dir.with_name(f".{run_dir.name}.lock")


def in_use(run_dir: Path) -> bool:
    """Return True if a launch of this run, or a process of one, is alive. Creates no file. The check of the hub's port
    before a run calls this."""
    path = run_lock(run_dir)
    try:
        return path.exists() and not is_free(path)
    except OSError:  # the file cannot be opened: `exclusive_run` reports that when a launch wants the run directory
        return False


@contextmanager
def exclusive_run(run_dir: Path, wait_s: float) -> Generator[None]:
    """Allow no other launch to write the run directory while the block runs, which is the whole launch of the first
    node.

    Waits first up to `wait_s` seconds for processes that a killed launcher of this run left behind.

    Raises:
        RunDirectoryError: another launch writes it, or such processes have not ended in time, or the output folder
            cannot be written.
    """
    path = run_lock(run_dir)
    # A stack, because an OSError of the caller's block must not be reported as one of the lock.
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


def _lock(descriptor: int, byte: int, flags: int) -> bool:
    """Try to lock one byte of a lock file without waiting, or unlock it. Returns False if another process holds it.

    Also returns True if the file system has no locks. Then a warning is logged, and nothing is protected: a run on such
    a file system is better than none. Raises OSError for all other errors.

    Args:
        descriptor: the open lock file.
        byte: LAUNCHER or PROCESSES.
        flags: flags of `fcntl.lockf`.
    """
    try:
        fcntl.lockf(descriptor, flags, 1, byte)
    except OSError as error:
        if error.errno in BUSY:
            return False
        if error.errno not in UNSUPPORTED:
            raise
        # The warning is logged for one of the two bytes only.
        if byte == LAUNCHER:
            log.warning("no locks on this file system (%s): two launches of a run would not notice", error.strerror)
    return True


def _wait_for_others(descriptor: int, seconds: float) -> bool:
    """Wait up to `seconds` until the processes of a killed launcher have ended. Returns True if they have."""
    if seconds == 0:
        return False
    log.warning("waiting up to %g s for the processes that a killed launcher left behind", seconds)
    return _wait_for_lock(descriptor, PROCESSES, seconds)


def _wait_for_lock(descriptor: int, byte: int, seconds: float) -> bool:
    """Wait up to `seconds` for an exclusive lock on one byte. Returns True if this process got it."""
    # lockf has no timeout, so a thread waits for it.
    acquired = threading.Event()

    def wait() -> None:
        """Wait for the lock. Runs in a thread, which may outlast the timeout."""
        with suppress(OSError):  # the time was over, and the file has been closed
            fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, byte)
            acquired.set()

    threading.Thread(target=wait, daemon=True).start()
    return acquired.wait(seconds)


def _write_holder(descriptor: int) -> None:
    """Write this process into the lock file as the holder of the lock, for the error messages of others."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, msgspec.json.encode(Holder(os.getpid(), socket.gethostname(), time.time())), 0)


def _holder(descriptor: int) -> str:
    """Return a phrase for the process that holds the lock, as the lock file names it."""
    try:
        return str(msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Holder))
    except DECODE_ERRORS:  # the process has not written itself into the file yet, or the file is damaged
        return "another process that has only just started"
