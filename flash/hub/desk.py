"""LeaseDesk: the nodes that wait for leases, those that hold some, and the dealing of what can be had. Pure state.

A node asks, and its reply fills at the next deal that has a share for it. Many tasks are dealt in slices, of which the
owner calls for the rest: after each, the nodes that were dealt to have their shares. `holders` and `shares` are told of
all else.
"""

from __future__ import annotations

from collections.abc import Callable

from flash.hub.leases import Holders
from flash.hub.shares import Shares
from flash.types import Lease

LEASES_AT_ONCE = 256
"""Leases of one reply: each takes some ten microseconds, and the node asks again at once."""
SLICE = 128
"""Leases after which a slice ends; the last reply is filled first."""


class LeaseDesk:
    """See the module's docstring.

    Args:
        at_hand: tasks that a node with the newest version could be given; perhaps some too many, never too few.
        lease: leases the next task to a node, or a whole group; none if there is nothing for it.
        unit: tasks that go to one node together.
    """

    def __init__(self, at_hand: Callable[[], int], lease: Callable[[int], list[Lease]], unit: int) -> None:
        self._at_hand = at_hand
        self._lease = lease
        self.holders = Holders()
        self.shares = Shares(self.holders.held, unit)
        self._replies: dict[int, list[Lease]] = {}
        """What the nodes that wait have got."""
        self._kept = self.shares.kept_until
        self.unfinished = False
        """Whether the last slice has left something to deal."""

    def asks(self, node: int, capacity: int) -> list[Lease]:
        """A node waits, with places for so many; returns the reply that fills."""
        self.shares.asks(node, capacity)
        self._replies[node] = reply = []
        return reply

    def leaves(self, node: int, reply: list[Lease]) -> None:
        """A node takes its reply, and waits no more."""
        if self._replies.get(node) is reply:
            del self._replies[node]
            self.shares.leaves(node)

    def lost(self, node: int) -> list[Lease]:
        """A node is gone; returns what it held."""
        self._replies.pop(node, None)
        self.shares.lost(node)
        return self.holders.lost(node)

    def deal(self, now: float) -> list[int]:
        """Give nodes that wait their shares, a slice at a time, until nothing is left that one of them could run.

        Returns the nodes that are to be woken: they have got something, or shares are kept for others from now on.
        """
        self.unfinished = not self._slice(now)
        if self.shares.kept_until != self._kept:
            self._kept = self.shares.kept_until
            return list(self._replies)
        return [node for node, reply in self._replies.items() if reply]

    def _slice(self, now: float) -> bool:
        """Deal so many leases; tells whether nothing is left to deal."""
        passed: set[int] = set()
        given = 0
        while self.shares.waiting and (tasks := self._at_hand()):
            shares = self.shares.of(tasks, now, passed)
            if not shares:
                break
            for node, share in shares.items():
                if given >= SLICE:
                    return False
                got, most = self._give(node, share, now)
                given += got
                if got < most:
                    passed.add(node)
        return True

    def _give(self, node: int, share: int, now: float) -> tuple[int, int]:
        """Lend a node its share as far as its reply has space; returns how much it got, of how much it could have."""
        reply = self._replies[node]
        most = min(share, LEASES_AT_ONCE - len(reply))
        given: list[Lease] = []
        while len(given) < most and (leases := self._lease(node)):
            given += leases
        self.holders.lend(node, given, now)
        reply += given
        if most <= len(given) and most < share:
            self.shares.cut(node, now)
        return len(given), most
