"""The choice of the node that gets the next leases. To *deal* is to distribute leases to waiting nodes. Pure state.

`NodeShares` decides how many of the available tasks each waiting node gets. `LeaseDealer` fills the nodes' replies by
these shares, and owns them. `flash.hub.work.NodeWork` owns the dealer. It calls `deal` whenever tasks may have become
available or nodes may have room, and wakes the nodes whose replies have got leases. To lease a task the dealer calls
`NodeWork._lease_next`. `NodeWork` and `flash.hub.nodes.WeightVersions` also change the shares.

The load of a node is its leases divided by the leases that it has room for, and shares make the loads equal. So the
engines of many nodes are filled like those of one node: a node with more engines gets more, and a node with slow
engines holds its leases longer and gets fewer.

Work conservation: all available tasks go to the nodes that wait, as far as these have room. A node that does not wait,
or cannot run the tasks, gets no share. There is one exception: a node that will soon ask keeps its share for at most
`KEPT_S`. This is a node that is loading the version which admits the tasks, or whose last reply was too short for its
whole share.

Many tasks are dealt in slices. The owner calls `deal` for the next slice after it has served other tasks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence

import msgspec

from flash.samples.leases import Holders
from flash.types import Lease

KEPT_S = 5.0
"""Seconds for which a share is kept for a node that will soon ask. Nodes may differ by this much in the time to load a
version. Without it, the first node that has loaded a version would take all tasks which the version admits. The limit
also bounds how long a node that hangs keeps its share from other nodes."""
LEASES_AT_ONCE = 256
"""Largest number of leases in one reply. Each lease takes some ten microseconds, and the node asks again at once."""
SLICE = 128
"""Number of leases after which a slice ends; the last reply of the slice is filled first."""


class _NodeRoom(msgspec.Struct):
    """Room of one node, and the reasons to keep a share for the node. Times are seconds on the caller's clock."""

    room: int = 0
    """Leases that the node can hold at once, as it last reported."""
    asked: int = 0
    """Number of tasks that the node waits for."""
    waits: bool = False
    """True if a request of the node waits for tasks."""
    no_engine: bool = False
    """True if the node has no engine now. It will report when an engine has loaded a version."""
    loads_until: float = -math.inf
    """A share is kept for the node until this time, or until the node has the newest version."""
    asks_until: float = -math.inf
    """A share is kept for the node until this time, or until the node asks again."""


class NodeLoad(msgspec.Struct, frozen=True):
    """Load of one node at a moment: the leases that it holds, and its room."""

    node: int
    held: int
    """Leases that the node holds."""
    room: int
    """Leases that the node can hold."""
    takes: bool = True
    """True if the node takes its share at once. Among equal loads such nodes come first."""


class NodeShares:
    """Decides how many of the available tasks each node gets. Times are seconds on the caller's clock.

    Args:
        held: returns the number of leases that a node holds.
        unit: number of tasks that go to one node together: 1, or the size of a whole group.
    """

    def __init__(self, held: Callable[[int], int], unit: int) -> None:
        self._held = held
        self._unit = unit
        self._nodes: dict[int, _NodeRoom] = {}
        self.kept_until = -math.inf
        """Time until which a share may be kept for a node. After it, all shares go to the waiting nodes."""

    def waits(self, node: int, capacity: int) -> None:
        """Note that a node waits for tasks, and could start `capacity` of them now."""
        known = self._nodes.setdefault(node, _NodeRoom())
        known.room, known.asked = self._held(node) + capacity, capacity
        known.waits, known.asks_until = True, -math.inf

    def set_capacity(self, node: int, capacity: int) -> None:
        """Update the room of a node that could start `capacity` tasks now, at least as many as it waits for."""
        if (known := self._nodes.get(node)) is not None:
            known.room = self._held(node) + max(capacity, known.asked if known.waits else 0)

    def stops_waiting(self, node: int) -> None:
        """Note that the request of a node was answered."""
        if node in self._nodes:
            self._nodes[node].waits = False

    def lost(self, node: int) -> None:
        """Forget a node that is gone or leaves."""
        self._nodes.pop(node, None)

    def version_published(self, now: float) -> None:
        """Keep the shares of all nodes that begin to load a new version."""
        self.kept_until = now + KEPT_S
        for known in self._nodes.values():
            known.loads_until = -math.inf if known.no_engine else self.kept_until

    def version_loaded(self, node: int) -> None:
        """Note that an engine of the node has the newest version."""
        if node in self._nodes:
            self._nodes[node].loads_until, self._nodes[node].no_engine = -math.inf, False

    def engines_died(self, node: int) -> None:
        """Note that the node has no engine. No share is kept for it until an engine has loaded a version."""
        if node in self._nodes:
            known = self._nodes[node]
            known.loads_until, known.asks_until, known.no_engine = -math.inf, -math.inf, True

    def reply_full(self, node: int, now: float) -> None:
        """Keep the part of a node's share for which its reply had no space, until the node asks again."""
        self.kept_until = now + KEPT_S
        known = self._nodes[node]
        known.waits, known.asks_until = False, self.kept_until

    @property
    def any_waiting(self) -> bool:
        """True if any node waits for tasks."""
        return any(known.waits for known in self._nodes.values())

    def compute(self, tasks: int, now: float, unable: Collection[int]) -> dict[int, int]:
        """Return the number of tasks that each waiting node gets now, the least loaded node first.

        Args:
            tasks: number of available tasks.
            now: the time.
            unable: nodes that can run none of the tasks that are left.
        """
        # A node for which a share is kept takes part, so that its share is left over, but is given nothing now.
        loads: list[NodeLoad] = []
        for node, known in self._nodes.items():
            takes = known.waits and node not in unable
            if takes or now < max(known.loads_until, known.asks_until):
                loads.append(NodeLoad(node, self._held(node), known.room, takes))
        if not any(load.takes for load in loads):
            return {}
        shares = equal_loads(loads, tasks, self._unit)
        given = sorted(
            (load.held / load.room, load.node, share)
            for load, share in zip(loads, shares, strict=True)
            if share and load.takes
        )
        return {node: share for _, node, share in given}


