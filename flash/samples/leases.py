"""Leases: which tasks wait, in order, and who has the others. Pure state.

Training and evaluation keep a `LeaseTable` each. Every task on its way is either queued there or out on one lease. A
lease that was withdrawn is out no more; the reason is kept until its node reports what it had generated. `Holders`
knows which node has which lease, of both.

Queued tasks stand in lines, one for each set of nodes on which they have failed. A node that avoids some of them
looks at the heads of the lines, of which there are few, and not at the tasks, of which there are many.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice, takewhile

import msgspec

from flash.samples.groups import Member
from flash.types import RETRIED, Lease, Outcome, Task


def as_issued(task: Task) -> QueuePlace:
    """Tasks go out in the order of their issue, and one that comes back keeps its place."""
    return task.group_id, task.sample_index


def failed_last(task: Task) -> QueuePlace:
    """As issued, but tasks that have failed go out after all that have not."""
    return task.attempt, task.group_id, task.sample_index


class LeaseTable:
    """See the module's docstring.

    Args:
        ids: numbers for the leases, which no other table gives.
        retries: attempts beyond the first at a task that fails for a reason of the infrastructure.
        place: the order of the queue.
    """

    def __init__(self, ids: Iterator[int], retries: int, place: Callable[[Task], QueuePlace]) -> None:
        self.ids = ids
        self._retries = retries
        self.queue = TaskQueue(place)
        """Tasks that wait."""
        self.out: dict[int, Member] = {}
        """Tasks that nodes are working on, by their leases."""
        self.reasons: dict[int, Outcome] = {}
        """Why leases were withdrawn whose nodes have not reported yet."""
        self.withdrawn: list[int] = []
        """Leases that have become pointless, to be cancelled on their nodes: the owner empties it."""

    def put(self, member: Member) -> None:
        """A task waits, at its place."""
        member.state = "queued"
        self.queue.put(member)

    def grant(self, member: Member, floor: int, number: int) -> Lease:
        """A waiting task goes out, on a lease of this number."""
        self.queue.take(member)
        self.out[number] = member
        member.state, member.lease_id, member.floor = "leased", number, floor
        return Lease(number, member.task, floor)

    def again(self, member: Member, outcome: Outcome, node: int) -> bool:
        """A task that came home failed on a node: queue it again, or tell that it is to be given up.

        A cancelled one is always queued again, one that the infrastructure failed as long as it has attempts left.
        """
        if outcome is not Outcome.CANCELLED:
            if outcome not in RETRIED or member.task.attempt >= self._retries:
                return False
            member.task = msgspec.structs.replace(member.task, attempt=member.task.attempt + 1)
            member.avoid += (node,)
        self.put(member)
        return True

    def revoke(self, lease_id: int) -> Member | None:
        """A lease's node is gone: its task, which is returned, queues again. None: the lease was withdrawn."""
        if (member := self.out.pop(lease_id, None)) is None:
            self.reason(lease_id)
            return None
        self.put(member)
        return member

    def remove(self, member: Member, reason: Outcome) -> None:
        """A task neither waits any more nor is out; a lease that still is will be withdrawn."""
        if member.state == "queued":
            self.queue.take(member)
        elif member.state == "leased" and self.out.pop(member.lease_id, None) is not None:
            self.reasons[member.lease_id] = reason
            self.withdrawn.append(member.lease_id)

    def reason(self, lease_id: int) -> Outcome:
        """Why a lease that is not out was withdrawn; asked once."""
        return self.reasons.pop(lease_id, Outcome.CANCELLED)


