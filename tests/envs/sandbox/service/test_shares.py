"""Things that all tokens share: one token's holder cannot take them from the others."""

from __future__ import annotations

import io
import logging
import tarfile
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from envs.sandbox.api import Job
from envs.sandbox.pool.host import HostSettings
from envs.sandbox.pool.state import PoolSettings
from envs.sandbox.protocol import ProblemError
from envs.sandbox.remote.client import SandboxClient
from envs.sandbox.service.service import ANSWERS_KEPT, CALLS_OPEN, JOBS_KEPT, LeaseWork, open_service
from envs.sandbox.service.web import RecordLimit
from flash.errors import SandboxBusyError, SandboxLostError
from flash.http.connections import HttpLimits
from tests.envs.sandbox.raw import END_S, bare, bearer, connected, head
from tests.envs.sandbox.services import OTHER_TOKEN, SPEC, TOKEN, running

pytestmark = pytest.mark.anyio

NO_ROOM = HostSettings(warm_max=0, memory_reserve=1.1)
"""A host that never has enough free memory to start a sandbox."""


async def serves(sandbox) -> bool:
    """Return True if another token's command runs."""
    return (await sandbox.run("echo served", timeout=10)).stdout == b"served\n"


async def test_trees_travel_while_all_threads_of_the_process_are_busy(tmp_path):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("file"))
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox, bare(world, **bearer()) as client:
        limiter = anyio.to_thread.current_default_thread_limiter()
        before, limiter.total_tokens = limiter.total_tokens, 1
        try:
            async with limiter:
                path = f"/v1/sandboxes/{sandbox.sandbox_id}/tree"
                assert (await client.put(path, params={"path": "t"}, content=archive.getvalue())).status_code == 204
                await sandbox.download("t", tmp_path / "down")
        finally:
            limiter.total_tokens = before
    assert [path.name for path in (tmp_path / "down").iterdir()] == ["file"]


async def test_a_tree_is_sent_as_it_comes_and_is_kept_nowhere(tmp_path):
    """Otherwise slow readers of large sparse files would fill the disk of the service."""
    async with (
        running(tmp_path, limits=HttpLimits(stall_s=0.5)) as world,
        world.client.acquire(SPEC) as sandbox,
        connected(world) as slow,
    ):
        await sandbox.run("python3 -c \"open('big','wb').truncate(200 << 20)\"", timeout=10)
        await slow.stream.send(head("GET", f"/v1/sandboxes/{sandbox.sandbox_id}/tree?path=big"))
        # The first bytes come although the reader takes no more: nobody waits for the end of the file.
        await slow.until(b"\r\n\r\n")
        assert b" 200 " in slow.got
        lease = world.service.pool.state.leases.of(sandbox.sandbox_id)
        with anyio.fail_after(END_S):
            while lease.uses:  # noqa: ASYNC110  # nothing reports when the service has noticed
                await anyio.sleep(0.05)
        assert await serves(sandbox)


