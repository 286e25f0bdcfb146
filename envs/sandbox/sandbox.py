"""A sandbox as its users hold it: what they call, once, over a seam of five members that each kind of sandbox has.

`SandboxSeam` is what a container of this machine, a sandbox under a lease, one of a service and a simulated one
implement. Whatever is asked of a sandbox is a `SandboxRequest`, answered once, or a `SandboxOpening`, held for the time
of a block: structs that can be refused or passed on without knowing each.

`Commands`, `Shells`, `Files`, `Snapshots` and `Lifecycle` are what users call: they make requests, and do nothing else.
`Sandbox` is all of them; who needs only a part asks for that part.
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
"""Trees up to this size are kept in memory on their way, larger ones in a temporary file."""
_TREES = anyio.CapacityLimiter(4)
"""Threads that pack or unpack trees at a time."""


class SandboxRequest(msgspec.Struct, Generic[T], frozen=True):
    """Something that is asked of a sandbox, and answered once, with a `T`."""


class RunCommand(SandboxRequest[Result], frozen=True):
    """Carry out a command to its end. Refused without a timeout."""

    exec: Exec


class StartJob(SandboxRequest[Job], frozen=True):
    """Start a command in the background. Refused with an input, which a job cannot have."""

    exec: Exec


class ReadFile(SandboxRequest[bytes], frozen=True):
    """See `Files.read`."""

    path: str
    offset: int = 0
    limit: int | None = None


class WriteFile(SandboxRequest[None], frozen=True):
    """See `Files.write`."""

    path: str
    data: bytes
    mode: int = 0o644
    append: bool = False


class ListFolder(SandboxRequest[list[FileInfo]], frozen=True):
    """See `Files.list`."""

    path: str


class RemovePath(SandboxRequest[None], frozen=True):
    """See `Files.remove`."""

    path: str


class PutArchive(SandboxRequest[None], frozen=True):
    """Unpack a tar archive in the sandbox as the file or folder `path`, piece by piece as it comes."""

    path: str
    pieces: AsyncIterator[bytes]
    size: int | None = None
    """Bytes of the archive, where that is known before."""


class TakeSnapshot(SandboxRequest[Snapshot], frozen=True):
    """See `Snapshots.snapshot`."""


class MakeForks(SandboxRequest[Sequence["Sandbox"]], frozen=True):
    """See `Snapshots.fork`."""

    count: int


class SandboxOpening(msgspec.Struct, Generic[T], frozen=True):
    """Something of a sandbox that is held for the time of a block, as a `T`."""


class StreamCommand(SandboxOpening[AsyncIterator[Chunk | Result]], frozen=True):
    """Carry out a command with its output as it comes; leaving the block kills it. Refused without a timeout."""

    exec: Exec


class StreamTree(SandboxOpening[AsyncIterator[bytes]], frozen=True):
    """Pack a file or folder of the sandbox as a tar archive, piece by piece. Its content must not be trusted."""

    path: str
    limits: TreeLimits


class OpenSession(SandboxOpening[Session], frozen=True):
    """See `Shells.session`."""

    name: str = "main"


class OpenTerminal(SandboxOpening[Terminal], frozen=True):
    """See `Shells.terminal`."""

    command: Command


def refused(asked: SandboxRequest[Any] | SandboxOpening[Any]) -> SandboxRefusedError:
    """What a kind of sandbox raises that cannot do this."""
    return SandboxRefusedError(f"a sandbox of this kind cannot do `{type(asked).__name__}`")


class SandboxFacts(msgspec.Struct, frozen=True):
    """What is known of a sandbox without asking it."""

    sandbox_id: str
    spec: Spec
    state: State


class SandboxSeam(ABC):
    """What each kind of sandbox implements."""

    @property
    @abstractmethod
    def facts(self) -> SandboxFacts:
        """How it stands now."""

    @abstractmethod
    async def ask(self, request: SandboxRequest[T]) -> T:
        """Carry out a request. Raises SandboxError, and SandboxRefusedError for one that it cannot carry out."""

    @abstractmethod
    def open(self, opening: SandboxOpening[T]) -> AbstractAsyncContextManager[T]:
        """What is asked for, for the time of the block. Raises SandboxError like `ask`."""

    @abstractmethod
    async def wait_ended(self) -> None:
        """Return once the state is `lost` or `closed`. The pool waits here for every sandbox it has given out."""

    @abstractmethod
    async def close(self) -> None:
        """End it and remove its container. May be called more than once."""


class Commands(SandboxSeam):
    """Runs programs, each by itself."""

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
        """Run a command in a process group of its own, to its end or for `timeout` seconds.

        With `patience`, time in which the command was ready to run and had no CPU does not count, until so many seconds
        have passed on the clock. Other processes of the group are killed when the command has ended; use `start` for
        commands that shall go on. `env` is added to the sandbox's own.
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
        """The same, with the output as it comes and uncapped; the `Result`, without output, is the last item.

        Leaving the loop early kills the command. Close the iterator (`contextlib.aclosing`) to have that at once.
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
        """Start a command in the background; without a timeout it may run for as long as the sandbox lives."""
        return await self.ask(StartJob(Exec(command=command, timeout=timeout, env=env, cwd=cwd)))


class Shells(SandboxSeam):
    """Programs that are talked with."""

    def session(self, name: str = "main") -> AbstractAsyncContextManager[Session]:
        """A shell for the time of the block. Raises SandboxBusyError when one of this name is open."""
        return self.open(OpenSession(name))

    def terminal(self, command: Command) -> AbstractAsyncContextManager[Terminal]:
        """Run a program on a pseudo-terminal for the time of the block: bytes travel both ways while it runs.

        Sandboxes of a service raise SandboxRefusedError: bytes both ways need a sandbox of this machine's engine.
        """
        return self.open(OpenTerminal(command))


class Files(SandboxSeam):
    """Files and trees. Relative paths start at the working directory."""

    tree_limits = TreeLimits()
    """Caps on uploads and downloads."""

    async def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Bytes of a regular file, fewer than `limit` at its end.

        Raises SandboxFileError when it cannot be read, SandboxLimitError when more is asked for than one call may give.
        """
        return await self.ask(ReadFile(path, offset, limit))

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, append: bool = False) -> None:
        """Replace a file in one step, or append to it; missing folders are made.

        Nobody in the sandbox sees half of a replaced file, also when the call is cancelled.
        """
        await self.ask(WriteFile(path, data, mode, append))

    async def list(self, path: str = ".") -> builtins.list[FileInfo]:
        """The entries of a folder, by name; of a file, its own."""
        return await self.ask(ListFolder(path))

    async def remove(self, path: str) -> None:
        """Remove a file, a link, or a folder with everything in it. Nothing when it does not exist."""
        await self.ask(RemovePath(path))

    async def upload(self, source: Path, path: str) -> None:
        """Copy a local file to the file `path`, or what is in a local folder into the folder `path`.

        Links are copied as links. Raises SandboxLimitError above the caps on size and entries.
        """
        with tempfile.SpooledTemporaryFile(MEMORY_BYTES) as archive:
            await _in_thread(partial(pack, Path(source), archive, self.tree_limits))
            size = archive.tell()
            archive.seek(0)
            await self.ask(PutArchive(path, _pieces(archive), size))

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or tree of the sandbox to `target`. Nothing is written outside of it, whatever the sandbox sends.

        Links that lead out of the tree, devices and pipes raise SandboxLimitError, as do too many bytes or entries.
        """
        with tempfile.SpooledTemporaryFile(MEMORY_BYTES) as archive:
            async with self.open(StreamTree(path, self.tree_limits)) as pieces:
                async for piece in pieces:
                    archive.write(piece)
            archive.seek(0)
            await _in_thread(partial(unpack, archive, Path(target), self.tree_limits))


async def _in_thread(work: Callable[[], None]) -> None:
    """Run to its end, also when cancelled: it is bounded by its caps, and must not work on what is closed."""
    # A limiter of its own: with anyio's, which the whole process shares, many trees would keep all its threads busy.
    await anyio.to_thread.run_sync(work, limiter=_TREES)


async def _pieces(archive: IO[bytes]) -> AsyncGenerator[bytes]:
    while piece := archive.read(COPY_BYTES):
        yield piece


class Snapshots(SandboxSeam):
    """Keeps the files of a sandbox, and makes more sandboxes of them."""

    async def snapshot(self) -> Snapshot:
        """Keep the files as they are now. The snapshot outlives the sandbox; its owner removes it."""
        return await self.ask(TakeSnapshot())

    async def fork(self, count: int) -> Sequence[Sandbox]:
        """`count` new sandboxes with the same files. They are closed with this one at the latest."""
        return await self.ask(MakeForks(count))


class Lifecycle(SandboxSeam):
    """What a sandbox is, and until when."""

    @property
    def sandbox_id(self) -> str:
        """What it is known by where it comes from."""
        return self.facts.sandbox_id

    @property
    def spec(self) -> Spec:
        """What was asked for."""
        return self.facts.spec

    @property
    def state(self) -> State:
        """How it stands now."""
        return self.facts.state


class Sandbox(Commands, Shells, Files, Snapshots, Lifecycle):
    """One sandbox, here or on another machine. Who needs only a part of it asks for that part."""


class SandboxProvider(Protocol):
    """Gives out sandboxes: a pool in this process, or the client of a service."""

    def acquire(
        self, spec: Spec, *, owner: str = "", priority: int = 0, deadline: float = 600.0, on_lost: OnLost = "fail"
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox for the time of the block.

        Args:
            spec: what kind.
            owner: who shares fairly with the others.
            priority: larger is sooner, among this owner's requests.
            deadline: seconds to wait for it.
            on_lost: `recreate` makes a lost sandbox again, empty; the holder is told by a SandboxLostError.

        Raises:
            SandboxBusyError: there was no room within the deadline.
            SandboxError: it cannot be made, or who gives it out cannot be reached.
        """
        ...
