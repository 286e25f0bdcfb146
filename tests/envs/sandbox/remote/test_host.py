"""A front over services on other machines: placement, forks, and taking over after a restart of either."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from envs.sandbox.pool.host import HostSettings, Ticket
from envs.sandbox.pool.journal import MemoryPoolJournal
from envs.sandbox.pool.lease import LeaseOrder, SandboxLease
from envs.sandbox.pool.pool import SandboxPool, open_pool
from envs.sandbox.pool.state import PoolSettings
from envs.sandbox.remote.client import SandboxClient
from envs.sandbox.remote.host import RemoteHost
from flash.errors import SandboxClosedError, SandboxError, SandboxLostError
from tests.envs.sandbox.services import NO_WARM, SPEC, TOKEN, Running, running

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def machines(folder: Path, count: int = 2, host_settings: HostSettings = NO_WARM) -> AsyncIterator[list[Running]]:
    """Services, each with an engine of its own."""
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            (folder / str(number)).mkdir()
            found.append(await stack.enter_async_context(running(folder / str(number), host_settings=host_settings)))
        yield found


@asynccontextmanager
async def front(services: list[Running], journal: MemoryPoolJournal | None = None) -> AsyncIterator[SandboxPool]:
    hosts = [RemoteHost("ab"[number], each.client, "front") for number, each in enumerate(services)]
    settings = PoolSettings(recover_retry_s=0.2)
    async with open_pool(hosts, journal=journal, settings=settings) as pool:
        yield pool


async def held(pool: SandboxPool) -> SandboxLease:
    lease = pool.order(LeaseOrder(spec=SPEC, owner="x"))
    await pool.wait_ready(lease, 20)
    return lease


async def test_forks_of_a_remote_sandbox_are_on_its_host_and_end_with_it(tmp_path):
    async with machines(tmp_path) as services, front(services) as pool:
        leases = [await held(pool), await held(pool)]
        assert {lease.host for lease in leases} == {"a", "b"}
        for lease in leases:
            origin = pool.handle(lease)
            await origin.write("where", lease.host.encode())
            forks = await pool.fork(lease, 2)
            assert {fork.host for fork in forks} == {lease.host}
            for fork in forks:
                assert await pool.handle(fork).read("where") == lease.host.encode()
                assert (await pool.handle(fork).run("cat where", timeout=20)).stdout == lease.host.encode()
        assert [len(each.backend.containers.kept) for each in services] == [3, 3]
        await pool.release(leases[0])
        here = services["ab".index(leases[0].host)]
        assert here.backend.containers.kept == {}
        assert here.backend.images.kept == {}
        assert len(pool.state.leases.all()) == 3
    assert [each.backend.containers.kept for each in services] == [{}, {}]


async def test_a_front_that_restarts_attaches_to_what_runs_and_ends_what_it_does_not_know(tmp_path):
    async with machines(tmp_path, 1) as [service]:
        before = RemoteHost("a", service.client, "front")
        known, forgotten = (Ticket(f"box-{name}", "l", "x", SPEC) for name in ("known", "forgotten"))
        sandbox = await before.start(known)
        await sandbox.write("kept", b"still here")
        await before.start(forgotten)
        other = await RemoteHost("a", service.client, "other-front").start(Ticket("box-other", "l", "x", SPEC))
        assert len(service.backend.containers.kept) == 3
        async with SandboxClient(service.url, TOKEN) as client:
            after = RemoteHost("a", client, "front")
            found = await after.recover([known, Ticket("box-gone", "l", "x", SPEC)])
            assert set(found) == {"box-known"}
            assert await found["box-known"].read("kept") == b"still here"
            assert len(service.backend.containers.kept) == 2
            assert (await other.run("echo untouched", timeout=20)).stdout == b"untouched\n"


async def test_a_front_waits_for_a_host_that_is_not_done_with_its_own_restart(tmp_path):
    one = HostSettings(warm_max=0, cpu_factor=1e-9 + 1.0, memory_factor=1.0)
    async with machines(tmp_path, 1, one) as [service], anyio.create_task_group() as tasks:
        # Until there is room, the sandbox stands as one does whose host has not found its own engine yet.
        room = []
        while True:
            lease = service.pool.order(LeaseOrder(spec=SPEC, owner="room"))
            with anyio.move_on_after(3):
                await service.pool.wait_ready(lease, 100)
                room.append(lease)
                continue
            lease.end("there is no more room")
            break
        ticket = Ticket("box-waits", "l", "x", SPEC)
        host = RemoteHost("a", service.client, "front")
        started = []

        async def start() -> None:
            started.append(await host.start(ticket))

        tasks.start_soon(start)
        while not any(info.key == "box-waits" for info in await service.client.list()):  # noqa: ASYNC110
            await anyio.sleep(0.02)

        async def make_room() -> None:
            await anyio.sleep(0.3)
            await service.pool.release(room[0])

        tasks.start_soon(make_room)
        found = await RemoteHost("a", service.client, "front").recover([ticket])
        assert (await found["box-waits"].run("echo ready", timeout=20)).stdout == b"ready\n"


async def test_a_start_that_is_cancelled_leaves_nothing_on_the_host(tmp_path):
    async with machines(tmp_path, 1) as [service]:
        host = RemoteHost("a", service.client, "front")
        for number in range(8):
            sandbox = None
            with anyio.move_on_after(0.01 * number):
                sandbox = await host.start(Ticket(f"box-{number}", "l", "x", SPEC))
            if sandbox is not None:
                await sandbox.close()
        assert await service.client.list() == []
        assert service.backend.containers.kept == {}


async def test_a_sandbox_whose_container_is_killed_is_lost_at_the_front_too(tmp_path):
    async with machines(tmp_path, 1) as [service], front([service]) as pool:
        lease = await held(pool)
        [id] = service.backend.containers.kept
        await service.backend.containers.kill(id)
        with pytest.raises(SandboxLostError):
            await pool.handle(lease).run("true", timeout=20)
        with anyio.fail_after(30):
            await lease.done.wait()
        assert lease.state == "failed"
        with pytest.raises((SandboxLostError, SandboxClosedError)):
            await pool.handle(lease).run("true", timeout=20)


@pytest.mark.integration  # half a minute of the real clock
async def test_a_host_that_goes_away_takes_no_more_and_what_it_had_is_told(tmp_path):
    leave = anyio.Event()

    async def serve(*, task_status) -> None:
        async with running(tmp_path, host_settings=NO_WARM) as service:
            task_status.started(service.url)
            await leave.wait()

    async with anyio.create_task_group() as tasks:
        url = await tasks.start(serve)
        async with SandboxClient(url, TOKEN) as client:
            host = RemoteHost("a", client, "front")
            async with open_pool([host], settings=PoolSettings(close_s=1)) as pool:
                lease = await held(pool)
                leave.set()
                with pytest.raises(SandboxError):
                    await pool.handle(lease).run("sleep 100", timeout=100)
                with anyio.fail_after(60):
                    while host.report().accepts:  # noqa: ASYNC110  # the report is read, not told
                        await anyio.sleep(0.1)
                assert host.report().why
                lease.end("its host is gone")
