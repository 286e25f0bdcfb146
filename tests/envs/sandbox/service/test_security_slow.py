"""Clients that are slow, or many: each is bounded by its own progress, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import time
from contextlib import AsyncExitStack

import anyio
import anyio.to_thread
import pytest

from flash.http.connections import HttpLimits
from flash.http.server import HttpAddress
from tests.envs.sandbox.raw import END_S, bare, bearer, connected, head
from tests.envs.sandbox.services import SPEC, TOKEN, running

pytestmark = pytest.mark.anyio

QUICK = HttpLimits(head_s=0.3, receive_s=0.3, stall_s=0.3, idle_s=1.0, strangers=20)
"""What a client may do in a test."""


async def serves(sandbox) -> bool:
    """Somebody else is served."""
    return (await sandbox.run("echo served", timeout=10)).stdout == b"served\n"


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET / HTTP/1.1\r\nhost:", id="half a head"),
        pytest.param(b"\r\n", id="an empty line"),
        pytest.param(head("GET", "/v1/status"), id="nothing after a request"),
        pytest.param(head("PUT", "/v1/x", "content-length: 1000000000", token=None) + b"x", id="body of a stranger"),
        pytest.param(head("GET", "/v1/status", "content-length: 1000000000") + b"x", id="body that nobody asked for"),
    ],
)
async def test_a_connection_on_which_nothing_happens_is_ended(tmp_path, begin):
    async with (
        running(tmp_path, limits=QUICK) as world,
        world.client.acquire(SPEC) as sandbox,
        connected(world) as connection,
    ):
        await connection.stream.send(begin)
        assert await serves(sandbox)
        assert await connection.ended()


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(b"GET / HTTP/1.1\r\nx: ", id="head"),
        pytest.param(b"", id="empty lines"),
        pytest.param(head("PUT", "/v1/x", "content-length: 1000000000", token=None), id="body of a stranger"),
        pytest.param(head("POST", "/v1/sandboxes", "content-length: 1000000000"), id="body"),
    ],
)
async def test_a_byte_now_and_then_does_not_hold_a_connection_open(tmp_path, begin):
    async with running(tmp_path, limits=QUICK) as world, connected(world) as connection:
        await connection.stream.send(begin)
        async with anyio.create_task_group() as tasks:

            async def drip() -> None:
                while True:
                    try:
                        await connection.stream.send(b"\n" if not begin else b"x")
                    except anyio.BrokenResourceError:
                        return
                    await anyio.sleep(0.05)

            tasks.start_soon(drip)
            assert await connection.ended()
            tasks.cancel_scope.cancel()


async def test_a_body_that_stops_is_answered(tmp_path):
    async with running(tmp_path, limits=QUICK) as world, world.client.acquire(SPEC) as sandbox:
        async with connected(world) as connection:
            path = f"/v1/sandboxes/{sandbox.sandbox_id}/run"
            await connection.stream.send(head("POST", path, "content-length: 100") + b"{")
            await connection.until(b" 408 ")
        assert await serves(sandbox)


@pytest.mark.parametrize("takes", [0, 1], ids=["nothing", "a byte now and then"])
async def test_a_stream_that_is_not_read_ends_with_its_command(tmp_path, takes):
    async with (
        running(tmp_path, limits=QUICK) as world,
        world.client.acquire(SPEC) as sandbox,
        connected(world) as slow,
    ):
        body = b'{"command":"echo $$ >pid; exec yes","timeout":3600}'
        path = f"/v1/sandboxes/{sandbox.sandbox_id}/stream"
        await slow.stream.send(head("POST", path, f"content-length: {len(body)}") + body)
        await slow.until(b"chunk")
        pid = int(await sandbox.read("pid"))
        assert await serves(sandbox)
        with anyio.fail_after(END_S):
            while (await sandbox.run(f"kill -0 {pid}", timeout=10)).ok:
                if takes:
                    await slow.stream.receive(1)


async def test_a_large_answer_is_given_to_a_client_that_takes_its_time(tmp_path):
    limits = HttpLimits(stall_s=0.3)
    async with (
        running(tmp_path, limits=limits) as world,
        world.client.acquire(SPEC) as sandbox,
        connected(world) as slow,
    ):
        await sandbox.write("big", b"x" * (8 << 20))
        await slow.stream.send(head("GET", f"/v1/sandboxes/{sandbox.sandbox_id}/files?path=big"))
        await slow.until(b"\r\n\r\n")
        size = len(slow.got.partition(b"\r\n\r\n")[2])
        with anyio.fail_after(END_S):
            while size < 8 << 20:
                size += len(await slow.stream.receive(1 << 18))
                await anyio.sleep(0.05)  # Longer in all than an answer may stand still.


async def test_answers_that_are_never_read_do_not_pile_up(tmp_path):
    """Many requests on one connection, none of whose answers is taken."""
    async with running(tmp_path, limits=QUICK) as world, connected(world) as greedy:

        async def ask_for_ever() -> None:
            while True:
                await greedy.stream.send(head("GET", "/v1/openapi.json") * 20)

        with pytest.raises(anyio.BrokenResourceError), anyio.fail_after(END_S):
            await ask_for_ever()


async def test_many_idle_strangers_keep_nobody_out(tmp_path):
    limits = HttpLimits(strangers=20, head_s=3600.0)
    async with (
        running(tmp_path, limits=limits) as world,
        world.client.acquire(SPEC) as sandbox,
        AsyncExitStack() as stack,
    ):
        idle = [await stack.enter_async_context(connected(world)) for _ in range(100)]
        assert await serves(sandbox)
        async with bare(world, **bearer(TOKEN)) as late:
            assert (await late.get("/v1/status")).status_code == 200
        # The oldest had to go, long before their time; who is known did not.
        for connection in idle[:70]:
            assert await connection.ended()
        assert await serves(sandbox)
        assert sandbox.state == "ready"


@pytest.fixture
def tls(tmp_path) -> HttpAddress:
    """Loopback with a certificate of its own."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return HttpAddress(port=0, certificate=certificate, key=key)


async def test_the_same_holds_under_tls(tmp_path, tls):
    context = ssl.create_default_context(cafile=tls.certificate)
    async with running(tmp_path, address=tls, limits=QUICK, verify=context) as world:
        assert world.url.startswith("https://127.0.0.1:")
        async with world.client.acquire(SPEC) as sandbox:
            await sandbox.write("big", b"x" * (4 << 20))
            assert len(await sandbox.read("big")) == 4 << 20
            for begin in (
                b"\r\n",
                b"GET / HTTP/1.1\r\n",
                head("GET", f"/v1/sandboxes/{sandbox.sandbox_id}/files?path=big") * 8,
            ):
                with socket.create_connection(("127.0.0.1", int(world.url.rpartition(":")[2]))) as plain:
                    assert await taken_late(context, plain, begin) < 8 * (4 << 20)
                assert await serves(sandbox)


async def taken_late(context: ssl.SSLContext, plain: socket.socket, begin: bytes) -> int:
    """Say this, and take nothing for longer than is allowed; the bytes that come before the connection's end."""

    def talk() -> int:
        size = 0
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as slow, contextlib.suppress(OSError):
            slow.sendall(begin)
            time.sleep(5 * QUICK.stall_s)
            slow.settimeout(END_S)
            while piece := slow.recv(1 << 20):
                size += len(piece)
        return size

    with anyio.fail_after(END_S):
        return await anyio.to_thread.run_sync(talk, abandon_on_cancel=True)
