"""End of the relay on the host: connects the sandbox's end to one address, and to no other.

`envs.relay.boxed` opens it for an agent in a sandbox without a network. Both ends exchange frames over a terminal:
`OPEN` (a program has connected), `DATA`, `END` (no more bytes from this side), `CLOSED` (the connection was given up),
and `CREDIT` (the receiver has passed on a number of bytes, so the sender may send as many more). At most `WINDOW` bytes
of a connection are on their way in one direction. A mark precedes the first frame, which holds the port. The file
`envs.relay.inside` describes the frames exactly.

The sandbox is not trusted. Its frames only name connections and carry bytes, so it can do no more than any client of
that address. The number of connections, and the bytes of each that wait here, are bounded. The task that reads frames
never waits for a connection: a slow one stops only its own program.

Lifecycle: `open_relay` starts one task, which runs the other end on a terminal and reads its frames. Each connection
has a task of its own. All of them end with the block. If the other end breaks the protocol, it is ended at once: the
port in the sandbox is closed, so later connections of the agent fail instead of waiting for ever.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import SocketStream, TaskGroup, TaskStatus

from envs.relay.inside import CLOSED, CONNECTIONS, COUNT, CREDIT, DATA, END, HEADER, MARK, OPEN, PIECE, WINDOW
from envs.sandbox.api import Terminal
from envs.sandbox.sandbox import Shells
from flash.errors import SandboxError, SandboxLostError, SandboxStartError
from flash.waiting import unwrapped_group

_log = logging.getLogger(__name__)

START_S = 30.0
"""Seconds that the end in the sandbox has to start."""
CHATTER = 1 << 16
"""Most bytes of the terminal before the relay's mark, for example a greeting that the image prints."""
REFUSALS = 64
"""Most connections that are being refused at a time. The other end opens no more than `CONNECTIONS`, so more refusals
mean that a program of the sandbox has taken its place; then the relay ends."""

SOURCE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
"""Program that runs in the sandbox."""

_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)
"""Errors of a connection that has ended."""


@asynccontextmanager
async def open_relay(sandbox: Shells, host: str, port: int) -> AsyncGenerator[int]:
    """Open a port on the sandbox's loopback that leads to `host:port`, for the time of the block. Yields the port.

    Raises:
        SandboxStartError: the relay does not start: the image has no Python, or the profile allows no internet sockets.
        SandboxError: the sandbox opens no terminal.
    """
    async with unwrapped_group() as tasks:
        relay = _Relay(tasks, host, port)
        await tasks.start(relay.run, sandbox)
        with anyio.move_on_after(START_S):
            await relay.settled.wait()
        if relay.inside_port is None:
            raise SandboxStartError(f"the relay does not start in the sandbox: {relay.last_output()}")
        yield relay.inside_port
        tasks.cancel_scope.cancel()


class _Connection:
    """Connection of a program in the sandbox, shared by the task that reads frames and the task that serves it."""

    def __init__(self) -> None:
        self.waiting = bytearray()
        """Bytes from the program that the address has not taken yet."""
        self.ended = False
        """True once the program sends no more."""
        self.may_receive = WINDOW
        """Bytes that the sandbox may still send. They wait here until the address takes them."""
        self.may_send = WINDOW
        """Bytes that may still be sent to the sandbox."""
        self.scope = anyio.CancelScope()
        """Cancel scope around the task that serves it."""
        self.changed = anyio.Event()
        """Event that is set, and replaced by a new one, at each change by a frame."""

    def change(self) -> None:
        """Wake the tasks that wait for a change."""
        self.changed.set()
        self.changed = anyio.Event()


