"""The listening end of the weights' port, with threads: rank 0's main thread belongs to torch.

Law: who has not proven the token holds one thread, for `prove_s` seconds in all, whatever it sends; of more than
`STRANGERS` such connections the oldest is ended. Running out of descriptors or threads makes it pause and say so;
it closes by `close` alone.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from flash.errors import TransportError
from flash.transport.auth import blocking_handshake, server_handshake
from flash.transport.server import PAUSE_S, LimitedLog

STRANGERS = 64
"""Connections without a proof at a time, and so threads that they hold."""
SAID = 20
"""Ended connections that are logged in a minute."""


class WeightsListener:
    """Lets in who proves the token, and has each served by a thread of its own.

    Args:
        host: the address to listen at; a free port is taken.
        token: what is proven in both directions.
        prove_s: seconds for a proof.
        silence_s: longest silence of who has proven it, in seconds.
        serve: serves one proven connection; may raise OSError and TransportError.
    """

    def __init__(
        self, host: str, token: bytes, prove_s: float, silence_s: float, serve: Callable[[socket.socket], None]
    ) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family)
        self._token = token
        self._prove_s = prove_s
        self._silence_s = silence_s
        self._serve = serve
        self._sayings = LimitedLog(time.monotonic, SAID)
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="flash-weights", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    def close(self) -> None:
        """Let no one in any more; connections that are open end on their own."""
        self._closing.set()
        # close() alone does not wake a thread that is blocked in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=self._silence_s)

    def _accept(self) -> None:
        """Consumes connections. Waits for the next one, or a moment where there is no room. Unblocked by `close`."""
        while not self._closing.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    self._pause(error, "let this process open more files (`ulimit -n`)")
                continue
            self._remember(connection)
            try:
                threading.Thread(target=self._meet, args=(connection, peer), daemon=True).start()
            except RuntimeError as error:  # the process may start no more threads
                self._forget(connection)
                connection.close()
                self._pause(error, "let this process start more threads (`ulimit -u`)")

    def _pause(self, error: Exception, advice: str) -> None:
        self._sayings.warn("nobody is let in for %g s: %s; %s", PAUSE_S, error, advice)
        self._end_strangers(keep=STRANGERS // 2)
        self._closing.wait(PAUSE_S)

    def _meet(self, connection: socket.socket, peer: object) -> None:
        with connection:
            try:
                try:
                    self._prove(connection)
                finally:
                    self._forget(connection)
                connection.settimeout(self._silence_s)
                self._serve(connection)
            except (OSError, TransportError) as error:
                # One worker's broken connection is its own error to report; the others go on.
                self._sayings.warn("a pull of weights from %s ended early: %s", peer, error)

    def _prove(self, connection: socket.socket) -> None:
        end = time.monotonic() + self._prove_s

        def left() -> float:
            """Seconds until the end, for one call more."""
            seconds = end - time.monotonic()
            if seconds <= 0:
                raise TransportError(f"no proof of the token within {self._prove_s:g} s")
            return seconds

        def send(data: bytes) -> None:
            connection.settimeout(left())
            connection.sendall(data)

        def receive(count: int) -> bytes:
            data = b""
            while len(data) < count:
                connection.settimeout(left())
                piece = connection.recv(count - len(data))
                if not piece:
                    raise TransportError("the other end hung up, or was hung up on, before the token was proven")
                data += piece
            return data

        blocking_handshake(server_handshake(self._token), send, receive)

    def _remember(self, connection: socket.socket) -> None:
        self._end_strangers(keep=STRANGERS - 1)
        with self._lock:
            self._strangers[connection] = None

    def _forget(self, connection: socket.socket) -> None:
        """Its socket may be closed now."""
        with self._lock:
            self._strangers.pop(connection, None)

    def _end_strangers(self, keep: int) -> None:
        """Wake the threads of the oldest, which close their connections."""
        with self._lock:
            for connection in list(self._strangers)[: max(0, len(self._strangers) - keep)]:
                del self._strangers[connection]
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
