"""The listening end: authenticated peers, many requests in flight on each connection.

Law of a connection: every request is answered exactly once, by a reply or by an error, unless its caller cancelled it
or the connection ended; then its handler is cancelled. So nothing a peer asked for outlives its interest.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Generic, TypeVar

import anyio
import msgspec
from anyio.abc import SocketAttribute, SocketListener, SocketStream, TaskGroup, TaskStatus
from anyio.streams.stapled import MultiListener

from flash.errors import ConfigError, FlashError, PeerLostError, ProtocolError, TransportError
from flash.transport.accept import STRANGERS, Sayings, Strangers, accept_all
from flash.transport.auth import admit_client, check_token
from flash.transport.connection import FrameConnection, tune
from flash.transport.frames import Frame, FrameKind, Refusal
from flash.transport.port_holder import port_holder

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

REFUSALS_SAID = 20
"""Refused connections that are logged in a minute."""

CALLS_AT_ONCE = 1 << 12
"""Requests of one peer under way: far above what ours ask at once, and each holds a task."""
FAREWELL_S = 2.0
"""Seconds for a dropped peer to take the words that tell it why."""

_log = logging.getLogger(__name__)


class Peer(msgspec.Struct, frozen=True):
    """One authenticated connection, as handlers see it."""

    id: int
    """Never used twice by one server; a client that connects again is a new peer."""
    name: str
    """What the client calls itself."""
    address: str
    """host:port of its end."""


Handler = Callable[[Peer, RequestT], Awaitable[msgspec.Struct]]


async def serve(
    host: str,
    port: int,
    token: bytes,
    request_type: type[RequestT],
    handler: Handler[RequestT],
    *,
    deadline: float,
    former: Callable[[str], int | None] | None = None,
    on_connect: Callable[[Peer], None] | None = None,
    on_disconnect: Callable[[Peer], None] | None = None,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Answer requests until cancelled.

    Consumes connections. Waits for the next one. Unblocked by a client. Produces one session per proven peer.

    Args:
        host: the address to listen at, such as 127.0.0.1 or 0.0.0.0.
        port: 0 takes any free one.
        token: what a peer has to prove, and what is proven to it.
        request_type: the struct, or tagged union of structs, that peers send.
        handler: turns a request into its reply, as a task of its own; replies may overtake each other. Its `FlashError`
            goes to the caller, and a `ProtocolError` ends the connection too; any other exception is a bug and ends
            the server.
        deadline: seconds for a new connection to prove the token.
        former: the id of the peer whose place a new one of this name takes, None where it takes none. That one is
            disconnected first, and its handlers end.
        on_connect: called once per peer, before its first request; a `ProtocolError` of it refuses the peer.
        on_disconnect: called once per peer, after its last handler ended, also when the server ends.
        task_status: is given the bound port.

    Raises:
        ConfigError: the address cannot be listened at, or the token is too short.
    """
    check_token(token)
    server = _Server(token, request_type, handler, deadline, former, on_connect, on_disconnect)
    async with await _listen(host, port) as listener, anyio.create_task_group() as tasks:
        for one in listener.listeners:
            assert isinstance(one, SocketListener), "a port's listeners are sockets"
            tasks.start_soon(accept_all, one, server.accept, tasks, server.strangers, server.sayings)
        task_status.started(listener.extra(SocketAttribute.local_port))


async def try_listening(host: str, port: int) -> None:
    """Whether an address can be listened at, as `serve` would. Raises ConfigError: it cannot."""
    async with await _listen(host, port):
        pass


async def _listen(host: str, port: int) -> MultiListener[SocketStream]:
    try:
        return await anyio.create_tcp_listener(local_host=host, local_port=port)
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen at {host}:{port}: no such host; name an address of this machine") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use by {port_holder(port)}; wait for its end or end it, or choose "
                "another port (0 takes any free one)"
            ) from error
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error}; name an address of this machine and a port it may open"
        ) from error


class _Server(Generic[RequestT]):
    """What all sessions share."""

    def __init__(
        self,
        token: bytes,
        request_type: type[RequestT],
        handler: Handler[RequestT],
        deadline: float,
        former: Callable[[str], int | None] | None,
        on_connect: Callable[[Peer], None] | None,
        on_disconnect: Callable[[Peer], None] | None,
    ) -> None:
        self.strangers = Strangers(STRANGERS)
        self.sayings = Sayings(anyio.current_time, REFUSALS_SAID)
        self._token = token
        self._decoder = msgspec.msgpack.Decoder(request_type)
        self._handler = handler
        self._deadline = deadline
        self._former = former
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._ids = count(1)
        self._sessions: dict[int, _Session[RequestT]] = {}

    async def accept(self, stream: SocketStream) -> None:
        """Serve one connection from its proof to its end."""
        async with stream:
            address = _address(stream)
            try:
                name = await self._name(stream)
                while self._former is not None and (former := self._former(name)) is not None:
                    await self._sessions[former].replace(address)
                peer = Peer(next(self._ids), name, address)
                tune(stream)
                if self._on_connect is not None:
                    self._on_connect(peer)
            except TimeoutError:
                self.sayings.warn("refused a connection from %s: no proof within %g s", address, self._deadline)
                return
            except (TransportError, OSError) as error:
                self.sayings.warn("refused a connection from %s: %s", address, error)
                return
            connection = FrameConnection(stream, f"{peer.name} at {address}")
            session = self._sessions[peer.id] = _Session(peer, connection, self._decoder, self._handler)
            try:
                await session.run()
            finally:
                if self._on_disconnect is not None:
                    self._on_disconnect(peer)
                del self._sessions[peer.id]
                session.ended.set()

    async def _name(self, stream: SocketStream) -> str:
        """What a connection calls itself, once it has proven the token."""
        name = ""
        with self.strangers.one() as scope, anyio.fail_after(self._deadline):
            name = await admit_client(stream, self._token)
        if scope.cancelled_caught:
            raise TransportError("no proof yet, and others wait")
        return name


