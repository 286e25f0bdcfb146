"""Dealing: how many of the tasks that can be had go to which node, and the filling of replies. Pure state.

The load of a node is the leases that it holds over those it has room for, and shares make the loads equal: the engines
of many nodes are filled like those of one, a node with more engines gets more, one with slow engines holds its leases
longer and gets fewer.

Work conserving: tasks go to whoever waits for them, as far as its room goes; a node that does not wait, or cannot run
them, takes nothing from the others. Only the share of a node that is about to ask is kept for it, `KEPT_S` at most: it
loads the version that admits the tasks, or its last reply was too short for all of its share.

A node asks, and its reply fills at the next deal that has a share for it. Many tasks are dealt in slices, of which the
owner calls for the rest: after each, the nodes that were dealt to have their shares. `holders` and `shares` are told of
all else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence

import msgspec

from flash.samples.leases import Holders
from flash.types import Lease

KEPT_S = 5.0
"""Seconds for which a share is kept: nodes may differ by so much in loading a version, and the first to have loaded it
would otherwise take all that it admits. A node that hangs keeps its share from the others no longer than this."""


class _Seat(msgspec.Struct):
    """One node."""

    room: int = 0
    """Leases that it could hold when it told last."""
    asked: int = 0
    """How many tasks it waits for."""
    waits: bool = False
    away: bool = False
    """It has no engine, and will say when it has one with a version."""
    loads_until: float = -math.inf
    """Its share is kept till then, unless it has the newest version earlier."""
    asks_until: float = -math.inf
    """Its share is kept till then, unless it asks earlier."""


class NodeShares:
    """See the module's docstring. Times are seconds on the caller's clock.

    Args:
        held: how many leases a node holds.
        unit: tasks that go to one node together.
    """

    def __init__(self, held: Callable[[int], int], unit: int) -> None:
        self._held = held
        self._unit = unit
        self._seats: dict[int, _Seat] = {}
        self.kept_until = -math.inf
        """When the last share that is kept for a node is given to the others."""

    def asks(self, node: int, capacity: int) -> None:
        """A node waits for tasks, of which it could start so many now."""
        seat = self._seats.setdefault(node, _Seat())
        seat.room, seat.asked = self._held(node) + capacity, capacity
        seat.waits, seat.asks_until = True, -math.inf

    def tells(self, node: int, capacity: int) -> None:
        """A node could start so many tasks now: more than it has asked for, or for the moment less."""
        if (seat := self._seats.get(node)) is not None:
            seat.room = self._held(node) + max(capacity, seat.asked if seat.waits else 0)

    def leaves(self, node: int) -> None:
        """A node does not wait any more."""
        if node in self._seats:
            self._seats[node].waits = False

    def lost(self, node: int) -> None:
        """A node is gone."""
        self._seats.pop(node, None)

    def loading(self, now: float) -> None:
        """A version is there: all nodes begin to load it."""
        self.kept_until = now + KEPT_S
        for seat in self._seats.values():
            seat.loads_until = -math.inf if seat.away else self.kept_until

    def loaded(self, node: int) -> None:
        """An engine of this node has the newest version."""
        if node in self._seats:
            self._seats[node].loads_until, self._seats[node].away = -math.inf, False

    def away(self, node: int) -> None:
        """This node has no engine: nothing is kept for it before it has loaded a version again."""
        if node in self._seats:
            seat = self._seats[node]
            seat.loads_until, seat.asks_until, seat.away = -math.inf, -math.inf, True

    def cut(self, node: int, now: float) -> None:
        """A node's reply is full: it will ask for the rest of its share."""
        self.kept_until = now + KEPT_S
        seat = self._seats[node]
        seat.waits, seat.asks_until = False, self.kept_until

    @property
    def waiting(self) -> bool:
        """Whether a node waits."""
        return any(seat.waits for seat in self._seats.values())

    def of(self, tasks: int, now: float, passed: Collection[int]) -> dict[int, int]:
        """How many of these tasks each waiting node is to get now, the least loaded node first.

        Args:
            tasks: how many can be had.
            now: the time.
            passed: nodes that can run none of those that are left.
        """
        loads: list[NodeLoad] = []
        for node, seat in self._seats.items():
            tries = seat.waits and node not in passed
            if tries or now < max(seat.loads_until, seat.asks_until):
                loads.append(NodeLoad(node, self._held(node), seat.room, tries))
        if not any(load.tries for load in loads):
            return {}
        shares = equal_loads(loads, tasks, self._unit)
        given = sorted(
            (load.held / load.room, load.node, share)
            for load, share in zip(loads, shares, strict=True)
            if share and load.tries
        )
        return {node: share for _, node, share in given}


class NodeLoad(msgspec.Struct, frozen=True):
    """What a node holds of what it could hold."""

    node: int
    held: int
    room: int
    tries: bool = True
    """Whether it takes its share at once; of nodes that are equal otherwise these come first."""


def equal_loads(loads: Sequence[NodeLoad], tasks: int, unit: int) -> list[int]:
    """How many of the tasks each node gets, so that the loads become as equal as they can.

    They are given in whole units, all of them as long as there is room. A node's last unit may be larger than its room.
    """
    level = _level(loads, tasks)
    shares = [max(0, math.floor((level * load.room - load.held) / unit)) * unit for load in loads]
    left = tasks - sum(shares)
    # What rounding down has left goes, unit by unit, where it makes the lowest load.
    heap = [
        ((load.held + share + unit) / load.room, not load.tries, load.node, at)
        for at, (load, share) in enumerate(zip(loads, shares, strict=True))
        if load.held + share < load.room
    ]
    heapq.heapify(heap)
    while left > 0 and heap:
        *_, at = heapq.heappop(heap)
        shares[at] += unit
        left -= unit
        load, held = loads[at], loads[at].held + shares[at]
        if held < load.room:
            heapq.heappush(heap, ((held + unit) / load.room, not load.tries, load.node, at))
    return shares


def _level(loads: Sequence[NodeLoad], tasks: int) -> float:
    """The load, at most 1, that the less loaded nodes have when they have got the tasks."""
    room, wanted = 0, float(tasks)
    level = 0.0
    for load in sorted((load for load in loads if load.held < load.room), key=lambda load: load.held / load.room):
        if room and wanted <= load.held / load.room * room:
            break
        room += load.room
        wanted += load.held
        level = wanted / room
    return min(1.0, level)


LEASES_AT_ONCE = 256
"""Leases of one reply: each takes some ten microseconds, and the node asks again at once."""
SLICE = 128
"""Leases after which a slice ends; the last reply is filled first."""


class LeaseDealer:
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
        self.shares = NodeShares(self.holders.held, unit)
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
