"""A whole service in the test's own process: agents as local processes, HTTP over a unix socket or loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from envs.sandbox.api import Spec
from envs.sandbox.engines.backend import Backend
from envs.sandbox.engines.fake import FakeBackend
from envs.sandbox.pool.host import HostSettings
from envs.sandbox.pool.journal import PoolJournal
from envs.sandbox.pool.local_host import open_engine_host
from envs.sandbox.pool.ownership import Identity
from envs.sandbox.pool.pool import SandboxPool, open_pool
from envs.sandbox.pool.state import PoolSettings
from envs.sandbox.remote.client import SandboxClient
from envs.sandbox.service.service import Service, open_service
from envs.sandbox.service.web import make_app
from envs.sandbox.tokens import ADMIN, Token, Tokens
from flash.http.connections import HttpLimits
from flash.http.server import HttpAddress, open_socket, serving

TOKEN = "t" * 32
OTHER_TOKEN = "o" * 32
SPEC = Spec(image="any")
NO_WARM = HostSettings(warm_max=0, cpu_factor=100.0)


class Running(msgspec.Struct, frozen=True):
    """What a test may look at."""

    url: str
    client: SandboxClient
    service: Service
    pool: SandboxPool
    backend: Any


@asynccontextmanager
async def running(
    folder: Path,
    *,
    backend: Backend | None = None,
    journal: PoolJournal | None = None,
    limits: HttpLimits | None = None,
    address: HttpAddress | None = None,
    settings: PoolSettings | None = None,
    host_settings: HostSettings = NO_WARM,
    warm: Any = (),
    verify: Any = True,
    tokens: Tokens | None = None,
) -> AsyncIterator[Running]:
    """A service and a client of it."""
    address = address or HttpAddress(unix=folder / "s")
    identity = Identity("test", str(folder / "lock"), "machine", "run")
    async with (
        _backend(backend) as engine,
        open_engine_host(engine, identity, name="here", settings=host_settings, warm=warm) as host,
        open_pool([host], journal=journal, settings=settings) as pool,
        open_service(pool, tokens or Tokens({ADMIN: Token(TOKEN), "other": Token(OTHER_TOKEN)})) as service,
        serving(make_app(service), open_socket(address), address, limits) as url,
        SandboxClient(url, TOKEN, verify=verify) as client,
    ):
        yield Running(url, client, service, pool, engine)


@asynccontextmanager
async def _backend(backend: Backend | None) -> AsyncIterator[Backend]:
    if backend is not None:
        yield backend
        return
    async with FakeBackend() as made:
        yield made
        assert made.containers.kept == {}
        assert made.images.kept == {}
