"""One authenticated TCP connection, as both ends use it: frames in, frames out.

Outgoing frames gather in a buffer that one writer task sends: frames that are ready together leave in one send, and
cancelling the task that posted a frame never tears it. The buffer is bounded: who has more to say waits for room first.
At most two buffers (one being sent, one filling) and one frame per sender are held for a reader that does not read.

A dead machine is noticed by the kernel (keepalive and user timeout), not by messages of ours.
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
"""Once this many bytes wait to be sent, senders wait."""
CHUNK_BYTES = 1 << 20
"""A long frame is sent in pieces of this size, so that copying it does not hold up the loop."""
GATHERED_BYTES = 1 << 18
"""Frames are gathered in one buffer up to this size; copying a long frame to others would hold up the loop."""
RECEIVE_BYTES = 1 << 18
"""Largest piece taken from the socket at once; asyncio reads as much."""
IDLE_SECONDS = 20
"""After this much silence the kernel begins to probe the peer."""
PROBE_SECONDS = 10
"""Time between two probes."""
PROBES = 4
"""Unanswered probes until the connection is given up: a silent peer is lost after 20 + 4 · 10 = 60 seconds."""


class FrameConnection:
    """Frames over one stream. `write` must run as a task for as long as frames are posted.

    Args:
        stream: an authenticated stream, closed by its owner.
        other: the other end in words, for error messages.
    """

    def __init__(self, stream: SocketStream, other: str) -> None:
        self._stream = stream
        self._other = other
        self._decoder = FrameDecoder()
        self._outgoing: list[bytearray] = []
        self._waiting_bytes = 0
        self._ready = anyio.Event()
        self._drained = anyio.Event()
        self._sending = False
        self._broken = False

    @property
    def full(self) -> bool:
        """Whether a sender has to await `room` before it posts."""
        return self._waiting_bytes >= BUFFER_BYTES and not self._broken

    async def room(self) -> None:
        """Wait until a frame may be posted, or the connection broke. Unblocked by `write`; bounded by the caller."""
        while self.full:
            await self._drained.wait()

    async def flush(self) -> None:
        """Wait until all that was posted is sent, or lost. Unblocked by `write`; bounded by the caller."""
        while (self._outgoing or self._sending) and not self._broken:
            await self._drained.wait()

    async def send(self, kind: FrameKind, call: int, body: msgspec.Struct) -> None:
        """Wait for room and queue one frame; others are served while a long one is encoded.

        Like `post` otherwise. Cancelled, it has queued nothing.
        """
        if self.full:
            await self.room()
        frame = bytearray()
        for _ in frame_slices(frame, kind, call, body):
            await checkpoint()
        self._queue(frame)

    def post(self, kind: FrameKind, call: int, body: msgspec.Struct | None = None) -> None:
        """Queue one small frame at once; dropped when the connection is already broken, which `receive` reports.

        Raises:
            TransportError: the frame is too long; nothing was queued.
        """
        frame = bytearray()
        append_frame(frame, kind, call, body)
        self._queue(frame)

    def _queue(self, frame: bytearray) -> None:
        if self._broken:
            return
        if self._outgoing and len(self._outgoing[-1]) + len(frame) <= GATHERED_BYTES:
            self._outgoing[-1] += frame
        else:
            self._outgoing.append(frame)
        self._waiting_bytes += len(frame)
        self._ready.set()

    async def write(self) -> None:
        """Send what is posted.

        Consumes the queued frames. Waits for a frame, then for the socket. Unblocked by senders and the reading peer.
        Produces bytes on the stream, and room. Returns when the connection breaks.
        """
        try:
            while True:
                await self._ready.wait()
                self._ready = anyio.Event()
                outgoing, self._outgoing, self._waiting_bytes = self._outgoing, [], 0
                self._sending = True
                self._tell_drained()
                for data in outgoing:
                    view = memoryview(data)
                    for start in range(0, len(data), CHUNK_BYTES):
                        await self._stream.send(bytes(view[start : start + CHUNK_BYTES]))
                self._sending = False
                self._tell_drained()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # `receive` reports it.
        finally:
            # Also when cancelled: who waits for room must not wait for a writer that is gone.
            self._broken = True
            self._outgoing, self._waiting_bytes = [], 0
            self._drained.set()

    def _tell_drained(self) -> None:
        self._drained.set()
        self._drained = anyio.Event()

    async def receive(self) -> list[Frame]:
        """The next frames: an empty list while a long one is arriving.

        Raises:
            PeerLostError: the connection ended.
            TransportError: what arrives are no frames.
        """
        try:
            piece = await self._stream.receive(RECEIVE_BYTES)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise PeerLostError(self._loss(error)) from error
        return self._decoder.feed(piece)

    async def close(self) -> None:
        """Drop the connection at once, unsent frames included."""
        await self._stream.aclose()

    def _loss(self, error: Exception) -> str:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        partial = self._decoder.partial
        inside = f" inside a frame, after {partial} of {self._decoder.wanted} bytes" if partial else ""
        return f"the connection to {self._other} ended{inside}{cause}; look at the log of that process"


def tune(stream: SocketStream) -> None:
    """Send small frames at once, and let the kernel notice a machine that vanished."""
    raw = stream.extra(SocketAttribute.raw_socket)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        # Keepalive is silent while sent data is unacknowledged; without this limit that lasts a quarter of an hour.
        lost_after_ms = (IDLE_SECONDS + PROBES * PROBE_SECONDS) * 1000
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_after_ms)
