"""The clients of a connection: `Client` for code on an event loop, and `BlockingClient` for code without one.

Node loops and launchers call `connect`, which gives a `Client`. Trainer ranks, whose main thread runs torch, use a
`BlockingClient`, which runs a `Client` in a background thread. The other end of the connection is
`flash.transport.server`.

Invariant: a call ends exactly once, by its reply, the handler's typed error, its deadline, the loss of the connection,
or its cancellation. After a deadline or a cancellation the client sends CANCEL, so that the server ends the handler
too. If a call ended in any other way than by its reply, the server may or may not have carried it out.

Lifecycle: `connect` proves to each end that the other holds the run's token, which is a secret. It then starts
`Client.run`, which reads until the block ends or the connection is lost. Then pending and later calls raise the
TransportError that ended the connection, usually PeerLostError. A client never connects again on its own; the caller
makes a new one.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import cache
from itertools import count
from typing import Any, Self

import anyio
import msgspec
from anyio.abc import SocketStream
from anyio.from_thread import BlockingPortal, start_blocking_portal

from flash.errors import DECODE_ERRORS, ConfigError, DeadlineError, PeerLostError, TransportError, error_of
from flash.transport.auth import check_token, prove_to_server
from flash.transport.frames import (
    Frame,
    FrameConnection,
    FrameKind,
    Refusal,
    ReplyT,
    Request,
    reply_type,
    set_socket_options,
)
from flash.waiting import deadline, unwrapped_group

LATE_S = 1.0
"""Seconds by which a deadline may be noticed too late. If the delay is longer, this process was stopped or its loop was
blocked, and the reply may have arrived unread."""

_REFUSALS = msgspec.msgpack.Decoder(Refusal)


@asynccontextmanager
async def connect(
    host: str,
    port: int,
    token: bytes,
    name: str,
    seconds: float,
    *,
    server: str = "hub",
) -> AsyncGenerator[Client]:
    """Connect, prove the token both ways, and give a client for the time of the block.

    Args:
        host: address at which the server listens.
        port: port at which the server listens.
        token: the run's token.
        name: name of this process in the server's messages.
        seconds: time limit for connecting and for the proof.
        server: name of the server in error messages.

    Raises:
        ConfigError: `host` cannot be the name of a host, the token is too short, or `name` is too long.
        PeerLostError: the host is unknown or cannot be reached, or no process listens there. Or the server has closed
            the connection during the proof, for example because it has ended or holds another token.
        TransportError: the server does not prove the token, or speaks another protocol.
        DeadlineError: connecting took too long.
    """
    check_token(token)
    where = f"{server} at {host}:{port}"
    async with await _open_stream(host, port, token, name, seconds, where) as stream, unwrapped_group() as tasks:
        client = Client(FrameConnection(stream, where), where)
        tasks.start_soon(client.run)
        try:
            yield client
        finally:
            client.close()
            tasks.cancel_scope.cancel()


async def _open_stream(host: str, port: int, token: bytes, name: str, seconds: float, where: str) -> SocketStream:
    """Return a stream on which both ends have proven the token. Raises the errors of `connect`."""
    try:
        with deadline(seconds, f"{where} to accept us", f"whether {host}:{port} can be reached"):
            stream = await anyio.connect_tcp(host, port)
            try:
                set_socket_options(stream)
                await prove_to_server(stream, token, name)
            except BaseException:
                await anyio.aclose_forcefully(stream)
                raise
            return stream
    except OSError as error:
        # anyio raises the error of the socket as the cause of its own error. If the host has several addresses, the
        # cause is a group with one error for each address.
        cause = error.__cause__
        causes = cause.exceptions if isinstance(cause, ExceptionGroup) else [cause or error]
        hint = "is it running, and may this machine reach it?"
        if any(isinstance(each, ConnectionRefusedError) for each in causes):
            hint = "nothing listens there: that process has ended, or is starting again; its own output says which"
        raise PeerLostError(f"cannot connect to {where}: {', '.join(map(str, causes))}; {hint}") from error
    except DeadlineError:
        raise  # The message names the server already.
    except UnicodeError as error:
        raise ConfigError(f"cannot connect to {where}: {host!r} is no possible name of a host: {error}") from error
    except TransportError as error:
        raise type(error)(f"no connection to {where}: {error}") from error


class _PendingCall:
    """A call that waits for its reply. `Client.call` makes it, and `Client.run` completes it."""

    __slots__ = ("done", "frame")

    def __init__(self) -> None:
        self.done = anyio.Event()
        """Set when the reply has arrived or the connection was lost."""
        self.frame: Frame | None = None
        """REPLY or ERROR frame; None until a frame arrives, and if the connection is lost first."""


class Client:
    """Calls over one connection, made by `connect`. Any number of calls may be in flight.

    Args:
        connection: frames to and from the server.
        where: description of the server, for error messages.
    """

    def __init__(self, connection: FrameConnection, where: str) -> None:
        self._connection = connection
        self._where = where
        self._ids = count(1)
        """Numbers of calls."""
        self._calls: dict[int, _PendingCall] = {}
        """Calls that wait for their replies, by number."""
        self._loss: TransportError | None = None
        """Error that ended the connection; None while it is open."""

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send a request and wait for its reply, at most `timeout` seconds.

        If this process was stopped meanwhile, the wait may begin again (`_wait_for_reply`).

        Raises:
            DeadlineError: no reply within `timeout` seconds.
            PeerLostError: the connection ended, before or during the call.
            FlashError: the error that the handler raised, in the class that the handler used.
            TransportError: the request is longer than a frame may be, or the handler raised a class that `flash.errors`
                does not know. Or the reply is not the struct that the request's class names, or the server broke the
                protocol, which ends the connection.
        """
        number = next(self._ids)
        call = _PendingCall()
        with anyio.move_on_after(timeout) as scope:
            self._check_connection()
            await self._connection.send(FrameKind.REQUEST, number, request)
            # If the connection was lost during `send`, nobody would wake a call that is added to `_calls` now.
            self._check_connection()
            self._calls[number] = call
            try:
                await _wait_for_reply(call, timeout, scope)
            finally:
                # A call that is still here has no reply: its deadline has passed, or its task was cancelled.
                if self._calls.pop(number, None) is not None:
                    self._connection.post(FrameKind.CANCEL, number)
        # The reply counts even if the deadline passed in the same turn of the loop.
        if call.frame is not None:
            return self._decode_reply(call.frame, request)
        self._check_connection()
        raise DeadlineError(
            f"the reply to {type(request).__name__} from {self._where}", timeout, "the log of that process"
        )

    async def run(self) -> None:
        """Give each reply to the call that waits for it, until the connection ends. Then end all pending calls.

        `connect` runs this. It also ends the connection if the server breaks the protocol.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._connection.write)
            try:
                while True:
                    for frame in await self._connection.receive():
                        if frame.kind is not FrameKind.REPLY and frame.kind is not FrameKind.ERROR:
                            raise TransportError(f"{self._where} may not send {frame.kind.name}")
                        # The call is not in `_calls` if the server sent the reply before it received our CANCEL. The
                        # reply is then dropped.
                        if (call := self._calls.pop(frame.call, None)) is not None:
                            call.frame = frame
                            call.done.set()
            except TransportError as error:
                self._end_calls(error)
                await self._connection.close()
            tasks.cancel_scope.cancel()

    def close(self) -> None:
        """End all pending calls with PeerLostError. Later calls raise PeerLostError too."""
        self._end_calls(PeerLostError(f"the connection to {self._where} was closed on this side"))

    def _end_calls(self, loss: TransportError) -> None:
        """Wake all pending calls. Stores the reason why the connection was lost, unless an earlier reason is stored.

        Pending and later calls raise this error (`_check_connection`).
        """
        if self._loss is None:
            self._loss = loss
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.done.set()

    def _check_connection(self) -> None:
        """Raise the error that ended the connection, if one did."""
        if self._loss is not None:
            # A new object for each caller: raising one object several times would mix the callers' tracebacks.
            raise type(self._loss)(str(self._loss)) from self._loss

    def _decode_reply(self, frame: Frame, request: Request[ReplyT]) -> ReplyT:
        """Return the reply in a REPLY frame, or raise the handler's error in an ERROR frame.

        Raises:
            FlashError: the handler raised it.
            TransportError: the frame cannot be read, or the error is of a class that `flash.errors` does not have.
        """
        try:
            if frame.kind is FrameKind.REPLY:
                return _decoder(reply_type(type(request))).decode(frame.body)
            refusal = _REFUSALS.decode(frame.body)
        except DECODE_ERRORS as error:
            raise TransportError(
                f"the reply to {type(request).__name__} from {self._where} cannot be read: {error}; "
                "do both ends run the same code?"
            ) from error
        raised = error_of(refusal.error, refusal.message)
        if raised is None:
            raise TransportError(f"{self._where} failed with {refusal.error}: {refusal.message}")
        raised.add_note(f"raised by {self._where}")
        raise raised


async def _wait_for_reply(call: _PendingCall, timeout: float, scope: anyio.CancelScope) -> None:
    """Wait until the call is done, or until the deadline of `scope`.

    A process that was stopped (by SIGSTOP or a debugger) finds the deadline passed before it has read a reply that
    arrived in time. So if the deadline is noticed `LATE_S` too late, the call gets `timeout` seconds more.
    """
    # The deadline is removed from the scope: the scope would cancel the wait and could not be extended after that.
    due, scope.deadline = scope.deadline, math.inf
    while True:
        with anyio.CancelScope(deadline=due) as wait:
            await call.done.wait()
        now = anyio.current_time()
        if not wait.cancelled_caught or now - due < LATE_S:
            return
        due = now + timeout


@cache
def _decoder(struct: type[msgspec.Struct]) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of a reply type. Making a decoder is slow, so each one is kept."""
    return msgspec.msgpack.Decoder(struct)


