"""Sandbox: the methods of every sandbox, wherever it runs.

`Commands`, `Shells`, `Archives`, `Files`, `Snapshots` and `Lifecycle` are its parts. `Sandbox` combines them; a
function that needs only one part takes that part as its parameter type. There are four kinds of sandboxes, and a call
passes through one or several of them:

- `envs.sandbox.remote.client.RemoteSandbox` sends the call to a service over HTTP. The service's route calls the same
  method of a leased sandbox.
- `envs.sandbox.pool.lease.LeasedSandbox` notes that the lease is in use, and calls the same method of its sandbox.
- `envs.sandbox.local.sandbox.LocalSandbox` is a container. Its methods, in `envs.sandbox.local.agent`, call the agent
  inside.
- `envs.sandbox.pool.simulated.SimulatedSandbox` only lets time pass, for tests.

A method that a kind does not implement raises SandboxRefusedError.
"""

from __future__ import annotations

import builtins
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import anyio
import anyio.to_thread

from envs.sandbox.api import Chunk, Command, FileInfo, Job, OnLost, Result, Session, Snapshot, Spec, State, Terminal
from envs.sandbox.trees import COPY_BYTES, TreeLimits, pack, unpack
from flash.errors import SandboxError, SandboxFileError, SandboxLimitError, SandboxRefusedError

MEMORY_BYTES = 1 << 20
"""Largest tree in bytes that is kept in memory while it is transferred; a larger one goes to a temporary file."""
_TREES = anyio.CapacityLimiter(4)
"""Limiter of the threads that pack or unpack trees: at most four at the same time."""