class _Session(Generic[RequestT]):
    """The requests of one peer, each answered by a task of its own."""

    def __init__(
        self,
        peer: Peer,
        connection: FrameConnection,
        decoder: msgspec.msgpack.Decoder[RequestT],
        handler: Handler[RequestT],
    ) -> None:
        self._peer = peer
        self._connection = connection
        self._decoder = decoder
        self._handler = handler
        self._running: dict[int, anyio.CancelScope] = {}
        self._dropped = False
        self._reading = anyio.CancelScope()
        self.ended = anyio.Event()

    async def run(self) -> None:
        """Until the connection ends; then all its handlers are cancelled."""
        async with anyio.create_task_group() as writing:
            writing.start_soon(self._connection.write)
            async with anyio.create_task_group() as tasks:
                try:
                    with self._reading:
                        await self._read(tasks)
                except PeerLostError as error:
                    _log.debug("%s left: %s", self._peer, error)
                except TransportError as error:
                    self._drop(error)
                tasks.cancel_scope.cancel()
            if self._dropped:
                with anyio.move_on_after(FAREWELL_S):
                    await self._connection.flush()
            writing.cancel_scope.cancel()

    async def replace(self, address: str) -> None:
        """End, since the peer has connected again; return when it has ended."""
        error = ProtocolError(
            f"another connection of {self._peer.name}, from {address}, has taken the place of this one"
        )
        for call in self._running:
            self._refuse(call, error)
        self._drop(error)
        self._reading.cancel()
        await self.ended.wait()

    def _drop(self, error: TransportError) -> None:
        """Say once why this peer is disconnected."""
        if not self._dropped:
            _log.warning("dropped %s: %s", self._peer, error)
        self._dropped = True

    async def _read(self, tasks: TaskGroup) -> None:
        """Start a handler per request, cancel the handlers of cancelled calls.

        Consumes frames. Waits for the next ones, and for room while the peer does not read its replies: so it can ask
        no more than it takes. Unblocked by the peer. Produces handler tasks. Ends with the connection's error.
        """
        while True:
            for frame in await self._connection.receive():
                if frame.kind is FrameKind.REQUEST:
                    await self._connection.room()
                    self._start(frame, tasks)
                elif frame.kind is FrameKind.CANCEL:
                    if (scope := self._running.get(frame.call)) is not None:
                        scope.cancel()
                else:
                    raise TransportError(f"a client may not send {frame.kind.name}")

    def _start(self, frame: Frame, tasks: TaskGroup) -> None:
        if frame.call in self._running:
            raise TransportError(f"call {frame.call} was begun twice")
        if len(self._running) >= CALLS_AT_ONCE:
            raise TransportError(f"more than {CALLS_AT_ONCE} calls wait at once")
        try:
            request = self._decoder.decode(frame.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            unread = ProtocolError(f"the request cannot be read: {error}; do both ends run the same code?")
            self._refuse(frame.call, unread)
            raise unread from error
        scope = self._running[frame.call] = anyio.CancelScope()
        tasks.start_soon(self._answer, frame.call, request, scope, tasks)

    def _refuse(self, call: int, error: FlashError) -> None:
        self._connection.post(FrameKind.ERROR, call, Refusal(type(error).__name__, str(error)))

    async def _answer(self, call: int, request: RequestT, scope: anyio.CancelScope, tasks: TaskGroup) -> None:
        try:
            with scope:
                try:
                    # Before the handler too: many requests may have come in one piece, and no work is done for a peer
                    # that takes no replies.
                    await self._connection.room()
                    reply = await self._handler(self._peer, request)
                    await self._connection.send(FrameKind.REPLY, call, reply)
                except ProtocolError as error:
                    self._refuse(call, error)
                    self._drop(error)
                    tasks.cancel_scope.cancel()
                except FlashError as error:
                    await self._connection.room()
                    self._refuse(call, error)
        finally:
            del self._running[call]


def _address(stream: SocketStream) -> str:
    """host:port of the other end, or that it already left."""
    try:
        address = stream.extra(SocketAttribute.remote_address)
    except OSError:
        return "a peer that already left"
    return f"{address[0]}:{address[1]}"