def equal_loads(loads: Sequence[NodeLoad], tasks: int, unit: int) -> list[int]:
    """Return the number of tasks that each node gets, so that the loads become as equal as they can.

    Tasks are given in whole units. All tasks are given as long as there is room. The last unit of a node may exceed its
    room.
    """
    level = _common_level(loads, tasks)
    shares = [max(0, math.floor((level * load.room - load.held) / unit)) * unit for load in loads]
    left = tasks - sum(shares)
    # Rounding down has left some tasks. Give them, unit by unit, to the node that then has the lowest load.
    heap = [
        ((load.held + share + unit) / load.room, not load.takes, load.node, at)
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
            heapq.heappush(heap, ((held + unit) / load.room, not load.takes, load.node, at))
    return shares


def _common_level(loads: Sequence[NodeLoad], tasks: int) -> float:
    """Return the load, at most 1, up to which these tasks fill all nodes that are below it."""
    room, wanted = 0, float(tasks)
    level = 0.0
    for load in sorted((load for load in loads if load.held < load.room), key=lambda load: load.held / load.room):
        if room and wanted <= load.held / load.room * room:
            break
        room += load.room
        wanted += load.held
        level = wanted / room
    return min(1.0, level)


class LeaseDealer:
    """Fills the replies of waiting nodes with leases, by their shares.

    Args:
        available: returns the number of tasks that a node with the newest version could get; perhaps too many, never
            too few.
        lease: leases the next task, or the next whole group, to a node; returns an empty list if there is none for it.
            This is `NodeWork._lease_next`.
        unit: number of tasks that go to one node together.
    """

    def __init__(self, available: Callable[[], int], lease: Callable[[int], list[Lease]], unit: int) -> None:
        self._available = available
        self._lease = lease
        self.holders = Holders()
        """Leases that each node holds."""
        self.shares = NodeShares(self.holders.held, unit)
        self._replies: dict[int, list[Lease]] = {}
        """Unfinished replies of the nodes that wait."""
        self._kept = self.shares.kept_until
        self.unfinished = False
        """True if the last slice has left tasks to deal."""

    def open_reply(self, node: int, capacity: int) -> list[Lease]:
        """Return an empty reply for a node that waits with room for `capacity` tasks. `deal` fills it."""
        self.shares.waits(node, capacity)
        self._replies[node] = reply = []
        return reply

    def close_reply(self, node: int, reply: list[Lease]) -> None:
        """Stop filling a reply. A later request of the node may have opened another one, which stays open."""
        if self._replies.get(node) is reply:
            del self._replies[node]
            self.shares.stops_waiting(node)

    def lost(self, node: int) -> list[Lease]:
        """Forget a node that is gone. Returns the leases that it held."""
        self._replies.pop(node, None)
        self.shares.lost(node)
        return self.holders.lost(node)

    def deal(self, now: float) -> list[int]:
        """Deal one slice of leases to the nodes that wait. Sets `unfinished` if tasks are left for another slice.

        Returns:
            The nodes to wake: nodes that have got leases. If the time has changed until which shares are kept for other
            nodes, all waiting nodes, since they have to wait for another moment.
        """
        self.unfinished = not self._deal_slice(now)
        if self.shares.kept_until != self._kept:
            self._kept = self.shares.kept_until
            return list(self._replies)
        return [node for node, reply in self._replies.items() if reply]

    def _deal_slice(self, now: float) -> bool:
        """Deal up to `SLICE` leases and the rest of the last share. Returns True if nothing is left to deal."""
        unable: set[int] = set()
        dealt = 0
        while self.shares.any_waiting and (tasks := self._available()):
            shares = self.shares.compute(tasks, now, unable)
            if not shares:
                break
            for node, share in shares.items():
                if dealt >= SLICE:
                    return False
                reply = self._replies[node]
                wanted = min(share, LEASES_AT_ONCE - len(reply))
                leases: list[Lease] = []
                while len(leases) < wanted and (more := self._lease(node)):
                    leases += more
                self.holders.lend(node, leases, now)
                reply += leases
                dealt += len(leases)
                if len(leases) < wanted:
                    unable.add(node)
                elif wanted < share:
                    self.shares.reply_full(node, now)
        return True
