"""The server: it accepts connections, authenticates peers, and answers their requests. The hub runs it.

`serve` accepts connections. A connection becomes a session once its peer has proven the token. A session starts one
task per request, which calls the handler (the hub's is `flash.hub.gate.Gate.handle`) and sends the reply.

Invariant: every request is answered exactly once, by a reply or by an error, unless its caller cancelled it or the
connection ended. In both of these cases the handler is cancelled, so that no work is done for a caller that is gone.

A *stranger* is a client that has not proven that it holds the run's token, which is a secret of the run's processes.
Invariant: the connection of a stranger uses little memory and is ended after a deadline. At most `MAX_UNPROVEN` such
connections are open; a further one ends the oldest. A process that runs out of file descriptors accepts no connection
for `PAUSE_S` seconds and logs this; connected peers are served meanwhile. The log lines that strangers cause are
limited (`LimitedLog`), so that strangers cannot fill a disk.

A peer that sends an invalid frame or request is dropped, with a log line that says why. The server goes on.
"""

from __future__ import annotations

import errno
import logging
import shlex
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar

import anyio
import msgspec
from anyio.abc import SocketAttribute, SocketListener, SocketStream, TaskGroup, TaskStatus
from anyio.streams.stapled import MultiListener

from flash.errors import DECODE_ERRORS, ConfigError, FlashError, PeerLostError, ProtocolError, TransportError
from flash.transport.auth import admit_client, check_token
from flash.transport.frames import Frame, FrameConnection, FrameKind, Refusal, set_socket_options

MAX_UNPROVEN = 256
"""Largest number of unproven connections at a time. A proof takes only two round trips, so even 1,000 nodes that
connect at once are admitted."""
PAUSE_S = 0.5
"""Seconds in which no connection is accepted after the process, or the machine, ran out of descriptors or memory.
Without this pause the loop would call accept() again and again without effect."""
LOG_WINDOW_S = 60.0
"""Seconds over which `LimitedLog` counts its lines."""
REFUSALS_LOGGED = 20
"""Largest number of refused connections that are logged within `LOG_WINDOW_S`, so that strangers cannot fill a disk."""
MAX_CALLS = 1 << 12
"""Largest number of requests of one peer that may be in progress at once: far more than a peer of a run needs. The
limit is needed because each request holds a task."""
FLUSH_S = 2.0
"""Seconds for a dropped peer to read the error that says why it is dropped. A peer that does not read must not delay
the end of its session for longer."""
LONGEST_COMMAND = 60
"""Number of characters of a command line in an error message: enough for the program, but not for all options of
another service."""

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of accept() that go away only when descriptors or memory become free."""

_log = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=msgspec.Struct)


class Peer(msgspec.Struct, frozen=True):
    """An authenticated connection, as handlers see it."""

    id: int
    """Number of the connection, unique in its server. A client that connects again is a new peer."""
    name: str
    """Name that the client gave itself. The client's proof of the token covers the name."""
    address: str
    """host:port of the client's end."""


Handler = Callable[[Peer, RequestT], Awaitable[msgspec.Struct]]
"""Turns a peer's request into the reply."""


# -- limits for connections that have not proven the token -----------------------------------------------------------


class LimitedLog:
    """Log for lines that strangers can cause: at most `most` in `LOG_WINDOW_S` seconds. Further lines are only counted.

    Before the first line of a later window, a line says how many were left out. The servers of weights use this log,
    too.

    Args:
        now: clock, in seconds.
        most: largest number of lines in each window.
    """

    def __init__(self, now: Callable[[], float], most: int) -> None:
        self._now = now
        self._most = most
        self._since = now()
        """Time at which the window began."""
        self._lines = 0
        """Number of lines in the window, also of lines that were left out."""

    def warn(self, message: str, *args: object) -> None:
        """Log a warning, unless the window has `most` lines already. `args` are filled into `message`."""
        now = self._now()
        if now - self._since >= LOG_WINDOW_S:
            if self._lines > self._most:
                _log.warning("%d more lines of this kind were left out", self._lines - self._most)
            self._since, self._lines = now, 0
        self._lines += 1
        if self._lines <= self._most:
            _log.warning(message, *args)


