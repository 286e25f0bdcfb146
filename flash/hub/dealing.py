"""The choice of the node that gets the next leases. To *deal* is to distribute leases to waiting nodes.

A lease is the right and the duty of a node to run one task. `Holders` records which node holds which lease.
`NodeShares` decides how many of the available tasks each waiting node gets. `LeaseDealer` owns both, and fills the
replies to the nodes by these shares. It calls `NodeWork._lease_next` to lease a task. All three are pure state: they
own no anyio task, clock or file.

`flash.hub.work.NodeWork` owns the dealer. It calls `deal` whenever tasks may have become available or nodes may have
room, and wakes the nodes whose replies have leases. `NodeWork` and `flash.hub.nodes.WeightVersions` also report to
`NodeShares` each event that changes the shares.

The load of a node is the number of its leases, divided by the number that it has room for. Shares make the loads equal.
So a node with more engines gets more leases. A node with slow engines holds its leases longer, so it gets fewer.

Invariant: no task waits while a waiting node could run it. All available tasks go to the waiting nodes, as far as these
have room. There is one exception: a share is kept, for at most `KEPT_S`, for a node that will soon ask. Such a node is
loading the version that the tasks need, or its last reply had no space for its whole share.

Many tasks are dealt in slices, so that the hub can do other work in between. If a slice was full, `NodeWork` calls
`deal` again later.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice, takewhile

import msgspec

from flash.types import Lease

KEPT_S = 5.0
"""Seconds for which a share is kept for a node that will soon ask. Nodes may differ by this much in the time to load a
version. If no share was kept, the first node that has loaded a version would take all tasks that need this version. The
limit also bounds how long a node that hangs keeps its share from other nodes."""
LEASES_AT_ONCE = 256
"""Largest number of leases in one reply, so that one reply takes only a few milliseconds: granting a lease takes some
ten microseconds. The node asks for the rest of its share at once."""
SLICE = 128
"""Number of leases after which a slice ends. A slice may have more leases, because the reply that is being filled when
this number is reached still gets its whole share, up to `LEASES_AT_ONCE`."""


class Holders:
    """Records which node holds which lease, and which leases each node has to cancel.

    It has training and evaluation leases alike. The sample buffer and the evaluations know the tasks that are leased,
    but need not know the nodes.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Lease, float]] = {}
        """Node, lease, and time at which it was granted, by the number of the lease, in the order of the times."""
        self._of_node: dict[int, dict[int, Lease]] = {}
        """Leases of each node, by the number of the lease."""
        self._cancels: dict[int, list[int]] = {}
        """Numbers of the leases to cancel, by node."""

    def granted(self, node: int, leases: Iterable[Lease], now: float) -> None:
        """Record that a node was given leases at the time `now`."""
        for lease in leases:
            self._held[lease.lease_id] = node, lease, now
            self._of_node.setdefault(node, {})[lease.lease_id] = lease

    def held(self, node: int) -> int:
        """Return the number of leases that a node holds."""
        return len(self._of_node.get(node, ()))

    def granted_before(self, then: float) -> list[tuple[int, Lease]]:
        """Return the leases that were granted before a time, each with its node. The hub takes back those that hang."""
        held = self._held.values()
        return [(node, lease) for node, lease, _ in takewhile(lambda each: each[2] < then, held)]

    def oldest(self, most: int) -> list[tuple[int, Lease, float]]:
        """Return the `most` oldest leases, each with its node and the time at which it was granted."""
        return list(islice(self._held.values(), most))

    def oldest_of(self, node: int) -> float | None:
        """Return the time at which the oldest lease of a node was granted; None if the node holds no lease."""
        first = next(iter(self._of_node.get(node, ())), None)
        return None if first is None else self._held[first][2]

    def ended(self, lease_id: int) -> None:
        """Record that a lease is over: its result was delivered, or the hub has taken it back.

        An unknown lease is ignored.
        """
        if (held := self._held.pop(lease_id, None)) is not None:
            del self._of_node[held[0]][lease_id]

    def lost(self, node: int) -> list[Lease]:
        """Forget a node that is gone, and the leases that it should have cancelled. Returns the leases that it held."""
        self._cancels.pop(node, None)
        leases = list(self._of_node.pop(node, {}).values())
        for lease in leases:
            del self._held[lease.lease_id]
        return leases

    def withdraw(self, lease_ids: Iterable[int]) -> set[int]:
        """Record that the nodes of these leases have to cancel them. Returns the nodes.

        Leases that no node holds any more are ignored.
        """
        nodes: set[int] = set()
        for lease_id in lease_ids:
            if lease_id in self._held:
                node = self._held[lease_id][0]
                self._cancels.setdefault(node, []).append(lease_id)
                nodes.add(node)
        return nodes

    def has_cancels(self, node: int) -> bool:
        """Return True if a node has leases to cancel."""
        return node in self._cancels

    def take_cancels(self, node: int) -> list[int]:
        """Return the leases that a node has to cancel, and forget them, because a node is notified once."""
        return self._cancels.pop(node, [])


class _NodeRoom(msgspec.Struct):
    """Room of one node, and the reasons to keep a share for the node. Times are seconds on the caller's clock."""

    room: int = 0
    """Number of leases that the node can hold at once, from its last report."""
    asked: int = 0
    """Number of tasks that the last request of the node could take."""
    waits: bool = False
    """True if a request of the node waits for tasks."""
    no_engine: bool = False
    """True if the node has no engine now. It will report when an engine has loaded a version."""
    loads_until: float = -math.inf
    """A share is kept for the node until this time, or until the node has the newest version."""
    asks_until: float = -math.inf
    """A share is kept for the node until this time, or until the node asks again."""


