"""End of the relay in the sandbox: listens on the loopback, and exchanges frames with the host over its terminal.

`envs.relay.outside` starts this file as a program and is the other end. The file needs only Python 3.6 and the standard
library, because it runs alone in the sandbox.

A frame, in both directions, has the number of a connection, a kind, a length, and as many bytes:

    OPEN      to the host only: a program has connected. Numbers rise, and none is used again.
    DATA      bytes of the connection
    END       no more bytes come from this side. Bytes in the other direction go on (half-closed).
    CLOSED    this side has given the connection up, in both directions
    CREDIT    four bytes, a number: the receiver has passed on so many bytes of DATA, so the sender may send as many
              more. In the sandbox the program takes them; at the host the address does.

A connection is over after an END from each side, or after one CLOSED. Late frames of a connection that is over are
ignored. Each side sends at most `WINDOW` bytes of DATA beyond the CREDIT that it got. So a connection that nobody reads
only stops itself, and neither side has to wait for it before it reads the next frame.

A mark precedes the first frame, since nothing else on a terminal looks like it. That frame, of connection 0, holds the
port.
"""

import errno
import os
import selectors
import socket
import struct
import time
import tty

MARK = b"\0flash relay\0"
"""Bytes before the first frame, which nothing else on a terminal contains."""
HEADER = struct.Struct(">IBI")
"""Number of the connection, kind of the frame, and number of its bytes."""
COUNT = struct.Struct(">I")
"""Content of a CREDIT frame: a number of bytes."""
OPEN, DATA, END, CLOSED, CREDIT = range(5)
"""Kinds of frames; see the module's docstring."""
PIECE = 1 << 16
"""Most bytes of one frame."""
WINDOW = 1 << 17
"""Bytes of one connection that may be on their way in one direction: two pieces, so that the sender seldom waits."""
CONNECTIONS = 256
"""Most connections at a time. Another one is closed at once."""
PAUSE_S = 0.05
"""Seconds to wait if no descriptor is left for a new connection."""


class RelayedClient:
    """A connection of a program in the sandbox to the relay, which the host continues to the address."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.waiting = bytearray()
        """Bytes from the host that the program has not taken yet."""
        self.credit = WINDOW
        """Bytes that the host still accepts."""
        self.sends = True
        """True until the program has ended its side."""
        self.ended = False
        """True once the host sends no more bytes. The program's reading side is then ended after the waiting bytes."""
        self.given_up = False
        """True once the host has given the connection up. Bytes of the program are then read and dropped: if they were
        left, the program would get an error instead of the end of the stream."""


