"""Connections that give up on clients who are too slow or too many.

Law: what a client holds open is bounded in time by its own progress, and in number by its token. Heads, bodies that
nobody wants any more and answers that are not taken each have a timer; a stranger, a connection that has shown no valid
token yet, can be ended at any time to make room for the next one; a token's holder has a share of all connections.

Everything that uvicorn has, but does not promise, is touched here and nowhere else:

    H11Protocol              made with config, server_state, app_state, _loop; app_state, conn (of h11), scope, loop,
                             transport;
                             on_response_complete, send_400_response, logger; cycle, with
                             disconnected, message_event, response_complete
    Config                   http, ws: may be any callable that makes a protocol
    Server                   capture_signals, startup, should_exit, serve(sockets)
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Literal

import anyio
import h11
import msgspec
import uvicorn
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from flash.waiting import unwrapped_group

_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)
"""For failures of the server. Faults of clients are answered, and not logged."""

PIECE = 2 << 10
"""Bytes that are read of a client at once: as chunks of one byte they keep the loop for 7 ms."""
COUNTED_PIECE = 256 << 10
"""Of a body whose length was said, which is not looked at byte by byte."""

ACCEPTED = 64
"""Connections that are taken at once."""
WAITING = 2048
"""That wait to be taken."""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on requests and connections. The defaults suit the internet; tests make them small."""

    head_bytes: int = 32 << 10
    """Largest head of a request."""
    head_s: float = 10.0
    """Seconds for the head of a request to arrive, and for the rest of a body that nobody wants any more."""
    body_bytes: int = 64 << 20
    """Largest request body."""
    held_bytes: int = 2 << 30
    """Of the bodies of all requests that are not answered yet. Beyond them requests get 503."""
    receive_s: float = 15.0
    """Seconds between two pieces of a request body."""
    bytes_per_s: int = 4096
    """Slowest average at which a body may arrive, or an answer be taken: a byte now and then holds nothing open."""
    stall_s: float = 30.0
    """Seconds over which the taking of an answer is measured."""
    idle_s: float = 75.0
    """Seconds for which a connection may stay open between two requests."""
    connections: int = 4096
    """Open at a time, or half of what the process may open, if that is less. Beyond them requests get 503."""
    strangers: int = 512
    """Of these, connections that have not shown a valid token yet; one more ends the oldest of them."""
    token_share: float = 0.25
    """Share of `connections` and of `held_bytes` that one bounded token may have (`HttpConnection.hold`)."""


class HttpStrangers:
    """The connections that have shown no token yet, oldest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[HttpConnection, None] = {}

    def arrived(self, connection: HttpConnection) -> None:
        """One more; if that is one too many, the oldest is ended."""
        self._waiting[connection] = None
        while len(self._waiting) > self._most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            if not oldest.known:
                oldest.transport.abort()

    def left(self, connection: HttpConnection) -> None:
        """Forget a connection that has ended."""
        self._waiting.pop(connection, None)


class HttpHolders:
    """The connections of each token, so that one token's holder cannot have those of all."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()
        self._idle: dict[str, dict[HttpConnection, None]] = {}
        """Connections without a request in progress, by token; the longest idle first."""

    def shown(self, connection: HttpConnection, token: str) -> bool:
        """Count a connection as one of `token`. False if the token has too many, and none of them is idle."""
        if connection.holder == token:
            self._idle.get(token, {}).pop(connection, None)
            return True
        if self._open[token] >= self._most:
            if not (idle := next(iter(self._idle.get(token, {})), None)):
                return False
            self.left(idle)
            idle.abort()
        self.left(connection)
        self._open[token] += 1
        connection.holder = token
        return True

    def rested(self, connection: HttpConnection) -> None:
        """Note that a connection has answered its request: it can be ended to make room for another one."""
        if connection.holder:
            self._idle.setdefault(connection.holder, {})[connection] = None

    def left(self, connection: HttpConnection) -> None:
        """Forget a connection that has ended, or that shows another token."""
        token, connection.holder = connection.holder, ""
        if not token:
            return
        if (idle := self._idle.get(token)) is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[token]
        self._open[token] -= 1
        if not self._open[token]:
            del self._open[token]