class Commands:
    """Methods that run programs, each in a process group of its own."""

    async def run(
        self,
        command: Command,
        *,
        timeout: float,
        patience: float | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Result:
        """Run a command in a process group of its own until it ends, for at most `timeout` seconds.

        With `patience`, time in which the command was ready to run but had no CPU does not count towards `timeout`,
        until `patience` seconds have passed on the clock. Other processes of the group are killed when the command has
        ended; use `start` for commands that should go on. `stdin` is the whole input of the command, `env` is added to
        the sandbox's own variables, and `cwd` is the folder where it starts; None: the working directory.

        Raises:
            SandboxRefusedError: an argument is wrong.
            SandboxLimitError: the command is too long.
            SandboxError: the sandbox cannot say how the command ended, for example because it was lost.
        """
        raise _refused(self, "run")

    def stream(
        self,
        command: Command,
        *,
        timeout: float,
        patience: float | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> AsyncGenerator[Chunk | Result]:
        """Run a command as `run` does, and yield its output as it is written, without a limit on its size.

        The last item is the `Result`, without output. Leaving the loop early kills the command. Close the iterator
        (`contextlib.aclosing`) to kill it at once.

        Raises:
            SandboxLimitError: `stdin` has more than `STREAM_INPUT` bytes.
            SandboxError: the errors of `run`.
        """
        raise _refused(self, "stream")

    async def start(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        patience: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Job:
        """Start a command in the background, and return at once. Without a timeout it may run as long as the sandbox.

        `timeout`, `patience`, `env` and `cwd` are those of `run`. Raises the errors of `run`.
        """
        raise _refused(self, "start")


class Shells:
    """Methods that start interactive programs."""

    def session(self, name: str = "main") -> AbstractAsyncContextManager[Session]:
        """Open a shell for the time of the block. Raises SandboxBusyError if a shell of this name is open."""
        raise _refused(self, "session")

    def terminal(self, command: Command) -> AbstractAsyncContextManager[Terminal]:
        """Run a program on a pseudo-terminal for the time of the block, with bytes in both directions while it runs.

        Raises:
            SandboxRefusedError: this is a sandbox of a service. Terminals need a sandbox of this machine's engine.
        """
        raise _refused(self, "terminal")


class Archives:
    """Methods that pass a file or a tree on as a tar archive, piece by piece. `Files` packs and unpacks archives."""

    async def put_archive(self, path: str, pieces: AsyncIterator[bytes], size: int | None = None) -> None:
        """Unpack a tar archive in the sandbox as the file or folder `path` while its pieces arrive.

        `size` is the number of bytes of the archive; None if it is not known in advance.

        Raises:
            SandboxFileError: the sandbox cannot have the file or folder `path`, or the archive is damaged.
            SandboxLimitError: the disk of the sandbox is full.
        """
        raise _refused(self, "put_archive")

    def get_archive(self, path: str, limits: TreeLimits) -> AsyncGenerator[bytes]:
        """Yield a file or folder of the sandbox as a tar archive. Its content must not be trusted.

        Raises:
            SandboxLimitError: the archive exceeds the limits.
        """
        raise _refused(self, "get_archive")


class Files(Archives):
    """Methods for files and trees. Relative paths start at the working directory."""

    tree_limits = TreeLimits()
    """Limits of uploads and downloads."""

    async def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes of a regular file from byte `offset` on: `limit` of them, or fewer at its end. None: all.

        Raises:
            SandboxFileError: the file cannot be read.
            SandboxLimitError: more bytes are requested than one call may return.
        """
        raise _refused(self, "read")

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, append: bool = False) -> None:
        """Replace a file atomically, or append to it. Missing folders are created.

        `mode`, from 0 to 0o777, holds the permissions of a file that is created or replaced. No program in the sandbox
        sees half of a replaced file, also if the call is cancelled. If `path` is a link, the link itself is replaced.
        Appending follows links and keeps the mode of an existing file.

        Raises:
            SandboxFileError: the file cannot be written.
            SandboxLimitError: the disk of the sandbox is full, or `data` has more bytes than one call may write.
            SandboxRefusedError: the path cannot be encoded, or the mode is wrong.
        """
        raise _refused(self, "write")

    async def list(self, path: str = ".") -> builtins.list[FileInfo]:
        """Return the entries of a folder, sorted by name. For a file or a link, return its own entry.

        Raises:
            SandboxFileError: there is no such folder, or it cannot be read.
            SandboxLimitError: the folder has too many entries.
        """
        raise _refused(self, "list")

    async def remove(self, path: str) -> None:
        """Remove a file, a link, or a folder with everything in it. Does nothing if it does not exist.

        Raises:
            SandboxFileError: the entry cannot be removed, or is the working directory or a folder that contains it.
        """
        raise _refused(self, "remove")

    async def upload(self, source: Path, path: str) -> None:
        """Copy a local file to the file `path`, or the content of a local folder into the folder `path`.

        Links are copied as links.

        Raises:
            SandboxRefusedError: the source cannot be read, has an entry that is neither a file, a folder nor a link, or
                exceeds the limits on size and entries.
            SandboxFileError: the sandbox cannot have the file or folder `path`.
            SandboxLimitError: the disk of the sandbox is full.
            SandboxError: this machine is at fault, for example because no temporary file can be written.
        """
        try:
            with tempfile.SpooledTemporaryFile(MEMORY_BYTES) as archive:
                try:
                    await _in_thread(partial(pack, Path(source), archive, self.tree_limits))
                except (SandboxFileError, SandboxLimitError) as error:
                    # Environments count these two classes as faults of what the policy did in the sandbox. The source
                    # is not in the sandbox.
                    raise SandboxRefusedError(str(error)) from error
                size = archive.tell()
                archive.seek(0)
                await self.put_archive(path, _pieces(archive), size)
        except OSError as error:  # The disk of temporary files is full. `seek` and the end of the block write as well.
            message = f"{source} cannot be uploaded: no temporary file can be written: {error}"
            raise SandboxError(message) from error

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or tree of the sandbox to `target`. Nothing is written outside of it, whatever the sandbox sends.

        Raises:
            SandboxFileError: `path` cannot be read, or the target cannot be written. A tree is never written over a
                file or into a folder that has entries; a single file replaces an existing file.
            SandboxLimitError: the tree exceeds the limits, or has devices, pipes or links that lead out of it.
            SandboxError: this machine is at fault, for example because its disk is full or it has no descriptor left.
        """
        try:
            with tempfile.SpooledTemporaryFile(MEMORY_BYTES) as archive:
                async with aclosing(self.get_archive(path, self.tree_limits)) as pieces:
                    async for piece in pieces:
                        archive.write(piece)
                archive.seek(0)
                await _in_thread(partial(unpack, archive, Path(target), self.tree_limits))
        except OSError as error:  # The disk of temporary files is full. `seek` and the end of the block write as well.
            message = f"{path} cannot be downloaded: no temporary file can be written: {error}"
            raise SandboxError(message) from error


async def _in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread until it ends, also if cancelled."""
    # It is not abandoned on cancellation, because its caller then closes the archive; the limits bound its time. The
    # limiter is separate: with anyio's, which the whole process shares, many trees would keep all threads busy.
    await anyio.to_thread.run_sync(work, limiter=_TREES)


async def _pieces(archive: IO[bytes]) -> AsyncGenerator[bytes]:
    """Yield the rest of an open archive in pieces of `COPY_BYTES`, for `put_archive`."""
    while piece := archive.read(COPY_BYTES):
        yield piece


class Snapshots:
    """Methods that save the files of a sandbox and start more sandboxes from them."""

    async def snapshot(self) -> Snapshot:
        """Save the current files as an image. The snapshot outlives the sandbox.

        A pool removes it after `PoolSettings.snapshot_s` seconds. A client of a service may remove it earlier. Raises
        SandboxError if it cannot be made.
        """
        raise _refused(self, "snapshot")

    async def fork(self, count: int) -> Sequence[Sandbox]:
        """Start `count` new sandboxes with the same files, and return them. They are closed with this one at the
        latest. Raises SandboxError if one cannot be started; none is left then."""
        raise _refused(self, "fork")


class Lifecycle(ABC):
    """Identity, state and end of a sandbox. Every kind implements these members; nothing here asks the sandbox."""

    @property
    @abstractmethod
    def sandbox_id(self) -> str:
        """Id of the sandbox at its provider."""

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """Spec that the sandbox was ordered with."""

    @property
    @abstractmethod
    def state(self) -> State:
        """Current state, as far as it is known here."""

    @abstractmethod
    async def wait_ended(self) -> None:
        """Wait until the state is `lost` or `closed`. The pool waits here for every sandbox that it has handed out."""

    @abstractmethod
    async def close(self) -> None:
        """End the sandbox and remove its container. May be called more than once."""


class Sandbox(Commands, Shells, Files, Snapshots, Lifecycle):
    """A sandbox, on this machine or another one."""


def _refused(part: object, method: str) -> SandboxRefusedError:
    """Return the error of a method that this kind of sandbox does not implement."""
    return SandboxRefusedError(f"a sandbox of this kind ({type(part).__name__}) has no `{method}`")


class SandboxProvider(Protocol):
    """Provider of sandboxes: a pool in this process, or the client of a service."""

    def acquire(
        self, spec: Spec, *, owner: str = "", priority: int = 0, deadline: float = 600.0, on_lost: OnLost = "fail"
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Lease a sandbox for the time of the block.

        Args:
            spec: the kind of sandbox.
            owner: name of the owner; the sandboxes are shared fairly between owners.
            priority: requests of one owner with a larger number are served sooner.
            deadline: seconds to wait for the sandbox.
            on_lost: with `recreate`, a lost sandbox is replaced by an empty one. A SandboxLostError reports the loss.

        Raises:
            SandboxBusyError: there was no room within the deadline.
            SandboxError: the sandbox cannot be started, or the provider cannot be reached.
        """
        ...
