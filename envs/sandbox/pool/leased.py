"""The sandbox as its holder uses it: every call goes through the lease."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from envs.sandbox.api import (
    Chunk,
    Command,
    Exec,
    Files,
    Job,
    JobStatus,
    Output,
    Result,
    Sandbox,
    Session,
    Snapshot,
    Spec,
    State,
    StreamName,
    Terminal,
)
from envs.sandbox.pool.lease import Lease
from envs.sandbox.pool.timeline import shown

_Method = TypeVar("_Method", bound=Callable[..., Any])


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


def _on_path(method: _Method) -> _Method:
    """A method of `Files` that begins with a path: asks the sandbox of the lease, in a use that shows the path."""
    name = method.__name__

    async def ask(self: LeasedSandbox, path: str = ".", *rest: object, **options: object) -> object:
        async with self.lease.use(name, path) as use:
            return await getattr(use.sandbox, name)(path, *rest, **options)

    return cast("_Method", ask)


class LeasedSandbox(Sandbox):
    """A sandbox under a lease of a pool."""

    def __init__(self, pool: Lessor, lease: Lease) -> None:
        self._pool = pool
        self.lease = lease

    @property
    def sandbox_id(self) -> str:
        return self.lease.id

    @property
    def spec(self) -> Spec:
        return self.lease.spec

    @property
    def generation(self) -> int:
        """How often the sandbox was made again after a loss."""
        return self.lease.generation

    @property
    def state(self) -> State:
        match self.lease.state:
            case "queued" | "starting":
                return "starting"
            case "ready":
                return self.lease.sandbox.state if self.lease.sandbox else "starting"
            case "failed":
                return "lost"
            case "closed":
                return "closed"

    async def run_exec(self, exec: Exec) -> Result:
        async with self.lease.use("run", shown(exec.command)) as use:
            return use.ended(await use.sandbox.run_exec(exec))

    async def stream_exec(self, exec: Exec) -> AsyncGenerator[Chunk | Result]:
        async with (
            self.lease.use("stream", shown(exec.command)) as use,
            aclosing(use.sandbox.stream_exec(exec)) as items,
        ):
            async for item in items:
                if isinstance(item, Result):
                    use.ended(item)
                yield item

    async def start_exec(self, exec: Exec) -> Job:
        async with self.lease.use("job", shown(exec.command)) as use:
            use.outcome = "started"
            job = await use.sandbox.start_exec(exec)
            return LeasedJob(job, f"{self.lease.generation}.{job.job_id}")

    @asynccontextmanager
    async def session(self, name: str = "main") -> AsyncGenerator[Session]:
        async with self.lease.use("session", f"open {name}") as use:
            sandbox = use.sandbox
        async with sandbox.session(name) as session:
            yield LeasedSession(self.lease, session)

    @asynccontextmanager
    async def terminal(
        self, command: Command | None = None, *, rows: int = 24, columns: int = 80
    ) -> AsyncGenerator[Terminal]:
        text = "a shell" if command is None else shown(command)
        async with (
            self.lease.use("terminal", text) as use,
            use.sandbox.terminal(command, rows=rows, columns=columns) as terminal,
        ):
            yield terminal

    read = _on_path(Files.read)
    list = _on_path(Files.list)
    remove = _on_path(Files.remove)
    download = _on_path(Files.download)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, append: bool = False) -> None:
        async with self.lease.use("write", f"{path} ({len(data)} bytes)") as use:
            await use.sandbox.write(path, data, mode=mode, append=append)

    async def upload(self, source: Path, path: str) -> None:
        async with self.lease.use("upload", path) as use:
            await use.sandbox.upload(source, path)

    async def wait_ended(self) -> None:
        await self.lease.done.wait()

    async def snapshot(self) -> Snapshot:
        return await self._pool.snapshot(self.lease)

    async def fork(self, count: int) -> list[Sandbox]:
        """New sandboxes with the same files, on the same host, closed with this one at the latest."""
        return [LeasedSandbox(self._pool, lease) for lease in await self._pool.fork(self.lease, count)]

    async def close(self) -> None:
        """End the lease, and wait until nothing is left of the sandbox."""
        await self._pool.release(self.lease)


class LeasedJob:
    """A `Job` whose id is its own: a sandbox that is made again counts its jobs from the beginning."""

    def __init__(self, job: Job, job_id: str) -> None:
        self._job = job
        self._job_id = job_id

    @property
    def job_id(self) -> str:
        return self._job_id

    async def poll(self) -> JobStatus:
        return await self._job.poll()

    async def wait(self, timeout: float) -> Result:
        return await self._job.wait(timeout)

    async def signal(self, name: str = "SIGTERM") -> None:
        await self._job.signal(name)

    async def output(self, stream: StreamName = "stdout", *, offset: int = 0, limit: int = 1 << 16) -> Output:
        return await self._job.output(stream, offset=offset, limit=limit)


class LeasedSession:
    """A `Session` whose commands are booked."""

    def __init__(self, lease: Lease, session: Session) -> None:
        self.lease = lease
        self._session = session

    @property
    def name(self) -> str:
        return self._session.name

    @property
    def restarts(self) -> int:
        return self._session.restarts

    async def run(self, command: str, *, timeout: float) -> Result:
        async with self.lease.use("session", shown(command)) as use:
            return use.ended(await self._session.run(command, timeout=timeout))

    async def interrupt(self) -> bool:
        return await self._session.interrupt()

    async def close(self) -> None:
        await self._session.close()
