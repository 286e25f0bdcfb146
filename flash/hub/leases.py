"""Leases: which tasks wait, in order, and who has the others. Pure state.

Training and evaluation keep a `LeaseTable` each. Every task on its way is either queued there or out on one lease. A
lease that was withdrawn is out no more; the reason is kept until its node reports what it had generated. `Holders`
knows which node has which lease, of both.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from flash.hub.groups import Member
from flash.types import RETRIED, Lease, Outcome, Task

Place = tuple[int, ...]
"""Where a task stands in the queue: lower places go out first."""


def as_issued(task: Task) -> Place:
    """Tasks go out in the order of their issue, and one that comes back keeps its place."""
    return task.group_id, task.sample_index


def failed_last(task: Task) -> Place:
    """As issued, but tasks that have failed go out after all that have not."""
    return task.attempt, task.group_id, task.sample_index


class LeaseTable:
    """See the module's docstring. `withdrawn` fills up for the owner, who empties it.

    Args:
        ids: numbers for the leases, which no other table gives.
        retries: attempts beyond the first at a task that fails for a reason of the infrastructure.
        place: the order of the queue.
    """

    def __init__(self, ids: Iterator[int], retries: int, place: Callable[[Task], Place]) -> None:
        self._ids = ids
        self._retries = retries
        self._place_of = place
        self._queue: list[Member] = []
        self._out: dict[int, Member] = {}
        self._reasons: dict[int, Outcome] = {}
        self.withdrawn: list[int] = []
        """Leases that have become pointless: to be cancelled on their nodes."""

    @property
    def queue(self) -> Sequence[Member]:
        """Tasks that wait, in order."""
        return self._queue

    @property
    def out(self) -> int:
        """Tasks that nodes are working on."""
        return len(self._out)

    def put(self, member: Member) -> None:
        """A task waits, at its place."""
        member.state = "queued"
        insort(self._queue, member, key=self._place)

    def grant(self, member: Member, floor: int) -> Lease:
        """A waiting task goes out."""
        self._unqueue(member)
        lease = Lease(next(self._ids), member.task, floor)
        self._out[lease.lease_id] = member
        member.state, member.lease_id, member.floor = "leased", lease.lease_id, floor
        return lease

    def ended(self, lease_id: int) -> Member | None:
        """A lease has ended. None: it was withdrawn, or belongs to a former life."""
        return self._out.pop(lease_id, None)

    def again(self, member: Member, outcome: Outcome, node: int) -> bool:
        """A task that came home failed on a node: queue it again, or tell that it is to be given up.

        A cancelled one is always queued again, one that the infrastructure failed as long as it has attempts left.
        """
        if outcome is not Outcome.CANCELLED:
            if outcome not in RETRIED or member.task.attempt >= self._retries:
                return False
            member.task = msgspec.structs.replace(member.task, attempt=member.task.attempt + 1)
            member.avoid.append(node)
        self.put(member)
        return True

    def revoke(self, lease_id: int) -> bool:
        """A lease's node is gone: its task queues again, unless the lease was withdrawn. Tells whether it does."""
        member = self.ended(lease_id)
        if member is None:
            self.reason(lease_id)
            return False
        self.put(member)
        return True

    def remove(self, member: Member, reason: Outcome) -> None:
        """A task neither waits any more nor is out; a lease that still is will be withdrawn."""
        if member.state == "queued":
            self._unqueue(member)
        elif member.state == "leased" and self._out.pop(member.lease_id, None) is not None:
            self._reasons[member.lease_id] = reason
            self.withdrawn.append(member.lease_id)

    def reason(self, lease_id: int) -> Outcome:
        """Why a lease that is not out was withdrawn; asked once."""
        return self._reasons.pop(lease_id, Outcome.CANCELLED)

    def _unqueue(self, member: Member) -> None:
        at = bisect_left(self._queue, self._place(member), key=self._place)
        assert self._queue[at] is member, "a queued member is in the queue"
        del self._queue[at]

    def _place(self, member: Member) -> Place:
        return self._place_of(member.task)


class Holders:
    """Which node holds which lease, and which of them it is still to be told to cancel."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Lease]] = {}
        self._cancels: dict[int, list[int]] = {}

    def lend(self, node: int, leases: Iterable[Lease]) -> None:
        """A node was given leases."""
        for lease in leases:
            self._held[lease.lease_id] = node, lease

    def ended(self, lease_id: int) -> None:
        """A node has handed a lease over, known here or not."""
        self._held.pop(lease_id, None)

    def lost(self, node: int) -> list[Lease]:
        """A node is gone: the leases that it held, whose cancels are forgotten too."""
        self._cancels.pop(node, None)
        leases = [lease for holder, lease in self._held.values() if holder == node]
        for lease in leases:
            del self._held[lease.lease_id]
        return leases

    def withdraw(self, lease_ids: Iterable[int]) -> None:
        """Leases have become pointless: their nodes will be told."""
        for lease_id in lease_ids:
            if lease_id in self._held:
                self._cancels.setdefault(self._held[lease_id][0], []).append(lease_id)

    def has_cancels(self, node: int) -> bool:
        """Whether a node is to be told of any."""
        return node in self._cancels

    def take_cancels(self, node: int) -> list[int]:
        """What a node is to be told; it is told once."""
        return self._cancels.pop(node, [])
