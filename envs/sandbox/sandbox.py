"""Sandbox: the methods that users call, and the interface that each kind of sandbox implements.

`SandboxSeam` is that interface, of five members. A container of this machine, a leased sandbox, a remote one and a
simulated one implement it. A `SandboxRequest` is answered once; a `SandboxOpening` is held for the time of a block.
Both are structs, so a sandbox can refuse them or pass them on without knowing each kind.

`Commands`, `Shells`, `Files`, `Snapshots` and `Lifecycle` are the parts that users call. They only create requests.
`Sandbox` combines them; a function that needs only one part takes that part as its parameter type.
"""

from __future__ import annotations

import builtins
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

import anyio
import anyio.to_thread
import msgspec

from envs.sandbox.api import (
    Chunk,
    Command,
    Exec,
    FileInfo,
    Job,
    OnLost,
    Result,
    Session,
    Snapshot,
    Spec,
    State,
    Terminal,
)
from envs.sandbox.trees import COPY_BYTES, TreeLimits, pack, unpack
from flash.errors import SandboxRefusedError

T = TypeVar("T")

MEMORY_BYTES = 1 << 20
"""Largest tree in bytes that is kept in memory while it is transferred; a larger one goes to a temporary file."""
_TREES = anyio.CapacityLimiter(4)
"""Most threads that pack or unpack trees at the same time."""


class SandboxRequest(msgspec.Struct, Generic[T], frozen=True):
    """Request to a sandbox that is answered once, with a `T`."""


class RunCommand(SandboxRequest[Result], frozen=True):
    """Request to run a command until it ends. Refused without a timeout."""

    exec: Exec


class StartJob(SandboxRequest[Job], frozen=True):
    """Request to start a command in the background. Refused with standard input, which a job cannot have."""

    exec: Exec


class ReadFile(SandboxRequest[bytes], frozen=True):
    """Request of `Files.read`."""

    path: str
    offset: int = 0
    limit: int | None = None


class WriteFile(SandboxRequest[None], frozen=True):
    """Request of `Files.write`."""

    path: str
    data: bytes
    mode: int = 0o644
    append: bool = False


class ListFolder(SandboxRequest[list[FileInfo]], frozen=True):
    """Request of `Files.list`."""

    path: str


class RemovePath(SandboxRequest[None], frozen=True):
    """Request of `Files.remove`."""

    path: str


class PutArchive(SandboxRequest[None], frozen=True):
    """Request to unpack a tar archive in the sandbox as the file or folder `path`, piece by piece as it arrives."""

    path: str
    pieces: AsyncIterator[bytes]
    size: int | None = None
    """Size of the archive in bytes, if it is known in advance."""


class TakeSnapshot(SandboxRequest[Snapshot], frozen=True):
    """Request of `Snapshots.snapshot`."""


class MakeForks(SandboxRequest[Sequence["Sandbox"]], frozen=True):
    """Request of `Snapshots.fork`."""

    count: int


class SandboxOpening(msgspec.Struct, Generic[T], frozen=True):
    """Request for a resource of a sandbox that is held for the time of a block, as a `T`."""


class StreamCommand(SandboxOpening[AsyncIterator[Chunk | Result]], frozen=True):
    """Request to run a command and stream its output. Leaving the block kills it. Refused without a timeout."""

    exec: Exec


class StreamTree(SandboxOpening[AsyncIterator[bytes]], frozen=True):
    """Request to stream a file or folder of the sandbox as a tar archive. Its content must not be trusted."""

    path: str
    limits: TreeLimits


class OpenSession(SandboxOpening[Session], frozen=True):
    """Request of `Shells.session`."""

    name: str = "main"


class OpenTerminal(SandboxOpening[Terminal], frozen=True):
    """Request of `Shells.terminal`."""

    command: Command


def refused(asked: SandboxRequest[Any] | SandboxOpening[Any]) -> SandboxRefusedError:
    """Return the error of a sandbox whose kind does not support a request."""
    return SandboxRefusedError(f"a sandbox of this kind cannot do `{type(asked).__name__}`")


class SandboxFacts(msgspec.Struct, frozen=True):
    """Properties of a sandbox that are known without a request to it."""

    sandbox_id: str
    spec: Spec
    state: State


class SandboxSeam(ABC):
    """Interface that each kind of sandbox implements."""

    @property
    @abstractmethod
    def facts(self) -> SandboxFacts:
        """Current properties of the sandbox."""

    @abstractmethod
    async def ask(self, request: SandboxRequest[T]) -> T:
        """Run a request.

        Raises:
            SandboxRefusedError: the sandbox does not support the request.
            SandboxError: another failure.
        """

    @abstractmethod
    def open(self, opening: SandboxOpening[T]) -> AbstractAsyncContextManager[T]:
        """Open a resource for the time of the block.

        Raises:
            SandboxRefusedError: the sandbox does not support it.
            SandboxError: another failure.
        """

    @abstractmethod
    async def wait_ended(self) -> None:
        """Wait until the state is `lost` or `closed`. The pool waits here for every sandbox that it has handed out."""

    @abstractmethod
    async def close(self) -> None:
        """End the sandbox and remove its container. May be called more than once."""


