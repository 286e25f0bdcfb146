"""Calls of code without an event loop, through `BlockingClient`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import anyio
import msgspec
import pytest
from anyio.from_thread import start_blocking_portal

from flash.errors import DeadlineError, EngineError, PeerLostError, TransportError
from flash.transport import BlockingClient, Peer, Request, new_token, serve


class Doubled(msgspec.Struct, frozen=True, tag=True):
    """Reply to `Double`."""

    value: int


class Double(Request[Doubled], frozen=True, tag=True):
    """Request for twice the number."""

    value: int


class Server:
    """Runs on a loop in a thread of its own. Negative numbers fail, 0 hangs."""

    def __init__(self) -> None:
        self.hanging = threading.Event()
        """Set when a call hangs."""
        self.cancelled = threading.Event()
        """Set when a call that hangs is cancelled."""
        self.interrupt_caller = False
        """True if a call that hangs sends SIGINT to the main thread, as Ctrl-C does."""

    async def handle(self, peer: Peer, request: Double) -> Doubled:
        """Answer one request, fail or hang."""
        if request.value < 0:
            raise EngineError("negative")
        if request.value == 0:
            self.hanging.set()
            if self.interrupt_caller:
                ident = threading.main_thread().ident
                assert ident is not None
                signal.pthread_kill(ident, signal.SIGINT)
            try:
                await anyio.sleep_forever()
            finally:
                self.cancelled.set()
        return Doubled(2 * request.value)


@pytest.fixture
def server() -> Server:
    """Return the server of one test."""
    return Server()


@pytest.fixture
def client(server: Server) -> Iterator[BlockingClient]:
    """Give a client that is connected to `server`, during the test."""
    token = new_token()
    with start_blocking_portal() as portal:
        run = partial(serve, "127.0.0.1", 0, token, Double, server.handle, deadline=5.0)
        future, port = portal.start_task(run)
        with BlockingClient("127.0.0.1", port, token, "rank 0", 5) as client:
            yield client
        future.cancel()


def test_a_reply_comes_back(client: BlockingClient):
    assert client.call(Double(21), 5) == Doubled(42)


def test_threads_may_share_a_client(client: BlockingClient):
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda value: client.call(Double(value), 30).value, range(1, 200)))
    assert replies == [2 * value for value in range(1, 200)]


def test_typed_errors_and_deadlines_reach_the_thread(client: BlockingClient, server: Server):
    with pytest.raises(EngineError, match="negative"):
        client.call(Double(-1), 5)
    with pytest.raises(DeadlineError, match="the reply to Double"):
        client.call(Double(0), 0.05)
    assert server.cancelled.wait(10)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the shell has started the tests with SIGINT ignored, as it does with
    its background jobs: there the interrupt would be lost, and the call would wait for its deadline."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_cancels_the_call_and_the_client_goes_on(client: BlockingClient, server: Server):
    server.interrupt_caller = True
    with pytest.raises(KeyboardInterrupt):
        client.call(Double(0), 60)
    assert server.cancelled.wait(10)
    assert client.call(Double(1), 5) == Doubled(2)


def test_an_interrupt_that_leaves_the_block_ends_its_thread_and_the_calls_of_others():
    server, token = Server(), new_token()
    threads = set(threading.enumerate())
    with start_blocking_portal() as portal:
        future, port = portal.start_task(partial(serve, "127.0.0.1", 0, token, Double, server.handle, deadline=5.0))
        with ThreadPoolExecutor(1) as pool:
            block = BlockingClient("127.0.0.1", port, token, "rank 0", 5)
            with suppress(KeyboardInterrupt), block as client:
                other = pool.submit(client.call, Double(0), 60)
                assert server.hanging.wait(10)
                raise KeyboardInterrupt
            with pytest.raises(PeerLostError, match="closed on this side"):
                other.result()
        future.cancel()
    assert set(threading.enumerate()) <= threads


def test_a_failed_connection_leaves_no_thread():
    threads = set(threading.enumerate())
    with (
        pytest.raises(TransportError, match="cannot connect to weights at"),
        BlockingClient("127.0.0.1", 1, new_token(), "rank 0", 5, server="weights"),
    ):
        pytest.fail("connected")
    assert set(threading.enumerate()) == threads
