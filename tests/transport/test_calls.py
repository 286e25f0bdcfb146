"""Calls over a connection: each ends once, by its reply, an error, its deadline or its cancellation."""

from __future__ import annotations

import time

import anyio
import msgspec
import pytest

from flash.errors import (
    ConfigError,
    ContractError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    FlashError,
    PeerLostError,
    ProtocolError,
    TransportError,
)
from flash.transport import Client, Peer, Request, connect
from flash.transport.client import LATE_S
from flash.transport.frames import check_reply

pytestmark = pytest.mark.anyio


class Sum(msgspec.Struct, frozen=True, tag=True):
    """Reply to `Add` and to `Wait`."""

    value: int


class Data(msgspec.Struct, frozen=True, tag=True):
    """Reply to `Echo`."""

    data: bytes


class Add(Request[Sum], frozen=True, tag=True):
    """Request for the sum of two numbers."""

    left: int
    right: int


class Wait(Request[Sum], frozen=True, tag=True):
    """Request that is answered when the test releases its key."""

    key: int


class Echo(Request[Data], frozen=True, tag=True):
    """Request that is answered with its own data."""

    data: bytes


class SumOfEcho(Request[Sum], frozen=True, tag="Echo"):
    """An `Echo` to the server, which answers it with `Data`; the client takes a `Sum` for its reply."""

    data: bytes


Served = Add | Wait | Echo


class Service:
    """Answers sums and echoes at once; a `Wait` when its key is released. Remembers how waits ended."""

    def __init__(self) -> None:
        self.started: dict[int, anyio.Event] = {}
        """Set when the `Wait` of a key has come."""
        self.released: dict[int, anyio.Event] = {}
        """Set by the test to let the `Wait` of a key be answered."""
        self.cancelled: dict[int, anyio.Event] = {}
        """Set when the `Wait` of a key was cancelled."""
        self.error: BaseException | None = None
        """Error that each `Add` raises; None: it is answered."""

    def expect(self, *keys: int) -> None:
        """Prepare the events of these keys."""
        for key in keys:
            self.started[key], self.released[key], self.cancelled[key] = anyio.Event(), anyio.Event(), anyio.Event()

    async def handle(self, peer: Peer, request: Served) -> Sum | Data:
        """Answer one request."""
        match request:
            case Add():
                if self.error is not None:
                    raise self.error
                return Sum(request.left + request.right)
            case Echo():
                return Data(request.data)
            case Wait():
                self.started[request.key].set()
                try:
                    await self.released[request.key].wait()
                except anyio.get_cancelled_exc_class():
                    self.cancelled[request.key].set()
                    raise
                return Sum(request.key)


@pytest.fixture
def service() -> Service:
    """Return the service of one test."""
    return Service()


@pytest.fixture
async def client(serving, token: bytes, service: Service):
    """Give a client that is connected to `service`, during the test."""
    async with (
        serving(Served, service.handle) as port,
        connect("127.0.0.1", port, token, "me", 5) as client,
    ):
        yield client


async def test_a_reply_comes_back(client: Client):
    assert await client.call(Add(2, 3), 5) == Sum(5)


async def test_a_request_is_answered_with_the_reply_type_that_it_names():
    assert check_reply(Add(2, 3), Sum(5)) == Sum(5)
    with pytest.raises(ContractError, match="Add was answered with Data, not with Sum"):
        check_reply(Add(2, 3), Data(b""))


async def test_replies_may_overtake_each_other(client: Client, service: Service):
    service.expect(*range(10))
    order: list[int] = []
    answered = [anyio.Event() for _ in range(10)]

    async def wait(key: int) -> None:
        order.append((await client.call(Wait(key), 5)).value)
        answered[key].set()

    async with anyio.create_task_group() as tasks:
        for key in range(10):
            tasks.start_soon(wait, key)
        for key in range(10):
            await service.started[key].wait()
        for key in reversed(range(10)):
            service.released[key].set()
            await answered[key].wait()
    assert order == list(reversed(range(10)))


@pytest.mark.slow
async def test_thousands_of_calls_at_once_each_get_their_own_reply(client: Client):
    replies: dict[int, int] = {}

    async def add(number: int) -> None:
        replies[number] = (await client.call(Add(number, 1), 30)).value

    async with anyio.create_task_group() as tasks:
        for number in range(3000):
            tasks.start_soon(add, number)
    assert replies == {number: number + 1 for number in range(3000)}