class Relay:
    """The relay with all connections of the loopback. The `number` of a connection names it in frames."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        """Selector of the terminal, the listener and the connections; `run` describes its data."""
        self.listener = socket.socket()
        """Socket at a free port of the loopback, where programs connect."""
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(64)
        # A program may leave before it is accepted; `accept` would then wait for the next one.
        self.listener.setblocking(False)
        self.clients: dict[int, RelayedClient] = {}
        """Connections by their numbers."""
        self.unread = bytearray()
        """Bytes from the host that are no complete frame yet."""
        self.last = 0
        """Number of the newest connection."""

    def run(self) -> None:
        """Report the port, and serve until the terminal ends, which it does when the host closes the relay.

        The selector's data of a descriptor is None for the terminal, 0 for the listener, and else the number of a
        connection.
        """
        tty.setraw(0)
        write(MARK)
        send(0, DATA, str(self.listener.getsockname()[1]).encode())
        self.selector.register(0, selectors.EVENT_READ, None)
        self.selector.register(self.listener, selectors.EVENT_READ, 0)
        while True:
            for key, events in self.selector.select():
                if key.data is None:
                    data = os.read(0, PIECE)
                    if not data:
                        return
                    self.process(data)
                elif key.data == 0:
                    self.accept()
                else:
                    if events & selectors.EVENT_WRITE and key.data in self.clients:
                        self.flush(key.data)
                    if events & selectors.EVENT_READ and key.data in self.clients:
                        self.receive(key.data)

    def accept(self) -> None:
        """Accept a connection, give it a number, and report it to the host."""
        try:
            stream, _ = self.listener.accept()
        except OSError as error:
            # The program has left already, or there is no descriptor for it. Then the listener stays readable, and the
            # loop would take a whole CPU without a pause.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(PAUSE_S)
            return
        if len(self.clients) >= CONNECTIONS:
            stream.close()
            return
        stream.setblocking(False)
        self.last += 1
        self.clients[self.last] = RelayedClient(stream)
        send(self.last, OPEN)
        self.watch(self.last)

    def receive(self, number: int) -> None:
        """Pass on the bytes that a program has sent, as many as the host accepts.

        The end of the program's side becomes an END frame. A connection that the program has broken is closed.
        """
        client = self.clients[number]
        try:
            # The credit is above 0, since `watch` asks for no events otherwise: `recv(0)` would look like an end.
            data = client.stream.recv(PIECE if client.given_up else min(PIECE, client.credit))
        except BlockingIOError:
            return
        except OSError:
            self.close(number)
            return
        if not data:
            client.sends = False
        if not client.given_up:
            client.credit -= len(data)
            send(number, DATA if data else END, data)
        self.watch(number)

    def process(self, data: bytes) -> None:
        """Process bytes from the host, and give complete frames to their connections.

        Frames of connections that are over are dropped, because the host may not know of the end yet.
        """
        self.unread += data
        while len(self.unread) >= HEADER.size:
            number, kind, size = HEADER.unpack_from(self.unread)
            if len(self.unread) < HEADER.size + size:
                return
            piece = bytes(self.unread[HEADER.size : HEADER.size + size])
            del self.unread[: HEADER.size + size]
            client = self.clients.get(number)
            if client is None:
                continue  # The program has closed it, which the host does not know yet.
            if kind == CREDIT:
                client.credit += COUNT.unpack(piece)[0]
                self.watch(number)
                continue
            client.waiting += piece
            client.ended = client.ended or kind in (END, CLOSED)
            client.given_up = client.given_up or kind == CLOSED
            self.flush(number)

    def flush(self, number: int) -> None:
        """Send a program as many of its waiting bytes as it takes, and then the end if the host has ended its side.

        The host gets credit for the bytes that were taken, unless it sends no more.
        """
        client = self.clients[number]
        try:
            count = client.stream.send(client.waiting) if client.waiting else 0
            del client.waiting[:count]
            if count and not client.ended:
                send(number, CREDIT, COUNT.pack(count))
            if client.ended and not client.waiting:
                client.stream.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self.close(number)
            return
        self.watch(number)

    def watch(self, number: int) -> None:
        """Let the selector report the events of a connection that the relay can handle now. Forget it if it is over.

        Must be called after each change of its credit, its waiting bytes, or its ends.
        """
        client = self.clients[number]
        if not client.sends and client.ended and not client.waiting:
            self.forget(number)
            return
        reads = client.sends and (client.credit > 0 or client.given_up)
        events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if client.waiting else 0)
        known = client.stream in self.selector.get_map()
        if events and known:
            self.selector.modify(client.stream, events, number)
        elif events:
            self.selector.register(client.stream, events, number)
        elif known:
            self.selector.unregister(client.stream)

    def close(self, number: int) -> None:
        """Give a connection up because the program has broken it, and report that: the host would keep its side."""
        if not self.clients[number].given_up:
            send(number, CLOSED)
        self.forget(number)

    def forget(self, number: int) -> None:
        """Close the socket of a connection, and drop its record."""
        client = self.clients.pop(number)
        if client.stream in self.selector.get_map():
            self.selector.unregister(client.stream)
        client.stream.close()


def send(number: int, kind: int, data: bytes = b"") -> None:
    """Send one frame to the host, which reads at all times. The module's docstring describes its parts."""
    write(HEADER.pack(number, kind, len(data)) + data)


def write(data: bytes) -> None:
    """Write all of `data` to the host."""
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    Relay().run()