class _Relay:
    """Relay over one terminal. Its tasks connect to the address for the programs in the sandbox.

    The `number` of a connection, which the sandbox's end gives it, names it in frames.
    """

    _terminal: Terminal
    """Terminal on which the other end runs. Set by `run`."""

    def __init__(self, tasks: TaskGroup, host: str, port: int) -> None:
        """Create a relay to the address `host:port`, whose tasks run in `tasks`."""
        self._tasks = tasks
        self._host = host
        self._port = port
        self._unread = bytearray()
        """Bytes from the terminal that are no complete frame yet."""
        self._writing = anyio.Lock()
        """Lock of the terminal's input, so that frames of several tasks do not mix."""
        self._open: dict[int, _Connection] = {}
        """Open connections by their numbers."""
        self._last = 0
        """Number of the newest connection."""
        self._refusals = 0
        """Number of tasks that refuse a connection."""
        self.settled = anyio.Event()
        """Event that is set once the other end listens, or has ended."""
        self.inside_port: int | None = None
        """Port on the sandbox's loopback; None until the other end has reported it."""

    def last_output(self) -> str:
        """Return the end of the terminal's output that was not read as frames, for an error message."""
        return self._unread.decode("utf-8", "replace").strip()[-500:]

    async def run(self, sandbox: Shells, *, task_status: TaskStatus[None]) -> None:
        """Run the other end on a terminal of the sandbox, and process its frames until it ends.

        Leaving the terminal's block ends the program there, and with it the port in the sandbox.

        Raises:
            SandboxError: the terminal cannot be opened. Later errors only end the relay.
        """
        async with sandbox.terminal(["python3", "-c", SOURCE]) as self._terminal:
            task_status.started()
            try:
                await self._read_frames()
            except SandboxError as error:
                # The calls that use the sandbox report its loss. A broken protocol is the fault of its programs.
                _log.warning("a relay ended: %s", error)
            finally:
                self.settled.set()
                for connection in self._open.values():
                    connection.scope.cancel()

    async def _read_frames(self) -> None:
        """Process frames from the sandbox's end until the terminal ends, or until its first `CHATTER` bytes hold no
        mark.

        Frames change the state of connections, and each new connection gets a task. This waits for the terminal alone:
        a slow connection must not delay the frames of the others.

        Raises:
            SandboxError: the sandbox is lost, or its end breaks the protocol.
        """
        while data := await self._terminal.read():
            self._unread += data
            if self.inside_port is None and not self._begins():
                if len(self._unread) > CHATTER:
                    return
                continue
            while (frame := self._next_frame()) is not None:
                self._process_frame(*frame)

    def _begins(self) -> bool:
        """Look for the mark and the frame with the port in the bytes read. Returns True once the port is known.

        A port that is no number also sets `settled`, so that `open_relay` fails at once. All bytes before the mark,
        such as a greeting of the image, are dropped with it.
        """
        at = self._unread.find(MARK)
        if at < 0 or len(self._unread) < at + len(MARK) + HEADER.size:
            return False
        _, _, size = HEADER.unpack_from(self._unread, at + len(MARK))
        # A port has at most five digits. After a longer frame, `_read_frames` gives up when it has `CHATTER` bytes.
        if size > 5 or len(self._unread) < at + len(MARK) + HEADER.size + size:
            return False
        del self._unread[: at + len(MARK)]
        frame = self._next_frame()
        assert frame is not None
        with suppress(ValueError):
            self.inside_port = int(frame[2])
        self.settled.set()
        return self.inside_port is not None

    def _next_frame(self) -> tuple[int, int, bytes] | None:
        """Take the next complete frame from the bytes read: number, kind and bytes. Returns None if there is none.

        Raises:
            SandboxLostError: the frame is longer than the other end ever sends.
        """
        if len(self._unread) < HEADER.size:
            return None
        number, kind, size = HEADER.unpack_from(self._unread)
        if size > PIECE:
            raise SandboxLostError(f"the relay in the sandbox sent a piece of {size} bytes")
        if len(self._unread) < HEADER.size + size:
            return None
        piece = bytes(self._unread[HEADER.size : HEADER.size + size])
        del self._unread[: HEADER.size + size]
        return number, kind, piece

    def _process_frame(self, number: int, kind: int, piece: bytes) -> None:
        """Process one frame of the sandbox's end, in `_read_frames`. This must not wait for a connection.

        Args:
            number: number of the connection that the frame belongs to.
            kind: kind of the frame, such as `OPEN` or `CLOSED`.
            piece: content of the frame.

        Raises:
            SandboxLostError: the other end never sends this: a program of the sandbox has taken its place.
        """
        if kind == OPEN:
            self._accept(number)
            return
        connection = self._open.get(number)
        if connection is None:
            return  # A late frame: the address has ended the connection, which the other end did not know yet.
        if kind == DATA:
            connection.may_receive -= len(piece)
            if connection.may_receive < 0:
                raise SandboxLostError("the relay in the sandbox sent more than it may")
            connection.waiting += piece
        elif kind == END:
            connection.ended = True
        elif kind == CREDIT and len(piece) == COUNT.size:
            # No more than the window, whatever the sandbox says: as many bytes can wait here for the terminal.
            connection.may_send = min(WINDOW, connection.may_send + COUNT.unpack(piece)[0])
        elif kind == CLOSED:
            del self._open[number]
            connection.scope.cancel()
        else:
            raise SandboxLostError(f"the relay in the sandbox sent a frame of kind {kind}")
        connection.change()

    def _accept(self, number: int) -> None:
        """Start a task that serves a new connection, or one that refuses it because there are too many.

        Raises:
            SandboxLostError: the number was used before, or far too many connections are opened.
        """
        if number <= self._last or self._refusals >= REFUSALS:
            raise SandboxLostError("the relay in the sandbox opens connections that it may not")
        self._last = number
        if len(self._open) >= CONNECTIONS:
            self._refusals += 1
            self._tasks.start_soon(self._refuse, number)
        else:
            self._open[number] = connection = _Connection()
            self._tasks.start_soon(self._serve, number, connection)

    async def _refuse(self, number: int) -> None:
        """Close a connection that is one too many, at the sandbox's end."""
        try:
            await self._send(number, CLOSED)
        finally:
            self._refusals -= 1

    async def _serve(self, number: int, connection: _Connection) -> None:
        """Serve one connection until both sides have ended it, or one has given it up.

        Two tasks move bytes in the two directions. An error of the address ends both, and is reported to the sandbox. A
        CLOSED frame of the sandbox cancels `connection.scope` instead.
        """
        complete = False
        try:
            with connection.scope:
                async with (
                    await anyio.connect_tcp(self._host, self._port) as stream,
                    anyio.create_task_group() as both,
                ):
                    both.start_soon(self._receive, number, connection, stream)
                    await self._forward(number, connection, stream)
                complete = True
        except* _GONE:
            pass
        self._open.pop(number, None)
        if not complete and not connection.scope.cancel_called:
            # Without this frame the program in the sandbox would wait for ever.
            await self._send(number, CLOSED)

    async def _forward(self, number: int, connection: _Connection, stream: SocketStream) -> None:
        """Send the bytes of the program to the address, and end this direction after the last ones.

        Frames that are read meanwhile add to `connection.waiting`, so its bytes are taken out before each wait.
        """
        while True:
            if connection.waiting:
                data = bytes(connection.waiting)
                connection.waiting.clear()
                await stream.send(data)
                connection.may_receive += len(data)
                await self._send(number, CREDIT, COUNT.pack(len(data)))
            elif connection.ended:
                # The answer of the address may still come: a program may end its side after its request.
                await stream.send_eof()
                return
            else:
                await connection.changed.wait()

    async def _receive(self, number: int, connection: _Connection, stream: SocketStream) -> None:
        """Send the bytes from the address to the sandbox, as many as the program takes, and then their end."""
        while True:
            while connection.may_send <= 0:
                await connection.changed.wait()
            try:
                data = await stream.receive(min(PIECE, connection.may_send))
            except anyio.EndOfStream:
                await self._send(number, END)
                return
            connection.may_send -= len(data)
            await self._send(number, DATA, data)

    async def _send(self, number: int, kind: int, data: bytes = b"") -> None:
        """Write one frame to the sandbox. Does nothing if the sandbox is gone."""
        with suppress(SandboxError):
            async with self._writing:
                await self._terminal.write(HEADER.pack(number, kind, len(data)) + data)
