"""Limits on one client: how many of its bytes are read at once, and how many are held."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import httpx
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flash.http.connections import PIECE, SIZED_PIECE, HttpLimits, SendTimer, http_protocol
from flash.http.server import MAX_JSON_VALUES, HttpAddress, open_socket, read_body, serving

pytestmark = pytest.mark.anyio

END_S = 30.0
"""Seconds after which a test that hangs fails."""


def test_a_server_without_a_place_for_a_stranger_is_refused():
    http_protocol(HttpLimits(), 2)
    with pytest.raises(AssertionError, match="at least 2 connections, not 1"):
        http_protocol(HttpLimits(), 1)


class App:
    """Reads bodies, and answers when it may."""

    def __init__(self) -> None:
        self.may = anyio.Event()
        """Set while requests may be answered."""
        self.may.set()
        self.passes = 0
        """Turns of the loop that other tasks have had."""
        self.came = anyio.Event()
        """Set when a whole body has arrived."""
        self.read: list[int] = []
        """Value of `passes` that each body took to arrive."""
        self.app = Starlette(routes=[Route("/", self._answer, methods=["POST"])])

    async def count(self) -> None:
        """Count the turns of the loop until this is cancelled."""
        while True:
            self.passes += 1
            await anyio.lowlevel.checkpoint()

    async def _answer(self, request: Request) -> Response:
        """Read the body, wait until the test allows the answer, and answer with the length of the body."""
        before = self.passes
        data = await read_body(request, 1 << 24)
        self.read.append(self.passes - before)
        self.came.set()
        await self.may.wait()
        return Response(str(len(data)))


@asynccontextmanager
async def served(app: App, limits: HttpLimits | None = None) -> AsyncIterator[str]:
    """Serve the application at a free port during the block. Yields the URL."""
    address = HttpAddress()
    async with serving(app.app, open_socket(address), address, limits) as url, anyio.create_task_group() as tasks:
        tasks.start_soon(app.count)
        with anyio.fail_after(END_S):
            yield url
        tasks.cancel_scope.cancel()


async def test_chunks_of_one_byte_leave_the_loop_to_others_after_each_piece():
    app, count = App(), SIZED_PIECE // 8
    async with served(app) as url:
        port = int(url.rpartition(":")[2])
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            await stream.send(head + b"1\r\nx\r\n" * count + b"0\r\n\r\n")
            got = b""
            while str(count).encode() not in got:
                got += await stream.receive()
    assert app.read[0] >= count * len(b"1\r\nx\r\n") // PIECE


async def test_what_follows_a_counted_body_is_read_in_small_pieces_again():
    """A body of five bytes opens no door for a quarter of a megabyte."""
    app, count = App(), SIZED_PIECE // 8
    async with served(app) as url:
        port = int(url.rpartition(":")[2])
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n1234")
            await anyio.sleep(0.1)
            head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            await stream.send(b"5" + head + b"1\r\nx\r\n" * count + b"0\r\n\r\n")
            got = b""
            while str(count).encode() not in got:
                got += await stream.receive()
    assert app.read[1] >= count * len(b"1\r\nx\r\n") // PIECE // 2


async def test_bodies_are_held_up_to_a_limit_until_they_are_answered():
    app, large = App(), b"x" * 800
    app.may = anyio.Event()
    async with served(app, HttpLimits(held_bytes=1000)) as url, httpx.AsyncClient(base_url=url) as client:
        async with anyio.create_task_group() as first:

            async def ask() -> None:
                assert (await client.post("/", content=large)).text == "800"

            first.start_soon(ask)
            await app.came.wait()
            refused = await client.post("/", content=large)
            assert (refused.status_code, "try again later" in refused.text) == (503, True)
            app.may.set()
        assert (await client.post("/", content=large)).text == "800"


async def test_a_server_answers_from_the_first_moment_of_its_block():
    app = App()
    async with served(app) as url, httpx.AsyncClient() as client:
        assert (await client.post(url, content=b"xyz")).text == "3"


async def test_a_request_in_progress_is_answered_before_its_server_ends():
    app, answers = App(), list[str]()
    app.may = anyio.Event()
    async with anyio.create_task_group() as clients, httpx.AsyncClient() as client:

        async def ask(url: str) -> None:
            answers.append((await client.post(url, content=b"xyz")).text)

        async def allow() -> None:
            await anyio.sleep(0.3)
            app.may.set()

        async with served(app) as url:
            clients.start_soon(ask, url)
            await app.came.wait()
            clients.start_soon(allow)
    assert answers == ["3"]


@pytest.mark.parametrize("sign", [b"[", b"{", b'"":'])
async def test_a_body_of_countless_lists_objects_or_keys_is_refused_before_it_is_decoded(sign):
    async def receive():
        return {"type": "http.request", "body": sign * (MAX_JSON_VALUES + 1)}

    with pytest.raises(HTTPException, match="lists, objects and keys"):
        await read_body(Request({"type": "http", "headers": []}, receive), 1 << 24)


class Waiting(asyncio.Transport):
    """A transport whose own buffer stands still, because the kernel's buffer is full."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__({"socket": connected})
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        """Return the same size at each call."""
        return 1 << 20

    def abort(self) -> None:
        """Note that the connection was ended."""
        self.aborted = True


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("bursts", "kept"), [([4] * 16, True), ([1, 7] * 8, True), ([7, 1] * 8, True), ([3] * 8, False), ([0], False)]
)
async def test_a_client_that_reads_in_bursts_is_kept_if_its_average_rate_suffices(bursts: list[int], kept: bool):
    """`bursts` has the number of pieces that the client reads in each measurement; four are enough."""
    here, there = socket.socketpair()
    with here, there:
        piece, pieces = bytes(1000), 80
        for _ in range(pieces):
            here.send(piece)
        unread = int.from_bytes(fcntl.ioctl(here.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        transport = Waiting(here)
        timer = SendTimer(transport, HttpLimits(stall_s=1.0, bytes_per_s=4 * unread // pieces))
        timer.start()
        await anyio.sleep(0.5)
        for count in bursts:
            for _ in range(count):
                there.recv(len(piece))
            await anyio.sleep(1.0)
        timer.stop()
        assert transport.aborted != kept
