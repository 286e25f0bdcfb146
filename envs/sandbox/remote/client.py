"""SandboxClient and RemoteSandbox: sandboxes of a service (`flash sandbox serve`), used like local ones.

Programs of users, `flash sandbox`, `open_sandboxes` and `RemoteHost` (a front service) use the client.
`SandboxClient.acquire` has the same parameters as `SandboxPool.acquire` and returns a `Sandbox`: code runs unchanged
with either. A task of the client, `RemoteSandbox.renew`, renews each lease and notices its end. If a client disappears,
its leases expire and the service ends their sandboxes.

Each method of a `RemoteSandbox` is one HTTP request (`envs.sandbox.remote.http`), which one function of
`envs.sandbox.service.routes` answers.
"""

from __future__ import annotations

import builtins
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote
from uuid import uuid4

import anyio
import httpx
import msgspec
from anyio.abc import TaskGroup

from envs.sandbox.api import (
    Chunk,
    Command,
    Exec,
    FileInfo,
    JobStatus,
    OnLost,
    Output,
    Result,
    Snapshot,
    Spec,
    State,
    StreamName,
    check_session_command,
    check_timeout,
)
from envs.sandbox.protocol import (
    TAR,
    Broken,
    Fork,
    Info,
    JobInfo,
    Last,
    Listing,
    RunInSession,
    SandboxList,
    SandboxOrder,
    SessionInfo,
    SessionInterrupted,
    SessionResult,
    Signal,
    SnapshotInfo,
    SnapshotList,
    Status,
    StreamLine,
    StreamPiece,
    error_of,
)
from envs.sandbox.remote.http import HttpClient
from envs.sandbox.sandbox import Sandbox
from envs.sandbox.text import from_wire, to_wire
from envs.sandbox.tokens import ADMIN, read_tokens
from envs.sandbox.trees import COPY_BYTES, HEAD_BYTES, TreeLimits
from flash.errors import (
    DECODE_ERRORS,
    ConfigError,
    SandboxBusyError,
    SandboxClosedError,
    SandboxError,
    SandboxLimitError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxStartError,
    SandboxTimeoutError,
)
from flash.waiting import unwrapped_group

_T = TypeVar("_T")

POLL_S = 20.0
"""Seconds for which the service may delay a response while a sandbox is not ready."""
LEASE_S = 120.0
"""Seconds without a renewal after which the service ends a sandbox. `acquire` orders sandboxes with it."""
CLOSE_S = 60.0
"""Seconds that ending a sandbox may take, also when the caller is being cancelled."""
RENEW_S = 20.0
"""Seconds for which the service may delay its response to the question whether a sandbox has ended."""
CANCEL_S = 30.0
"""Seconds that the service has to kill a command whose caller was cancelled, and to close a shell."""
JOB_POLL_S = 30.0
"""Seconds for which the service may delay its response to the question whether a job has ended."""
TREE_S = 600.0
"""Seconds that a snapshot, forks, or the upload of a tree may take."""
RETRY_S = 1.0
"""Seconds between two attempts to renew a lease."""
STATE_S = 5.0
"""Seconds that a call with a loss waits in total for the service's report about the sandbox, before it raises."""
NOTICE_S = 1.0
"""Seconds for which the service may delay this report until the lease has ended. A call may notice a loss earlier."""


