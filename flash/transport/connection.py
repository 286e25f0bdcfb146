"""Frames over one authenticated TCP connection. The client and the server both use this class.

Queued frames wait in a bounded buffer, and one writer task sends them. So frames that are queued together leave in one
send, and cancelling the task that queued a frame never sends half of the frame.

Backpressure: a sender waits for room while `BUFFER_BYTES` are unsent. If the peer does not read, memory holds at most
two buffers (one that is being sent, one that fills) and one frame per sender.

If the peer's machine vanishes, the kernel notices it (keepalive and user timeout), so there is no heartbeat message.
"""

from __future__ import annotations

import socket
import sys

import anyio
import msgspec
from anyio.abc import SocketAttribute, SocketStream
from anyio.lowlevel import checkpoint

from flash.errors import PeerLostError
from flash.transport.frames import Frame, FrameDecoder, FrameKind, append_frame, frame_slices

BUFFER_BYTES = 1 << 20
"""Unsent bytes at which senders begin to wait."""
CHUNK_BYTES = 1 << 20
"""Bytes given to the socket at once. The bytes are copied, and copying all of a long frame would stop the loop."""
MERGED_BYTES = 1 << 18
"""Longest buffer that small frames are merged into. Copying a long frame into another buffer would stop the loop."""
RECEIVE_BYTES = 1 << 18
"""Largest piece taken from the socket at once, in bytes: as much as asyncio reads in one call."""
IDLE_SECONDS = 20
"""Seconds of silence after which the kernel begins to probe the peer."""
PROBE_SECONDS = 10
"""Seconds between two probes."""
PROBES = 4
"""Unanswered probes until the connection is given up: a silent peer is lost after 20 + 4 · 10 = 60 seconds."""


class FrameConnection:
    """Sends and receives frames over one stream. The owner runs `write` as a task, else no queued frame is sent.

    Args:
        stream: an authenticated stream. Its owner closes it.
        peer: description of the other end, for error messages.
    """

    def __init__(self, stream: SocketStream, peer: str) -> None:
        self._stream = stream
        self._peer = peer
        self._decoder = FrameDecoder()
        self._outgoing: list[bytearray] = []
        self._waiting_bytes = 0
        self._ready = anyio.Event()
        self._drained = anyio.Event()
        self._sending = False
        self._broken = False

    async def wait_for_room(self) -> None:
        """Wait until a frame may be queued or the connection broke. Sets no deadline.

        If there is room, returns at once and lets no other task run. `write` ends the wait.
        """
        while self._waiting_bytes >= BUFFER_BYTES and not self._broken:
            await self._drained.wait()

    async def flush(self) -> None:
        """Wait until all queued frames are sent or lost. Sets no deadline. `write` ends the wait."""
        while (self._outgoing or self._sending) and not self._broken:
            await self._drained.wait()

    async def send(self, kind: FrameKind, call: int, body: msgspec.Struct) -> None:
        """Wait for room, encode one frame while other tasks run in between, and queue it.

        If the task is cancelled, nothing is queued. On a broken connection the frame is dropped silently; `receive`
        raises the loss.

        Raises:
            TransportError: the frame is too long; nothing was queued.
        """
        await self.wait_for_room()
        frame = bytearray()
        for _ in frame_slices(frame, kind, call, body):
            await checkpoint()
        self._queue(frame)

    def post(self, kind: FrameKind, call: int, body: msgspec.Struct | None = None) -> None:
        """Queue one small frame without waiting.

        For frames that must be queued without awaiting: CANCEL while a task is cancelled, and ERROR. There is no check
        for room: these frames are small, and the caller may await `wait_for_room` before. On a broken connection the
        frame is dropped silently; `receive` raises the loss.

        Raises:
            TransportError: the frame is too long; nothing was queued.
        """
        frame = bytearray()
        append_frame(frame, kind, call, body)
        self._queue(frame)

    def _queue(self, frame: bytearray) -> None:
        """Append an encoded frame to the buffer that `write` sends, or drop it if the connection is broken."""
        if self._broken:
            return
        if self._outgoing and len(self._outgoing[-1]) + len(frame) <= MERGED_BYTES:
            self._outgoing[-1] += frame
        else:
            self._outgoing.append(frame)
        self._waiting_bytes += len(frame)
        self._ready.set()

    async def write(self) -> None:
        """Send queued frames until the connection breaks.

        Consumes the queued frames. Waits for a frame, then for the socket. Unblocked by senders, and by the peer when
        the peer reads. Produces bytes on the stream, and room for more frames.
        """
        try:
            while True:
                await self._ready.wait()
                self._ready = anyio.Event()
                outgoing, self._outgoing, self._waiting_bytes = self._outgoing, [], 0
                self._sending = True
                self._notify_drained()
                for data in outgoing:
                    view = memoryview(data)
                    for start in range(0, len(data), CHUNK_BYTES):
                        await self._stream.send(bytes(view[start : start + CHUNK_BYTES]))
                self._sending = False
                self._notify_drained()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # `receive` raises the loss.
        finally:
            # Also when this task is cancelled: a sender would otherwise wait for ever for a writer that has ended.
            self._broken = True
            self._outgoing, self._waiting_bytes = [], 0
            self._drained.set()

    def _notify_drained(self) -> None:
        """Wake the tasks in `wait_for_room` and `flush`, which then look again at the buffer."""
        self._drained.set()
        self._drained = anyio.Event()

    async def receive(self) -> list[Frame]:
        """Return the next complete frames; an empty list while a long frame arrives.

        Raises:
            PeerLostError: the connection ended.
            TransportError: the bytes are not frames.
        """
        try:
            piece = await self._stream.receive(RECEIVE_BYTES)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            partial = self._decoder.partial
            inside = f" inside a frame, after {partial} of {self._decoder.wanted} bytes" if partial else ""
            raise PeerLostError(
                f"the connection to {self._peer} ended{inside}{cause}; look at the log of that process"
            ) from error
        return self._decoder.feed(piece)

    async def close(self) -> None:
        """Close the connection at once. Unsent frames are dropped."""
        await self._stream.aclose()


def set_socket_options(stream: SocketStream) -> None:
    """Set the socket's options: small frames are sent without delay, and the kernel notices a machine that vanished."""
    raw = stream.extra(SocketAttribute.raw_socket)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        # The kernel does not probe while sent data is unacknowledged. Without this limit it then waits 15 minutes.
        lost_after_ms = (IDLE_SECONDS + PROBES * PROBE_SECONDS) * 1000
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_after_ms)
