"""Takeover by another host after the agent's host is gone. It must know the secret."""

import _socket
import os
import sys
from _operator import _compare_digest as compare_digest

from envs.sandbox.agent.proc import Stat

MAX_STRANGERS = 16
"""Most connections from inside that have not yet sent the secret. Commands can open any number of them."""


class Listener:
    """Waits for hosts. The address is bound before any command runs, so that no command can take it."""

    def __init__(self, agent: object, address: str) -> None:
        self.agent = agent
        self.strangers = 0
        """Connections from inside that have not sent the secret yet."""
        self.listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self.listener.bind("\0" + address)
        self.listener.listen(8)
        self.listener.setblocking(False)
        agent.loop.watch(self.listener.fileno(), self.accept)

    def accept(self) -> None:
        """Accept a connection, and let it take over if it sends the secret within 5 seconds."""
        try:
            # Not with the module `socket`, whose import takes as long as the start of Python.
            fd = self.listener._accept()[0]
            connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fd)
        except OSError:
            return
        inside = not from_outside(connection)
        if inside and self.strangers >= MAX_STRANGERS:
            connection.close()
            return
        secret = self.agent.options["secret"].encode()
        connection.setblocking(False)
        got = bytearray()

        def prove() -> None:
            """Compare the bytes received with the secret. A host that proves itself is connected."""
            try:
                piece = connection.recv(len(secret) - len(got))
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            got.extend(piece)
            if piece and len(got) < len(secret):
                return
            self.agent.loop.cancel(timer)
            self.strangers -= inside
            self.agent.loop.watch(connection.fileno())
            if compare_digest(bytes(got), secret):
                fd = os.dup(connection.fileno())
                connection.close()
                self.agent.connect(fd, fd)
            else:
                connection.close()

        def give_up() -> None:
            """Close a connection that did not send the secret in time."""
            self.strangers -= inside
            self.agent.loop.watch(connection.fileno())
            connection.close()

        self.strangers += inside
        timer = self.agent.loop.later(5, give_up)
        self.agent.loop.watch(connection.fileno(), prove)


def from_outside(connection: object) -> bool:
    """Return True if the peer was started by the engine: its parent is not a process of the sandbox.

    A command cannot fake this: a process of the sandbox that loses its parent becomes our child.
    """
    peer = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    try:
        return Stat(int.from_bytes(peer[:4], sys.byteorder)).parent == 0
    except (OSError, ValueError, IndexError):
        return False
