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
from anyio.abc import SocketAttribute, SocketStream, TaskGroup, TaskStatus
from anyio.streams.stapled import MultiListener

from flash.errors import ConfigError, FlashError, PeerLostError, TransportError
from flash.transport.auth import admit_client, check_token
from flash.transport.connection import FrameConnection, tune
from flash.transport.frames import Frame, FrameKind, Refusal

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

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
            goes to the caller; any other exception is a bug and ends the server.
        deadline: seconds for a new connection to prove the token.
        on_disconnect: called once per peer, after its last handler ended, also when the server ends.
        task_status: is given the bound port.

    Raises:
        ConfigError: the address cannot be listened at, or the token is too short.
    """
    check_token(token)
    server = _Server(token, request_type, handler, deadline, on_disconnect)
    async with await _listen(host, port) as listener:
        task_status.started(listener.extra(SocketAttribute.local_port))
        await listener.serve(server.accept)


async def _listen(host: str, port: int) -> MultiListener[SocketStream]:
    try:
        return await anyio.create_tcp_listener(local_host=host, local_port=port)
    except socket.gaierror as error:
        raise ConfigError(f"cannot listen at {host}:{port}: no such host; name an address of this machine") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use; end the process that listens there, or choose another port "
                "(0 takes any free one)"
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
        on_disconnect: Callable[[Peer], None] | None,
    ) -> None:
        self._token = token
        self._decoder = msgspec.msgpack.Decoder(request_type)
        self._handler = handler
        self._deadline = deadline
        self._on_disconnect = on_disconnect
        self._ids = count(1)

    async def accept(self, stream: SocketStream) -> None:
        """Serve one connection from its proof to its end."""
        async with stream:
            address = _address(stream)
            try:
                with anyio.fail_after(self._deadline):
                    name = await admit_client(stream, self._token)
                tune(stream)
            except TimeoutError:
                _log.warning("refused a connection from %s: no proof within %g s", address, self._deadline)
                return
            except (TransportError, OSError) as error:
                _log.warning("refused a connection from %s: %s", address, error)
                return
            peer = Peer(next(self._ids), name, address)
            try:
                await _Session(
                    peer, FrameConnection(stream, f"{name} at {address}"), self._decoder, self._handler
                ).run()
            finally:
                if self._on_disconnect is not None:
                    self._on_disconnect(peer)


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

    async def run(self) -> None:
        """Until the connection ends; then all its handlers are cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._connection.write)
            try:
                await self._read(tasks)
            except PeerLostError as error:
                _log.debug("%s left: %s", self._peer, error)
            except TransportError as error:
                _log.warning("dropped %s: %s", self._peer, error)
            tasks.cancel_scope.cancel()

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
        try:
            request = self._decoder.decode(frame.body)
        except msgspec.DecodeError as error:
            refusal = Refusal("TransportError", f"the request cannot be read: {error}; do both ends run the same code?")
            self._connection.post(FrameKind.ERROR, frame.call, refusal)
            return
        scope = self._running[frame.call] = anyio.CancelScope()
        tasks.start_soon(self._answer, frame.call, request, scope)

    async def _answer(self, call: int, request: RequestT, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                try:
                    # Before the handler too: many requests may have come in one piece, and no work is done for a peer
                    # that takes no replies.
                    await self._connection.room()
                    reply = await self._handler(self._peer, request)
                    await self._connection.room()
                    self._connection.post(FrameKind.REPLY, call, reply)
                except FlashError as error:
                    await self._connection.room()
                    self._connection.post(FrameKind.ERROR, call, Refusal(type(error).__name__, str(error)))
        finally:
            del self._running[call]


def _address(stream: SocketStream) -> str:
    """host:port of the other end, or that it already left."""
    try:
        address = stream.extra(SocketAttribute.remote_address)
    except OSError:
        return "a peer that already left"
    return f"{address[0]}:{address[1]}"
