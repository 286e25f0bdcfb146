"""Connections that give up on clients who are too slow or too many, over HTTP and on websockets.

Law: what a client holds open is bounded in time by its own progress, and in number until it has shown a token. Heads,
bodies that nobody wants any more and answers that are not taken each have a timer; a stranger, a connection that has
shown no valid token yet, can be ended at any time to make room for the next one.

Everything that uvicorn has, but does not promise, is touched here and nowhere else:

    H11Protocol              made with config, server_state, app_state, _loop; conn (of h11), scope, loop, transport;
                             on_response_complete, handle_websocket_upgrade, send_400_response; cycle, with
                             disconnected, message_event, response_complete
    WebSocketsSansIOProtocol made in the same way; conn (with logger and debug), transport
    Config                   http, ws: may be any callable that makes a protocol
    Server                   capture_signals, should_exit, serve(sockets)
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Literal

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from envs.sandbox.service.limits import Limits
from flash.waiting import unwrapped_group

_QUIET = logging.getLogger(__name__)
_QUIET.setLevel(logging.INFO)


class Strangers:
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
        """It has ended, or is a websocket now."""
        self._waiting.pop(connection, None)


class _Taking:
    """Watches whether a client takes what is sent to it, from the first byte that waits until none does."""

    def __init__(self, transport: asyncio.Transport, limits: Limits) -> None:
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


class _Measured(asyncio.BaseProtocol):
    """A connection whose client is watched while it takes what is sent to it."""

    _taking: _Taking

    def pause_writing(self) -> None:
        self._taking.begin()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._taking.end()
        super().resume_writing()


class HttpConnection(_Measured, H11Protocol):
    """HTTP/1.1 for one client."""

    def __init__(self, *args: Any, limits: Limits, strangers: Strangers, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._strangers = strangers
        self._awaited: Literal["head", "rest"] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def known(self) -> bool:
        """Whether a request on it had a valid token."""
        scope: Any = self.scope  # None before the first request.
        return scope is not None and "token" in scope["state"]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._taking = _Taking(transport, self._limits)
        self._taking.watch()
        self._strangers.arrived(self)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
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

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._forget()
        super().handle_websocket_upgrade(event)

    def _forget(self) -> None:
        self._strangers.left(self)
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


class WebSocketConnection(_Measured, WebSocketsSansIOProtocol):
    """A websocket for one client."""

    def __init__(self, *args: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        # It would log the heads of requests, and with them the tokens, where somebody asks for details.
        self.conn.logger, self.conn.debug = _QUIET, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._taking = _Taking(self.transport, self._limits)
        self._taking.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._taking.end()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """Leaves the process's signals to their owner."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def protocols(limits: Limits, strangers: Strangers) -> dict[str, Any]:
    """What a `uvicorn.Config` needs to know of these connections."""
    return {
        "http": partial(HttpConnection, limits=limits, strangers=strangers),
        "ws": partial(WebSocketConnection, limits=limits),
    }


@asynccontextmanager
async def accepting(config: uvicorn.Config, bound: socket.socket) -> AsyncGenerator[None]:
    """Take connections at this socket for the time of the block.

    Then requests in progress have the time that the configuration gives them; uvicorn cancels the rest.
    """
    server = _Server(config)
    async with unwrapped_group() as tasks:
        tasks.start_soon(server.serve, [bound])
        yield
        server.should_exit = True
