"""Peers that leave, do not read, or send what they may not."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

import anyio
import msgspec
import pytest
from anyio.abc import SocketAttribute, SocketStream, TaskStatus

from flash.errors import DeadlineError, PeerLostError, TransportError
from flash.transport import Peer, Request, connect, serve
from flash.transport.auth import prove_to_server
from flash.transport.frames import BUFFER_BYTES, FrameDecoder, FrameKind, append_frame
from flash.transport.server import MAX_CALLS

pytestmark = pytest.mark.anyio


class Data(msgspec.Struct, frozen=True):
    """Reply to `Get`."""

    data: bytes = b""


class Get(Request[Data], frozen=True):
    """Request of any length."""

    data: bytes = b""


class Hang:
    """A handler that answers nothing and notes how it ended."""

    def __init__(self) -> None:
        self.started = anyio.Event()
        self.ended = anyio.Event()

    async def handle(self, peer: Peer, request: Get) -> Data:
        """Wait until this is cancelled."""
        self.started.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.ended.set()
        raise AssertionError


async def answer(peer: Peer, request: Get) -> Data:
    """Answer a request with its own data."""
    return Data(request.data)


def frame(kind: FrameKind, call: int, body: msgspec.Struct | None = None) -> bytes:
    """Return the bytes of one frame."""
    buffer = bytearray()
    append_frame(buffer, kind, call, body)
    return bytes(buffer)


def raw(body: bytes) -> bytes:
    """Return the bytes of a REQUEST frame with this body, which need not be msgpack."""
    return struct.pack("!IBQ", len(body) + 9, FrameKind.REQUEST, 1) + body


async def send_and_read_to_the_end(stream: SocketStream, sent: bytes) -> None:
    """Send bytes, then read until the other end closes the connection."""
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        await stream.send(sent)
        while True:
            await stream.receive()


async def read_nothing(stream: SocketStream) -> None:
    """Keep the connection open and read nothing, until this is cancelled."""
    await anyio.sleep_forever()


async def test_all_pending_calls_and_all_later_ones_fail_when_the_server_goes(puppet, token: bytes):
    async def leave_after_five(stream: SocketStream) -> None:
        decoder, seen = FrameDecoder(), 0
        while seen < 5:
            seen += len(decoder.feed(await stream.receive()))

    failed: list[str] = []

    async def call() -> None:
        with pytest.raises(PeerLostError, match=r"the connection to hub at .* ended") as caught:
            await client.call(Get(), 60)
        failed.append(str(caught.value))

    async with puppet(leave_after_five) as port, connect("127.0.0.1", port, token, "me", 5) as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(call)
        assert len(failed) == 5
        await call()


async def test_handlers_end_before_the_disconnect_is_told_when_a_client_goes(serving, token: bytes):
    hang = Hang()
    gone: list[tuple[Peer, bool]] = []
    told = anyio.Event()

    def on_disconnect(peer: Peer) -> None:
        gone.append((peer, hang.ended.is_set()))
        told.set()

    async with serving(Get, hang.handle, on_disconnect=on_disconnect) as port:
        async with connect("127.0.0.1", port, token, "me", 5) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(client.call, Get(), 60)
            await hang.started.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(5):
            await told.wait()
    assert [(peer.name, peer.id, ended) for peer, ended in gone] == [("me", 1, True)]


async def test_each_connection_is_a_peer_of_its_own(serving, token: bytes):
    seen: list[Peer] = []

    async def handle(peer: Peer, request: Get) -> Data:
        seen.append(peer)
        return Data()

    async with serving(Get, handle) as port:
        for _ in range(2):
            async with connect("127.0.0.1", port, token, "twin", 5) as client:
                await client.call(Get(), 5)
                await client.call(Get(), 5)
    assert [(peer.id, peer.name) for peer in seen] == [(1, "twin"), (1, "twin"), (2, "twin"), (2, "twin")]


async def test_the_disconnect_is_told_once_when_the_server_ends_first(token: bytes):
    hang = Hang()
    gone: list[Peer] = []
    server = anyio.CancelScope()

    async def run(*, task_status: TaskStatus[int]) -> None:
        with server:
            await serve(
                "127.0.0.1",
                0,
                token,
                Get,
                hang.handle,
                deadline=5,
                on_disconnect=gone.append,
                task_status=task_status,
            )

    async def call() -> None:
        with pytest.raises(PeerLostError):
            await client.call(Get(), 60)

    async with anyio.create_task_group() as tasks:
        port = await tasks.start(run)
        async with connect("127.0.0.1", port, token, "me", 5) as client, anyio.create_task_group() as calls:
            calls.start_soon(call)
            await hang.started.wait()
            server.cancel()
    assert hang.ended.is_set()
    assert [peer.id for peer in gone] == [1]


async def test_calls_of_other_tasks_fail_when_the_block_ends(serving, token: bytes):
    hang = Hang()

    async def call() -> None:
        with pytest.raises(PeerLostError, match="closed on this side"):
            await client.call(Get(), 60)

    async with serving(Get, hang.handle) as port, anyio.create_task_group() as tasks:
        async with connect("127.0.0.1", port, token, "me", 5) as client:
            tasks.start_soon(call)
            await hang.started.wait()
        with pytest.raises(PeerLostError, match="closed on this side"):
            await client.call(Get(), 60)


async def test_a_reply_cut_off_in_the_middle_says_so(puppet, token: bytes):
    async def cut(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(frame(FrameKind.REPLY, 1, Data(b"x" * 100))[:-1])
        await stream.send_eof()
        await anyio.sleep_forever()

    async with puppet(cut) as port, connect("127.0.0.1", port, token, "me", 5) as client:
        with pytest.raises(PeerLostError, match=r"inside a frame, after \d+ of \d+ bytes"):
            await client.call(Get(), 60)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"\x00" * 13, "no frame"),
        (struct.pack("!IBQ", 2**31, FrameKind.REPLY, 1), "announces"),
        (frame(FrameKind.REQUEST, 1, Data()), "may not send REQUEST"),
    ],
)
async def test_a_client_drops_a_server_that_sends_garbage(puppet, token: bytes, sent: bytes, message: str):
    left = anyio.Event()

    async def play(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(sent)
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()
        left.set()

    async with puppet(play) as port, connect("127.0.0.1", port, token, "me", 5) as client:
        with pytest.raises(TransportError, match=message):
            await client.call(Get(), 60)
        await left.wait()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 13,
        struct.pack("!IBQ", 2**31, FrameKind.REQUEST, 1),
        frame(FrameKind.REPLY, 1, Data()),
        frame(FrameKind.REQUEST, 7, Get(b"hang")) * 2,
        b"".join(frame(FrameKind.REQUEST, call, Get(b"hang")) for call in range(MAX_CALLS + 1)),
        raw(b"\x81\xa4data\xa1\xff"),
        raw(b"\x81\xa1x" + b"\x91" * 200_000),
        raw(b"\x81\xa1x" + b"\x81\x01" * 200_000),
        raw(b"\xc1"),
        raw(b""),
    ],
)
async def test_a_server_drops_a_client_that_sends_garbage_and_lives_on(
    serving, token: bytes, sent: bytes, caplog: pytest.LogCaptureFixture
):
    async def handle(peer: Peer, request: Get) -> Data:
        if request.data == b"hang":
            await anyio.sleep_forever()
        return Data(request.data)

    async with serving(Get, handle) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await prove_to_server(stream, token, "rude")
            with anyio.fail_after(60):
                await send_and_read_to_the_end(stream, sent)
        async with connect("127.0.0.1", port, token, "me", 5) as client:
            assert await client.call(Get(b"fine"), 5) == Data(b"fine")
    assert ["dropped Peer(id=1, name='rude'" in message for message in caplog.messages] == [True]


async def test_a_cancel_of_an_unknown_call_is_ignored(serving, token: bytes):
    async with serving(Get, answer) as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        await prove_to_server(stream, token, "late")
        await stream.send(frame(FrameKind.CANCEL, 5) + frame(FrameKind.REQUEST, 6, Get()))
        (reply,) = FrameDecoder().feed(await stream.receive())
        assert (reply.kind, reply.call) == (FrameKind.REPLY, 6)


async def test_a_client_that_does_not_read_is_asked_no_more_and_gets_all_its_replies_later(serving, token: bytes):
    total, size = 2000, 1 << 16
    handled = 0

    async def handle(peer: Peer, request: Get) -> Data:
        nonlocal handled
        handled += 1
        return Data(bytes(size))

    async with serving(Get, handle) as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        # A small window, so that little hides in the kernel.
        stream.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        await prove_to_server(stream, token, "slow")
        await stream.send(b"".join(frame(FrameKind.REQUEST, call, Get()) for call in range(total)))
        before = -1
        while handled > before:
            before = handled
            await anyio.sleep(0.1)
        # One buffer fills while one is being sent; the kernel holds a few MiB more.
        assert 0 < handled * size < 2 * BUFFER_BYTES + (16 << 20)
        decoder, calls = FrameDecoder(), []
        while len(calls) < total:
            calls += [reply.call for reply in decoder.feed(await stream.receive(1 << 18))]
    assert sorted(calls) == list(range(total))
    assert handled == total


async def test_calls_wait_for_room_when_the_server_does_not_read_and_all_fail_when_it_goes(puppet, token: bytes):
    hang_up = anyio.Event()

    async def play(stream: SocketStream) -> None:
        await hang_up.wait()

    async def call() -> None:
        with pytest.raises(PeerLostError):
            await client.call(Get(bytes(1 << 20)), 60)

    async with (
        puppet(play) as port,
        connect("127.0.0.1", port, token, "me", 5) as client,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(64):
            tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(DeadlineError, match="the reply to Get"):
            await client.call(Get(), 0.05)
        with anyio.move_on_after(0.05) as scope:
            await client.call(Get(), 60)
        assert scope.cancelled_caught
        hang_up.set()


async def test_a_block_ends_though_the_server_does_not_read(puppet, token: bytes):
    async with puppet(read_nothing) as port:
        async with connect("127.0.0.1", port, token, "me", 5) as client:
            with pytest.raises(DeadlineError):
                await client.call(Get(bytes(64 << 20)), 0.05)
        with pytest.raises(PeerLostError):
            await client.call(Get(), 5)


async def test_calls_given_up_while_they_waited_for_room_were_never_sent(puppet, token: bytes):
    begin = anyio.Event()
    seen: list[FrameKind] = []

    async def read_late(stream: SocketStream) -> None:
        await begin.wait()
        decoder = FrameDecoder()
        while True:
            for got in decoder.feed(await stream.receive(1 << 18)):
                seen.append(got.kind)
                if got.kind is FrameKind.REQUEST and len(got.body) < 100:
                    await stream.send(frame(FrameKind.REPLY, got.call, Data(b"last")))
                    await anyio.sleep_forever()

    async with puppet(read_late) as port, connect("127.0.0.1", port, token, "me", 5) as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(64):
                tasks.start_soon(client.call, Get(bytes(1 << 20)), 60)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        begin.set()
        assert await client.call(Get(), 60) == Data(b"last")
    # What the buffers on the way hold; each of these calls was cancelled as well.
    assert 0 < seen.count(FrameKind.REQUEST) - 1 < 32
    assert seen.count(FrameKind.CANCEL) == seen.count(FrameKind.REQUEST) - 1