class BlockingClient:
    """A context manager that gives the calls of a `Client` to code without an event loop. Threads may share it.

    The connection lives on an event loop in a background thread, from the beginning of the block to its end. If a
    waiting call is interrupted (Ctrl-C), it is cancelled on that loop, so that leaving the block never waits for a
    reply.

    Args:
        host: address at which the server listens.
        port: port at which the server listens.
        token: the run's token.
        name: name of this process in the server's messages.
        deadline: seconds for connecting and for the proof of the token.
        server: name of the server in error messages.
    """

    _portal: BlockingPortal
    _client: Client

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        name: str,
        deadline: float,
        *,
        server: str = "hub",
    ) -> None:
        self._connect = lambda: connect(host, port, token, name, deadline, server=server)
        self._name = name
        self._stack = ExitStack()
        self._running: dict[object, anyio.CancelScope] = {}
        """Scopes of the calls in progress. A key belongs to one call; only the loop's thread uses the dictionary."""

    def __enter__(self) -> Self:
        """Start the thread with the loop, and connect. Raises the errors of `connect`; the thread has ended then."""
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name=f"{self._name} transport"))
            self._client = stack.enter_context(self._portal.wrap_async_context_manager(self._connect()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection and end the thread. Calls of other threads that still wait raise PeerLostError."""
        # The error of the block is not passed to the stack: a KeyboardInterrupt raised in the loop would kill the
        # loop's thread.
        self._stack.close()

    def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send a request and wait for its reply, at most `timeout` seconds. Raises the errors of `Client.call`."""
        key = object()
        try:
            return self._portal.call(self._call, key, request, timeout)
        except BaseException:
            # An interrupt may come before the portal has made a future that could be cancelled. So the call is found by
            # its key. The loop runs `_call` before `_cancel`, because `_call` was given to the loop first.
            with suppress(RuntimeError):  # The portal is closed, so the call has ended.
                self._portal.start_task_soon(self._cancel, key)
            raise

    async def _call(self, key: object, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Run one call on the loop, in a scope that `_cancel` finds by `key`.

        Raises TransportError if it was cancelled. Nobody receives this error, because the caller was interrupted.
        """
        with anyio.CancelScope() as scope:
            self._running[key] = scope
            try:
                return await self._client.call(request, timeout)
            finally:
                del self._running[key]
        raise TransportError(f"the caller of {type(request).__name__} was interrupted")

    def _cancel(self, key: object) -> None:
        """Cancel the call with this key, if it is still running."""
        if (scope := self._running.get(key)) is not None:
            scope.cancel()