class Taking:
    """Watches whether a client takes what is sent to it, from the first byte that waits until none does."""

    def __init__(self, transport: asyncio.Transport, limits: HttpLimits) -> None:
        self._transport = transport
        self._limits = limits
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """From now on: this may call `begin` at once."""
        # Not the usual 64 KiB: an answer below that, never taken, would never be noticed.
        self._transport.set_write_buffer_limits(high=1, low=0)

    def begin(self) -> None:
        self.end()
        self._left = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(self._limits.stall_s, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._left - self._transport.get_write_buffer_size() < self._limits.bytes_per_s * self._limits.stall_s:
            self._transport.abort()
        else:
            self.begin()


class MeasuredConnection(asyncio.BaseProtocol):
    """A connection whose client is watched while it takes what is sent to it."""

    _taking: Taking

    def pause_writing(self) -> None:
        self._taking.begin()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._taking.end()
        super().resume_writing()


class HttpConnection(MeasuredConnection, H11Protocol, asyncio.BufferedProtocol):
    """HTTP/1.1 for one client, read in pieces of our size: asyncio would hand on a quarter of a megabyte at once."""

    def __init__(
        self,
        *args: Any,
        limits: HttpLimits,
        strangers: HttpStrangers,
        holders: HttpHolders,
        into: memoryview,
        **options: Any,
    ) -> None:
        """`into` is the buffer of one piece. Connections share it, because it is empty before the next read."""
        super().__init__(*args, **options)
        # Copied into each request's `scope["state"]`: applications reach the connection by it.
        self.app_state = {**self.app_state, "connection": self}
        # Strangers could fill the log: uvicorn writes a warning for each request that is no HTTP.
        self.logger = _log
        self._holders = holders
        self.holder = ""
        """Name of the token that this connection counts for; empty before `hold`."""
        self._limits = limits
        self._into = into
        self._due = 0
        """Bytes of the body that were said to come still."""
        self._due_of: Any = None
        """The request that it is of."""
        self._strangers = strangers
        self._awaited: Literal["head", "rest"] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def known(self) -> bool:
        """Whether a request on it had a valid token."""
        scope: Any = self.scope  # None before the first request.
        return scope is not None and "token" in scope["state"]

    def hold(self, token: str) -> None:
        """Count this connection as one of `token`, whose number of connections is bounded.

        Raises:
            HTTPException: the token has too many connections, all of them with a request in progress.
        """
        if not self._holders.shown(self, token):
            raise HTTPException(
                503, "this token has too many requests in progress; wait for some of them", {"connection": "close"}
            )

    def abort(self) -> None:
        """End the connection at once, also in the middle of an answer."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._taking = Taking(transport, self._limits)
        self._taking.watch()
        self._strangers.arrived(self)
        self._watch()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next piece is read into: no more than a piece beyond a body whose length was said."""
        if self.conn.their_state is not h11.SEND_BODY:
            self._due = 0
        elif self._due_of is not self.scope:
            self._due_of, self._due = self.scope, _length(self.scope["headers"])
        return self._into[: max(PIECE, min(self._due, COUNTED_PIECE))]

    def buffer_updated(self, nbytes: int) -> None:
        """A piece has come."""
        self._due -= nbytes
        self.data_received(bytes(self._into[:nbytes]))
        self._watch()

    def on_response_complete(self) -> None:
        self._holders.rested(self)
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE:  # Otherwise the client may be idle for a while.
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. Whoever is answering its beginning is told that the client has left: the answer to it
        is this one, unless one has begun."""
        cycle: Any = self.cycle  # None before the first request.
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _forget(self) -> None:
        self._strangers.left(self)
        self._holders.left(self)
        self._taking.end()
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        """A timer runs while a head is incomplete, and while a request that is answered already goes on."""
        awaited = None
        if self.conn.their_state is h11.IDLE:
            awaited = "head"
        elif self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            awaited = "rest"
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if awaited is not None:
            self._timer = self.loop.call_later(self._limits.head_s, self.transport.abort)


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """The length of a body as h11, which has checked it, takes it: one that comes in chunks has none."""
    said = dict(headers)
    return 0 if b"transfer-encoding" in said else int(said.get(b"content-length", b"0"))


class _Server(uvicorn.Server):
    """Leaves the process's signals to their owner."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = anyio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def http_protocol(limits: HttpLimits, connections: int) -> Any:
    """Return the maker of connections that `uvicorn.Config` takes as `http`. `connections`: open at a time."""
    return partial(
        HttpConnection,
        limits=limits,
        strangers=HttpStrangers(min(limits.strangers, connections // 2)),
        holders=HttpHolders(max(1, int(limits.token_share * connections))),
        into=memoryview(bytearray(COUNTED_PIECE)),
    )


@asynccontextmanager
async def accepting(config: uvicorn.Config, bound: socket.socket) -> AsyncGenerator[None]:
    """Take connections at this socket for the time of the block, from its beginning on.

    Then requests in progress have the time that the configuration gives them; uvicorn cancels the rest.
    """
    server = _Server(config)
    async with unwrapped_group() as tasks:
        tasks.start_soon(server.serve, [bound])
        await server.listening.wait()
        # asyncio would take as many of them at once as may wait, which keeps the loop for half a second.
        bound.listen(WAITING)
        yield
        server.should_exit = True
