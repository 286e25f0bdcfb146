"""HTTP connections that end when their client is too slow, or when there are too many of them.

`flash.http.server.serving` gives `http_protocol` to uvicorn, which makes an `HttpConnection` for each connection, and
runs the server with `accepting`. All of it runs on the event loop of the service: the endpoint for agents, the sandbox
service, or `flash view`.

A *stranger* is a connection that has not shown a valid token yet. A *bounded* token is one whose connections are
counted, because its application calls `HttpConnection.hold`.

Law: a connection stays open only as long as its client makes progress, and each token has a bounded number of them.
- A timer runs while a request's head is incomplete, and while the rest of a body arrives after the answer was sent.
- A timer runs while bytes of an answer wait for the client to read them.
- A stranger can be ended at any time, to make room for a newer connection.
- A bounded token has at most its share of all connections.

uvicorn's settings bound the size of a head, the number of connections and the time between two requests, but none of
the cases above. Applications, such as those of Starlette, do not see connections at all. So this module uses internals
of uvicorn that are not part of its public API. No other module uses them, and tests/http/test_uvicorn.py reports each
internal that a new version lacks:

    H11Protocol              made with config, server_state, app_state, _loop; app_state, conn (of h11), scope, loop,
                             transport; on_response_complete, send_400_response, logger; cycle, with
                             disconnected, message_event, response_complete
    Config                   http, ws: any callable that makes a protocol
    Server                   capture_signals, startup, should_exit, serve(sockets)
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import sys
import termios
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
"""Logger for failures of the server. Faults of clients are answered and not logged, or they could fill the log."""

PIECE = 2 << 10
"""Largest number of bytes that are read from a client at once. If they are chunks of one byte each, they block the loop
for 7 ms."""
SIZED_PIECE = 256 << 10
"""Largest number of bytes that are read at once of a body with a content-length, which h11 does not parse byte by
byte."""
ACCEPTED = 64
"""Largest number of connections that the loop accepts in one turn."""
BACKLOG = 2048
"""Largest number of connections that wait in the kernel to be accepted."""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on requests and connections. The defaults are meant for clients on the internet."""

    head_bytes: int = 32 << 10
    """Largest head of a request, in bytes."""
    head_s: float = 10.0
    """Seconds for the head of a request to arrive, and for the rest of a body that is still sent after the answer."""
    body_bytes: int = 64 << 20
    """Largest request body, in bytes."""
    held_bytes: int = 2 << 30
    """Largest number of bytes of the bodies of all requests that are not answered yet. Further requests get 503."""
    receive_s: float = 15.0
    """Longest time between two pieces of a request body, in seconds."""
    bytes_per_s: int = 4096
    """Slowest average rate at which a client may send a body or read an answer. A client that sends one byte now and
    then cannot keep a connection open."""
    stall_s: float = 30.0
    """Seconds over which the rate is averaged at which a client reads an answer."""
    idle_s: float = 75.0
    """Seconds for which a connection may stay open between two requests."""
    connections: int = 4096
    """Number of open connections from which on requests get 503, or half of the files that the process may open if that
    is less. At least 2."""
    strangers: int = 512
    """Largest number of connections that have not shown a valid token yet. One more ends the oldest of them. At
    least 1."""
    token_share: float = 0.25
    """Share of `connections` and of `held_bytes` that one bounded token may have (`HttpConnection.hold`)."""


