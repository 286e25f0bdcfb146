"""RemoteSandbox: a `Sandbox` of a service, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import quote
from uuid import uuid4

import anyio
import httpx
import msgspec

from envs.sandbox.api import Chunk, Exec, JobStatus, Output, Result, Snapshot, State, StreamName, check_timeout
from envs.sandbox.protocol.problems import error_of
from envs.sandbox.protocol.wire import (
    TAR,
    Broken,
    Fork,
    Info,
    JobInfo,
    Last,
    Listing,
    RunInSession,
    SandboxList,
    SessionInfo,
    SessionInterrupted,
    SessionResult,
    Signal,
    StreamLine,
    StreamPiece,
)
from envs.sandbox.remote.http import HttpClient
from envs.sandbox.sandbox import (
    ListFolder,
    MakeForks,
    OpenSession,
    PutArchive,
    ReadFile,
    RemovePath,
    RunCommand,
    Sandbox,
    SandboxFacts,
    SandboxOpening,
    SandboxRequest,
    StartJob,
    StreamCommand,
    StreamTree,
    TakeSnapshot,
    WriteFile,
    refused,
)
from envs.sandbox.text import from_wire, to_wire
from envs.sandbox.trees import COPY_BYTES, HEAD_BYTES
from flash.errors import SandboxError, SandboxFileError, SandboxLimitError, SandboxLostError, SandboxTimeoutError

_T = TypeVar("_T")

_KEEP_S = 20.0
"""Seconds for which the service may delay its response to the question whether the sandbox has ended."""
_CANCEL_S = 30.0
"""Seconds that the service has to kill a command whose caller was cancelled."""
_JOB_POLL_S = 30.0
_NO_ANSWER_S = 60.0
"""Seconds without a response of the service after which the sandbox counts as lost."""
_RETRY_S = 1.0
_LOOK_S = 5.0
"""Seconds that the service has to report the state of a sandbox that a call reported as lost."""
_NOTICE_S = 1.0
"""Seconds in which the service itself notices such a loss: a call may notice it first."""


class ServiceClient(Protocol):
    """Functions of its client that a remote sandbox uses."""

    @property
    def http(self) -> HttpClient: ...

    def attach(self, info: Info) -> Sandbox:
        """Return another sandbox of the service."""
        ...

    async def end(self, id: str) -> None:
        """End a sandbox, and wait until its container is removed. Raises SandboxError."""
        ...

    def in_background(self, work: Callable[[str], Coroutine[Any, Any, None]], argument: str) -> None:
        """Run `work(argument)` in a task that nobody waits for."""
        ...


class RemoteSandbox(Sandbox):
    """A sandbox of a service. `SandboxClient` creates it."""

    def __init__(self, client: ServiceClient, info: Info) -> None:
        self._client = client
        self.http = client.http
        self._info = info
        self.path = f"/v1/sandboxes/{info.id}"
        self._ended = anyio.Event()
        self._state: State = "ready"

    @property
    def facts(self) -> SandboxFacts:
        return SandboxFacts(self._info.id, self._info.spec, self._state)

    @property
    def generation(self) -> int:
        """Number of times the sandbox was replaced after a loss, as of the service's last response."""
        return self._info.generation

    async def keep(self) -> None:
        """Renew the lease until it ends, and record its end.

        Consumes the service's responses. Waits for the end of the sandbox. Unblocked by it, or when the service cannot
        be reached for too long. Produces the state `lost` or `closed`.
        """
        heard = anyio.current_time()
        while self._state == "ready":
            wait = min(_KEEP_S, self._info.lease_s / 3)
            try:
                self._info = await self.http.ask("GET", f"{self.path}/end", Info, query={"wait": wait}, seconds=wait)
            except SandboxTimeoutError:
                pass
            except SandboxLostError:
                if anyio.current_time() - heard > _NO_ANSWER_S:
                    return self._end("lost")
                await anyio.sleep(_RETRY_S)
            except SandboxError:
                return self._end("closed")  # The service does not know the sandbox any more.
            else:
                heard = anyio.current_time()
                if self._info.state in ("failed", "closed"):
                    self._end("lost" if self._info.state == "failed" else "closed")
        return None

    async def ask(self, request: SandboxRequest[_T]) -> _T:
        return cast("_T", await self._answer(request))

    async def _answer(self, request: SandboxRequest[Any]) -> object:
        """Send a request to the service, as the call that stands for it."""
        match request:
            case RunCommand(exec):
                return await self.once("run", Result, exec.converted(to_wire), exec.seconds)
            case StartJob(exec):
                return RemoteJob(self, (await self.once("jobs", JobInfo, exec.converted(to_wire), 0.0)).job_id)
            case ReadFile(path, offset, limit):
                query = {"path": path, "offset": offset} | ({} if limit is None else {"limit": limit})
                return await self.http.get_bytes(f"{self.path}/files", query)
            case WriteFile(path, data, mode, append):
                query = {"path": path, "mode": mode, "append": str(append).lower()}
                return await self.http.put_bytes(f"{self.path}/files", query, data)
            case ListFolder(path):
                listing = await self.http.ask("GET", f"{self.path}/entries", Listing, query={"path": path})
                return [msgspec.structs.replace(entry, name=from_wire(entry.name)) for entry in listing.entries]
            case RemovePath(path):
                return await self.http.ask("DELETE", f"{self.path}/files", type(None), query={"path": path})
            case PutArchive(path, pieces, size):
                return await self.http.put_pieces(f"{self.path}/tree", {"path": path}, pieces, size, media_type=TAR)
            case TakeSnapshot():
                return await self.http.ask("POST", f"{self.path}/snapshot", Snapshot, seconds=600.0)
            case MakeForks(count):
                forks = await self.once("fork", SandboxList, Fork(count=count), 600.0)
                return [self._client.attach(info) for info in forks.sandboxes]
            case _:
                raise refused(request)

    def open(self, opening: SandboxOpening[_T]) -> AbstractAsyncContextManager[_T]:
        return cast("AbstractAsyncContextManager[_T]", self._opened(opening))

    def _opened(self, opening: SandboxOpening[Any]) -> AbstractAsyncContextManager[object]:
        match opening:
            case StreamCommand(exec):
                return aclosing(self._stream(exec))
            case StreamTree(path, limits):
                return aclosing(self._tree(path, limits.total + HEAD_BYTES * limits.entries))
            case OpenSession(name):
                return self._session(name)
            case _:
                raise refused(opening)

    async def _stream(self, exec: Exec) -> AsyncGenerator[Chunk | Result]:
        async with self.http.streamed("POST", f"{self.path}/stream", body=exec.converted(to_wire)) as response:
            try:
                async for text in response.aiter_lines():
                    line = msgspec.json.decode(text, type=StreamLine)
                    match line:
                        case StreamPiece(chunk):
                            yield chunk
                        case Last(result):
                            yield result
                            return
                        case Broken(problem):
                            raise error_of(problem)
                        case _:
                            pass
            except (httpx.HTTPError, msgspec.DecodeError) as error:
                raise SandboxLostError(f"the stream of {self.path} broke: {error}") from error
        raise SandboxLostError(f"the stream of {self.path} ended without a result")

    async def _tree(self, path: str, most: int) -> AsyncGenerator[bytes]:
        async with self.http.streamed("GET", f"{self.path}/tree", query={"path": path}) as response:
            try:
                async for piece in response.aiter_raw(COPY_BYTES):
                    most -= len(piece)
                    if most < 0:
                        raise SandboxLimitError(f"{path}: the archive is larger than the limits allow")
                    yield piece
            except httpx.HTTPError as error:
                # The service has begun its response, so it can report a failure only by closing the connection.
                raise SandboxFileError(
                    f"{path}: the copy broke off: the files changed, they are too many, or the sandbox ended"
                ) from error

    @asynccontextmanager
    async def _session(self, name: str) -> AsyncGenerator[RemoteSession]:
        info = await self.http.ask("PUT", f"{self.path}/sessions/{quote(name, safe='')}", SessionInfo)
        session = RemoteSession(self, info)
        try:
            yield session
        finally:
            with anyio.move_on_after(_CANCEL_S, shield=True):
                await session.close()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def close(self) -> None:
        try:
            await self._client.end(self.sandbox_id)
        finally:
            self._end("closed")

    async def once(self, path: str, answer: type[_T], body: msgspec.Struct, seconds: float) -> _T:
        """Send a call that is run only once even if it is sent repeatedly. It ends if its caller is cancelled."""
        key = uuid4().hex
        try:
            return await self.http.ask("POST", f"{self.path}/{path}", answer, body=body, seconds=seconds, key=key)
        except SandboxLostError:
            await self._look()
            raise
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(_CANCEL_S, shield=True):
                await self._cancel(key)
            raise
        except SandboxTimeoutError:
            # The service may only be slow. It must not run the call later, when nobody waits for it any more.
            self._client.in_background(self._cancel, key)
            raise

    async def _look(self) -> None:
        """Ask for the sandbox's state after a loss, so that it is known before `keep` notices it.

        Does nothing if the service does not answer.
        """
        with suppress(SandboxError):
            info = await self.http.ask("GET", f"{self.path}/end", Info, query={"wait": _NOTICE_S}, seconds=_LOOK_S)
            if info.sandbox_state in ("lost", "closed"):
                self._end(info.sandbox_state)

    async def _cancel(self, key: str) -> None:
        with suppress(
            SandboxError
        ):  # The call may have ended with its sandbox or the service. Its own timeout ends the command.
            await self.http.ask("DELETE", f"{self.path}/calls/{key}", type(None), seconds=_CANCEL_S)

    def _end(self, state: State) -> None:
        if not self._ended.is_set():
            self._state = state
            self._ended.set()


