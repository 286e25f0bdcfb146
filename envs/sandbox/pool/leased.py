"""The sandbox as its holder uses it: every call goes through the lease."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar, cast

from envs.sandbox.api import Chunk, Job, JobStatus, Output, Result, Session, Snapshot, State, StreamName
from envs.sandbox.pool.lease import SandboxLease, Use
from envs.sandbox.pool.timeline import described, shown
from envs.sandbox.sandbox import (
    MakeForks,
    OpenSession,
    Sandbox,
    SandboxFacts,
    SandboxOpening,
    SandboxRequest,
    StartJob,
    StreamCommand,
    TakeSnapshot,
)

T = TypeVar("T")


class Lessor(Protocol):
    """What a leased sandbox asks of the pool that it is from."""

    async def snapshot(self, lease: SandboxLease) -> Snapshot:
        """Keep the files of the lease's sandbox. Raises SandboxError."""
        ...

    async def fork(self, parent: SandboxLease, count: int) -> Sequence[SandboxLease]:
        """Leases on sandboxes with the same files, all of them ready. Raises SandboxError; then there is none."""
        ...

    async def release(self, lease: SandboxLease) -> None:
        """End the lease, and wait until nothing is left of its sandbox."""
        ...


class LeasedSandbox(Sandbox):
    """A sandbox under a lease of a pool."""

    def __init__(self, pool: Lessor, lease: SandboxLease) -> None:
        self._pool = pool
        self.lease = lease

    @property
    def facts(self) -> SandboxFacts:
        return SandboxFacts(self.lease.id, self.lease.spec, self._state())

    @property
    def generation(self) -> int:
        """How often the sandbox was made again after a loss."""
        return self.lease.generation

    def _state(self) -> State:
        match self.lease.state:
            case "queued" | "starting":
                return "starting"
            case "ready":
                return self.lease.sandbox.state if self.lease.sandbox else "starting"
            case "failed":
                return "lost"
            case "closed":
                return "closed"

    async def ask(self, request: SandboxRequest[T]) -> T:
        return cast("T", await self._answer(request))

    async def _answer(self, request: SandboxRequest[Any]) -> object:
        match request:
            case TakeSnapshot():
                return await self._pool.snapshot(self.lease)
            case MakeForks(count):
                # On the same host, closed with this one at the latest.
                return [LeasedSandbox(self._pool, lease) for lease in await self._pool.fork(self.lease, count)]
            case _:
                pass
        async with self.lease.use(*described(request)) as use:
            answer = await use.sandbox.ask(request)
            if isinstance(answer, Result):
                return use.ended(answer)
            if isinstance(request, StartJob):
                use.outcome = "started"
                return LeasedJob(answer, f"{self.lease.generation}.{answer.job_id}")
            return answer

    def open(self, opening: SandboxOpening[T]) -> AbstractAsyncContextManager[T]:
        return cast("AbstractAsyncContextManager[T]", self._opened(opening))

    @asynccontextmanager
    async def _opened(self, opening: SandboxOpening[Any]) -> AsyncGenerator[object]:
        if isinstance(opening, OpenSession):
            # Its commands are uses of their own.
            async with self.lease.use(*described(opening)) as use:
                sandbox = use.sandbox
            async with sandbox.open(opening) as session:
                yield LeasedSession(self.lease, session)
            return
        async with self.lease.use(*described(opening)) as use, use.sandbox.open(opening) as held:
            yield _noted(held, use) if isinstance(opening, StreamCommand) else held

    async def wait_ended(self) -> None:
        await self.lease.done.wait()

    async def close(self) -> None:
        """End the lease, and wait until nothing is left of the sandbox."""
        await self._pool.release(self.lease)


async def _noted(items: AsyncIterator[Chunk | Result], use: Use) -> AsyncGenerator[Chunk | Result]:
    """The same items; how the command ended is the outcome of the use."""
    async for item in items:
        yield use.ended(item) if isinstance(item, Result) else item


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

    def __init__(self, lease: SandboxLease, session: Session) -> None:
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
