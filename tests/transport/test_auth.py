"""The proof of the token: who is refused, and what each end learns."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import SocketAttribute, SocketStream

from flash.errors import ConfigError, DeadlineError, PeerLostError, TransportError
from flash.transport import Peer, Request, connect, new_token, serve
from flash.transport.auth import prove_to_server

pytestmark = pytest.mark.anyio


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Reply to `Ask`."""

    name: str


class Ask(Request[Answer], frozen=True, tag=True):
    """Request for the name by which the server knows its peer."""


async def tell_name(peer: Peer, request: Ask) -> Answer:
    """Answer a peer with its own name."""
    return Answer(peer.name)


async def test_the_server_learns_the_name_that_was_proven(serving, token: bytes):
    async with (
        serving(Ask, tell_name) as port,
        connect("127.0.0.1", port, token, "node 3 äöü", 5) as client,
    ):
        assert (await client.call(Ask(), 5)).name == "node 3 äöü"


async def test_a_client_refuses_a_server_with_another_token(serving):
    async with serving(Ask, tell_name) as port:
        with pytest.raises(TransportError, match=r"hub at 127\.0\.0\.1:.*another run"):
            async with connect("127.0.0.1", port, new_token(), "stranger", 5):
                pytest.fail("connected")


async def test_a_server_refuses_a_client_that_skips_its_own_check(serving, caplog: pytest.LogCaptureFixture):
    async with serving(Ask, tell_name) as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(b"flashrl\x01" + bytes(32))
        assert len(await stream.receive()) == 8 + 32 + 32
        await stream.send(bytes(32) + b"\x03liar"[:4])
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()
    assert "the client does not prove our token" in caplog.text


async def test_a_server_cannot_pass_by_sending_the_client_its_own_words():
    async def mirror(stream: SocketStream) -> None:
        async with stream:
            hello = await stream.receive()
            await stream.send(hello + bytes(32))
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()  # The client's proof must not come.

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, mirror)
        port = listener.extra(SocketAttribute.local_port)
        with pytest.raises(TransportError, match="does not prove our token"):
            async with connect("127.0.0.1", port, new_token(), "me", 5):
                pytest.fail("connected")
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


async def test_a_recorded_proof_is_useless_the_second_time(serving, token: bytes):
    sent: list[bytes] = []

    class Recorder:
        def __init__(self, stream: SocketStream) -> None:
            self.stream = stream

        async def send(self, data: bytes) -> None:
            sent.append(data)
            await self.stream.send(data)

        async def receive(self, count: int) -> bytes:
            return await self.stream.receive(count)

    async with serving(Ask, tell_name) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await prove_to_server(Recorder(stream), token, "me")  # pyright: ignore[reportArgumentType]
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(sent[0])
            await stream.receive()
            await stream.send(sent[1])
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()


async def test_the_token_is_never_on_the_wire(token: bytes):
    heard = bytearray()

    async def listen(stream: SocketStream) -> None:
        async with stream, await anyio.connect_tcp("127.0.0.1", real_port) as server, anyio.create_task_group() as both:

            async def copy(source: SocketStream, target: SocketStream) -> None:
                try:
                    async for piece in source:
                        heard.extend(piece)
                        await target.send(piece)
                except anyio.BrokenResourceError:
                    pass
                both.cancel_scope.cancel()

            both.start_soon(copy, stream, server)
            both.start_soon(copy, server, stream)

    async def run(*, task_status: anyio.abc.TaskStatus[int]) -> None:
        await serve("127.0.0.1", 0, token, Ask, tell_name, deadline=5, task_status=task_status)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        real_port = await tasks.start(run)
        tasks.start_soon(listener.serve, listen)
        async with connect("127.0.0.1", listener.extra(SocketAttribute.local_port), token, "me", 5) as client:
            await client.call(Ask(), 5)
        tasks.cancel_scope.cancel()
    assert b"flashrl" in heard
    assert token not in heard


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"\xff" * 500])
async def test_another_protocol_is_turned_away_and_the_server_lives_on(serving, token: bytes, opening: bytes):
    async with serving(Ask, tell_name) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(opening)
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        async with connect("127.0.0.1", port, token, "me", 5) as client:
            assert await client.call(Ask(), 5) == Answer("me")


