"""The sandbox as its holder uses it: every call goes through the lease."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Protocol, cast

from envs.sandbox.api import (
    Chunk,
    Command,
    FileInfo,
    Job,
    JobStatus,
    Output,
    Result,
    SandboxLike,
    Session,
    Snapshot,
    Spec,
    State,
    StreamName,
    Terminal,
)
from envs.sandbox.pool.lease import Lease
from envs.sandbox.pool.timeline import shown


class Lessor(Protocol):
    """What a leased sandbox asks of the pool that it is from."""

    async def snapshot(self, lease: Lease) -> Snapshot:
        """Keep the files of the lease's sandbox. Raises SandboxError."""
        ...

    async def fork(self, parent: Lease, count: int) -> Sequence[Lease]:
        """Leases on sandboxes with the same files, all of them ready. Raises SandboxError; then there is none."""
        ...

    async def release(self, lease: Lease) -> None:
        """End the lease, and wait until nothing is left of its sandbox."""
        ...


class Leased:
    """A `SandboxLike` under a lease of a pool."""

    def __init__(self, pool: Lessor, lease: Lease) -> None:
        self._pool = pool
        self._lease = lease

    @property
    def sandbox_id(self) -> str:
        return self._lease.id

    @property
    def spec(self) -> Spec:
        return self._lease.spec

    @property
    def generation(self) -> int:
        """How often the sandbox was made again after a loss."""
        return self._lease.generation

    @property
    def state(self) -> State:
        match self._lease.state:
            case "queued" | "starting":
                return "starting"
            case "ready":
                return self._lease.box.state if self._lease.box else "starting"
            case "failed":
                return "lost"
            case "closed":
                return "closed"

    async def run(
        self,
        command: Command,
        *,
        timeout: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Result:
        """Run a command to its end."""
        async with self._lease.call("run", shown(command)) as call:
            return call.ended(await call.box.run(command, timeout=timeout, stdin=stdin, env=env, cwd=cwd))

    async def stream(
        self,
        command: Command,
        *,
        timeout: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> AsyncGenerator[Chunk | Result]:
        """Run a command, with its output as it comes."""
        async with self._lease.call("stream", shown(command)) as call:
            items = call.box.stream(command, timeout=timeout, stdin=stdin, env=env, cwd=cwd)
            async with aclosing(cast("AsyncGenerator[Chunk | Result]", items)):
                async for item in items:
                    if isinstance(item, Result):
                        call.ended(item)
                    yield item

    async def start(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Job:
        """Start a command in the background."""
        async with self._lease.call("job", shown(command)) as call:
            call.outcome = "started"
            job = await call.box.start(command, timeout=timeout, env=env, cwd=cwd)
            return LeasedJob(job, f"{self._lease.generation}.{job.job_id}")

    @asynccontextmanager
    async def session(self, name: str = "main") -> AsyncGenerator[Session]:
        """A shell for the time of the block."""
        async with self._lease.call("session", f"open {name}") as call:
            box = call.box
        async with box.session(name) as session:
            yield LeasedSession(self._lease, session)

    @asynccontextmanager
    async def terminal(
        self, command: Command | None = None, *, rows: int = 24, columns: int = 80
    ) -> AsyncGenerator[Terminal]:
        """A program on a pseudo-terminal for the time of the block."""
        text = "a shell" if command is None else shown(command)
        async with (
            self._lease.call("terminal", text) as call,
            call.box.terminal(command, rows=rows, columns=columns) as terminal,
        ):
            yield terminal

    async def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Bytes of a file."""
        async with self._lease.call("read", path) as call:
            return await call.box.read(path, offset=offset, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, append: bool = False) -> None:
        """Replace a file, or append to it."""
        async with self._lease.call("write", f"{path} ({len(data)} bytes)") as call:
            await call.box.write(path, data, mode=mode, append=append)

    async def list(self, path: str = ".") -> list[FileInfo]:
        """The entries of a folder."""
        async with self._lease.call("list", path) as call:
            return await call.box.list(path)

    async def remove(self, path: str) -> None:
        """Remove a file or a folder."""
        async with self._lease.call("remove", path) as call:
            await call.box.remove(path)

    async def upload(self, source: Path, path: str) -> None:
        """Copy a local file or tree into the sandbox."""
        async with self._lease.call("upload", path) as call:
            await call.box.upload(source, path)

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or tree out of the sandbox."""
        async with self._lease.call("download", path) as call:
            await call.box.download(path, target)

    async def wait_ended(self) -> None:
        """Return once the lease has ended."""
        await self._lease.done.wait()

    async def snapshot(self) -> Snapshot:
        """Keep the files as they are now."""
        return await self._pool.snapshot(self._lease)

    async def fork(self, count: int) -> list[SandboxLike]:
        """New sandboxes with the same files, on the same host, closed with this one at the latest."""
        return [Leased(self._pool, lease) for lease in await self._pool.fork(self._lease, count)]

    async def close(self) -> None:
        """End the lease, and wait until nothing is left of the sandbox."""
        await self._pool.release(self._lease)


class LeasedJob:
    """A `Job` whose id is its own: a sandbox that is made again counts its jobs from the beginning."""

    def __init__(self, job: Job, job_id: str) -> None:
        self._job = job
        self._job_id = job_id

    @property
    def job_id(self) -> str:
        return self._job_id

    async def poll(self) -> JobStatus:
        """How it stands."""
        return await self._job.poll()

    async def wait(self, timeout: float) -> Result:
        """Its result."""
        return await self._job.wait(timeout)

    async def signal(self, name: str = "SIGTERM") -> None:
        """Send it a signal."""
        await self._job.signal(name)

    async def output(self, stream: StreamName = "stdout", *, offset: int = 0, limit: int = 1 << 16) -> Output:
        """A range of what it wrote."""
        return await self._job.output(stream, offset=offset, limit=limit)


class LeasedSession:
    """A `Session` whose commands are booked."""

    def __init__(self, lease: Lease, session: Session) -> None:
        self._lease = lease
        self._session = session

    @property
    def name(self) -> str:
        return self._session.name

    @property
    def restarts(self) -> int:
        return self._session.restarts

    async def run(self, command: str, *, timeout: float) -> Result:
        """Run one command in the shell."""
        async with self._lease.call("session", shown(command)) as call:
            return call.ended(await self._session.run(command, timeout=timeout))

    async def interrupt(self) -> bool:
        """Send SIGINT to the running command."""
        return await self._session.interrupt()

    async def close(self) -> None:
        """End the shell."""
        await self._session.close()
