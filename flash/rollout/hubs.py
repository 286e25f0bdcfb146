"""Hubs: the hubs that a node serves, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import anyio

from flash.errors import TransportError
from flash.hub import protocol as p
from flash.transport.frames import ReplyT, Request


class HubLink(NamedTuple):
    """A hub, and who we are there."""

    node: int
    first_engine: int
    """The number of our first engine."""
    hub: p.HubCaller


class Hubs:
    """The hub of now, or waiting for the next one.

    A call that the loss of a hub has ended is made anew to the next one, as that one needs it.

    Args:
        link: the first one.
        on_loss: told once of each hub that is lost, and brings the next one within a deadline of its own, or ends the
            node; None: the loss of the hub ends the calls.
    """

    def __init__(self, link: HubLink, on_loss: Callable[[TransportError], None] | None) -> None:
        self._link: HubLink | None = link
        self._on_loss = on_loss
        self._came = anyio.Event()
        self.node = link.node
        """Our number at the last one."""

    def moved(self, link: HubLink) -> None:
        """This is the next one; all that waits goes there."""
        self._link, self.node = link, link.node
        self._came.set()

    async def call(self, make: Callable[[int], Request[ReplyT]], seconds: float) -> ReplyT:
        """The answer of the hub, or of the one after it.

        Args:
            make: the request of the node of a number; made again for each hub.
            seconds: for each of them to answer.

        Raises:
            FlashError: as of `HubCaller.call`; the loss of the hub only where none comes after it.
        """
        while True:
            link = self._link
            if link is None:
                await self._came.wait()
                continue
            try:
                return await link.hub.call(make(link.node), seconds)
            except TransportError as error:
                if self._on_loss is None or error.fatal:
                    raise
                if self._link is link:
                    self._link, self._came = None, anyio.Event()
                    self._on_loss(error)
