"""Leases: which tasks wait, in the order of their issue, and who has the others. Pure state.

Every task on its way is either queued here or out on one lease. A lease that was withdrawn is out no more; the reason
is kept until its node reports what it had generated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from flash.hub.groups import Member
from flash.types import Lease, Outcome, Task

Place = tuple[int, int]
"""Group and index of a task: the order of issue."""


class Leases:
    """See the module's docstring. `withdrawn` fills up for the owner, who empties it."""

    def __init__(self) -> None:
        self._queue: list[Place] = []
        self._out: dict[int, Task] = {}
        self._next = 0
        self._reasons: dict[int, Outcome] = {}
        self.withdrawn: list[int] = []
        """Leases that have become pointless: to be cancelled on their nodes."""

    @property
    def queue(self) -> Sequence[Place]:
        """Tasks that wait, the first issued first."""
        return self._queue

    @property
    def out(self) -> int:
        """Tasks that nodes are working on."""
        return len(self._out)

    def put(self, member: Member) -> None:
        """A task waits, at its place in the order of issue."""
        member.state = "queued"
        insort(self._queue, _place(member))

    def grant(self, member: Member, floor: int) -> Lease:
        """A waiting task goes out."""
        self._unqueue(member)
        lease = Lease(self._next, member.task, floor)
        self._next += 1
        self._out[lease.lease_id] = member.task
        member.state, member.lease_id, member.floor = "leased", lease.lease_id, floor
        return lease

    def home(self, lease_id: int) -> Task | None:
        """A lease has ended. None: it was withdrawn, or belongs to a former life."""
        return self._out.pop(lease_id, None)

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
        place = bisect_left(self._queue, _place(member))
        assert self._queue[place] == _place(member), "a queued member is in the queue"
        del self._queue[place]


def _place(member: Member) -> Place:
    return member.task.group_id, member.task.sample_index