class StrangerConnections:
    """Connections that perhaps have not shown a valid token yet, the oldest first; at most `most` (1 or more) of them.

    All connections of a server share one object. All calls are made on the event loop.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._connections: dict[HttpConnection, None] = {}
        """The connections, as a set that keeps their order."""

    def add(self, connection: HttpConnection) -> None:
        """Add a connection that has just been made. If there are too many then, remove the oldest, and end it if it
        still has no token."""
        self._connections[connection] = None
        while len(self._connections) > self._most:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            # A connection stays here after it has shown a token, so this is checked only now.
            if not oldest.had_token:
                oldest.transport.abort()

    def remove(self, connection: HttpConnection) -> None:
        """Forget a connection that has ended. Does nothing if it was removed before, as the oldest."""
        self._connections.pop(connection, None)


class TokenConnections:
    """Connections of each bounded token, at most `most` for each, so that one token cannot use all connections.

    Tokens are given by name. A connection is *idle* if it has no request in progress. All connections of a server share
    one object.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()
        """Number of connections, idle or not, by name of their token."""
        self._idle: dict[str, dict[HttpConnection, None]] = {}
        """Idle connections, by name of their token. The connection that has been idle for longest is first."""

    def claim(self, connection: HttpConnection, name: str) -> bool:
        """Count a connection, whose request has begun, as one of the token with this name.

        The connection is then not idle, so it cannot be ended to make room. `HttpConnection.hold` calls this for each
        request. If the token has `most` connections already, the connection that has been idle for longest is ended to
        make room. Returns False if none is idle; the caller then refuses the request.
        """
        if connection.holder == name:  # a further request on a connection that is counted already
            self._idle.get(name, {}).pop(connection, None)
            return True
        if self._open[name] >= self._most:
            idle = next(iter(self._idle.get(name, {})), None)
            if idle is None:
                return False
            self.remove(idle)
            idle.abort()
        # An earlier request on this connection may have shown another token.
        self.remove(connection)
        self._open[name] += 1
        connection.holder = name
        return True

    def mark_idle(self, connection: HttpConnection) -> None:
        """Record that a connection has answered its request, so that it can be ended to make room for another one. Does
        nothing if it has no token."""
        if connection.holder:
            self._idle.setdefault(connection.holder, {})[connection] = None

    def remove(self, connection: HttpConnection) -> None:
        """Forget a connection that has ended, or that now shows another token. Does nothing if it has no token."""
        name, connection.holder = connection.holder, ""
        if not name:
            return
        if (idle := self._idle.get(name)) is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[name]
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]