class NodeLoad(msgspec.Struct, frozen=True):
    """Load of one node at one moment: the leases that the node holds, and its room."""

    node: int
    held: int
    """Number of leases that the node holds."""
    room: int
    """Number of leases that the node can hold."""
    takes: bool = True
    """True if the node takes its share now; False if the share is kept for it. If two loads are equal, a node that
    takes its share is served before a node that does not."""


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
        """Time until which a share may be kept for some node. After this time, all shares go to the waiting nodes."""

    def waits(self, node: int, capacity: int) -> None:
        """Record that a request of a node waits for tasks. The node could start `capacity` of them now."""
        known = self._nodes.setdefault(node, _NodeRoom())
        known.room, known.asked = self._held(node) + capacity, capacity
        known.waits, known.asks_until = True, -math.inf

    def set_capacity(self, node: int, capacity: int) -> None:
        """Update the room of a node that could start `capacity` tasks now.

        While a request of the node waits for more tasks than that, the number of the request counts. An unknown node
        changes nothing.
        """
        if (known := self._nodes.get(node)) is not None:
            known.room = self._held(node) + max(capacity, known.asked if known.waits else 0)

    def stops_waiting(self, node: int) -> None:
        """Record that no request of the node waits any more."""
        if node in self._nodes:
            self._nodes[node].waits = False

    def lost(self, node: int) -> None:
        """Remove a node that is lost or leaves the run. It gets no share any more."""
        self._nodes.pop(node, None)

    def version_published(self, now: float) -> None:
        """Keep a share for each node that has an engine, because these nodes begin to load a new version."""
        self.kept_until = now + KEPT_S
        for known in self._nodes.values():
            known.loads_until = -math.inf if known.no_engine else self.kept_until

    def version_loaded(self, node: int) -> None:
        """Record that an engine of the node has the newest version, so that no share is kept for the node."""
        if node in self._nodes:
            self._nodes[node].loads_until, self._nodes[node].no_engine = -math.inf, False

    def engines_died(self, node: int) -> None:
        """Record that the node has no engine. No share is kept for the node until an engine has loaded a version."""
        if node in self._nodes:
            known = self._nodes[node]
            known.loads_until, known.asks_until, known.no_engine = -math.inf, -math.inf, True

    def reply_full(self, node: int, now: float) -> None:
        """Keep the rest of a node's share until the node asks again, because its reply had no space for the rest."""
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
            now: the present time.
            unable: nodes that can run none of the tasks that are left.

        Returns:
            The number of tasks by node. Nodes without a share are left out. Empty if no waiting node can get a task.
        """
        # A node for which a share is kept counts in the division, so that nobody else gets its share. The node itself
        # gets nothing now.
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
    """Return the common load that the tasks give to all nodes with a lower load; at most 1, which is a full node."""
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
        available: returns the number of tasks that a node with the newest version could get. The number may be too
            high, but is never too low.
        lease: leases the next task, or the next whole group, to a node. It returns an empty list if there is no task
            that this node can run. `NodeWork._lease_next` is this function.
        unit: number of tasks that go to one node together.
    """

    def __init__(self, available: Callable[[], int], lease: Callable[[int], list[Lease]], unit: int) -> None:
        self._available = available
        self._lease = lease
        self.holders = Holders()
        """Leases that each node holds."""
        self.shares = NodeShares(self.holders.held, unit)
        self._replies: dict[int, list[Lease]] = {}
        """Replies to the waiting nodes, to which `deal` still appends leases, by node."""
        self._kept = self.shares.kept_until
        """Value of `shares.kept_until` after the last `deal`. If it has changed, all waiting nodes are woken."""
        self.unfinished = False
        """True if the last slice ended because it was full. Then the owner has to call `deal` again."""

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
        """Remove a node that is lost. Returns the leases that the node held."""
        self._replies.pop(node, None)
        self.shares.lost(node)
        return self.holders.lost(node)

    def deal(self, now: float) -> list[int]:
        """Deal one slice of leases to the waiting nodes.

        Sets `unfinished` to True if the slice ended because it was full, and to False otherwise. Tasks that no waiting
        node can take do not make it True.

        Returns:
            The nodes to wake. These are the nodes whose open reply has leases, from this slice or an earlier one. If
            `shares.kept_until` has changed since the last call, all waiting nodes are returned: the request of each
            sleeps until that time (`NodeWork._wait_for_leases`), and has to learn the new time.
        """
        self.unfinished = not self._deal_slice(now)
        if self.shares.kept_until != self._kept:
            self._kept = self.shares.kept_until
            return list(self._replies)
        return [node for node, reply in self._replies.items() if reply]

    def _deal_slice(self, now: float) -> bool:
        """Deal leases until `SLICE` is reached. The reply that is being filled then still gets its whole share.

        Returns False if the slice is full, and True if no more tasks can be dealt now.
        """
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
                self.holders.granted(node, leases, now)
                reply += leases
                dealt += len(leases)
                if len(leases) < wanted:
                    # The node cannot run any task that is left, for example because it lacks the version for it.
                    unable.add(node)
                elif wanted < share:
                    self.shares.reply_full(node, now)
        return True