class UnprovenConnections:
    """Set of the connections that have not proven the token yet, oldest first; at most `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._scopes: dict[anyio.CancelScope, None] = {}

    @contextmanager
    def scope(self) -> Generator[anyio.CancelScope]:
        """Count a connection as unproven during the block. Ends the oldest other connections if there are too many.

        The scope that is yielded is cancelled when this connection has to make room for a newer one.
        """
        while len(self._scopes) >= self._most:
            self.end_oldest()
        with anyio.CancelScope() as scope:
            self._scopes[scope] = None
            try:
                yield scope
            finally:
                self._scopes.pop(scope, None)

    def end_oldest(self) -> None:
        """Cancel the connection that has been unproven for longest, if there is one."""
        oldest = next(iter(self._scopes), None)
        if oldest is not None:
            del self._scopes[oldest]
            oldest.cancel()


# -- listening -------------------------------------------------------------------------------------------------------


async def serve(
    host: str,
    port: int,
    token: bytes,
    request_type: type[RequestT],
    handler: Handler[RequestT],
    *,
    deadline: float,
    connection_to_replace: Callable[[str], int | None] | None = None,
    on_connect: Callable[[Peer], None] | None = None,
    on_disconnect: Callable[[Peer], None] | None = None,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Accept connections and answer requests until cancelled. Each peer that proves the token gets a session.

    Args:
        host: the address to listen at, such as 127.0.0.1 or 0.0.0.0.
        port: the port to listen at; 0 takes any free one.
        token: the secret that both ends prove.
        request_type: the struct, or tagged union of structs, that peers send.
        handler: turns a request into its reply. The handler runs in a task of its own, so that a later request may be
            answered first. A `FlashError` that it raises is sent to the caller; a `ProtocolError` ends the connection
            too. Any other exception is a bug and ends the server.
        deadline: seconds for a new connection to prove the token.
        connection_to_replace: returns the id of the connection that a new connection with this name replaces; None if
            it replaces none. The old connection is ended first, and its handlers end before `on_connect` is called. If
            this argument is None, no connection is replaced.
        on_connect: called once per peer, before its first request. The function refuses the peer by raising a
            `ProtocolError`.
        on_disconnect: called once per peer, after its last handler ended, also when the server ends.
        task_status: receives the bound port.

    Raises:
        ConfigError: the address cannot be listened at, or the token is too short.
    """
    check_token(token)
    server = ConnectionServer(token, request_type, handler, deadline, connection_to_replace, on_connect, on_disconnect)
    async with await _listen(host, port) as listener, anyio.create_task_group() as tasks:
        for one in listener.listeners:
            assert isinstance(one, SocketListener), "a port's listeners are sockets"
            tasks.start_soon(server.accept_all, one, tasks)
        task_status.started(listener.extra(SocketAttribute.local_port))


async def try_listening(host: str, port: int) -> None:
    """Check, before models are loaded, that `serve` could listen at an address. Raises ConfigError if not."""
    async with await _listen(host, port):
        pass


async def _listen(host: str, port: int) -> MultiListener[SocketStream]:
    """Return listeners on an address. Raises a ConfigError that says why the address cannot be used."""
    try:
        return await anyio.create_tcp_listener(local_host=host, local_port=port)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: the text is no possible name of a host
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


