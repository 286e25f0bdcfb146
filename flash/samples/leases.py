"""Leases: the queue of tasks that wait for a node, and the nodes that hold the leased tasks. Pure state.

A lease is the right and the duty of a node to run one task. `flash.samples.store.SampleStore` owns the `LeaseTable` of
the training tasks, and `flash.samples.evaluation` owns the table of the evaluation tasks. The buffer's
`SampleBuffer.lease` takes tasks from the queue. Invariant: each unfinished task is either in the table's queue or *out*
on exactly one lease. A withdrawn lease is not out any more. The reason of the withdrawal is kept until its node reports
the number of tokens that it had generated. `Holders`, which `flash.hub.dealing.LeaseDealer` owns, records which node
has which lease, for both tables.

The queue has one line for each set of nodes on which tasks have failed. To find a task that a node may run, only the
first task of each line is checked. There are few lines, but there may be a hundred thousand tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice, takewhile

import msgspec

from flash.samples.groups import Member
from flash.types import RETRIED, Lease, Outcome, Task

QueuePlace = tuple[int, ...]
"""Place of a task in the queue. Tasks with lower places are leased first."""


def as_issued(task: Task) -> QueuePlace:
    """Return the place of a training task: the order of issue, so that a task that is queued again keeps its place."""
    return task.group_id, task.sample_index


def failed_last(task: Task) -> QueuePlace:
    """Return the place of an evaluation task: the order of issue, but tasks that have failed come last."""
    return task.attempt, task.group_id, task.sample_index


class LeaseTable:
    """Table of the unfinished tasks, each of which is queued or leased.

    Args:
        ids: numbers of new leases. No other table may use the same numbers.
        retries: number of further attempts at a task that has failed because of the infrastructure.
        place: returns the place of a task in the queue.
    """

    def __init__(self, ids: Iterator[int], retries: int, place: Callable[[Task], QueuePlace]) -> None:
        self.ids = ids
        self._retries = retries
        self.queue = TaskQueue(place)
        """Tasks that wait for a node."""
        self.out: dict[int, Member] = {}
        """Tasks that nodes are working on, by the number of the lease."""
        self.reasons: dict[int, Outcome] = {}
        """Reason of each withdrawn lease that its node has not reported yet, by the number of the lease."""
        self.withdrawn: list[int] = []
        """Numbers of the leases to cancel on their nodes. The owner passes them on and empties the list."""

    def put(self, member: Member) -> None:
        """Queue a task, at its place."""
        member.state = "queued"
        self.queue.put(member)

    def grant(self, member: Member, floor: int, number: int) -> Lease:
        """Lease a queued task as lease `number`: it leaves the queue and is out. Returns the lease.

        `floor`: oldest version that a token of the sample may have.
        """
        self.queue.take(member)
        self.out[number] = member
        member.state, member.lease_id, member.floor = "leased", number, floor
        return Lease(number, member.task, floor)

    def retry(self, member: Member, outcome: Outcome, node: int) -> bool:
        """Queue a task again that has failed on a node. Returns False if it has to be given up instead.

        A cancelled task is always queued again. A task that failed because of the infrastructure is queued again while
        it has attempts left.
        """
        if outcome is not Outcome.CANCELLED:
            if outcome not in RETRIED or member.task.attempt >= self._retries:
                return False
            member.task = msgspec.structs.replace(member.task, attempt=member.task.attempt + 1)
            member.avoid += (node,)
        self.put(member)
        return True

    def revoke(self, lease_id: int) -> Member | None:
        """Queue the task of a lease again, because the lease's node is lost or has not claimed it.

        Returns the task. None if the lease had been withdrawn: then its reason is forgotten.
        """
        if (member := self.out.pop(lease_id, None)) is None:
            self.take_reason(lease_id)
            return None
        self.put(member)
        return member

    def remove(self, member: Member, reason: Outcome) -> None:
        """Remove a task from the queue, or withdraw its lease for this reason."""
        if member.state == "queued":
            self.queue.take(member)
        elif member.state == "leased" and self.out.pop(member.lease_id, None) is not None:
            self.reasons[member.lease_id] = reason
            self.withdrawn.append(member.lease_id)

    def take_reason(self, lease_id: int) -> Outcome:
        """Return the reason why a lease was withdrawn, and forget the reason, because a node reports once per lease.

        The reason of an unknown lease is CANCELLED.
        """
        return self.reasons.pop(lease_id, Outcome.CANCELLED)


class Holders:
    """Records which node holds which lease, and which leases each node has to cancel."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Lease, float]] = {}
        """Node, lease and time at which it was granted, by the number of the lease, in the order of the times."""
        self._of_node: dict[int, dict[int, Lease]] = {}
        """Leases of each node, by the number of the lease."""
        self._cancels: dict[int, list[int]] = {}
        """Numbers of the leases to cancel, by node."""

    def lend(self, node: int, leases: Iterable[Lease], now: float) -> None:
        """Record that a node was given leases."""
        for lease in leases:
            self._held[lease.lease_id] = node, lease, now
            self._of_node.setdefault(node, {})[lease.lease_id] = lease

    def held(self, node: int) -> int:
        """Return the number of leases that a node holds."""
        return len(self._of_node.get(node, ()))

    def lent_before(self, then: float) -> list[tuple[int, Lease]]:
        """Return the leases that were lent before a time, each with its node."""
        held = self._held.values()
        return [(node, lease) for node, lease, _ in takewhile(lambda each: each[2] < then, held)]

    def oldest(self, most: int) -> list[tuple[int, Lease, float]]:
        """Return up to `most` leases that were lent first, each with its node and the time of lending."""
        return list(islice(self._held.values(), most))

    def oldest_of(self, node: int) -> float | None:
        """Return the time at which the oldest lease of a node was lent; None if the node holds no lease."""
        first = next(iter(self._of_node.get(node, ())), None)
        return None if first is None else self._held[first][2]

    def ended(self, lease_id: int) -> None:
        """Record that a node has delivered the result of a lease. An unknown lease changes nothing."""
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
        """Record that nodes have to cancel these leases, whose results are not needed. Returns these nodes."""
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
        """Return the leases that a node has to cancel, and forget them: a node is notified once."""
        return self._cancels.pop(node, [])


