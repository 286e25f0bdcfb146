"""Where sandboxes come from: a pool of our own over this machine's engine, or a service. One text decides."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import msgspec

from envs.sandbox.api import OnLost, SandboxLike, Spec
from flash.errors import ConfigError

LOCAL = "local"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Which sandboxes."""

    at: str = LOCAL
    """`local`: of this machine's engine (DOCKER_HOST, then the usual sockets); otherwise the address of a service:
    http://…, https://… or unix:/path."""
    token_file: str | None = None
    """Of the service; its `admin` token is used. FLASH_SANDBOX_TOKEN, where set, is used instead."""
    ca: str | None = None
    """PEM file of the certificate authority of an https:// service, where it is not a public one."""


class Supply(Protocol):
    """What pools and clients have in common."""

    def acquire(
        self, spec: Spec, *, owner: str = "", priority: int = 0, deadline: float = 600.0, on_lost: OnLost = "fail"
    ) -> AbstractAsyncContextManager[SandboxLike]:
        """A sandbox for the time of the block. See `envs.sandbox.pool.pool.Pool.acquire`."""
        ...


def check_source(source: Source) -> None:
    """Refuse what cannot work, without asking the engine or the service.

    Raises:
        ConfigError: naming the option.
    """
    if source.at != LOCAL and not source.at.startswith(("http://", "https://", "unix:")):
        raise ConfigError(f"at must be `local`, http://…, https://… or unix:/path, but is {source.at!r}")
    for name, path in [("token_file", source.token_file), ("ca", source.ca)]:
        if path is not None and source.at == LOCAL:
            raise ConfigError(f"{name} belongs to a service, but at is `local`")
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name}: there is no file {path}")
    if source.at != LOCAL and source.token_file is None and "FLASH_SANDBOX_TOKEN" not in os.environ:
        raise ConfigError(f"the service at {source.at} needs a token: give token_file, or set FLASH_SANDBOX_TOKEN")


@asynccontextmanager
async def open_supply(source: Source, owner: str) -> AsyncGenerator[Supply]:
    """Sandboxes for the time of the block, on behalf of `owner`. At its end all of them are closed.

    Raises:
        ConfigError: there is no engine, a package or a token is missing.
        SandboxError: the engine or the service does not answer.
    """
    async with AsyncExitStack() as stack:
        try:
            supply = await (_pool(stack) if source.at == LOCAL else _client(stack, source, owner))
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is not installed; pip install 'flash-rl[sandbox]'") from error
        yield supply


async def _pool(stack: AsyncExitStack) -> Supply:
    from envs.sandbox.engines.docker import DockerBackend
    from envs.sandbox.pool.engine_maker import open_maker
    from envs.sandbox.pool.host import Identity
    from envs.sandbox.pool.local_host import LocalHost
    from envs.sandbox.pool.ownership import OwnerLock, runtime_folder
    from envs.sandbox.pool.pool import open_pool

    backend = await stack.enter_async_context(DockerBackend())
    # Asked once before anything else: a pool would wait for an engine that does not answer.
    await backend.info()
    service = uuid4().hex
    # A name of its own: nobody else will ever take this lock, so it can go with us.
    path = runtime_folder() / f"{service}.lock"
    stack.callback(path.unlink, missing_ok=True)
    lock = stack.enter_context(OwnerLock(path))
    maker = await stack.enter_async_context(open_maker(backend))
    host = LocalHost(os.uname().nodename, maker, Identity.of(service, lock))
    return await stack.enter_async_context(open_pool([host]))


async def _client(stack: AsyncExitStack, source: Source, owner: str) -> Supply:
    from envs.sandbox.remote.client import SandboxClient, service_token, trusting

    token = os.environ.get("FLASH_SANDBOX_TOKEN") or service_token(Path(source.token_file or ""))
    verify = trusting(Path(source.ca) if source.ca else None)
    return await stack.enter_async_context(SandboxClient(source.at, token, owner=owner, verify=verify))