class Holders:
    """Which node holds which lease, and which of them it is still to be told to cancel."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Lease, float]] = {}
        """In the order in which they were lent."""
        self._of_node: dict[int, dict[int, Lease]] = {}
        self._cancels: dict[int, list[int]] = {}

    def lend(self, node: int, leases: Iterable[Lease], now: float) -> None:
        """A node was given leases."""
        for lease in leases:
            self._held[lease.lease_id] = node, lease, now
            self._of_node.setdefault(node, {})[lease.lease_id] = lease

    def held(self, node: int) -> int:
        """How many leases a node holds."""
        return len(self._of_node.get(node, ()))

    def lent_before(self, then: float) -> list[tuple[int, Lease]]:
        """Leases that have been out since before a time, with their nodes."""
        held = self._held.values()
        return [(node, lease) for node, lease, _ in takewhile(lambda each: each[2] < then, held)]

    def oldest(self, most: int) -> list[tuple[int, Lease, float]]:
        """The leases that have been out longest, each with its node and since when."""
        return list(islice(self._held.values(), most))

    def oldest_of(self, node: int) -> float | None:
        """Since when a node has had the oldest of its leases."""
        first = next(iter(self._of_node.get(node, ())), None)
        return None if first is None else self._held[first][2]

    def ended(self, lease_id: int) -> None:
        """A node has handed a lease over, known here or not."""
        if (held := self._held.pop(lease_id, None)) is not None:
            del self._of_node[held[0]][lease_id]

    def lost(self, node: int) -> list[Lease]:
        """A node is gone: the leases that it held, whose cancels are forgotten too."""
        self._cancels.pop(node, None)
        leases = list(self._of_node.pop(node, {}).values())
        for lease in leases:
            del self._held[lease.lease_id]
        return leases

    def withdraw(self, lease_ids: Iterable[int]) -> set[int]:
        """Leases have become pointless: these are the nodes that are to be told."""
        nodes: set[int] = set()
        for lease_id in lease_ids:
            if lease_id in self._held:
                node = self._held[lease_id][0]
                self._cancels.setdefault(node, []).append(lease_id)
                nodes.add(node)
        return nodes

    def has_cancels(self, node: int) -> bool:
        """Whether a node is to be told of any."""
        return node in self._cancels

    def take_cancels(self, node: int) -> list[int]:
        """What a node is to be told; it is told once."""
        return self._cancels.pop(node, [])


QueuePlace = tuple[int, ...]
"""Where a task stands in the queue: lower places go out first."""


class TaskQueue:
    """See the module's docstring. What a task avoids does not change while it waits.

    Args:
        place: the place of a task, that of no other one.
    """

    def __init__(self, place: Callable[[Task], QueuePlace]) -> None:
        self._place = place
        self._lines: dict[frozenset[int], _Line] = {}
        """None of them is empty."""

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    @property
    def first(self) -> Member:
        """The task that goes out next; there has to be one."""
        return min(line.first for line in self._lines.values())[1]

    def first_for(self, node: int, nodes: Collection[int]) -> Member | None:
        """The task that goes out next to a node: none that has failed there, unless it has failed on all `nodes`."""
        lines = (line for failed, line in self._lines.items() if node not in failed or failed.issuperset(nodes))
        return min((line.first for line in lines), default=(None, None))[1]

    def put(self, member: Member) -> None:
        """A task waits, at its place."""
        line, place = self._lines.setdefault(frozenset(member.avoid), _Line()), self._place(member.task)
        line.waiting[place] = member
        heappush(line.places, place)

    def take(self, member: Member) -> None:
        """A task that waits does so no more."""
        failed = frozenset(member.avoid)
        line = self._lines[failed]
        taken = line.waiting.pop(self._place(member.task), None)
        assert taken is member, "a queued member is in the queue"
        if not line.waiting:
            del self._lines[failed]


class _Line:
    """Tasks that have failed on the same nodes."""

    def __init__(self) -> None:
        self.waiting: dict[QueuePlace, Member] = {}
        self.places: list[QueuePlace] = []
        """A heap; of tasks that wait no more as well, until they would be next."""

    @property
    def first(self) -> tuple[QueuePlace, Member]:
        while self.places[0] not in self.waiting:
            heappop(self.places)
        return self.places[0], self.waiting[self.places[0]]
