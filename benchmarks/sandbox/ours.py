"""Operations of Flash's sandboxes that `benchmarks.sandbox.run` times, on real containers.

`benchmarks.sandbox.swerex` has the same operations of the system that Flash is compared with.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import anyio

from benchmarks.sandbox.engine import IMAGE
from envs.sandbox.api import Result, Session, Spec
from envs.sandbox.engines.backend import Backend
from envs.sandbox.local.sandbox import LocalSandbox
from envs.sandbox.pool.host import HostSettings
from envs.sandbox.pool.local_host import LocalHost, open_engine_host
from envs.sandbox.pool.ownership import Identity, OwnerLock
from envs.sandbox.pool.pool import SandboxPool, open_pool
from envs.sandbox.remote.client import SandboxClient
from envs.sandbox.sandbox import Sandbox
from envs.sandbox.service.service import open_service
from envs.sandbox.service.web import make_app
from envs.sandbox.tokens import ADMIN, Token, Tokens
from flash.http.server import HttpAddress, open_socket, serving

SPEC = Spec(image=IMAGE)
"""Description of the sandboxes."""
COMMAND_S = 60.0
"""Longest wait for a command, in seconds."""
READY_S = 120.0
"""Longest wait for a warm sandbox, in seconds. A sandbox is warm if it has started and nobody uses it yet."""
FIXED_WARM = HostSettings(warm_max=0)
"""Settings of a host that keeps a fixed number of sandboxes warm, and does not adapt it to the load."""


def checked(result: Result) -> Result:
    """Return the result if the command succeeded; else raise RuntimeError, because its time would mean nothing."""
    if not result.ok:
        raise RuntimeError(f"a command failed: {result}")
    return result


async def timed(call: Callable[[], Awaitable[Result]], count: int) -> list[float]:
    """Return the seconds of each of `count` calls, one after the other. Raises RuntimeError if a command fails."""
    taken: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        result = await call()
        taken.append(time.perf_counter() - begin)
        checked(result)
    return taken


async def session(shell: Session, count: int) -> list[float]:
    """Return the seconds of each of `count` commands in a shell that stays open."""
    return await timed(lambda: shell.run("true", timeout=COMMAND_S), count)


async def fresh(sandbox: Sandbox, count: int) -> list[float]:
    """Return the seconds of each of `count` commands, each a process of its own."""
    return await timed(lambda: sandbox.run(["true"], timeout=COMMAND_S), count)


async def cold_start(backend: Backend, labels: dict[str, str]) -> float:
    """Return the seconds from nothing to the result of a first command in a new sandbox."""
    begin = time.perf_counter()
    async with LocalSandbox(backend, SPEC, labels=labels) as sandbox:
        result = await sandbox.run(["true"], timeout=COMMAND_S)
        taken = time.perf_counter() - begin
    checked(result)
    return taken


async def engine_start(backend: Backend, labels: dict[str, str]) -> float:
    """Return the seconds of the engine to make and start the same container, without our agent in it."""
    begin = time.perf_counter()
    container_id = await backend.containers.create(SPEC, name=f"bare-{uuid4().hex[:20]}", labels=labels)
    try:
        await backend.containers.start(container_id)
        return time.perf_counter() - begin
    finally:
        with anyio.CancelScope(shield=True):
            await backend.containers.delete(container_id)


@asynccontextmanager
async def open_local_pool(
    backend: Backend, settings: HostSettings | None = None, warm: Sequence[tuple[Spec, int]] = ()
) -> AsyncGenerator[tuple[SandboxPool, LocalHost]]:
    """Open a pool like the one of the sandbox service, with this machine as its only host.

    Args:
        backend: container engine.
        settings: settings of the host; None: the defaults.
        warm: sandboxes that the host keeps warm, and the number of each.
    """
    with tempfile.TemporaryDirectory(prefix="flash-bench-") as folder, OwnerLock(Path(folder) / "lock") as lock:
        identity = Identity.of(f"benchmark-{uuid4().hex[:12]}", lock)
        async with (
            open_engine_host(backend, identity, name="here", settings=settings, warm=warm) as host,
            open_pool([host]) as pool,
        ):
            yield pool, host


@asynccontextmanager
async def over_http(backend: Backend) -> AsyncGenerator[Sandbox]:
    """Provide a sandbox of a service over HTTP at loopback. Service and client are in this process."""
    token, address = uuid4().hex, HttpAddress(port=0)
    async with (
        open_local_pool(backend, FIXED_WARM) as (pool, _),
        open_service(pool, Tokens({ADMIN: Token(token)})) as service,
        serving(make_app(service), open_socket(address), address) as url,
        SandboxClient(url, token) as client,
        client.acquire(SPEC, deadline=READY_S) as sandbox,
    ):
        yield sandbox


async def warm_starts(backend: Backend, count: int) -> list[float]:
    """Return the seconds of `count` starts in a pool that has a warm sandbox.

    The time of a start is from the request of a sandbox to the result of its first command.
    """
    taken: list[float] = []
    async with open_local_pool(backend, FIXED_WARM, [(SPEC, 1)]) as (pool, host):
        for _ in range(count):
            # The request before took the only warm sandbox. The host makes the next one in the background, and
            # `pool.state` gets a new version when that sandbox is warm.
            with anyio.fail_after(READY_S):
                while not sum(host.report().warm.values()):
                    await pool.state.changed_since(pool.state.version)
            begin = time.perf_counter()
            async with pool.acquire(SPEC, deadline=READY_S) as sandbox:
                result = await sandbox.run(["true"], timeout=COMMAND_S)
                taken.append(time.perf_counter() - begin)
                checked(result)
    return taken
