"""End of the relay on the host: connects the sandbox's end to one address, and to no other.

`envs.relay.boxed` opens it for an agent in a sandbox without a network. `envs.relay.inside` describes the frames.

The sandbox is not trusted. Its frames only name connections and carry bytes, so it can do no more than any client of
that address. The number of connections, and the bytes of each that wait here, are bounded. The task that reads frames
never waits for a connection: a slow one stops only its own program.

Lifecycle: `open_relay` starts the other end and one task that reads its frames, and each connection has a task of its
own. All of them end with the block.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import SocketStream, TaskGroup

from envs.relay.inside import CLOSED, CONNECTIONS, COUNT, CREDIT, DATA, END, HEADER, MARK, OPEN, PIECE, WINDOW
from envs.sandbox.api import Terminal
from envs.sandbox.sandbox import Shells
from flash.errors import SandboxError, SandboxLostError, SandboxStartError
from flash.waiting import unwrapped_group

START_S = 30.0
"""Seconds for the end in the sandbox to start."""
CHATTER = 1 << 16
"""Most bytes before the relay's mark, for example a greeting that the image prints."""
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
    """
    async with sandbox.terminal(["python3", "-c", SOURCE]) as terminal, unwrapped_group() as tasks:
        relay = _Relay(terminal, tasks, host, port)
        tasks.start_soon(relay.read_frames)
        with anyio.move_on_after(START_S):
            await relay.started.wait()
        if relay.port is None:
            raise SandboxStartError(f"the relay does not start in the sandbox: {relay.said()}")
        yield relay.port
        tasks.cancel_scope.cancel()


class _Connection:
    """Connection of a program in the sandbox, shared by the task that reads frames and the task that serves it."""

    def __init__(self) -> None:
        self.waiting = bytearray()
        """Bytes from the program that the address has not taken yet."""
        self.ended = False
        """True once the program sends no more."""
        self.room = WINDOW
        """Bytes that the sandbox may still send."""
        self.credit = WINDOW
        """Bytes that the sandbox still accepts."""
        self.scope = anyio.CancelScope()
        """Cancel scope around the task that serves it."""
        self.changed = anyio.Event()
        """Event that is set, and replaced by a new one, at each change by a frame."""

    def change(self) -> None:
        """Wake the tasks that wait for a change."""
        self.changed.set()
        self.changed = anyio.Event()


class _Relay:
    """Relay over one terminal. Its tasks connect the address for the programs in the sandbox."""

    def __init__(self, terminal: Terminal, tasks: TaskGroup, host: str, port: int) -> None:
        self._terminal = terminal
        self._tasks = tasks
        self._host = host
        self._port = port
        self._read = bytearray()
        self._writing = anyio.Lock()
        """Lock of the terminal's input, so that frames of several tasks do not mix."""
        self._open: dict[int, _Connection] = {}
        self._last = 0
        """Number of the newest connection."""
        self._refusals = 0
        """Number of tasks that refuse a connection."""
        self.started = anyio.Event()
        self.port: int | None = None

    def said(self) -> str:
        """Return the end of the bytes that were not read as frames, for an error message."""
        return self._read.decode("utf-8", "replace").strip()[-500:]

    async def read_frames(self) -> None:
        """Process frames from the sandbox's end until the terminal ends.

        Consumes frames. Waits for the terminal alone. Unblocked by output or the end of the terminal. Produces changes
        of connections, and tasks that serve new ones. At the end all connections are closed.
        """
        try:
            while data := await self._terminal.read():
                self._read += data
                if self.port is None and not self._begins():
                    if len(self._read) > CHATTER:
                        return
                    continue
                while (frame := self._frame()) is not None:
                    self._take(*frame)
        except SandboxError:
            pass  # The calls that use the sandbox report its loss.
        finally:
            self.started.set()
            for connection in self._open.values():
                connection.scope.cancel()

    def _begins(self) -> bool:
        """Look for the mark and the frame with the port. Returns True once the port is known."""
        at = self._read.find(MARK)
        if at < 0 or len(self._read) < at + len(MARK) + HEADER.size:
            return False
        _, _, size = HEADER.unpack_from(self._read, at + len(MARK))
        if size > 5 or len(self._read) < at + len(MARK) + HEADER.size + size:
            return False
        del self._read[: at + len(MARK)]
        frame = self._frame()
        assert frame is not None
        with suppress(ValueError):
            self.port = int(frame[2])
        self.started.set()
        return self.port is not None

    def _frame(self) -> tuple[int, int, bytes] | None:
        """Take the next complete frame from the bytes read: number, kind and bytes. Returns None if there is none.

        Raises:
            SandboxLostError: the frame is longer than the other end ever sends.
        """
        if len(self._read) < HEADER.size:
            return None
        number, kind, size = HEADER.unpack_from(self._read)
        if size > PIECE:
            raise SandboxLostError(f"the relay in the sandbox sent a piece of {size} bytes")
        if len(self._read) < HEADER.size + size:
            return None
        piece = bytes(self._read[HEADER.size : HEADER.size + size])
        del self._read[: HEADER.size + size]
        return number, kind, piece

    def _take(self, number: int, kind: int, piece: bytes) -> None:
        """Process one frame.

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
            connection.room -= len(piece)
            if connection.room < 0:
                raise SandboxLostError("the relay in the sandbox sent more than it may")
            connection.waiting += piece
        elif kind == END:
            connection.ended = True
        elif kind == CREDIT and len(piece) == COUNT.size:
            # No more than the window, whatever the sandbox says: as many bytes can wait here for the terminal.
            connection.credit = min(WINDOW, connection.credit + COUNT.unpack(piece)[0])
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
        """Send the bytes of the program to the address, and end this direction after the last ones."""
        while True:
            if connection.waiting:
                data = bytes(connection.waiting)
                connection.waiting.clear()
                await stream.send(data)
                connection.room += len(data)
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
            while connection.credit <= 0:
                await connection.changed.wait()
            try:
                data = await stream.receive(min(PIECE, connection.credit))
            except anyio.EndOfStream:
                await self._send(number, END)
                return
            connection.credit -= len(data)
            await self._send(number, DATA, data)

    async def _send(self, number: int, kind: int, data: bytes = b"") -> None:
        """Write one frame to the sandbox. Does nothing if the sandbox is gone."""
        with suppress(SandboxError):
            async with self._writing:
                await self._terminal.write(HEADER.pack(number, kind, len(data)) + data)