async def test_a_tree_that_cannot_be_read_is_answered_with_its_status(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox, bare(world, **bearer()) as client:
        await sandbox.run("python3 -c \"open('big','wb').truncate(1 << 40)\"", timeout=10)
        for name, status in (("nothing", 404), ("big", 413)):
            answer = await client.get(f"/v1/sandboxes/{sandbox.sandbox_id}/tree", params={"path": name})
            assert answer.status_code == status, answer.text


async def test_one_tokens_requests_leave_connections_for_the_others(tmp_path):
    async with (
        running(tmp_path, limits=HttpLimits(connections=40, strangers=30)) as world,
        world.client.acquire(SPEC) as honest,
        SandboxClient(world.url, OTHER_TOKEN) as client,
        client.acquire(SPEC) as sandbox,
        AsyncExitStack() as stack,
    ):
        poll = head("GET", f"/v1/sandboxes/{sandbox.sandbox_id}/end?wait=60", token=OTHER_TOKEN)
        polls = [await stack.enter_async_context(connected(world)) for _ in range(12)]
        for each in polls:
            await each.stream.send(poll)
        refused = 0
        for each in polls:
            with anyio.move_on_after(0.5):
                await each.until(b" 503 ")
                assert await each.ended()
                refused += 1
        assert refused >= 2  # Ten are its share.
        assert await serves(honest)
        async with SandboxClient(world.url, TOKEN) as another:
            assert await another.list()


async def test_one_tokens_idle_connections_make_room_for_its_next(tmp_path):
    async with (
        running(tmp_path, limits=HttpLimits(connections=40, strangers=30)) as world,
        AsyncExitStack() as stack,
    ):
        idle = [await stack.enter_async_context(connected(world)) for _ in range(15)]
        for each in idle:
            await each.stream.send(head("GET", "/v1/snapshots", token=OTHER_TOKEN))
            await each.until(b" 200 ")
        assert await idle[0].ended()
        assert await idle[4].ended()
        assert await serves_status(world)


async def serves_status(world) -> bool:
    """Return True if the service answers its administrator."""
    async with bare(world, **bearer()) as client:
        return (await client.get("/v1/snapshots")).status_code == 200


async def test_one_tokens_bodies_leave_memory_for_those_of_the_others(tmp_path):
    limits = HttpLimits(held_bytes=40_000)
    async with running(tmp_path, limits=limits) as world, AsyncExitStack() as stack:
        for _ in range(2):
            begun = await stack.enter_async_context(connected(world))
            await begun.stream.send(
                head("POST", "/v1/sandboxes", "content-length: 20000", token=OTHER_TOKEN) + b" " * 8000
            )
        await begun.until(b" 503 ")
        async with bare(world, **bearer()) as client:
            answer = await client.post("/v1/sandboxes", content=b" " * 15_000)
            assert answer.status_code == 400


async def test_strangers_and_what_is_no_http_leave_no_line_in_the_log(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    upgrade = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: x")
    async with running(tmp_path) as world:
        for data in (b"nothing\r\n\r\n", head("GET", "/v1/status", *upgrade, token=None)):
            async with connected(world) as connection:
                await connection.stream.send(data)
                await connection.until(b"HTTP/1.1 4")
    assert not caplog.records


async def test_calls_that_go_on_without_their_client_are_bounded(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        lease = world.service.pool.state.leases.of(sandbox.sandbox_id)
        work = world.service.work(lease)
        async with anyio.create_task_group() as tasks:
            for number in range(CALLS_OPEN):
                tasks.start_soon(work.once, f"key-{number}", b"", anyio.sleep_forever)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(SandboxBusyError, match="256 calls are in progress"):
                await work.once("one more", b"", anyio.sleep_forever)
            tasks.cancel_scope.cancel()


async def test_a_call_that_outlasts_many_others_is_carried_out_once(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        work = world.service.work(world.service.pool.state.leases.of(sandbox.sandbox_id))
        runs: list[str] = []
        ready = anyio.Event()

        async def long() -> int:
            runs.append("begun")
            await ready.wait()
            return len(runs)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work.once, "long", b"", long)
            await anyio.wait_all_tasks_blocked()
            for number in range(ANSWERS_KEPT):
                await work.once(f"key-{number}", b"", anyio.lowlevel.checkpoint)
            ready.set()
        assert await work.once("long", b"", long) == 1


async def test_a_stream_with_the_key_of_a_call_in_progress_harms_neither_the_call_nor_the_service(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        work = world.service.work(world.service.pool.state.leases.of(sandbox.sandbox_id))
        ready = anyio.Event()
        answers: list[object] = []

        async def long() -> str:
            await ready.wait()
            return "answer"

        async def ask() -> None:
            answers.append(await work.once("key", b"digest", long))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            work.keep_error("key", SandboxLostError("the stream broke off"))
            for number in range(2 * ANSWERS_KEPT):
                await work.once(f"key-{number}", b"", anyio.lowlevel.checkpoint)
            ready.set()
        assert answers == ["answer"]
        assert await serves(sandbox)


async def test_a_call_that_the_end_of_the_service_has_cut_off_is_an_error(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        lease = world.service.pool.state.leases.of(sandbox.sandbox_id)
        errors: list[SandboxLostError] = []

        begun = anyio.Event()

        async def never_end() -> None:
            begun.set()
            await anyio.sleep_forever()

        async def ask(work: LeaseWork) -> None:
            try:
                await work.once("key", b"", never_end)
            except SandboxLostError as error:
                errors.append(error)

        async with (
            anyio.create_task_group() as clients,
            open_service(world.service.pool, world.service.tokens) as service,
        ):
            clients.start_soon(ask, service.work(lease))
            await begun.wait()
        assert "the service ended during the call" in str(errors[0])


async def test_a_job_that_clients_ask_for_is_not_forgotten(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        job = await sandbox.start("sleep 60")
        work = world.service.work(world.service.pool.state.leases.of(sandbox.sandbox_id))
        for number in range(2 * JOBS_KEPT):
            work.add_job(cast("Job", SimpleNamespace(job_id=f"later-{number}")))
            assert work.job(job.job_id).job_id == job.job_id
        with pytest.raises(ProblemError, match="there is no job later-0"):
            work.job("later-0")
        assert (await job.poll()).running


def test_a_flood_of_records_is_cut_and_its_size_is_told():
    now = [0.0]
    few = RecordLimit(3, clock=lambda: now[0])
    records = [logging.LogRecord("envs", logging.WARNING, "", 0, "failed %d", (number,), None) for number in range(9)]
    assert [few.filter(record) for record in records[:8]] == [True] * 3 + [False] * 5
    now[0] = 61.0
    assert few.filter(records[8])
    assert records[8].getMessage() == "[5 earlier records were dropped] failed 8"


async def test_one_tokens_requests_leave_places_in_the_queue_for_the_others(tmp_path):
    settings = PoolSettings(max_waiting=12)
    async with running(tmp_path, settings=settings, host_settings=NO_ROOM) as world, bare(world) as client:
        answers: list[int] = []
        for token in (OTHER_TOKEN,) * 5 + (TOKEN,):
            order = {"spec": {"image": "any", "memory_mib": 16}}
            answers.append((await client.post("/v1/sandboxes", json=order, headers=bearer(token))).status_code)
        assert answers == [201, 201, 201, 503, 503, 201]