class SandboxClient:
    """Client of a service. An asynchronous context manager.

    Its block owns one task for each sandbox, which renews the sandbox's lease. At the end of the block these tasks end,
    and the service ends sandboxes that are still open when their leases expire.
    """

    def __init__(self, url: str, token: str, *, verify: ssl.SSLContext | bool = True) -> None:
        """Create a client, which connects when its block is entered.

        Args:
            url: address of the service: http://…, https://… or unix:/path.
            token: secret of a token of the service. It decides which sandboxes the client may use.
            verify: how the certificate of an https:// service is checked, as `certificate_check` returns it.

        Raises:
            ConfigError: the address or the token cannot be used.
        """
        self.http = HttpClient(url, token, verify)
        """HTTP connection to the service."""
        self._stack = AsyncExitStack()
        """Everything that the end of the block closes."""
        self._tasks: TaskGroup
        """Tasks that renew leases, and those of `in_background`. Set by `__aenter__`."""

    async def __aenter__(self) -> Self:
        """Connect to the service.

        Raises:
            SandboxError: the service cannot be reached, or does not accept the token.
        """
        try:
            await self.status()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.http.aclose()
            raise
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.http.aclose)
            self._tasks = await stack.enter_async_context(unwrapped_group())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the tasks, so that leases are not renewed any more, and close the connection."""
        self._tasks.cancel_scope.cancel()
        await self._stack.__aexit__(None, None, None)

    @asynccontextmanager
    async def acquire(
        self, spec: Spec, *, owner: str = "", priority: int = 0, deadline: float = 600.0, on_lost: OnLost = "fail"
    ) -> AsyncGenerator[RemoteSandbox]:
        """Lease a sandbox for the time of the block, as `SandboxProvider` says.

        An empty `owner` stands for the name of the token. Raises SandboxBusyError if the sandbox is not ready within
        `deadline` seconds, and the SandboxError of a failed order or start.
        """
        order = SandboxOrder(spec=spec, owner=owner, priority=priority, on_lost=on_lost, lease_s=LEASE_S)
        key = uuid4().hex
        sandbox: RemoteSandbox | None = None
        try:
            begin = anyio.current_time()
            info = await self.order(order, key, wait=min(POLL_S, deadline))
            left = max(0.0, begin + deadline - anyio.current_time())
            info = await self.wait_ready(info, left, whole_wait=deadline)
            sandbox = self.attach(info)
            yield sandbox
        finally:
            # If the response to the order was lost, a second order with the same key finds the sandbox.
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self._end_acquired(sandbox, order, key)

    async def order(self, order: SandboxOrder, key: str, *, wait: float = POLL_S) -> Info:
        """Order a sandbox. It may not be ready yet when this returns; `wait_ready` waits for it.

        If the response was lost, call this again with the same key.

        Args:
            order: the order.
            key: idempotency key: a further order with this key returns the same sandbox.
            wait: seconds for which the service may delay the response until the sandbox is ready.

        Raises:
            SandboxError: the service refuses the order, or cannot be reached.
        """
        return await self.http.ask(
            "POST", "/v1/sandboxes", Info, body=order, query={"wait": wait}, seconds=wait, key=key
        )

    async def wait_ready(self, info: Info, left: float, whole_wait: float) -> Info:
        """Wait until an ordered sandbox is ready, and return its new state.

        Args:
            info: state of the sandbox, as `order` returned it.
            left: seconds to wait at most.
            whole_wait: seconds that the caller has waited in the end, with the order; for the error message.

        Raises:
            SandboxBusyError: the sandbox was not ready in time.
            SandboxStartError: it was closed before it was ready.
            SandboxError: the error that ended the sandbox, or the service cannot be reached.
        """
        until = anyio.current_time() + left
        while info.state in ("queued", "starting") and (left := until - anyio.current_time()) > 0:
            wait = min(POLL_S, left)
            info = await self.http.ask("GET", f"/v1/sandboxes/{info.id}", Info, query={"wait": wait}, seconds=wait)
        if info.state in ("queued", "starting"):
            why = info.waiting_for or info.reason
            raise SandboxBusyError(f"waited {whole_wait:g} s for a sandbox of {info.spec.image}: {why}")
        if info.problem is not None:
            raise error_of(info.problem)
        if info.state != "ready":
            raise SandboxStartError(f"sandbox {info.id} was closed before it was ready: {info.reason}")
        return info

    def attach(self, info: Info) -> RemoteSandbox:
        """Return a sandbox of the service, and renew its lease for as long as this client is open.

        `acquire` uses it for a new sandbox, a front for a recovered one, and `RemoteSandbox.fork` for the forks.
        """
        sandbox = RemoteSandbox(self, info)
        self._tasks.start_soon(sandbox.renew, name=f"lease {info.id}")
        return sandbox

    def in_background(self, work: Callable[[str], Coroutine[Any, Any, None]], argument: str) -> None:
        """Run `work(argument)` in a task that ends with this client. Nobody waits for the task; it must not raise."""
        self._tasks.start_soon(work, argument)

    async def find(self, id: str) -> RemoteSandbox:
        """Return a sandbox by its id, for `flash sandbox run --in`. Its lease is renewed from then on.

        Raises:
            SandboxError: there is no such sandbox for this token, or the service cannot be reached.
        """
        return self.attach(await self.http.ask("GET", f"/v1/sandboxes/{quote(id, safe='')}", Info))

    async def list(self) -> list[Info]:
        """Return the sandboxes that this token may use."""
        return (await self.http.ask("GET", "/v1/sandboxes", SandboxList)).sandboxes

    async def status(self, *, since: int = -1, wait: float = 0.0) -> Status:
        """Return the state of the service and of its hosts.

        Waits for up to `wait` seconds until `Status.version` differs from `since`; -1 differs from every version.
        """
        query = {"since": since, "wait": wait}
        return await self.http.ask("GET", "/v1/status", Status, query=query, seconds=wait)

    async def end(self, id: str) -> None:
        """End a sandbox, and wait until its container is removed.

        Raises SandboxClosedError if there is no such sandbox for this token, and SandboxError for another failure.
        """
        await self.http.ask("DELETE", f"/v1/sandboxes/{quote(id, safe='')}", type(None), seconds=CLOSE_S)

    async def snapshots(self) -> list[SnapshotInfo]:
        """Return the snapshots that this token may use, oldest first."""
        return (await self.http.ask("GET", "/v1/snapshots", SnapshotList)).snapshots

    async def forget(self, snapshot_id: str) -> None:
        """Remove a snapshot. Its host waits with the removal while a sandbox runs from it."""
        await self.http.ask("DELETE", f"/v1/snapshots/{quote(snapshot_id, safe='')}", type(None), seconds=CLOSE_S)

    async def _end_acquired(self, sandbox: RemoteSandbox | None, order: SandboxOrder, key: str) -> None:
        """End the sandbox of `acquire`, at the end of its block.

        `sandbox` is None if the order was not answered, or the sandbox did not become ready. Then the order is repeated
        to learn the id.
        """
        try:
            if sandbox is not None:
                await sandbox.close()
            else:
                await self.end((await self.order(order, key, wait=0.0)).id)
        except SandboxError:
            pass  # The service cannot be reached, or never created the sandbox. Its lease expires by itself.


class RemoteSandbox(Sandbox):
    """A sandbox of a service. `SandboxClient.attach` creates it.

    Its methods do what the same methods of `envs.sandbox.sandbox` say, with one request each. Texts with bytes that are
    not UTF-8 (surrogates in Python) cannot travel as they are, so `to_wire` and `from_wire` convert them.

    Parameters: `timeout` and `patience` are seconds; with `patience`, time in which the command had no CPU does not
    count towards `timeout`, until `patience` seconds have passed. `stdin` is the whole input, `env` adds variables, and
    `cwd` is the folder of the command; None: the working directory, where relative paths begin. `offset` and `limit`
    are bytes; a `limit` of None is the whole file. `mode` has the permissions of a new or replaced file.

    Each method raises the SandboxError of the service, of the same class as in a local sandbox. SandboxLostError also
    means that the service cannot be reached, and SandboxTimeoutError that it did not answer in time.
    """

    def __init__(self, client: SandboxClient, info: Info) -> None:
        """Name a sandbox of the service. `info` is its state in the last response; the caller starts `renew`."""
        self._client = client
        self.http = client.http
        self._info = info
        """State of the sandbox at the service, in the last response."""
        self.path = f"/v1/sandboxes/{info.id}"
        """Path of the sandbox in the service's API."""
        self._ended = anyio.Event()
        """Event that is set once the end of the sandbox is recorded."""
        self._state: State = "ready"
        """State that `state` reports: `ready` until `_end` records another one."""

    @property
    def sandbox_id(self) -> str:
        """Id of the lease at the service."""
        return self._info.id

    @property
    def spec(self) -> Spec:
        """Spec that the sandbox was ordered with."""
        return self._info.spec

    @property
    def state(self) -> State:
        """State as far as this client knows: `ready` until `renew` or a failed call has learned of the end."""
        return self._state

    @property
    def generation(self) -> int:
        """Number of times the sandbox was replaced after a loss, as of the service's last response."""
        return self._info.generation

    # ---- lifecycle

    async def renew(self) -> None:
        """Renew the lease until it ends, and record its end as the state `lost` or `closed`.

        `SandboxClient.attach` starts this in a task. It returns when the service reports the end of the sandbox. It
        also returns if no renewal was answered until the lease has run out: the service may have ended the sandbox.
        """
        renewed = anyio.current_time()
        while self._state == "ready":
            asked = anyio.current_time()
            wait = min(RENEW_S, self._info.lease_s / 3)
            # The bound is needed: a service that accepts the connection and stays silent raises no error. The service
            # renews the lease when a request arrives, so an answered request has renewed it when it was sent.
            with anyio.move_on_after(renewed + self._info.lease_s - asked) as left:
                try:
                    info = await self.http.ask("GET", f"{self.path}/end", Info, query={"wait": wait}, seconds=wait)
                except (SandboxClosedError, SandboxRefusedError):
                    return self._end("closed")  # The service does not know the sandbox, or our token, any more.
                except SandboxError:
                    # The service is out of reach, slow or too busy now.
                    await anyio.sleep(RETRY_S)
                    continue
                self._info, renewed = info, asked
                if info.state in ("failed", "closed"):
                    self._end("lost" if info.state == "failed" else "closed")
            if left.cancelled_caught:
                self._end("lost")
        return None

    async def wait_ended(self) -> None:
        """Wait until the end of the sandbox is recorded here."""
        await self._ended.wait()

    async def close(self) -> None:
        """End the sandbox at the service, and wait until its container is removed. Raises SandboxError on failure.

        The sandbox is recorded as closed in any case. Then `renew` stops, and the lease expires.
        """
        try:
            await self._client.end(self.sandbox_id)
        finally:
            self._end("closed")

    def _end(self, state: State) -> None:
        """Record the end of the sandbox. Only the first call has an effect."""
        if not self._ended.is_set():
            self._state = state
            self._ended.set()

    # ---- commands

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
        """Run a command to its end, as `Commands.run` says. Cancelling this call kills the command."""
        check_timeout(timeout)
        body = Exec(command=command, timeout=timeout, patience=patience, stdin=stdin, env=env, cwd=cwd)
        return await self.call_once("run", Result, body.converted(to_wire), max(timeout, patience or 0.0))

    async def stream(
        self,
        command: Command,
        *,
        timeout: float,
        patience: float | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> AsyncGenerator[Chunk | Result]:
        """Run a command and yield its output as it is written, as `Commands.stream` says.

        The response has one JSON object per line. Leaving the loop closes the connection, and the service then kills
        the command. The call is never repeated: the caller may have used a part of the output.

        Raises:
            SandboxLostError: the sandbox is lost, or the connection broke before the result.
            SandboxError: the error of the service, also after a part of the output.
        """
        check_timeout(timeout)
        body = Exec(command=command, timeout=timeout, patience=patience, stdin=stdin, env=env, cwd=cwd)
        try:
            async with self.http.streamed("POST", f"{self.path}/stream", body=body.converted(to_wire)) as response:
                async for line in lines_of(response):
                    match msgspec.json.decode(line, type=StreamLine):
                        case StreamPiece(chunk):
                            yield chunk
                        case Last(result):
                            yield result
                            return
                        case Broken(problem):
                            raise error_of(problem)
                        case _:
                            pass  # `Alive`, which only keeps the connection from being silent.
            raise SandboxLostError(f"the stream of {self.path} ended without a result")
        except (httpx.HTTPError, *DECODE_ERRORS) as error:
            await self._record_end_after_loss()
            raise SandboxLostError(f"the stream of {self.path} broke: {error}") from error
        except SandboxLostError:
            await self._record_end_after_loss()
            raise

    async def start(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        patience: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> RemoteJob:
        """Start a command in the background, as `Commands.start` says."""
        body = Exec(command=command, timeout=timeout, patience=patience, env=env, cwd=cwd)
        return RemoteJob(self, (await self.call_once("jobs", JobInfo, body.converted(to_wire), 0.0)).job_id)

    @asynccontextmanager
    async def session(self, name: str = "main") -> AsyncGenerator[RemoteSession]:
        """Open a shell for the time of the block. Its end is shielded from cancellation.

        Raises SandboxBusyError if a shell of this name is open.
        """
        info = await self.http.ask("PUT", f"{self.path}/sessions/{quote(name, safe='')}", SessionInfo)
        session = RemoteSession(self, info)
        try:
            yield session
        finally:
            with anyio.move_on_after(CANCEL_S, shield=True):
                await session.close()

    # ---- files

    async def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes of a file, as `Files.read` says."""
        query = {"path": path, "offset": offset} | ({} if limit is None else {"limit": limit})
        return await self.http.get_bytes(f"{self.path}/files", query)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, append: bool = False) -> None:
        """Replace a file or append to it, as `Files.write` says."""
        query = {"path": path, "mode": mode, "append": str(append).lower()}
        await self.http.put_bytes(f"{self.path}/files", query, data)

    async def list(self, path: str = ".") -> builtins.list[FileInfo]:
        """Return the entries of a folder, as `Files.list` says."""
        listing = await self.http.ask("GET", f"{self.path}/entries", Listing, query={"path": path})
        return [msgspec.structs.replace(entry, name=from_wire(entry.name)) for entry in listing.entries]

    async def remove(self, path: str) -> None:
        """Remove a file or tree, as `Files.remove` says."""
        await self.http.ask("DELETE", f"{self.path}/files", type(None), query={"path": path})

    async def put_archive(self, path: str, pieces: AsyncIterator[bytes], size: int | None = None) -> None:
        """Unpack a tar archive in the sandbox as `path`. `pieces` are its bytes, `size` their number if it is known."""
        query = {"path": path}
        await self.http.put_pieces(f"{self.path}/tree", query, pieces, size, media_type=TAR, seconds=TREE_S)

    async def get_archive(self, path: str, limits: TreeLimits) -> AsyncGenerator[bytes]:
        """Yield a file or folder as a tar archive, as `Archives.get_archive` says.

        Raises:
            SandboxError: the service's error, of the same class as in a local sandbox, also after a part was yielded.
            SandboxLimitError: the archive is larger than the limits allow.
            SandboxLostError: the connection broke, and the service knows no error of the sandbox.
        """
        left, key = limits.total + HEAD_BYTES * limits.entries, uuid4().hex
        try:
            async with self.http.streamed("GET", f"{self.path}/tree", query={"path": path}, key=key) as response:
                async for piece in response.aiter_raw(COPY_BYTES):
                    left -= len(piece)
                    if left < 0:
                        raise SandboxLimitError(f"{path}: the archive is larger than the limits allow")
                    yield piece
        except httpx.HTTPError as error:
            # The service has begun its response, so it can report a failure only by closing the connection. A broken
            # network looks the same, but only a fault of the files may count against the program that made them. So the
            # same call is sent once more: the service answers with the error, if it had one.
            try:
                async with self.http.streamed("GET", f"{self.path}/tree", query={"path": path}, key=key):
                    raise SandboxLostError(f"{path}: the connection to the service broke during the copy") from error
            except SandboxLostError:
                await self._record_end_after_loss()
                raise

    # ---- snapshots

    async def snapshot(self) -> Snapshot:
        """Save the files as an image of the service, which keeps it for some time.

        The call has no idempotency key, so it is not repeated: after a SandboxLostError the snapshot may exist.
        """
        return await self.http.ask("POST", f"{self.path}/snapshot", Snapshot, seconds=TREE_S)

    async def fork(self, count: int) -> Sequence[RemoteSandbox]:
        """Start `count` sandboxes with the same files. The service ends them with this one at the latest."""
        forks = await self.call_once("fork", SandboxList, Fork(count=count), TREE_S)
        return [self._client.attach(info) for info in forks.sandboxes]

    # ---- calls that must run only once

    async def call_once(self, path: str, answer: type[_T], body: msgspec.Struct, seconds: float) -> _T:
        """Send a call that must run only once, such as a command, and return its result.

        It has an idempotency key, so that it can be sent again when the connection breaks. If its caller is cancelled
        or the service does not answer in time, the call is cancelled at the service too: the command must not run on
        when nobody waits for it.

        Args:
            path: path of the call below that of the sandbox.
            answer: type of the response.
            body: body of the request.
            seconds: seconds that the call itself may take.

        Raises:
            SandboxLostError: the sandbox is lost, or it is unknown if the call was carried out.
            SandboxError: the error of the service.
        """
        key = uuid4().hex
        try:
            return await self.http.ask("POST", f"{self.path}/{path}", answer, body=body, seconds=seconds, key=key)
        except SandboxLostError:
            await self._record_end_after_loss()
            raise
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(CANCEL_S, shield=True):
                await self._cancel(key)
            raise
        except SandboxTimeoutError:
            # The service may only be slow. It must not run the call later, when nobody waits for it any more.
            self._client.in_background(self._cancel, key)
            raise

    async def _record_end_after_loss(self) -> None:
        """Ask the service if the sandbox has ended, after a call reported a loss, and record its end.

        Otherwise a caller that looks at `state` after the error would still find `ready`, until `renew` notices the
        loss. Does nothing if the service does not answer within `STATE_S`.
        """
        # The own bound is needed: `ask` alone repeats the request for `REPEAT_S` if the service is gone.
        with anyio.move_on_after(STATE_S), suppress(SandboxError):
            info = await self.http.ask("GET", f"{self.path}/end", Info, query={"wait": NOTICE_S}, seconds=NOTICE_S)
            # The lease fails only once the lost container is removed, so `info.state` may still be `ready`.
            if info.sandbox_state in ("lost", "closed"):
                self._end(info.sandbox_state)

    async def _cancel(self, key: str) -> None:
        """Cancel the call with this idempotency key at the service. Errors are ignored."""
        # The call may have ended with its sandbox or the service. Its own timeout ends the command.
        with suppress(SandboxError):
            await self.http.ask("DELETE", f"{self.path}/calls/{key}", type(None), seconds=CANCEL_S)


class RemoteSession:
    """A shell of a remote sandbox: the `Session` that `RemoteSandbox.session` yields."""

    def __init__(self, sandbox: RemoteSandbox, info: SessionInfo) -> None:
        """Name an open session of `sandbox`, as the service described it."""
        self._sandbox = sandbox
        self._path = f"sessions/{info.name}"
        """Path of the session below that of its sandbox."""
        self._name = info.name
        self._restarts = info.restarts

    @property
    def name(self) -> str:
        """Name of the session in its sandbox."""
        return self._name

    @property
    def restarts(self) -> int:
        """Number of times that the shell was replaced, in the last response."""
        return self._restarts

    async def run(self, command: str, *, timeout: float) -> Result:
        """Run one command after the session's earlier ones, as `Session.run` says. Cancelling this kills it."""
        check_session_command(command, timeout)
        body = RunInSession(command=to_wire(command), timeout=timeout)
        # The agent lets the command wait for earlier ones for `timeout` seconds, and then run for as long.
        answer = await self._sandbox.call_once(f"{self._path}/run", SessionResult, body, 2 * timeout)
        self._restarts = answer.restarts
        return answer.result

    async def interrupt(self) -> bool:
        """Send SIGINT to the running command. Returns False if no command runs."""
        path = f"{self._sandbox.path}/{self._path}/interrupt"
        return (await self._sandbox.http.ask("POST", path, SessionInterrupted)).interrupted

    async def close(self) -> None:
        """End the shell and everything that it started. Errors are ignored."""
        with suppress(SandboxError):  # The shell may have ended with its sandbox.
            await self._sandbox.http.ask("DELETE", f"{self._sandbox.path}/{self._path}", type(None))


class RemoteJob:
    """A background job of a remote sandbox: the `Job` that `RemoteSandbox.start` returns."""

    def __init__(self, sandbox: RemoteSandbox, job_id: str) -> None:
        """Name a job that was started in `sandbox`."""
        self._http = sandbox.http
        self._path = f"{sandbox.path}/jobs/{job_id}"
        """Path of the job in the service's API."""
        self._job_id = job_id

    @property
    def job_id(self) -> str:
        """Id that the agent in the sandbox chose."""
        return self._job_id

    async def poll(self) -> JobStatus:
        """Return the current state without waiting."""
        return await self._http.ask("GET", self._path, JobStatus)

    async def wait(self, timeout: float) -> Result:
        """Wait for the result, with requests of at most `JOB_POLL_S` seconds each.

        Raises:
            SandboxTimeoutError: the job still runs after `timeout` seconds. It goes on.
        """
        deadline = anyio.current_time() + timeout
        while True:
            wait = min(JOB_POLL_S, max(0.0, deadline - anyio.current_time()))
            status = await self._http.ask("GET", self._path, JobStatus, query={"wait": wait}, seconds=wait)
            if status.result is not None:
                return status.result
            if anyio.current_time() >= deadline:
                raise SandboxTimeoutError(f"job {self._job_id} still runs after {timeout:g} s")

    async def signal(self, name: str = "SIGTERM") -> None:
        """Send a signal to the job's process group, as `Job.signal` says."""
        await self._http.ask("POST", f"{self._path}/signal", type(None), body=Signal(name=name))

    async def output(self, stream: StreamName = "stdout", *, offset: int = 0, limit: int = 1 << 16) -> Output:
        """Return a range of the job's kept output, from byte `offset` of the stream on."""
        query = {"stream": stream, "offset": offset, "limit": limit}
        return await self._http.ask("GET", f"{self._path}/output", Output, query=query)


async def lines_of(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the lines of a streamed response.

    The last one may lack its newline. Splits at newlines only: `Response.aiter_lines` also splits at characters such as
    U+2028, which JSON leaves as they are in a text.
    """
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def certificate_check(ca: Path | None) -> ssl.SSLContext | bool:
    """Return how to check a service's certificate, for `SandboxClient`: by an SSL context, or True.

    `ca` is the PEM file of the authority that has signed it. None: the result is True, which means the public
    authorities.

    Raises:
        ConfigError: the file is not a certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca) if ca else True
    except OSError as error:
        raise ConfigError(f"{ca} cannot be used as a certificate authority: {error}") from error


def service_token(path: Path, name: str = ADMIN) -> str:
    """Return the secret of a token from a service's token file on this machine, for `SandboxClient`.

    `name` is the name of the token in the file.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it has no token of this name.
    """
    # Not `Path.exists`, which raises an error for a folder that this user may not enter.
    if not os.path.exists(path):
        raise ConfigError(f"there is no token file {path}; start the service, or name another one with --token-file")
    tokens = read_tokens(path)
    if name not in tokens:
        raise ConfigError(f"{path} has no token {name!r}, only {', '.join(tokens)}")
    return tokens[name].secret