class Commands(SandboxSeam):
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
        ended; use `start` for commands that should go on. `env` is added to the sandbox's own variables.
        """
        exec = Exec(command=command, timeout=timeout, patience=patience, stdin=stdin, env=env, cwd=cwd)
        return await self.ask(RunCommand(exec))

    def stream(
        self,
        command: Command,
        *,
        timeout: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> AsyncGenerator[Chunk | Result]:
        """Run a command as `run` does, and yield its output as it is written, without a limit on its size.

        The last item is the `Result`, without output. Leaving the loop early kills the command. Close the iterator
        (`contextlib.aclosing`) to kill it at once.
        """
        return self._streamed(Exec(command=command, timeout=timeout, stdin=stdin, env=env, cwd=cwd))

    async def _streamed(self, exec: Exec) -> AsyncGenerator[Chunk | Result]:
        async with self.open(StreamCommand(exec)) as items:
            async for item in items:
                yield item

    async def start(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Job:
        """Start a command in the background. Without a timeout it may run for as long as the sandbox lives."""
        return await self.ask(StartJob(Exec(command=command, timeout=timeout, env=env, cwd=cwd)))


class Shells(SandboxSeam):
    """Methods that start interactive programs."""

    def session(self, name: str = "main") -> AbstractAsyncContextManager[Session]:
        """Open a shell for the time of the block. Raises SandboxBusyError if a shell of this name is open."""
        return self.open(OpenSession(name))

    def terminal(self, command: Command) -> AbstractAsyncContextManager[Terminal]:
        """Run a program on a pseudo-terminal for the time of the block, with bytes in both directions while it runs.

        Raises:
            SandboxRefusedError: this is a sandbox of a service. Terminals need a sandbox of this machine's engine.
        """
        return self.open(OpenTerminal(command))


class Files(SandboxSeam):
    """Methods for files and trees. Relative paths start at the working directory."""

    tree_limits = TreeLimits()
    """Limits of uploads and downloads."""

    async def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes of a regular file; fewer than `limit` only at its end.

        Raises:
            SandboxFileError: the file cannot be read.
            SandboxLimitError: more bytes are requested than one call may return.
        """
        return await self.ask(ReadFile(path, offset, limit))

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, append: bool = False) -> None:
        """Replace a file atomically, or append to it. Missing folders are created.

        No program in the sandbox sees half of a replaced file, also if the call is cancelled.
        """
        await self.ask(WriteFile(path, data, mode, append))

    async def list(self, path: str = ".") -> builtins.list[FileInfo]:
        """Return the entries of a folder, sorted by name. For a file, return its own entry."""
        return await self.ask(ListFolder(path))

    async def remove(self, path: str) -> None:
        """Remove a file, a link, or a folder with everything in it. Does nothing if it does not exist."""
        await self.ask(RemovePath(path))

    async def upload(self, source: Path, path: str) -> None:
        """Copy a local file to the file `path`, or the content of a local folder into the folder `path`.

        Links are copied as links.

        Raises:
            SandboxFileError: the source cannot be read, or has an entry that is neither a file, a folder nor a link.
            SandboxLimitError: the source exceeds the limits on size and entries.
        """
        with tempfile.SpooledTemporaryFile(MEMORY_BYTES) as archive:
            await _in_thread(partial(pack, Path(source), archive, self.tree_limits))
            size = archive.tell()
            archive.seek(0)
            await self.ask(PutArchive(path, _pieces(archive), size))

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or tree of the sandbox to `target`. Nothing is written outside of it, whatever the sandbox sends.

        Raises:
            SandboxFileError: the target exists or cannot be written.
            SandboxLimitError: the tree exceeds the limits, or has devices, pipes or links that lead out of it.
        """
        with tempfile.SpooledTemporaryFile(MEMORY_BYTES) as archive:
            async with self.open(StreamTree(path, self.tree_limits)) as pieces:
                async for piece in pieces:
                    archive.write(piece)
            archive.seek(0)
            await _in_thread(partial(unpack, archive, Path(target), self.tree_limits))


async def _in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread until it ends, also if cancelled."""
    # It is not abandoned on cancellation, because its caller then closes the archive; the limits bound its time. The
    # limiter is separate: with anyio's, which the whole process shares, many trees would keep all threads busy.
    await anyio.to_thread.run_sync(work, limiter=_TREES)


async def _pieces(archive: IO[bytes]) -> AsyncGenerator[bytes]:
    while piece := archive.read(COPY_BYTES):
        yield piece


class Snapshots(SandboxSeam):
    """Methods that save the files of a sandbox and start more sandboxes from them."""

    async def snapshot(self) -> Snapshot:
        """Save the current files as an image. The snapshot outlives the sandbox; its owner removes it."""
        return await self.ask(TakeSnapshot())

    async def fork(self, count: int) -> Sequence[Sandbox]:
        """Start `count` new sandboxes with the same files. They are closed with this one at the latest."""
        return await self.ask(MakeForks(count))


class Lifecycle(SandboxSeam):
    """Identity and state of a sandbox."""

    @property
    def sandbox_id(self) -> str:
        """Id of the sandbox at its provider."""
        return self.facts.sandbox_id

    @property
    def spec(self) -> Spec:
        """Spec that the sandbox was ordered with."""
        return self.facts.spec

    @property
    def state(self) -> State:
        """Current state."""
        return self.facts.state


class Sandbox(Commands, Shells, Files, Snapshots, Lifecycle):
    """A sandbox, on this machine or another one."""


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
