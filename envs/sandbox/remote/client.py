"""SandboxClient: sandboxes of a service, used like local ones.

`SandboxClient.acquire` has the same parameters as `SandboxPool.acquire` and returns a `Sandbox`: code runs unchanged
with either. A task of the client renews each lease and notices its end. If a client disappears, its leases expire and
the service ends their sandboxes.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote
from uuid import uuid4

import anyio
from anyio.abc import TaskGroup

from envs.sandbox.api import OnLost, Spec
from envs.sandbox.protocol.problems import error_of
from envs.sandbox.protocol.tokens import ADMIN, read_tokens
from envs.sandbox.protocol.wire import Info, SandboxList, SandboxOrder, SnapshotInfo, SnapshotList, Status
from envs.sandbox.remote.http import HttpClient
from envs.sandbox.remote.sandbox import RemoteSandbox
from flash.errors import ConfigError, SandboxBusyError, SandboxError
from flash.waiting import unwrapped_group

POLL_S = 20.0
"""Seconds for which the service may delay a response while a sandbox is not ready."""
LEASE_S = 120.0
"""Seconds without a renewal after which the service ends a sandbox."""
CLOSE_S = 60.0
"""Seconds that ending a sandbox may take, also when the caller is being cancelled."""


class SandboxClient:
    """Client of a service. An asynchronous context manager."""

    def __init__(self, url: str, token: str, *, owner: str = "", verify: ssl.SSLContext | bool = True) -> None:
        """Create a client for the service at `url`: http://…, https://… or unix:/path.

        `owner` is the owner of the sandboxes that `acquire` orders.

        Raises:
            ConfigError: the address or the token cannot be used.
        """
        self._http = HttpClient(url, token, verify)
        self._owner = owner
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup

    @property
    def http(self) -> HttpClient:
        """HTTP connection to the service."""
        return self._http

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
        self._tasks.cancel_scope.cancel()
        await self._stack.__aexit__(None, None, None)

    @asynccontextmanager
    async def acquire(
        self, spec: Spec, *, owner: str = "", priority: int = 0, deadline: float = 600.0, on_lost: OnLost = "fail"
    ) -> AsyncGenerator[RemoteSandbox]:
        """Lease a sandbox for the time of the block, as `SandboxProvider` says.

        Without `owner`, the client's owner is used.
        """
        order = SandboxOrder(spec=spec, owner=owner or self._owner, priority=priority, on_lost=on_lost, lease_s=LEASE_S)
        key = uuid4().hex
        sandbox: RemoteSandbox | None = None
        try:
            begin = anyio.current_time()
            info = await self.order(order, key, wait=min(POLL_S, deadline))
            info = await self.wait_ready(info, max(0.0, begin + deadline - anyio.current_time()), deadline)
            sandbox = self.attach(info)
            yield sandbox
        finally:
            # If the response to the order was lost, a second order with the same key finds the sandbox.
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self._give_back(sandbox, order, key)

    async def order(self, order: SandboxOrder, key: str, *, wait: float = POLL_S) -> Info:
        """Order a sandbox. The same key returns the same sandbox.

        Args:
            order: the order.
            key: idempotency key.
            wait: seconds for which the service may delay the response until the sandbox is ready.

        Raises:
            SandboxError: the service refuses the order, or cannot be reached.
        """
        return await self.http.ask(
            "POST", "/v1/sandboxes", Info, body=order, query={"wait": wait}, seconds=wait, key=key
        )

    async def wait_ready(self, info: Info, seconds: float, deadline: float) -> Info:
        """Wait until an ordered sandbox is ready, for at most `seconds`.

        `deadline` is the whole waiting time in seconds, for the error message.

        Raises:
            SandboxBusyError: the sandbox was not ready in time.
            SandboxError: the error that ended the sandbox.
        """
        until = anyio.current_time() + seconds
        while info.state in ("queued", "starting") and (left := until - anyio.current_time()) > 0:
            wait = min(POLL_S, left)
            info = await self.http.ask("GET", f"/v1/sandboxes/{info.id}", Info, query={"wait": wait}, seconds=wait)
        if info.state in ("queued", "starting"):
            why = info.waiting_for or info.reason
            raise SandboxBusyError(f"waited {deadline:g} s for a sandbox of {info.spec.image}: {why}")
        if info.problem is not None:
            raise error_of(info.problem)
        return info

    def attach(self, info: Info) -> RemoteSandbox:
        """Return a sandbox of the service, and renew its lease for as long as this client is open."""
        sandbox = RemoteSandbox(self, info)
        self._tasks.start_soon(sandbox.keep, name=f"lease {info.id}")
        return sandbox

    def in_background(self, work: Callable[[str], Coroutine[Any, Any, None]], argument: str) -> None:
        """Run `work(argument)` in a task that ends with this client. Nobody waits for the task."""
        self._tasks.start_soon(work, argument)

    async def find(self, id: str) -> RemoteSandbox:
        """Return a sandbox by its id.

        Raises:
            SandboxError: there is no such sandbox for this token, or the service cannot be reached.
        """
        return self.attach(await self.http.ask("GET", f"/v1/sandboxes/{quote(id, safe='')}", Info))

    async def list(self) -> list[Info]:
        """Return the sandboxes that this token may use."""
        return (await self.http.ask("GET", "/v1/sandboxes", SandboxList)).sandboxes

    async def status(self, *, since: int = -1, wait: float = 0.0) -> Status:
        """Return the state of the service. Waits for up to `wait` seconds until its version differs from `since`."""
        query = {"since": since, "wait": wait}
        return await self.http.ask("GET", "/v1/status", Status, query=query, seconds=wait)

    async def end(self, id: str) -> None:
        """End a sandbox, and wait until its container is removed."""
        await self.http.ask("DELETE", f"/v1/sandboxes/{quote(id, safe='')}", type(None), seconds=CLOSE_S)

    async def snapshots(self) -> list[SnapshotInfo]:
        """Return the snapshots that this token may use, oldest first."""
        return (await self.http.ask("GET", "/v1/snapshots", SnapshotList)).snapshots

    async def forget(self, snapshot_id: str) -> None:
        """Remove a snapshot that no sandbox runs from any more."""
        await self.http.ask("DELETE", f"/v1/snapshots/{quote(snapshot_id, safe='')}", type(None), seconds=CLOSE_S)

    async def _give_back(self, sandbox: RemoteSandbox | None, order: SandboxOrder, key: str) -> None:
        try:
            if sandbox is not None:
                await sandbox.close()
            else:
                await self.end((await self.order(order, key, wait=0.0)).id)
        except SandboxError:
            pass  # The service cannot be reached, or never created the sandbox. Its lease expires by itself.


def trusting(ca: Path | None) -> ssl.SSLContext | bool:
    """Return how to check a service's certificate: by this certificate authority, or by the public ones if None.

    Raises:
        ConfigError: the file is not a certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca) if ca else True
    except OSError as error:
        raise ConfigError(f"{ca} cannot be used as a certificate authority: {error}") from error


def service_token(path: Path, name: str = ADMIN) -> str:
    """Return a token from a token file on this machine.

    Raises:
        ConfigError: there is no such file, or no token of this name in it.
    """
    if not path.exists():
        raise ConfigError(f"there is no token file {path}; start the service, or name another one with --token-file")
    tokens = read_tokens(path)
    if name not in tokens:
        raise ConfigError(f"{path} has no token {name!r}, only {', '.join(tokens)}")
    return tokens[name].secret
