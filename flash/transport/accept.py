"""Taking connections from a port that strangers may reach.

Law: who has not proven the token yet holds little, and not for long. At most `STRANGERS` such connections are open; one
more ends the oldest. A process that runs out of descriptors takes no connections for a moment and says so; those that
stand are served on.
"""

from __future__ import annotations

import errno
import logging
import resource
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any

import anyio
from anyio.abc import SocketListener, SocketStream, TaskGroup

STRANGERS = 256
"""Unproven connections at a time: a proof takes two round trips, so that even a thousand nodes at once get through."""
PAUSE_S = 0.5
"""Seconds without accepting after the process, or the machine, ran out of something."""
SAID_AGAIN_S = 60.0
"""Seconds in which one thing is said so often as `Sayings` allows: strangers must not fill a disk with our log."""

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What accept() fails with until something else is closed."""

_log = logging.getLogger(__name__)


def raise_descriptor_limit() -> None:
    """Let this process, and what it starts, open as many files and connections as the system grants it.

    The usual soft limit of 1,024 is less than a large run's connections.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:  # some systems grant less than they name
        _log.debug("the limit of open files stays as it is: %s", error)


class Sayings:
    """Log lines about strangers: `most` in `SAID_AGAIN_S` seconds, the rest only counted."""

    def __init__(self, now: Callable[[], float], most: int) -> None:
        self._now = now
        self._most = most
        self._since = now()
        self._said = 0

    def warn(self, message: str, *args: object) -> None:
        """Say it, unless too much was said lately."""
        now = self._now()
        if now - self._since >= SAID_AGAIN_S:
            if self._said > self._most:
                _log.warning("%d more lines of this kind were left out", self._said - self._most)
            self._since, self._said = now, 0
        self._said += 1
        if self._said <= self._most:
            _log.warning(message, *args)


class Strangers:
    """The connections that have not proven the token yet, oldest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._scopes: dict[anyio.CancelScope, None] = {}

    @contextmanager
    def one(self) -> Generator[anyio.CancelScope]:
        """The time in which a connection is a stranger's; its scope is cancelled to make room for a newer one."""
        while len(self._scopes) >= self._most:
            self.end_oldest()
        with anyio.CancelScope() as scope:
            self._scopes[scope] = None
            try:
                yield scope
            finally:
                self._scopes.pop(scope, None)

    def end_oldest(self) -> None:
        """Cancel the one that has waited longest, if there is one."""
        oldest = next(iter(self._scopes), None)
        if oldest is not None:
            del self._scopes[oldest]
            oldest.cancel()


async def accept_all(
    listener: SocketListener,
    serve: Callable[[SocketStream], Coroutine[Any, Any, None]],
    tasks: TaskGroup,
    strangers: Strangers,
    sayings: Sayings,
) -> None:
    """Serve each connection in a task of its own.

    Consumes connections. Waits for the next one, for as long as the server lives, or a moment where there is no room.
    Unblocked by a client. Produces tasks.
    """
    while True:
        try:
            stream = await listener.accept()
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            strangers.end_oldest()
            sayings.warn(
                "no connections are taken for %g s: %s; let this process open more files (`ulimit -n`)",
                PAUSE_S,
                error.strerror,
            )
            await anyio.sleep(PAUSE_S)
        else:
            tasks.start_soon(serve, stream)
