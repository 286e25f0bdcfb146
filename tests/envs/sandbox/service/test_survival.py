"""No request, however wrong it is, ends the service or another one's call."""

from __future__ import annotations

from urllib.parse import urlencode

import anyio
import pytest

from envs.sandbox.sandbox import Sandbox
from envs.sandbox.service.web import ENDPOINTS
from flash.errors import SandboxError, SandboxFileError, SandboxLimitError, SandboxRefusedError, SandboxStartError
from tests.envs.sandbox.raw import bare, bearer
from tests.envs.sandbox.services import SPEC, TOKEN, running

pytestmark = pytest.mark.anyio

LIMIT = 20.0


async def test_too_large_a_command_is_answered_with_its_size_and_the_service_goes_on(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        with pytest.raises(SandboxLimitError, match="10000 arguments, not 100001"):
            await sandbox.run(["true"] + ["x"] * 100_000, timeout=LIMIT)
        async with sandbox.session() as session:
            with pytest.raises(SandboxLimitError, match="120000 bytes, not 270000"):
                await session.run("€" * 90_000, timeout=LIMIT)
        async with bare(world, **bearer(TOKEN)) as client:
            for keyed in ({}, {"idempotency-key": "k"}):
                body = {"command": ["true"] + ["x"] * 100_000, "timeout": LIMIT}
                answer = await client.post(f"{sandbox.path}/run", json=body, headers=keyed)
                assert answer.status_code == 413
                assert answer.json()["cause"] == "SandboxLimitError"
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"


async def test_too_long_a_path_is_refused_before_it_is_sent(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        for path in ("x" * 4096, "€" * 4000, "y" * 100_000):
            for ask in (sandbox.read, sandbox.list, sandbox.remove, lambda path: sandbox.write(path, b"")):
                with pytest.raises(SandboxFileError, match="at most 4095 bytes"):
                    await ask(path)
        await sandbox.write("d/" + "€" * 85, b"x")
        assert await sandbox.read("d/" + "€" * 85) == b"x"
        with pytest.raises(SandboxRefusedError, match="cannot be requested"):
            async with sandbox.session("s" * 100_000):
                pass
        assert (await sandbox.run("true", timeout=LIMIT)).ok


class Faulty(Sandbox):
    """Every call of it meets a bug."""

    def __init__(self, sandbox):
        self.sandbox = sandbox

    @property
    def sandbox_id(self):
        return self.sandbox.sandbox_id

    @property
    def spec(self):
        return self.sandbox.spec

    @property
    def state(self):
        return self.sandbox.state

    async def run(self, command, **options):
        raise AssertionError("a bug")

    def session(self, name="main"):
        raise AssertionError("a bug")

    async def wait_ended(self):
        await self.sandbox.wait_ended()

    async def close(self):
        await self.sandbox.close()


async def test_a_repeated_call_in_a_session_says_after_a_restart_that_it_may_have_been_carried_out(tmp_path):
    body = {"command": "true", "timeout": LIMIT}
    async with (
        running(tmp_path) as world,
        world.client.acquire(SPEC) as sandbox,
        bare(world, **bearer(TOKEN)) as client,
    ):
        path = f"{sandbox.path}/sessions/main/run"
        answer = await client.post(path, json=body, headers={"idempotency-key": "k", "flash-boot": "earlier"})
        assert answer.json()["cause"] == "SandboxLostError"
        for headers in ({}, {"idempotency-key": "k"}):
            answer = await client.post(path, json=body, headers=headers)
            assert answer.status_code == 404
            assert answer.json()["cause"] == "SandboxClosedError"


async def test_a_bug_in_a_call_ends_this_call_only(tmp_path, caplog):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox, sandbox.session("other") as other:
        lease = world.pool.state.leases.find(sandbox.sandbox_id)
        right, lease.sandbox = lease.sandbox, Faulty(lease.sandbox)
        with pytest.raises(SandboxError, match="its log says why"):
            await sandbox.run("true", timeout=LIMIT)
        with pytest.raises(SandboxError, match="its log says why"):
            async with sandbox.session():
                pass
        lease.sandbox = right
        assert caplog.text.count("AssertionError: a bug") == 2
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"
        assert (await other.run("echo on", timeout=LIMIT)).stdout == b"on\n"


async def test_a_bug_in_a_sandbox_ends_this_one_only(tmp_path, caplog):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        world.backend.faults.create = AssertionError("a bug")
        with pytest.raises(SandboxStartError, match="the log says why"):
            async with world.client.acquire(SPEC):
                pass
        assert "AssertionError: a bug" in caplog.text
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"


ODD = (
    *(
        "",
        " ",
        "x",
        "\0",
        "ü",
        "%ff",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "-1",
        "1e3",
        "0x10",
        "1_0",
        "٣",
        "true",
        "null",
        "[]",
    ),
    *(f"1{'0' * power}" for power in (9, 18, 19, 20, 30, 400, 5000)),
    *(f"-1{'0' * power}" for power in (9, 18, 19, 30, 400)),
)
"""Values of queries that no client of ours sends."""


QUERIES = [
    pytest.param(endpoint, name, id=f"{endpoint.method}-{endpoint.path}-{name}")
    for endpoint in ENDPOINTS
    for name in (endpoint.query.__struct_fields__ if endpoint.query else ())
]
"""Each parameter of the whole API."""


@pytest.mark.parametrize(("endpoint", "name"), QUERIES)
async def test_no_value_of_a_query_is_a_failure_of_the_service(tmp_path, caplog, endpoint, name):
    async with (
        running(tmp_path) as world,
        world.client.acquire(SPEC) as sandbox,
        bare(world, **bearer(TOKEN)) as client,
    ):
        await sandbox.write("f", b"content")
        job = await sandbox.start("echo said")
        await job.wait(LIMIT)
        filled = endpoint.path.replace("{id}", sandbox.sandbox_id).replace("{job}", job.job_id)
        other = "path=f&" if name != "path" and "path" in endpoint.query.__struct_fields__ else ""
        for text in (*(urlencode({name: value}) for value in ODD), f"{name}=%ff", f"{name}=1%ff", f"%ff{name}=1"):
            with anyio.move_on_after(2):
                answer = await client.request(endpoint.method, f"{filled}?{other}{text}")
                assert answer.status_code < 500, (text, answer.text)
        assert not any(record.exc_info for record in caplog.records), caplog.text
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"