class SendTimer:
    """A timer that ends a connection whose client reads an answer too slowly.

    The timer runs as long as bytes wait to be sent. Without it, a client that reads nothing could keep a connection,
    and the memory of its answer, for ever.
    """

    def __init__(self, transport: asyncio.Transport, limits: HttpLimits) -> None:
        self._transport = transport
        self._limits = limits
        self._least = limits.bytes_per_s * limits.stall_s
        """Bytes that a client at the slowest rate reads during one measurement."""
        self._ahead = self._least
        """Bytes by which the client is ahead of the slowest rate, at most `_least`."""
        self._unread = 0
        """Bytes that the client had not read when the current measurement began."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the current measurement; None if nothing is measured."""

    def start(self) -> None:
        """Measure from now on, `stall_s` seconds at a time. `HttpConnection.pause_writing` calls this when bytes
        wait."""
        self._ahead = self._least  # a whole measurement without a byte ends the connection
        self._measure()

    def stop(self) -> None:
        """Stop measuring: no bytes wait, or the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _measure(self) -> None:
        """Begin a measurement, which ends with `_check`."""
        self.stop()
        self._unread = self._count_unread()
        self._timer = asyncio.get_running_loop().call_later(self._limits.stall_s, self._check)

    def _check(self) -> None:
        """End the connection if the client reads too slowly; else measure again. Called by the timer.

        The limit is `bytes_per_s` on average: a client that was faster before may be slower for a time. But one
        measurement in which no byte was read always ends the connection.
        """
        # uvicorn lets the application write nothing while bytes wait, so the client has read the difference. Bytes are
        # read in bursts, because the client's kernel accepts more only when much of its buffer is free. So the bytes
        # beyond the slowest rate count for the next measurement, too.
        taken = self._unread - self._count_unread()
        self._ahead = min(self._ahead + taken - self._least, self._least)
        if self._ahead <= 0:
            self._transport.abort()
        else:
            self._measure()

    def _count_unread(self) -> int:
        """Return the bytes of answers in asyncio's buffer, and those in the kernel's that the client's machine has not
        acknowledged."""
        # asyncio's buffer alone would not do: it stands still until the kernel's buffer, of some MB, is one third free.
        number = self._transport.get_extra_info("socket").fileno()
        if number < 0:  # the socket is closed, and `HttpConnection.connection_lost` is about to be called
            return 0
        in_kernel = int.from_bytes(fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return self._transport.get_write_buffer_size() + in_kernel


class HttpConnection(H11Protocol, asyncio.BufferedProtocol):
    """An HTTP/1.1 connection with limits, which replaces uvicorn's own connection.

    asyncio's streams read a quarter of a megabyte at once. A `BufferedProtocol` chooses the size of its pieces itself.
    """

    _send_timer: SendTimer
    """Timer of the answers; `connection_made` makes it."""

    def __init__(
        self,
        *args: Any,
        limits: HttpLimits,
        strangers: StrangerConnections,
        by_token: TokenConnections,
        buffer: memoryview,
        **options: Any,
    ) -> None:
        """Make a connection, for uvicorn: `args` and `options` are uvicorn's own arguments.

        `strangers` and `by_token` are shared by all connections. So is `buffer`, into which one piece is read, because
        the piece is handled before the next read.
        """
        super().__init__(*args, **options)
        # uvicorn copies this into each request's `scope["state"]`, where applications find the connection.
        self.app_state = {**self.app_state, "connection": self}
        # uvicorn logs a warning for each request that is not HTTP. Clients without a token could fill the log.
        self.logger = _log
        self._by_token = by_token
        self.holder = ""
        """Name of the token that this connection counts for; empty before `hold`."""
        self._limits = limits
        self._buffer = buffer
        self._body_left = 0
        """Bytes of the current request's body that have not arrived yet, if its length is known; else 0 or less."""
        self._body_of: Any = None
        """Scope of the request that `_body_left` belongs to."""
        self._strangers = strangers
        self._awaited: Literal["head", "rest"] | None = None
        """Part of a request for which `_timer` runs: the head, or the rest of a body after the answer was sent. None if
        the timer does not run."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer that ends the connection `head_s` seconds after it was started; None if it does not run."""

    @property
    def had_token(self) -> bool:
        """True if the latest request on this connection had a valid token: the connection is then no stranger."""
        scope: Any = self.scope  # None before the first request.
        return scope is not None and "token" in scope["state"]

    def hold(self, name: str) -> None:
        """Count this connection as one of the token with this name. The number of the token's connections is bounded.

        An application calls it for each request, once it has found the token valid.

        Raises:
            HTTPException: the token has too many connections, all of them with a request in progress.
        """
        if not self._by_token.claim(self, name):
            raise HTTPException(
                503, "this token has too many requests in progress; wait for some of them", {"connection": "close"}
            )

    def abort(self) -> None:
        """End the connection at once, also in the middle of an answer."""
        self.transport.abort()

    # Called by asyncio and uvicorn.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection: count it as a stranger, and start the timer for the first head."""
        super().connection_made(transport)
        self._send_timer = SendTimer(transport, self._limits)
        # asyncio calls `pause_writing` only if more bytes than this wait, and may do so at once. With the usual 64 KiB,
        # a client that never reads a smaller answer would not be noticed.
        transport.set_write_buffer_limits(high=1, low=0)
        self._strangers.add(self)
        self._set_timer()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer that the next piece is read into, of `PIECE` bytes. asyncio calls this before each read.
        Its `sizehint` is not used.

        It is larger while a body with a known length arrives, because h11 does not parse such a body byte by byte. But
        at most `PIECE` bytes beyond the end of that body are read, because the next request may follow.
        """
        if self.conn.their_state is not h11.SEND_BODY:
            self._body_left = 0
        elif self._body_of is not self.scope:
            self._body_of, self._body_left = self.scope, _content_length(self.scope["headers"])
        return self._buffer[: max(PIECE, min(self._body_left, SIZED_PIECE))]

    def buffer_updated(self, nbytes: int) -> None:
        """Handle a piece of `nbytes` that was read into the buffer. asyncio calls this after each read."""
        self._body_left -= nbytes
        self.data_received(bytes(self._buffer[:nbytes]))
        self._set_timer()

    def pause_writing(self) -> None:
        """Begin to measure how fast the client reads. asyncio calls this when bytes wait to be sent."""
        self._send_timer.start()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Stop measuring how fast the client reads. asyncio calls this when no bytes wait any more."""
        self._send_timer.stop()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Count the connection as idle, and start the timer if the rest of the request's body still arrives.

        uvicorn calls it when the answer was sent, which may be before the client has sent the whole body.
        """
        self._by_token.mark_idle(self)
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE:  # In the state IDLE, uvicorn gives the next request `idle_s`.
            self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and stop its timers. asyncio calls this at its end, whoever has ended it."""
        self._strangers.remove(self)
        self._by_token.remove(self)
        self._send_timer.stop()
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with the error `msg`. uvicorn calls this when h11 cannot parse the bytes.

        If the application is still answering an earlier request, it is notified that the client has left. This error
        replaces that answer, unless a part of the answer was sent already; then the connection is aborted.
        """
        cycle: Any = self.cycle  # None before the first request.
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _set_timer(self) -> None:
        """Start or stop the timer, which runs while a head is incomplete or the body of an answered request arrives.

        Called at the beginning of the connection, after each read, and after an answer. The timer goes on if the
        awaited part is the same as before: further bytes of a head do not extend its time.
        """
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


def _content_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the length of a body from its headers, which h11 has checked; 0 for a body in chunks or none."""
    values = dict(headers)
    return 0 if b"transfer-encoding" in values else int(values.get(b"content-length", b"0"))