def port_holder(port: int) -> str:
    """Return a phrase for error messages that names the process which listens at a port of this machine.

    /proc/net lists the inodes of listening sockets, and the open files of each process show which process has such an
    inode. The files of other users' processes cannot be read.
    """
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                # State 0A is LISTEN.
                if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                    inodes.add(inode)
    sockets = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if any(str(file.readlink()) in sockets for file in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                command = shlex.join(filter(None, words))
                shown = command if len(command) <= LONGEST_COMMAND else f"{command[:LONGEST_COMMAND]}…"
                return f"process {process.name} ({shown})"
    return "a process of another user or container"


# -- connections -----------------------------------------------------------------------------------------------------


class ConnectionServer(Generic[RequestT]):
    """State that all connections of a server share. `serve` describes the arguments."""

    def __init__(
        self,
        token: bytes,
        request_type: type[RequestT],
        handler: Handler[RequestT],
        deadline: float,
        connection_to_replace: Callable[[str], int | None] | None,
        on_connect: Callable[[Peer], None] | None,
        on_disconnect: Callable[[Peer], None] | None,
    ) -> None:
        self._unproven = UnprovenConnections(MAX_UNPROVEN)
        self._log = LimitedLog(anyio.current_time, REFUSALS_LOGGED)
        self._token = token
        self._decoder = msgspec.msgpack.Decoder(request_type)
        self._handler = handler
        self._deadline = deadline
        self._connection_to_replace = connection_to_replace
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._ids = count(1)
        """Numbers of connections."""
        self._sessions: dict[int, _Session[RequestT]] = {}
        """Sessions of the connected peers, by the number of the connection."""

    async def accept_all(self, listener: SocketListener, tasks: TaskGroup) -> None:
        """Accept connections until cancelled, and serve each in a task that runs `_serve_connection`.

        Waits for the next client, or for `PAUSE_S` after the process ran out of descriptors.
        """
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                # Ending one unproven connection frees a descriptor, so that strangers cannot keep peers out.
                self._unproven.end_oldest()
                self._log.warn(
                    "no connections are taken for %g s: %s; let this process open more files (`ulimit -n`)",
                    PAUSE_S,
                    error.strerror,
                )
                await anyio.sleep(PAUSE_S)
            else:
                tasks.start_soon(self._serve_connection, stream)

    async def _serve_connection(self, stream: SocketStream) -> None:
        """Serve one connection from its proof to its end.

        The reason for a refusal is logged. A client whose connection is refused gets no error: its connection is
        closed.
        """
        async with stream:
            address = _address(stream)
            try:
                name = await self._authenticate(stream)
                # End a silent connection of the same client. While `replace` waits, the client may connect once more,
                # so ask again.
                to_replace = self._connection_to_replace
                while to_replace is not None and (old := to_replace(name)) is not None:
                    await self._sessions[old].replace(address)
                peer = Peer(next(self._ids), name, address)
                set_socket_options(stream)
                if self._on_connect is not None:
                    self._on_connect(peer)
            except TimeoutError:
                self._log.warn("refused a connection from %s: no proof within %g s", address, self._deadline)
                return
            except (TransportError, OSError) as error:
                self._log.warn("refused a connection from %s: %s", address, error)
                return
            # Do not await between `on_connect` and this line. A cancellation there would leave an admitted peer without
            # a session, and `on_disconnect` would never be called.
            connection = FrameConnection(stream, f"{peer.name} at {address}")
            session = self._sessions[peer.id] = _Session(peer, connection, self._decoder, self._handler)
            try:
                await session.run()
            finally:
                if self._on_disconnect is not None:
                    self._on_disconnect(peer)
                del self._sessions[peer.id]
                session.ended.set()

    async def _authenticate(self, stream: SocketStream) -> str:
        """Return the client's name once both ends have proven the token.

        Raises:
            PeerLostError: the client has closed the connection.
            TransportError: the proof is wrong, or a newer connection has taken the place of this one.
            TimeoutError: the proof has taken too long.
        """
        name = ""
        # The whole proof has one deadline, so that a client cannot extend it by sending a byte now and then.
        with self._unproven.scope() as scope, anyio.fail_after(self._deadline):
            name = await admit_client(stream, self._token)
        if scope.cancelled_caught:
            raise TransportError("no proof of the token yet, and a newer connection needs the place")
        return name


class _Session(Generic[RequestT]):
    """Session of one peer: reads the peer's requests and answers each in a task of its own."""

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
        """Scopes of the handlers in progress, by call number."""
        self._dropped = False
        """True once the session ends because of an error. The peer should still receive this error."""
        self._reading = anyio.CancelScope()
        """Scope in which requests are read. `replace` cancels it."""
        self.ended = anyio.Event()
        """Set when all handlers have ended and `on_disconnect` was called."""

    async def run(self) -> None:
        """Serve the peer until its connection ends, it is dropped, or `replace` ends the session.

        Then the handlers of its requests are cancelled. A peer that is dropped because of an error, or replaced by a
        new connection, gets up to `FLUSH_S` seconds to read the error. The writer must run until that time is over, so
        it is a task of the outer group.
        """
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
                with anyio.move_on_after(FLUSH_S):
                    await self._connection.flush()
            writing.cancel_scope.cancel()

    async def replace(self, address: str) -> None:
        """End this session because the client has connected again from `address`. Returns once the session has
        ended."""
        error = ProtocolError(
            f"another connection of {self._peer.name}, from {address}, has taken the place of this one"
        )
        for call in self._running:
            self._send_error(call, error)
        self._drop(error)
        self._reading.cancel()
        await self.ended.wait()

    def _drop(self, error: TransportError) -> None:
        """Mark the peer as dropped, and log the first reason."""
        if not self._dropped:
            _log.warning("dropped %s: %s", self._peer, error)
        self._dropped = True

    async def _read(self, tasks: TaskGroup) -> None:
        """Start a handler for each request and cancel the handlers of cancelled calls, until the connection ends.

        Before it starts a handler, it waits for room to reply. So a peer that does not read its replies cannot make the
        server work on further requests.

        Raises:
            PeerLostError: the connection has ended.
            TransportError: the peer broke the protocol.
        """
        while True:
            for frame in await self._connection.receive():
                if frame.kind is FrameKind.REQUEST:
                    await self._connection.wait_for_room()
                    self._start_handler(frame, tasks)
                elif frame.kind is FrameKind.CANCEL:
                    if (scope := self._running.get(frame.call)) is not None:
                        scope.cancel()
                else:
                    raise TransportError(f"a client may not send {frame.kind.name}")

    def _start_handler(self, frame: Frame, tasks: TaskGroup) -> None:
        """Decode a request and start a task that answers it. Raises TransportError if the peer broke the protocol."""
        if frame.call in self._running:
            raise TransportError(f"call {frame.call} was started twice")
        if len(self._running) >= MAX_CALLS:
            raise TransportError(f"more than {MAX_CALLS} calls are in progress at once")
        try:
            request = self._decoder.decode(frame.body)
        except DECODE_ERRORS as error:
            unread = ProtocolError(f"the request cannot be read: {error}; do both ends run the same code?")
            self._send_error(frame.call, unread)
            raise unread from error
        scope = self._running[frame.call] = anyio.CancelScope()
        tasks.start_soon(self._answer, frame.call, request, scope, tasks)

    async def _answer(self, call: int, request: RequestT, scope: anyio.CancelScope, tasks: TaskGroup) -> None:
        """Run the handler of one request and send its reply or its error. `scope` is cancelled by a CANCEL frame."""
        try:
            with scope:
                try:
                    # `_read` has waited for room too, but many requests may have come in one piece. So wait again,
                    # because no work is done for a peer that does not read its replies.
                    await self._connection.wait_for_room()
                    reply = await self._handler(self._peer, request)
                    await self._connection.send(FrameKind.REPLY, call, reply)
                except ProtocolError as error:
                    # The peer broke a rule of the handler. The session ends with this error.
                    self._send_error(call, error)
                    self._drop(error)
                    tasks.cancel_scope.cancel()
                except FlashError as error:
                    # `_send_error` does not wait. Without this wait, the errors for a peer that does not read its
                    # replies would fill the memory.
                    await self._connection.wait_for_room()
                    self._send_error(call, error)
        finally:
            del self._running[call]

    def _send_error(self, call: int, error: FlashError) -> None:
        """Queue the reply to a call that failed: the class and the message of the error."""
        self._connection.post(FrameKind.ERROR, call, Refusal(type(error).__name__, str(error)))


def _address(stream: SocketStream) -> str:
    """Return host:port of the other end, for messages, or a phrase if the other end has already left."""
    try:
        address = stream.extra(SocketAttribute.remote_address)
    except OSError:
        return "a peer that already left"
    return f"{address[0]}:{address[1]}"
