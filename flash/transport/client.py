"""The calling end: `connect` gives a `Client` whose calls share one connection.

Law of a call: it ends exactly once, by its reply, the handler's typed error, its deadline, the loss of the connection,
or its own cancellation; in the last two cases of interest lost the server is told, so that the handler ends as well.
A call that did not end by its reply may or may not have been carried out.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import cache
from itertools import count
from typing import Any

import anyio
import msgspec
from anyio.abc import SocketStream

from flash.errors import DeadlineError, FlashError, PeerLostError, TransportError, error_of
from flash.transport.auth import check_token, prove_to_server
from flash.transport.connection import FrameConnection, tune
from flash.transport.frames import Frame, FrameKind, Refusal
from flash.transport.request import ReplyT, Request, reply_type
from flash.waiting import deadline, unwrapped_group

LATE_S = 1.0
"""A deadline that is noticed so much later was missed by this process, which was stopped or blocked."""

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
    """Connect, prove the token both ways, and call until the block ends.

    Args:
        host: where the server listens.
        port: where the server listens.
        token: the run's token.
        name: what this process is called in the server's messages.
        seconds: until the connection must stand.
        server: what the server is called in error messages.

    Raises:
        PeerLostError: nobody listens there.
        TransportError: the server does not prove the token, or refuses us.
        DeadlineError: it took too long.
    """
    check_token(token)
    where = f"{server} at {host}:{port}"
    async with await _open(host, port, token, name, seconds, where) as stream, unwrapped_group() as tasks:
        client = Client(FrameConnection(stream, where), where)
        tasks.start_soon(client.run)
        try:
            yield client
        finally:
            client.close()
            tasks.cancel_scope.cancel()


async def _open(host: str, port: int, token: bytes, name: str, seconds: float, where: str) -> SocketStream:
    """A stream on which both ends have proven the token."""
    try:
        with deadline(seconds, f"{where} to accept us", f"whether {host}:{port} can be reached"):
            stream = await anyio.connect_tcp(host, port)
            try:
                tune(stream)
                await prove_to_server(stream, token, name)
            except BaseException:
                await anyio.aclose_forcefully(stream)
                raise
            return stream
    except DeadlineError:
        raise
    except OSError as error:
        cause = error.__cause__ or error
        hint = "is it running, and may this machine reach it?"
        if isinstance(cause, ConnectionRefusedError):
            hint = "nothing listens there: that process has ended, or is starting again; its own output says which"
        raise PeerLostError(f"cannot connect to {where}: {cause}; {hint}") from error
    except TransportError as error:
        raise TransportError(f"no connection to {where}: {error}") from error


class _PendingCall:
    """One call that waits for its frame."""

    __slots__ = ("done", "frame")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.frame: Frame | None = None


async def _over(call: _PendingCall, timeout: float, scope: anyio.CancelScope) -> None:
    """Wait for the end of a call until the scope's deadline; from there once more if it was this process that was late.

    A process that was stopped has not read what came meanwhile, when it finds that the time is over.
    """
    due, scope.deadline = scope.deadline, math.inf
    while True:
        with anyio.CancelScope(deadline=due) as wait:
            await call.done.wait()
        now = anyio.current_time()
        if not wait.cancelled_caught or now - due < LATE_S:
            return
        due = now + timeout


class Client:
    """Calls over one connection; made by `connect`. Any number may be in flight."""

    def __init__(self, connection: FrameConnection, where: str) -> None:
        self._connection = connection
        self._where = where
        self._ids = count(1)
        self._calls: dict[int, _PendingCall] = {}
        self._loss: TransportError | None = None

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send a request and wait for its reply.

        Raises:
            DeadlineError: no reply within `timeout` seconds.
            PeerLostError: the connection ended, before or during the call.
            FlashError: the handler raised it, of the same class.
            TransportError: the handler raised a class that `flash.errors` does not know, or the reply is not
                the struct that the request names.
        """
        number = next(self._ids)
        call = _PendingCall()
        with anyio.move_on_after(timeout) as scope:
            self._check()
            await self._connection.send(FrameKind.REQUEST, number, request)
            self._check()
            self._calls[number] = call
            try:
                await _over(call, timeout, scope)
            finally:
                if self._calls.pop(number, None) is not None:
                    self._connection.post(FrameKind.CANCEL, number)
        # The reply counts even when the deadline came in the same turn of the loop.
        if call.frame is not None:
            return self._open_reply(call.frame, request)
        self._check()
        raise DeadlineError(
            f"the reply to {type(request).__name__} from {self._where}", timeout, "the log of that process"
        )

    async def run(self) -> None:
        """Hand each reply to its call.

        Consumes frames. Waits for the next ones. Unblocked by the server. Produces ended calls. Returns when the
        connection ends, which ends all calls.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._connection.write)
            try:
                while True:
                    for frame in await self._connection.receive():
                        self._settle(frame)
            except TransportError as error:
                self._lose(error)
                await self._connection.close()
            tasks.cancel_scope.cancel()

    def close(self) -> None:
        """End all calls, those under way and those to come, with PeerLostError."""
        self._lose(PeerLostError(f"the connection to {self._where} was closed on this side"))

    def _settle(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.REPLY and frame.kind is not FrameKind.ERROR:
            raise TransportError(f"{self._where} may not send {frame.kind.name}")
        # A reply that crosses our cancel finds no call.
        if (call := self._calls.pop(frame.call, None)) is not None:
            call.frame = frame
            call.done.set()

    def _lose(self, error: TransportError) -> None:
        if self._loss is None:
            self._loss = error
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.done.set()

    def _check(self) -> None:
        """Raise the loss of the connection, a new error for each caller."""
        if self._loss is not None:
            raise type(self._loss)(str(self._loss)) from self._loss

    def _open_reply(self, frame: Frame, request: Request[ReplyT]) -> ReplyT:
        try:
            if frame.kind is FrameKind.REPLY:
                return _decoder(reply_type(type(request))).decode(frame.body)
            refusal = _REFUSALS.decode(frame.body)
        except msgspec.DecodeError as error:
            raise TransportError(
                f"the reply to {type(request).__name__} from {self._where} cannot be read: {error}; "
                "do both ends run the same code?"
            ) from error
        raise _error(refusal, self._where)


@cache
def _decoder(struct: type[msgspec.Struct]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(struct)


def _error(refusal: Refusal, where: str) -> FlashError:
    """The handler's error, of its own class where `flash.errors` knows it."""
    error = error_of(refusal.error, refusal.message)
    if error is None:
        return TransportError(f"{where} failed with {refusal.error}: {refusal.message}")
    error.add_note(f"raised by {where}")
    return error
