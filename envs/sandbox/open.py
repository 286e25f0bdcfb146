"""Sandboxes for programs of this process: from a pool over this machine's engine, or from a service.

`Location` selects one of the two; `open_sandboxes` opens it. `BoundedSandboxes` limits how many are in use at a time;
`envs.judging.judge.shared_judge` makes one for each node of a run.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from uuid import uuid4

import anyio
import msgspec

from envs.sandbox.api import Spec
from envs.sandbox.sandbox import Sandbox, SandboxProvider
from flash.errors import ConfigError, SandboxBusyError, advice_for_extra
from flash.types import Stock

LOCAL = "local"
"""Value of `Location.at` that stands for this machine's engine."""


class Location(msgspec.Struct, frozen=True, kw_only=True):
    """Location of a provider of sandboxes."""

    at: str = LOCAL
    """`local` for this machine's engine (DOCKER_HOST, then the usual sockets), otherwise the address of a service:
    http://…, https://… or unix:/path."""
    token_file: str | None = None
    """Token file of the service; its `admin` token is used. FLASH_SANDBOX_TOKEN takes precedence if it is set."""
    ca: str | None = None
    """PEM file of the certificate authority of an https:// service; None: a public authority."""


def check_location(location: Location) -> None:
    """Check a location without connecting to the engine or the service.

    Raises:
        ConfigError: an option is wrong or missing; the message names it.
    """
    if location.at != LOCAL and not location.at.startswith(("http://", "https://", "unix:")):
        raise ConfigError(f"at must be `local`, http://…, https://… or unix:/path, but is {location.at!r}")
    for name, path in [("token_file", location.token_file), ("ca", location.ca)]:
        if path is not None and location.at == LOCAL:
            raise ConfigError(f"{name} belongs to a service, but at is `local`")
        # Not `Path.is_file`, which raises an error for a folder that this user may not enter.
        if path is not None and not os.path.isfile(path):
            raise ConfigError(f"{name}: there is no file {path}")
    if location.at != LOCAL and location.token_file is None and "FLASH_SANDBOX_TOKEN" not in os.environ:
        raise ConfigError(f"the service at {location.at} needs a token: give token_file, or set FLASH_SANDBOX_TOKEN")


@asynccontextmanager
async def open_sandboxes(location: Location) -> AsyncGenerator[SandboxProvider]:
    """Open a provider of sandboxes for the time of the block. At its end all its sandboxes are closed.

    Raises:
        ConfigError: there is no engine, or a package or a token is missing.
        SandboxError: the engine or the service does not answer.
    """
    async with AsyncExitStack() as stack:
        try:
            sandboxes = await (_pool(stack) if location.at == LOCAL else _client(stack, location))
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is not installed: {advice_for_extra('sandbox')}") from error
        yield sandboxes


class BoundedSandboxes:
    """Lends new sandboxes of a provider, at most `most` at a time. Each is closed after its use.

    A sandbox is never reused: cleaning one safely is hard, and the provider keeps new ones ready.
    """

    def __init__(self, provider: SandboxProvider, *, owner: str, most: int) -> None:
        """Create a lender of the provider's sandboxes. `owner` is the name under which they are ordered."""
        self._provider = provider
        self._owner = owner
        self._most = most
        self._places = anyio.Semaphore(most)
        """Semaphore with one place for each sandbox in use."""
        self._made = 0
        """Number of sandboxes lent so far."""

    @asynccontextmanager
    async def borrow(self, spec: Spec, deadline: float) -> AsyncGenerator[Sandbox]:
        """Lend a new sandbox for the time of the block.

        Raises:
            SandboxBusyError: none was free within `deadline` seconds.
            SandboxError: the sandbox cannot be started.
        """
        begin = anyio.current_time()
        with anyio.move_on_after(deadline) as waiting:
            await self._places.acquire()
        if waiting.cancelled_caught:
            raise SandboxBusyError(f"waited {deadline:g} s while all {self._most} sandboxes of this node were in use")
        try:
            # At least a second for the order, also if the wait for a place took nearly all of the time.
            left = max(1.0, begin + deadline - anyio.current_time())
            async with self._provider.acquire(spec, owner=self._owner, deadline=left) as sandbox:
                self._made += 1
                yield sandbox
        finally:
            self._places.release()

    def stock(self) -> Stock:
        """Return the number of sandboxes in use, of waiting callers, and of sandboxes lent so far, as metrics."""
        return Stock(
            name="sandboxes",
            in_use=self._most - self._places.value,
            ready=0,  # The provider keeps sandboxes ready, and has metrics of its own.
            waiting=self._places.statistics().tasks_waiting,
            most=self._most,
            made=self._made,
        )


async def _pool(stack: AsyncExitStack) -> SandboxProvider:
    """Open a pool over this machine's engine. Everything that it needs is closed with `stack`.

    Raises ConfigError without an engine or a folder for its lock, and SandboxError if the engine does not answer.
    """
    from envs.sandbox.engines.docker import DockerBackend
    from envs.sandbox.pool.local_host import open_engine_host
    from envs.sandbox.pool.ownership import Identity, OwnerLock
    from envs.sandbox.pool.pool import open_pool
    from envs.sandbox.user_folder import user_folder

    backend = await stack.enter_async_context(DockerBackend())
    # The engine is asked before anything else: a pool would wait for an engine that does not answer.
    await backend.info()
    service = uuid4().hex
    # The lock has a new name each time, so no other process ever takes it and it can be removed with this pool.
    path = user_folder() / f"{service}.lock"
    stack.callback(path.unlink, missing_ok=True)
    lock = stack.enter_context(OwnerLock(path))
    host = await stack.enter_async_context(open_engine_host(backend, Identity.of(service, lock)))
    return await stack.enter_async_context(open_pool([host]))


async def _client(stack: AsyncExitStack, location: Location) -> SandboxProvider:
    """Open a client of the service at `location`. It is closed with `stack`.

    Raises ConfigError if its token, certificate or address cannot be used, and SandboxError if it does not answer.
    """
    from envs.sandbox.remote.client import SandboxClient, certificate_check, service_token

    token = os.environ.get("FLASH_SANDBOX_TOKEN") or service_token(Path(location.token_file or ""))
    verify = certificate_check(Path(location.ca) if location.ca else None)
    return await stack.enter_async_context(SandboxClient(location.at, token, verify=verify))
