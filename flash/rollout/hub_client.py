"""HubClient: a node's connection to the hub, and the leases that the node holds.

The scheduler takes leases from here (`lease`) and hands results back (`deliver`). Each becomes a request of
`flash.hub.protocol`, which `flash.transport.client.Client.call` sends to the hub. A run may have several hubs, one
after the other, and a node may outlive its hub: calls that the loss of a hub has ended are repeated at the next one.

Conservation: a granted lease is held until a hub has acknowledged its result, or until the next hub does not know it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import anyio

from flash.errors import TransportError
from flash.hub import protocol as p
from flash.transport.frames import ReplyT, Request
from flash.types import Lease


class HubLink(NamedTuple):
    """Connection to one hub, and the numbers that the node has there."""

    node: int
    """Number of the node."""
    first_engine: int
    """Number of the node's first engine among all engines of the run."""
    hub: p.HubCaller
    """Sends requests to the hub."""


class HubClient:
    """See the module's docstring. Implements `scheduler.LeaseSource`.

    Args:
        link: connection to the first hub.
        on_loss: called once for each hub that is lost. Within a deadline of its own it must connect to the next hub and
            call `connected`, or end the node. None: the loss of the hub ends all calls with an error.
        request_s: seconds that a hub has to answer a request.
    """

    def __init__(self, link: HubLink, on_loss: Callable[[TransportError], None] | None, request_s: float) -> None:
        self._link: HubLink | None = link
        self._on_loss = on_loss
        self._request_s = request_s
        self._reconnected = anyio.Event()
        self._held: dict[int, Lease] = {}
        self.node = link.node
        """Number of the node at the newest hub."""

    def connected(self, link: HubLink) -> None:
        """Use the next hub. Calls that wait for one are sent to it."""
        self._link, self.node = link, link.node
        self._reconnected.set()

    async def call(self, make_request: Callable[[int], Request[ReplyT]], seconds: float | None = None) -> ReplyT:
        """Send a request to the hub, or to the next one if this one is lost, and return the reply.

        Args:
            make_request: makes the request, given the node's number; called again for each hub.
            seconds: time that each hub has to answer; None: `request_s`.

        Raises:
            FlashError: the hub refuses the request, or the hub is lost and no other hub can follow it.
        """
        seconds = self._request_s if seconds is None else seconds
        while True:
            link = self._link
            if link is None:
                await self._reconnected.wait()
                continue
            try:
                return await link.hub.call(make_request(link.node), seconds)
            except TransportError as error:
                if self._on_loss is None or error.fatal:
                    raise
                # Several calls fail with one hub: only the first of them reports the loss.
                if self._link is link:
                    self._link, self._reconnected = None, anyio.Event()
                    self._on_loss(error)

    # -- leases ------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> list[Lease]:
        """Leases whose results no hub has acknowledged."""
        return list(self._held.values())

    def holds(self, lease_id: int) -> bool:
        """Return True if the hub waits for the result of this lease."""
        return lease_id in self._held

    async def lease(self, capacity: int) -> list[Lease] | None:
        """Ask the hub for at most `capacity` leases. Returns None when there will be no more."""
        reply = await self.call(lambda node: p.LeaseRequest(node, capacity))
        if reply.done:
            return None
        self._held |= {lease.lease_id: lease for lease in reply.leases}
        return reply.leases

    async def deliver(self, ended: list[p.EndedLease], capacity: int) -> None:
        """Send results to the hub, and how many leases could start now. Returns when the hub has acknowledged them."""

        def make_request(node: int) -> p.DeliverRequest:
            # Some of the leases may have been forgotten while the call waited for the next hub.
            return p.DeliverRequest(node, [each for each in ended if self.holds(each.lease_id)], capacity)

        await self.call(make_request)
        self.forget(each.lease_id for each in ended)

    def forget(self, lease_ids: Iterable[int]) -> None:
        """Hold these leases no longer: the hub has their results, or does not know them."""
        for lease_id in lease_ids:
            self._held.pop(lease_id, None)