async def test_a_frame_of_64_megabytes_goes_there_and_back(client: Client):
    data = bytes(range(256)) * (64_000_000 // 256)
    assert (await client.call(Echo(data), 60)).data == data


async def test_small_calls_pass_while_large_ones_are_under_way(client: Client):
    data = bytes(8_000_000)
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(client.call, Echo(data), 60)
        for number in range(20):
            assert await client.call(Add(number, 0), 60) == Sum(number)


@pytest.mark.parametrize("kind", [ConfigError, ContractError, EngineError, EngineDeadError, TransportError])
async def test_a_typed_error_of_the_handler_is_raised_in_the_caller(
    client: Client, service: Service, kind: type[FlashError]
):
    service.error = kind("the reason")
    with pytest.raises(kind) as caught:
        await client.call(Add(1, 1), 5)
    assert type(caught.value) is kind
    assert str(caught.value) == "the reason"
    assert "hub at 127.0.0.1" in caught.value.__notes__[0]
    service.error = None
    assert await client.call(Add(1, 1), 5) == Sum(2)


async def test_an_error_with_arguments_of_its_own_keeps_its_message(client: Client, service: Service):
    service.error = DeadlineError("an engine", 7, "its log")
    with pytest.raises(DeadlineError, match="waited 7 s") as caught:
        await client.call(Add(1, 1), 5)
    assert str(caught.value) == "waited 7 s for an engine; look at its log"


async def test_an_error_class_of_someone_else_arrives_as_a_transport_error(client: Client, service: Service):
    class HouseError(FlashError):
        pass

    service.error = HouseError("the reason")
    with pytest.raises(TransportError, match="HouseError: the reason"):
        await client.call(Add(1, 1), 5)


async def test_a_bug_in_a_handler_ends_the_server(serving, token: bytes, service: Service):
    service.error = ZeroDivisionError("a bug")
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with (
            serving(Served, service.handle) as port,
            connect("127.0.0.1", port, token, "me", 5) as client,
        ):
            await client.call(Add(1, 1), 5)


async def test_a_request_the_server_cannot_read_is_answered_with_an_error_and_the_last_of_its_client(client: Client):
    class Unknown(Request[Sum], frozen=True, tag=True):
        pass

    with pytest.raises(ProtocolError, match=r"the request cannot be read: .*Unknown.* same code"):
        await client.call(Unknown(), 5)
    with pytest.raises(PeerLostError):
        await client.call(Add(1, 1), 5)


async def test_a_handler_ends_the_connection_of_a_client_that_says_what_it_may_not(
    serving, token: bytes, service: Service, caplog: pytest.LogCaptureFixture
):
    service.error = ProtocolError("you may not add")
    async with serving(Served, service.handle) as port, connect("127.0.0.1", port, token, "me", 5) as client:
        with pytest.raises(ProtocolError, match="you may not add"):
            await client.call(Add(1, 1), 5)
        with pytest.raises(PeerLostError):
            await client.call(Add(1, 1), 5)
        service.error = None
        async with connect("127.0.0.1", port, token, "another", 5) as another:
            assert await another.call(Add(1, 1), 5) == Sum(2)
    assert [record.getMessage().split(": ")[-1] for record in caplog.records] == ["you may not add"]


async def test_a_peer_that_is_not_awaited_is_refused_before_it_says_anything(
    serving, token: bytes, service: Service, caplog: pytest.LogCaptureFixture
):
    def arrived(peer: Peer) -> None:
        raise ProtocolError(f"nobody awaits {peer.name}")

    left: list[Peer] = []
    async with (
        serving(Served, service.handle, on_connect=arrived, on_disconnect=left.append) as port,
        connect("127.0.0.1", port, token, "me", 5) as client,
    ):
        with pytest.raises(PeerLostError):
            await client.call(Add(1, 1), 5)
    assert "nobody awaits me" in caplog.text
    assert left == []


async def test_a_client_that_connects_again_takes_the_place_of_its_former_connection_whose_calls_end_before(
    serving, token: bytes, service: Service, caplog: pytest.LogCaptureFixture
):
    here: dict[str, int] = {}
    events: list[str] = []

    def arrived(peer: Peer) -> None:
        assert peer.name not in here
        here[peer.name] = peer.id
        events.append(f"{peer.id} came")

    def left(peer: Peer) -> None:
        events.append(f"{peer.id} left, its call cancelled: {service.cancelled[1].is_set()}")
        del here[peer.name]

    service.expect(1)
    options = {"connection_to_replace": here.get, "on_connect": arrived, "on_disconnect": left}

    async def wait(client: Client) -> None:
        with pytest.raises(ProtocolError, match=r"another connection of me, from .*, has taken the place"):
            await client.call(Wait(1), 60)

    async with (
        serving(Served, service.handle, **options) as port,
        connect("127.0.0.1", port, token, "me", 5) as old,
        anyio.create_task_group() as calls,
    ):
        calls.start_soon(wait, old)
        await service.started[1].wait()
        async with connect("127.0.0.1", port, token, "me", 5) as new:
            assert await new.call(Add(1, 1), 5) == Sum(2)
            assert events == ["1 came", "1 left, its call cancelled: True", "2 came"]


async def test_a_reply_other_than_the_request_names_fails_its_call_only(serving, token: bytes, service: Service):
    async with (
        serving(Served, service.handle) as port,
        connect("127.0.0.1", port, token, "me", 5) as client,
    ):
        with pytest.raises(TransportError, match=r"the reply to SumOfEcho from hub at .* cannot be read"):
            await client.call(SumOfEcho(b""), 5)
        assert await client.call(Add(1, 1), 5) == Sum(2)


async def test_law_1_a_late_reply_is_a_deadline_error_and_cancels_its_handler(client: Client, service: Service):
    service.expect(1)
    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for the reply to Wait from hub at 127\.0\.0\.1:"):
        await client.call(Wait(1), 0.05)
    await service.cancelled[1].wait()
    assert await client.call(Add(1, 1), 5) == Sum(2)


async def test_a_process_that_was_stopped_reads_what_has_come_before_it_gives_up(client: Client, service: Service):
    service.expect(1)

    async def stopped() -> None:
        await service.started[1].wait()
        service.released[1].set()
        time.sleep(0.1 + 2 * LATE_S)  # noqa: ASYNC251 - as by SIGSTOP: no loop runs, and the clock goes on

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stopped)
        assert await client.call(Wait(1), 0.1) == Sum(1)


