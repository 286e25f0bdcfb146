"""Journal: the events that change a sample buffer, in the order in which they happened.

`SampleBuffer` records each event before `SampleStore.apply` makes the change. An event holds the decisions of the
buffer, such as the task of a lease (the right and the duty of a node to run one task) or the groups of a step. After a
crash, `flash.samples.replay` applies the events to the state of the last checkpoint, and so comes to the same state.

Work on many groups waits in the *backlog* of the store and is done in slices. Each slice is an event, too, so that a
replay has slices and results in the order of the run. `flash.run.restart.journal` keeps the events in files. Events are
encoded as arrays with a number instead of a name, so a new field must be the last one, and numbers stay.

Law: no result, batch or commit is acknowledged to a peer before its event is `written`. A lease may be sent to its node
earlier: after a crash the next hub refuses the claim of a lease that it does not know.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from flash.samples.rules import BufferSettings
from flash.samples.tasks import Problem
from flash.types import Failure, Trajectory


class Began(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A hub process has started. Leases that a previous one granted stay valid until they end."""

    step: int
    """Version from which the run continues. Steps from this number on are trained again, even if the journal has their
    commits."""
    settings: BufferSettings
    """Settings by which this hub process decides."""


class Issued(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The next group was issued."""

    problem: Problem
    """Problem of the group. The tasks follow from it and from the state."""


class Leased(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Queued members of a group, which are its tasks, were leased to a node."""

    group_id: int
    node: int
    """Number of the node that holds the leases."""
    leases: list[tuple[int, int, int]]
    """For each lease: its number, the index of the member in its group, and `Lease.min_version`, the oldest version of
    an engine that may run the task."""


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A node has delivered the result of a lease."""

    lease_id: int
    node: int
    """Number of the node. If the task has failed and is tried again, it avoids this node."""
    result: Trajectory | Failure


class DeliveredLate(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A node has delivered the result of a lease that had been withdrawn or revoked. Only its tokens are counted.

    The hub withdraws a lease whose sample is not needed any more, and revokes the leases of a node that it takes for
    lost.
    """

    lease_id: int
    tokens: int
    """Number of action tokens that were sampled for the result."""


class Revoked(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The tasks of these leases are queued again: their node is lost, or no node has claimed them after a restart."""

    lease_ids: list[int]


class SliceDone(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A slice of the backlog was done, and nothing else."""


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The batch of a step was chosen."""

    step: int
    groups: list[int]
    """Numbers of the groups of the batch. Empty if a previous hub had formed the batch of this step. Groups of which an
    earlier step has trained a part are not listed; their finished members join the batch in addition."""


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """All trainer ranks have trained a step, and its samples count as trained."""

    step: int
    counts: tuple[int, int, int]
    """Number of tasks issued, tasks in flight and tokens generated, before this event. A replay must come to the same
    numbers."""


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The last step was committed, and all remaining groups were withdrawn."""


Event = Began | Issued | Leased | Delivered | DeliveredLate | Revoked | SliceDone | Taken | Committed | Closed


class Journal(Protocol):
    """Interface of a journal. `flash.run.restart.journal.FileJournal` keeps the events in files."""

    def record(self, event: Event) -> None:
        """Record an event that is about to be applied. Returns at once; the event need not be on disk yet."""
        ...

    async def written(self) -> None:
        """Wait until all events recorded so far are safely stored.

        The hub calls this before it acknowledges a result, a batch or a commit. The peer waits meanwhile and gives up
        after its own timeout, so this must not take long.
        """
        ...

    def begin(self, version: int) -> int:
        """Start a new file for the events after the checkpoint of a version. Returns the number of the file.

        The checkpoint keeps this number, so that a restarted run knows where to continue reading.
        """
        ...


class NoJournal:
    """Journal that keeps no event, for `checkpoint.journal = "off"`, simulations and tests.

    After a crash the run continues from the checkpoint, and generates again what was delivered after it.
    """

    def record(self, event: Event) -> None: ...

    async def written(self) -> None: ...

    def begin(self, version: int) -> int:
        return 0


class MemoryJournal:
    """Journal that keeps all events in memory, for tests."""

    def __init__(self) -> None:
        self.files: list[list[Event]] = [[]]

    @property
    def events(self) -> list[Event]:
        """Events since the last checkpoint, that is, the last call of `begin`."""
        return self.files[-1]

    def after(self, number: int) -> list[Event]:
        """Return the events of the file with this number and of all later files."""
        return [event for file in self.files[number:] for event in file]

    def record(self, event: Event) -> None:
        self.events.append(event)

    async def written(self) -> None: ...

    def begin(self, version: int) -> int:
        self.files.append([])
        return len(self.files) - 1


NO_JOURNAL = NoJournal()
