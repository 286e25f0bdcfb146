"""Connections without the token cannot do anything to a server that its peers notice."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import anyio
import anyio.lowlevel
import msgspec
import pytest

from flash.run.processes.worker import raise_descriptor_limit
from flash.transport import Peer, Request, connect
from flash.transport.auth import MAGIC
from flash.transport.server import LOG_WINDOW_S, MAX_UNPROVEN, LimitedLog

pytestmark = pytest.mark.anyio


class Data(msgspec.Struct, frozen=True):
    """Reply to `Get`."""

    data: bytes = b""


class Get(Request[Data], frozen=True):
    """Request of any length."""

    data: bytes = b""


async def answer(peer: Peer, request: Get) -> Data:
    """Answer a request with its own data."""
    return Data(request.data)


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """Let the process open only 60 more files than it has open now. Gives the largest number of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 60
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def idle() -> Iterator[Callable[[int], socket.socket]]:
    """Give a function that connects to a port and sends nothing. The connections stay open until the test ends."""
    with ExitStack() as stack:

        def call(port: int) -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))

        yield call


async def test_idle_connections_beyond_the_limit_of_descriptors_do_not_end_the_server(
    serving, token: bytes, few_descriptors: int, idle: Callable[[int], socket.socket], caplog: pytest.LogCaptureFixture
):
    strangers: list[socket.socket] = []
    async with serving(Get, answer) as port, connect("127.0.0.1", port, token, "me", 5) as client:
        # Both ends are of this process: the server finds no descriptor for what the last of these asks for.
        with suppress(OSError):
            for _ in range(few_descriptors):
                strangers.append(idle(port))
                await anyio.lowlevel.checkpoint()
        for _ in range(3):
            assert await client.call(Get(b"still"), 5) == Data(b"still")
        for stranger in strangers:
            stranger.close()
        async with connect("127.0.0.1", port, token, "late", 5) as late:
            assert await late.call(Get(b"again"), 5) == Data(b"again")
    assert "`ulimit -n`" in caplog.text


async def test_more_strangers_than_allowed_end_the_oldest_and_no_peer(
    serving, token: bytes, idle: Callable[[int], socket.socket], caplog: pytest.LogCaptureFixture
):
    async with serving(Get, answer, deadline=60.0) as port, connect("127.0.0.1", port, token, "me", 5) as client:
        strangers = [idle(port) for _ in range(MAX_UNPROVEN + 3)]
        for stranger in strangers[:3]:
            assert await anyio.to_thread.run_sync(stranger.recv, 1) == b""
        assert await client.call(Get(b"still"), 5) == Data(b"still")
        async with connect("127.0.0.1", port, token, "another", 5) as another:
            assert await another.call(Get(b"too"), 5) == Data(b"too")
    assert "no proof of the token yet, and a newer connection needs the place" in caplog.text


async def test_a_byte_now_and_then_does_not_stretch_the_time_for_a_proof(
    serving, idle: Callable[[int], socket.socket], caplog: pytest.LogCaptureFixture
):
    async with serving(Get, answer, deadline=0.3) as port:
        stranger = idle(port)
        with suppress(ConnectionError):
            for byte in MAGIC[:-1] * 100:
                stranger.send(bytes([byte]))
                await anyio.sleep(0.05)
                if "no proof within 0.3 s" in caplog.text:
                    break
    assert "no proof within 0.3 s" in caplog.text


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture):
    now = [0.0]
    limited = LimitedLog(lambda: now[0], most=2)
    for number in range(5):
        limited.warn("refused %d", number)
    now[0] = LOG_WINDOW_S
    limited.warn("refused %d", 5)
    assert caplog.messages == ["refused 0", "refused 1", "3 more lines of this kind were left out", "refused 5"]


def test_the_limit_of_descriptors_is_raised_to_what_the_system_grants():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