async def test_cancelling_a_call_cancels_its_handler_and_no_other(client: Client, service: Service):
    service.expect(1, 2)
    async with anyio.create_task_group() as kept, anyio.create_task_group() as dropped:
        kept.start_soon(client.call, Wait(1), 5)
        dropped.start_soon(client.call, Wait(2), 5)
        await service.started[1].wait()
        await service.started[2].wait()
        dropped.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await service.cancelled[2].wait()
        service.released[1].set()
    assert not service.cancelled[1].is_set()


async def test_a_call_cancelled_before_its_first_await_leaves_the_connection_whole(client: Client, service: Service):
    service.expect(1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await client.call(Wait(1), 5)
    assert scope.cancelled_caught
    assert await client.call(Add(1, 1), 5) == Sum(2)


async def test_a_reply_that_crosses_its_cancellation_is_dropped(client: Client, service: Service):
    service.expect(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.call, Wait(1), 5)
        await service.started[1].wait()
        # Both in one turn of the loop: the handler ends on its own before the cancellation can reach it.
        service.released[1].set()
        tasks.cancel_scope.cancel()
    assert await client.call(Add(1, 1), 5) == Sum(2)
    assert not service.cancelled[1].is_set()


async def test_an_error_of_the_block_passes_through_unwrapped(serving, token: bytes, service: Service):
    async with serving(Served, service.handle) as port:
        with pytest.raises(KeyError, match="mine"):
            async with connect("127.0.0.1", port, token, "me", 5):
                raise KeyError("mine")


async def test_a_request_that_cannot_be_encoded_fails_alone(client: Client):
    with pytest.raises(TypeError):
        await client.call(Echo(object()), 5)  # pyright: ignore[reportArgumentType]
    assert await client.call(Add(1, 1), 5) == Sum(2)
