"""SandboxClient: sandboxes of a service, used like local ones.

`SandboxClient.acquire` takes what `Pool.acquire` takes, and gives a `Sandbox`: code runs unchanged with either. A
task of the client keeps each lease alive and notices its end; a client that vanishes loses its sandboxes when their
leases run out.
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
"""Seconds for which the service holds an answer back while a sandbox is not ready."""
LEASE_S = 120.0
"""Seconds after which the service ends a sandbox whose client is silent."""
CLOSE_S = 60.0
"""Seconds for a sandbox to be ended, also when the caller is being cancelled."""


class SandboxClient:
    """A service's client; an asynchronous context manager."""

    def __init__(self, url: str, token: str, *, owner: str = "", verify: ssl.SSLContext | bool = True) -> None:
        """For the service at `url`: http://…, https://… or unix:/path. `owner` names whose sandboxes are asked for.

        Raises:
            ConfigError: the address is no such thing.
        """
        self._http = HttpClient(url, token, verify)
        self._owner = owner
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup

    @property
    def http(self) -> HttpClient:
        """The service, as it is reached over HTTP."""
        return self._http

    async def __aenter__(self) -> Self:
        """Connect.

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
        """See `SandboxProvider`. Without an `owner` the client's own is meant."""
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
            # Without an answer to the order its key says which sandbox it is.
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self._give_back(sandbox, order, key)

    async def order(self, order: SandboxOrder, key: str, *, wait: float = POLL_S) -> Info:
        """Ask for a sandbox. The same key gives the same sandbox."""
        return await self.http.ask(
            "POST", "/v1/sandboxes", Info, body=order, query={"wait": wait}, seconds=wait, key=key
        )

    async def wait_ready(self, info: Info, seconds: float, deadline: float) -> Info:
        """Wait for a sandbox that was asked for, `seconds` that are left of its `deadline`.

        Raises:
            SandboxBusyError: it was not ready in time.
            SandboxError: what ended it.
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
        """Use a sandbox of the service, and keep its lease for as long as this client lives."""
        sandbox = RemoteSandbox(self, info)
        self._tasks.start_soon(sandbox.keep, name=f"lease {info.id}")
        return sandbox

    def in_background(self, work: Callable[[str], Coroutine[Any, Any, None]], argument: str) -> None:
        """Do something that nobody waits for, while this client lives."""
        self._tasks.start_soon(work, argument)

    async def find(self, id: str) -> RemoteSandbox:
        """A sandbox by its id."""
        return self.attach(await self.http.ask("GET", f"/v1/sandboxes/{quote(id, safe='')}", Info))

    async def list(self) -> list[Info]:
        """The sandboxes that this token may use."""
        return (await self.http.ask("GET", "/v1/sandboxes", SandboxList)).sandboxes

    async def status(self, *, since: int = -1, wait: float = 0.0) -> Status:
        """The whole service; with `wait`, once it differs from version `since`."""
        query = {"since": since, "wait": wait}
        return await self.http.ask("GET", "/v1/status", Status, query=query, seconds=wait)

    async def end(self, id: str) -> None:
        """End a sandbox, and wait until it is gone."""
        await self.http.ask("DELETE", f"/v1/sandboxes/{quote(id, safe='')}", type(None), seconds=CLOSE_S)

    async def snapshots(self) -> list[SnapshotInfo]:
        """The snapshots that this token may use, oldest first."""
        return (await self.http.ask("GET", "/v1/snapshots", SnapshotList)).snapshots

    async def forget(self, snapshot_id: str) -> None:
        """Remove a snapshot that nothing runs from any more."""
        await self.http.ask("DELETE", f"/v1/snapshots/{quote(snapshot_id, safe='')}", type(None), seconds=CLOSE_S)

    async def _give_back(self, sandbox: RemoteSandbox | None, order: SandboxOrder, key: str) -> None:
        try:
            if sandbox is not None:
                await sandbox.close()
            else:
                await self.end((await self.order(order, key, wait=0.0)).id)
        except SandboxError:
            pass  # It cannot be reached, or was never made; its lease runs out by itself.


def trusting(ca: Path | None) -> ssl.SSLContext | bool:
    """How a service's certificate is checked: by this authority, or by the public ones.

    Raises:
        ConfigError: the file is no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca) if ca else True
    except OSError as error:
        raise ConfigError(f"{ca} cannot be used as a certificate authority: {error}") from error


def service_token(path: Path, name: str = ADMIN) -> str:
    """A token of a token file on this machine.

    Raises:
        ConfigError: there is no such file, or no such token in it.
    """
    if not path.exists():
        raise ConfigError(f"there is no token file {path}; start the service, or name another one with --token-file")
    tokens = read_tokens(path)
    if name not in tokens:
        raise ConfigError(f"{path} has no token {name!r}, only {', '.join(tokens)}")
    return tokens[name].secret
