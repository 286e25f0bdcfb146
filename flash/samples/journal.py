"""Journal: the events that change a sample buffer, in the order in which they happened.

`SampleBuffer` records each event before `SampleStore.apply` makes the change. An event holds the decisions of the
buffer, such as the task of a lease (the right and the duty of a node to run one task) or the groups of a step. So
`flash.samples.replay` can apply the same events to the state of a checkpoint, and comes to the same state. Work on many
groups waits in the store's backlog and is done in slices. Each slice is an event, too, so that the replay has slices
and results in the order of the run.

`flash.run.restart.journal` keeps the events in files.

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
    """A hub has started. Leases that a previous hub granted stay valid until they end."""

    step: int
    """Version from which the run continues. Steps from this number on are trained again, even if the journal has their
    commits."""
    settings: BufferSettings


class Issued(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The next group was issued."""

    problem: Problem


class Leased(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Queued members of a group were leased."""

    group_id: int
    node: int
    """Number of the node that holds the leases."""
    leases: list[tuple[int, int, int]]
    """For each lease its number, the index of the member, and the oldest version that one of its tokens can have."""


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A node has delivered the result of a lease."""

    lease_id: int
    node: int
    result: Trajectory | Failure


class DeliveredLate(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A node has delivered the result of a lease that had been withdrawn or revoked. Only its tokens are counted."""

    lease_id: int
    tokens: int
    """Number of action tokens that were sampled for the result."""


class Revoked(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The tasks of these leases queue again: their node is gone, or no node has claimed them after a restart."""

    lease_ids: list[int]


class SliceDone(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A slice of the backlog was done."""


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The batch of a step was chosen."""

    step: int
    groups: list[int]
    """Numbers of the groups of the batch. Empty if a previous hub formed the batch. Finished members of groups of which
    a part was trained before are not listed; they join the batch in addition."""


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """A step was trained."""

    step: int
    counts: tuple[int, int, int]
    """Number of tasks issued, tasks in flight and tokens generated before this event. A replay checks that it comes to
    the same numbers."""


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The last step was committed."""


Event = Began | Issued | Leased | Delivered | DeliveredLate | Revoked | SliceDone | Taken | Committed | Closed


class Journal(Protocol):
    """Interface of a journal; `flash.run.restart.journal` keeps the events in files."""

    def record(self, event: Event) -> None:
        """Record an event that is about to be applied. Returns at once."""
        ...

    async def written(self) -> None:
        """Wait until all events recorded so far are safely stored.

        A peer waits for a reply meanwhile and gives up after its own timeout, so this must not take long.
        """
        ...

    def begin(self, version: int) -> int:
        """Start a new file for the events after the checkpoint of a version. Returns the number of the file."""
        ...


class NoJournal:
    """Journal that keeps no event. After a crash the run continues from the checkpoint itself."""

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
        """Events since the last checkpoint."""
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