async def test_a_connection_that_proves_nothing_is_closed_at_its_deadline(serving, caplog: pytest.LogCaptureFixture):
    async with (
        serving(Ask, tell_name, deadline=0.05) as port,
        await anyio.connect_tcp("127.0.0.1", port) as stream,
    ):
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
    assert "no proof within 0.05 s" in caplog.text


async def test_a_server_that_proves_nothing_is_given_up_at_the_deadline():
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(SocketAttribute.local_port)
        with pytest.raises(DeadlineError, match=r"waited 0\.05 s for hub at 127.0.0.1:"):
            async with connect("127.0.0.1", port, new_token(), "me", 0.05):
                pytest.fail("connected")


async def test_a_server_that_ends_before_the_proof_is_a_lost_peer_which_may_come_back(token: bytes):
    async def hang_up(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, hang_up)
        port = listener.extra(SocketAttribute.local_port)
        with pytest.raises(PeerLostError, match="hung up before") as caught:
            async with connect("127.0.0.1", port, token, "node-1", 5.0):
                pass
        assert not caught.value.fatal
        tasks.cancel_scope.cancel()


async def test_nobody_listening_is_said_with_host_and_port():
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(SocketAttribute.local_port)
    with pytest.raises(
        PeerLostError,
        match=rf"cannot connect to hub at 127\.0\.0\.1:{port}: .*nothing listens there: that process has ended",
    ):
        async with connect("127.0.0.1", port, new_token(), "me", 5):
            pytest.fail("connected")


def test_nobody_listening_at_any_address_of_a_host_is_said_like_at_one():
    class TwoAddresses(asyncio.SelectorEventLoop):
        async def getaddrinfo(self, host: Any, port: Any, **options: int) -> Any:
            return [
                (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
            ]

    async def reach() -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            port = listener.extra(SocketAttribute.local_port)
        with pytest.raises(PeerLostError, match=rf"two\.test:{port}: .*127\.0\.0\.1.*; nothing listens there"):
            async with connect("two.test", port, new_token(), "me", 5):
                pytest.fail("connected")

    anyio.run(reach, backend_options={"loop_factory": TwoAddresses})


@pytest.mark.parametrize("host", ["büro..x", "ü" * 70])
async def test_a_text_that_no_host_can_have_as_its_name_is_refused(host: str):
    with pytest.raises(ConfigError, match=f"cannot connect to hub at {host}:1: '{host}' is no possible name of a host"):
        async with connect(host, 1, new_token(), "me", 5):
            pytest.fail("connected")


async def test_a_short_token_is_refused_on_both_ends():
    with pytest.raises(ConfigError, match="at least 16"):
        async with connect("127.0.0.1", 1, b"short", "me", 5):
            pytest.fail("connected")
    with pytest.raises(ConfigError, match="at least 16"):
        await serve("127.0.0.1", 0, b"short", Ask, tell_name, deadline=5)


async def test_a_port_in_use_is_said_with_what_to_do(serving, token: bytes):
    async with serving(Ask, tell_name) as port:
        in_use = rf"port {port} of 127\.0\.0\.1 is in use by process {os.getpid()} \(.+\); wait .* choose another port"
        with pytest.raises(ConfigError, match=in_use):
            await serve("127.0.0.1", port, token, Ask, tell_name, deadline=5)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_an_address_of_another_machine_cannot_be_listened_at(token: bytes, host: str):
    with pytest.raises(ConfigError, match=f"cannot listen at {host}:0"):
        await serve(host, 0, token, Ask, tell_name, deadline=5)