class TaskQueue:
    """Queue of the tasks that wait for a node. `Member.avoid` of a task must not change while the task waits.

    Args:
        place: returns the place of a task. No two tasks have the same place.
    """

    def __init__(self, place: Callable[[Task], QueuePlace]) -> None:
        self._place = place
        self._lines: dict[frozenset[int], _Line] = {}
        """Lines that are not empty, by the nodes on which their tasks have failed."""

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    @property
    def first(self) -> Member:
        """Task with the lowest place. The queue must not be empty."""
        return min(line.first for line in self._lines.values())[1]

    def first_for(self, node: int, nodes: Collection[int]) -> Member | None:
        """Return the next task that a node may run; None if there is no such task.

        A task that has failed on the node is returned only if it has failed on all `nodes`.
        """
        lines = (line for failed, line in self._lines.items() if node not in failed or failed.issuperset(nodes))
        return min((line.first for line in lines), default=(None, None))[1]

    def put(self, member: Member) -> None:
        """Add a task, at its place."""
        line, place = self._lines.setdefault(frozenset(member.avoid), _Line()), self._place(member.task)
        line.waiting[place] = member
        heappush(line.places, place)

    def take(self, member: Member) -> None:
        """Remove a task that waits."""
        failed = frozenset(member.avoid)
        line = self._lines[failed]
        taken = line.waiting.pop(self._place(member.task), None)
        assert taken is member, "a queued member is in the queue"
        if not line.waiting:
            del self._lines[failed]


class _Line:
    """Waiting tasks that have failed on the same nodes."""

    def __init__(self) -> None:
        self.waiting: dict[QueuePlace, Member] = {}
        self.places: list[QueuePlace] = []
        """Heap of places. Places of tasks that were taken stay in the heap until they reach its top."""

    @property
    def first(self) -> tuple[QueuePlace, Member]:
        """Lowest place, and the task at it. Removes places of taken tasks from the top of the heap."""
        while self.places[0] not in self.waiting:
            heappop(self.places)
        return self.places[0], self.waiting[self.places[0]]