class _Server(uvicorn.Server):
    """A server of uvicorn that installs no signal handlers, and sets the event `listening` once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = anyio.Event()
        """Set when the server listens."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Install no signal handlers: the process of the service has its own."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then set `listening`. uvicorn calls this in `serve`."""
        await super().startup(sockets)
        self.listening.set()


def http_protocol(limits: HttpLimits, connections: int) -> Any:
    """Return the factory of connections that `uvicorn.Config` takes as `http`. All connections share the limits.

    `flash.http.server.serving` calls this once for each server.

    Args:
        limits: bounds on the connections.
        connections: number of open connections from which on uvicorn answers requests with 503, at least 2. It replaces
            `limits.connections`, because `serving` may lower it.
    """
    # Each connection begins as a stranger. With fewer than two connections there would be no place for a stranger.
    assert connections >= 2, f"a server needs at least 2 connections, not {connections}"
    # Strangers get at most half of the connections, so that they cannot keep clients with a token out.
    return partial(
        HttpConnection,
        limits=limits,
        strangers=StrangerConnections(min(limits.strangers, connections // 2)),
        by_token=TokenConnections(max(1, int(limits.token_share * connections))),
        buffer=memoryview(bytearray(SIZED_PIECE)),
    )


@asynccontextmanager
async def accepting(config: uvicorn.Config, bound: socket.socket) -> AsyncGenerator[None]:
    """Accept connections at a bound socket during the block; the block begins when the socket listens.

    `flash.http.server.serving` is the only caller. `config` has uvicorn's settings, and `bound` is the socket, which
    does not listen yet. When the block ends, requests in progress have a time to finish, which `config` gives. Then
    uvicorn cancels them. The server runs in a task of its own, and an error of it ends the block. An error of the block
    cancels the server at once.
    """
    server = _Server(config)
    async with unwrapped_group() as tasks:
        tasks.start_soon(server.serve, [bound])
        await server.listening.wait()
        # `config.backlog` is both the number of connections that asyncio accepts in one turn and the number that may
        # wait in the kernel. A large number would block the loop for half a second, so only the second one is raised.
        bound.listen(BACKLOG)
        yield
        server.should_exit = True
