"""End of the relay on the host: connects the sandbox's end to one address, and to no other.

The sandbox is not trusted. Its frames only name connections and carry bytes, so it can do no more than any client of
that address. The number of connections, and the bytes that wait, are bounded.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import SocketStream, TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from envs.relay.inside import HEADER, MARK, PIECE
from envs.sandbox.api import Terminal
from envs.sandbox.sandbox import Shells
from flash.errors import SandboxLostError, SandboxStartError
from flash.waiting import unwrapped_group

START_S = 30.0
"""Seconds for the end in the sandbox to start."""
CONNECTIONS = 256
"""Most connections at a time."""
CHATTER = 1 << 16
"""Most bytes before the relay's mark, for example a greeting that the image prints."""
WAITING = 64
"""Most pieces of one connection that wait for the address to take them."""

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
        tasks.start_soon(relay.live)
        with anyio.move_on_after(START_S):
            await relay.started.wait()
        if relay.port is None:
            raise SandboxStartError(f"the relay does not start in the sandbox: {relay.said()}")
        yield relay.port
        tasks.cancel_scope.cancel()


class _Relay:
    """Relay over one terminal. Its tasks connect the address for the programs in the sandbox."""

    def __init__(self, terminal: Terminal, tasks: TaskGroup, host: str, port: int) -> None:
        self._terminal = terminal
        self._tasks = tasks
        self._host = host
        self._port = port
        self._read = bytearray()
        self._one = anyio.Lock()
        """Lock of the terminal's input, so that frames of several tasks do not mix."""
        self._open: dict[int, MemoryObjectSendStream[bytes]] = {}
        self.started = anyio.Event()
        self.port: int | None = None

    def said(self) -> str:
        """Return the end of the bytes that were not read as frames, for an error message."""
        return self._read.decode("utf-8", "replace").strip()[-500:]

    async def live(self) -> None:
        """Pass on frames from the sandbox's end until the terminal ends.

        Consumes frames. Waits for the terminal. Unblocked by output or the end of the terminal. Produces pieces for
        connections.
        """
        try:
            while data := await self._terminal.read():
                self._read += data
                if self.port is None and not self._begins():
                    if len(self._read) > CHATTER:
                        return
                    continue
                while (frame := self._frame()) is not None:
                    await self._take(*frame)
        except SandboxLostError:
            pass  # the calls that use the sandbox report its loss
        finally:
            self.started.set()

    def _begins(self) -> bool:
        """Look for the mark and the frame with the port. Returns True once the port is known."""
        at = self._read.find(MARK)
        if at < 0 or len(self._read) < at + len(MARK) + HEADER.size:
            return False
        _, size = HEADER.unpack_from(self._read, at + len(MARK))
        if size > 5 or len(self._read) < at + len(MARK) + HEADER.size + size:
            return False
        del self._read[: at + len(MARK)]
        frame = self._frame()
        assert frame is not None
        with suppress(ValueError):
            self.port = int(frame[1])
        self.started.set()
        return self.port is not None

    def _frame(self) -> tuple[int, bytes] | None:
        """Take the next complete frame from the bytes read. Returns None if there is none."""
        if len(self._read) < HEADER.size:
            return None
        number, size = HEADER.unpack_from(self._read)
        if size > PIECE:
            raise SandboxLostError(f"the relay in the sandbox sent a piece of {size} bytes")
        if len(self._read) < HEADER.size + size:
            return None
        piece = bytes(self._read[HEADER.size : HEADER.size + size])
        del self._read[: HEADER.size + size]
        return number, piece

    async def _take(self, number: int, piece: bytes) -> None:
        """Pass a piece on to its connection. A new number opens a connection, and an empty piece ends one."""
        known = self._open.get(number)
        if not piece:
            if known is not None:
                del self._open[number]
                known.close()
            return
        if known is None:
            if len(self._open) >= CONNECTIONS:
                await self._send(number, b"")
                return
            known, pieces = anyio.create_memory_object_stream[bytes](WAITING)
            self._open[number] = known
            self._tasks.start_soon(self._connection, number, pieces)
        with suppress(*_GONE):
            await known.send(piece)

    async def _connection(self, number: int, pieces: MemoryObjectReceiveStream[bytes]) -> None:
        """Serve one connection, from its first piece until either side ends."""
        try:
            async with (
                pieces,
                await anyio.connect_tcp(self._host, self._port) as stream,
                anyio.create_task_group() as both,
            ):
                both.start_soon(self._answers, number, stream, both)
                async for piece in pieces:
                    await stream.send(piece)
                both.cancel_scope.cancel()
        except* _GONE:
            pass
        finally:
            if (known := self._open.pop(number, None)) is not None:
                known.close()
            with suppress(SandboxLostError):
                await self._send(number, b"")

    async def _answers(self, number: int, stream: SocketStream, both: TaskGroup) -> None:
        """Send the bytes from the address to the sandbox until the connection ends."""
        with suppress(*_GONE):
            while True:
                await self._send(number, await stream.receive(PIECE))
        both.cancel_scope.cancel()

    async def _send(self, number: int, piece: bytes) -> None:
        """Write one frame to the sandbox."""
        async with self._one:
            await self._terminal.write(HEADER.pack(number, len(piece)) + piece)
