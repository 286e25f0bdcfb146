"""End of the relay in the sandbox: listens on the loopback, and exchanges frames with the host over its terminal.

A frame, in both directions, is the number of a connection and a length, four bytes each, and then as many bytes. A
frame of length 0 reports that its side of the connection has ended. The first frame, of connection 0, holds the port. A
mark precedes it, which nothing else on a terminal looks like. This file needs only Python 3.6 and the standard library,
because it runs alone in the sandbox.
"""

import os
import selectors
import socket
import struct
import tty

MARK = b"\0flash relay\0"
"""Bytes before the first frame, which nothing else on a terminal contains."""
HEADER = struct.Struct(">II")
"""Number of the connection, and length of the piece."""
PIECE = 1 << 16
"""Bytes that one read takes at most."""
MOST = 1 << 24
"""Bytes that may wait for a connection which does not read. A connection with more of them is closed."""


class Relay:
    """The relay with all connections of the loopback."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(64)
        self.clients: dict[int, socket.socket] = {}
        """Connection of each number."""
        self.waiting: dict[int, bytes] = {}
        """Bytes that a connection has not taken yet, by its number."""
        self.ending: set[int] = set()
        """Numbers of connections that the host has ended. They are closed when they have taken all bytes."""
        self.read = b""
        self.last = 0

    def run(self) -> None:
        """Serve until the terminal ends."""
        tty.setraw(0)
        port = str(self.listener.getsockname()[1]).encode()
        write(MARK + HEADER.pack(0, len(port)) + port)
        self.selector.register(0, selectors.EVENT_READ, None)
        self.selector.register(self.listener, selectors.EVENT_READ, 0)
        while True:
            for key, events in self.selector.select():
                if key.data is None:
                    data = os.read(0, PIECE)
                    if not data:
                        return
                    self.take(data)
                elif key.data == 0:
                    self.accept()
                elif key.data in self.clients:
                    if events & selectors.EVENT_WRITE:
                        self.flush(key.data)
                    if events & selectors.EVENT_READ and key.data in self.clients:
                        self.receive(key.data)

    def accept(self) -> None:
        """Accept a connection and give it a number."""
        client, _ = self.listener.accept()
        client.setblocking(False)
        self.last += 1
        self.clients[self.last], self.waiting[self.last] = client, b""
        self.selector.register(client, selectors.EVENT_READ, self.last)

    def receive(self, number: int) -> None:
        """Pass on the bytes that a connection has sent."""
        try:
            data = self.clients[number].recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        write(HEADER.pack(number, len(data)) + data)
        if not data:
            self.close(number)

    def take(self, data: bytes) -> None:
        """Process bytes from the host, and give complete frames to their connections."""
        self.read += data
        while len(self.read) >= HEADER.size:
            number, size = HEADER.unpack_from(self.read)
            if len(self.read) < HEADER.size + size:
                return
            piece, self.read = self.read[HEADER.size : HEADER.size + size], self.read[HEADER.size + size :]
            if number in self.clients:
                self.waiting[number] += piece
                if not piece:
                    self.ending.add(number)
                self.flush(number)

    def flush(self, number: int) -> None:
        """Send a connection as many of its waiting bytes as it takes."""
        client, waiting = self.clients[number], self.waiting[number]
        try:
            self.waiting[number] = waiting = waiting[client.send(waiting) :] if waiting else waiting
        except BlockingIOError:
            pass
        except OSError:
            self.close(number)
            return
        if (not waiting and number in self.ending) or len(waiting) > MOST:
            self.close(number)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
        self.selector.modify(client, events, number)

    def close(self, number: int) -> None:
        """Close and forget a connection."""
        client = self.clients.pop(number)
        del self.waiting[number]
        self.ending.discard(number)
        self.selector.unregister(client)
        client.close()


def write(data: bytes) -> None:
    """Write all of `data` to the host."""
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    Relay().run()