class RemoteSession:
    """A shell of a remote sandbox."""

    def __init__(self, sandbox: RemoteSandbox, info: SessionInfo) -> None:
        self._sandbox = sandbox
        self._path = f"sessions/{info.name}"
        self._name = info.name
        self._restarts = info.restarts

    @property
    def name(self) -> str:
        return self._name

    @property
    def restarts(self) -> int:
        return self._restarts

    async def run(self, command: str, *, timeout: float) -> Result:
        check_timeout(timeout)
        body = RunInSession(command=to_wire(command), timeout=timeout)
        answer = await self._sandbox.once(f"{self._path}/run", SessionResult, body, timeout)
        self._restarts = answer.restarts
        return answer.result

    async def interrupt(self) -> bool:
        path = f"{self._sandbox.path}/{self._path}/interrupt"
        return (await self._sandbox.http.ask("POST", path, SessionInterrupted)).interrupted

    async def close(self) -> None:
        with suppress(SandboxError):  # The shell may have ended with its sandbox.
            await self._sandbox.http.ask("DELETE", f"{self._sandbox.path}/{self._path}", type(None))


class RemoteJob:
    """A background job of a remote sandbox."""

    def __init__(self, sandbox: RemoteSandbox, job_id: str) -> None:
        self._http = sandbox.http
        self._path = f"{sandbox.path}/jobs/{job_id}"
        self._job_id = job_id

    @property
    def job_id(self) -> str:
        return self._job_id

    async def poll(self) -> JobStatus:
        return await self._http.ask("GET", self._path, JobStatus)

    async def wait(self, timeout: float) -> Result:
        deadline = anyio.current_time() + timeout
        while True:
            wait = min(_JOB_POLL_S, max(0.0, deadline - anyio.current_time()))
            status = await self._http.ask("GET", self._path, JobStatus, query={"wait": wait}, seconds=wait)
            if status.result is not None:
                return status.result
            if anyio.current_time() >= deadline:
                raise SandboxTimeoutError(f"job {self._job_id} still runs after {timeout:g} s")

    async def signal(self, name: str = "SIGTERM") -> None:
        await self._http.ask("POST", f"{self._path}/signal", type(None), body=Signal(name=name))

    async def output(self, stream: StreamName = "stdout", *, offset: int = 0, limit: int = 1 << 16) -> Output:
        query = {"stream": stream, "offset": offset, "limit": limit}
        return await self._http.ask("GET", f"{self._path}/output", Output, query=query)
