"""The share of the available tasks that each node gets. Pure state: it owns no tasks, clocks or files.

A *lease* assigns one task to one node. The *load* of a node is the number of its leases, divided by the number that it
has room for. `NodeShares` divides the available tasks so that all loads become equal. So a node with more engines gets
more leases, and a node with slow engines, which holds its leases longer, gets fewer.

A share is also *kept*, for at most `KEPT_S`, for a node that will soon ask: the node is loading the version that the
tasks need, or its last reply had no space for its whole share. `flash.hub.work.NodeWork` and
`flash.hub.nodes.WeightVersions` report each event that changes the shares. `NodeWork` asks for the shares when it
grants leases.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence

import msgspec

KEPT_S = 5.0
"""Seconds for which a share is kept for a node that will soon ask. Nodes may differ by this much in the time to load a
version. If no share was kept, the first node that has loaded a version would take all tasks that need this version. The
limit also bounds how long a node that hangs keeps its share from other nodes."""


class _NodeRoom(msgspec.Struct):
    """Room of one node, and the reasons to keep a share for the node. Times are seconds on the caller's clock."""

    room: int = 0
    """Number of leases that the node can hold at once, from its last report."""
    requested: int = 0
    """Number of tasks that the last request of the node could take."""
    waiting: bool = False
    """True if a request of the node waits for tasks."""
    no_engine: bool = False
    """True if no engine of the node has a version now. The node will report when an engine has loaded one."""
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
        """Nodes that have asked for tasks and are not lost."""
        self.kept_until = -math.inf
        """Time until which a share may be kept for some node. After this time, all shares go to the waiting nodes."""

    def node_waits(self, node: int, capacity: int) -> None:
        """Record that a request of a node waits for tasks. The node could start `capacity` of them now."""
        known = self._nodes.setdefault(node, _NodeRoom())
        known.room, known.requested = self._held(node) + capacity, capacity
        known.waiting, known.asks_until = True, -math.inf

    def stops_waiting(self, node: int) -> None:
        """Record that no request of the node waits any more."""
        if node in self._nodes:
            self._nodes[node].waiting = False

    def set_capacity(self, node: int, capacity: int) -> None:
        """Update the room of a node that has delivered results, and could start `capacity` tasks now.

        A request of the node may wait for more than `capacity` tasks, because the node has sent the two messages at
        different times. Then the number in the request counts. An unknown node changes nothing.
        """
        if (known := self._nodes.get(node)) is not None:
            known.room = self._held(node) + max(capacity, known.requested if known.waiting else 0)

    def remove(self, node: int) -> None:
        """Remove a node that is lost or leaves the run. The node gets no share any more."""
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
        """Keep the rest of a node's share until the node asks again, because its reply had no space for the rest.

        The node then counts as one that does not wait, so that it gets nothing more in this reply.
        """
        self.kept_until = now + KEPT_S
        known = self._nodes[node]
        known.waiting, known.asks_until = False, self.kept_until

    @property
    def any_waiting(self) -> bool:
        """True if any node waits for tasks."""
        return any(known.waiting for known in self._nodes.values())

    def compute(self, tasks: int, now: float, unable: Collection[int]) -> dict[int, int]:
        """Return the number of tasks that each waiting node gets now, the least loaded node first.

        Args:
            tasks: number of available tasks.
            now: the present time.
            unable: nodes that can run none of the tasks that are left.

        Returns:
            The number of tasks by node. Nodes without a share are left out. Empty if no waiting node can get a task.
        """
        # A node for which a share is kept counts in the division, so that no other node gets its share. The node itself
        # gets nothing now.
        loads: list[NodeLoad] = []
        for node, known in self._nodes.items():
            takes = known.waiting and node not in unable
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

    Tasks are given in groups of `unit` tasks that stay together. All tasks are given as long as there is room. The last
    unit of a node may exceed its room, because a unit is never divided.
    """
    level = _common_level(loads, tasks)
    shares = [max(0, math.floor((level * load.room - load.held) / unit)) * unit for load in loads]
    left = tasks - sum(shares)
    # Rounding down has left some tasks. Give them, unit by unit, to the node that then has the lowest load. An entry of
    # the heap has that load and the index of the node in `loads`. Between equal loads, nodes that take their share now
    # come first, and then lower numbers.
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
    """Return the load that the tasks give to all nodes with a lower load, if nothing is rounded.

    The result is at most 1, which is the load of a full node. `equal_loads` rounds the share that brings each node to
    this level.
    """
    room, wanted = 0, float(tasks)
    level = 0.0
    # Take in one node after the other, the least loaded first. `level` is the load that these nodes reach with all
    # tasks, and `wanted` is the tasks plus their leases. Stop before a node whose load is already higher than `level`.
    for load in sorted((load for load in loads if load.held < load.room), key=lambda load: load.held / load.room):
        if room and wanted <= load.held / load.room * room:
            break
        room += load.room
        wanted += load.held
        level = wanted / room
    return min(1.0, level)
