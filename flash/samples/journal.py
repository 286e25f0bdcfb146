"""Journal: the events that change a buffer, in the order in which they happened.

`SampleBuffer` records each event before `SampleStore.apply` makes the change. An event holds what the buffer has
decided, such as the task of a lease or the groups of a step. So `flash.samples.replay` can apply the same events to the
state of a checkpoint, and comes to the same state. The backlog is worked off in slices, and each slice is an event, so
that slices and results mix in the replay as they did in the run.

`flash.run.restart.journal` keeps the events in files.

Law: no result, batch or commit is acknowledged to a peer before it is `written`. A lease may go out earlier: after a
crash the next hub refuses the claim of a lease that it does not know.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from flash.samples.admission import AgeContract
from flash.samples.rules import BufferRules
from flash.samples.tasks import Problem
from flash.types import Failure, Trajectory


class BufferSettings(msgspec.Struct, frozen=True):
    """All settings by which a buffer decides."""

    contract: AgeContract
    rules: BufferRules
    # The encoded name is part of the format of checkpoints and journals.
    slice_size: int = msgspec.field(name="at_once")
    """Groups in one slice of the backlog."""


class Began(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A hub has started. Leases from before stay out until they end."""

    step: int
    """The version that the run continues from. Steps from this one on that were booked as trained are trained again."""
    settings: BufferSettings


class Issued(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The next group was issued."""

    problem: Problem


class Lent(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Queued members of a group were leased."""

    group_id: int
    node: int
    """Number of the node that holds the leases."""
    leases: list[tuple[int, int, int]]
    """For each lease its number, the index of the member, and the oldest version that a token may have."""


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A node has delivered the result of a lease."""

    lease_id: int
    node: int
    result: Trajectory | Failure


class DeliveredLate(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A node has delivered the result of a lease that was no longer out. Only its tokens are booked."""

    lease_id: int
    tokens: int
    """Action tokens that were sampled."""


class Revoked(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The node of these leases is gone, or no node has claimed them."""

    lease_ids: list[int]


class Tidied(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A slice of the backlog was worked off."""


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The batch of a step was chosen."""

    step: int
    groups: list[int]
    """Groups of the batch. Groups that were trained in parts join it. Empty if a previous hub formed the batch."""


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """A step was trained."""

    step: int
    books: tuple[int, int, int]
    """Tasks issued, tasks in flight and tokens generated before this event. A replay has to come to the same."""


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The last step was committed."""


Event = Began | Issued | Lent | Delivered | DeliveredLate | Revoked | Tidied | Taken | Committed | Closed


class Journal(Protocol):
    """Keeps events; `flash.run.restart.journal` does so in files."""

    def record(self, event: Event) -> None:
        """Record an event that is about to be applied. Returns at once."""
        ...

    async def written(self) -> None:
        """Wait until all events recorded so far are safe. The caller's peer has a deadline for our answer."""
        ...

    def begin(self, version: int) -> int:
        """Start a new file for the events after the checkpoint of a version. Returns the number of the file."""
        ...


class NoJournal:
    """Keeps nothing: a restart goes back to the checkpoint."""

    def record(self, event: Event) -> None: ...

    async def written(self) -> None: ...

    def begin(self, version: int) -> int:
        return 0


class MemoryJournal:
    """Keeps everything in memory, for tests."""

    def __init__(self) -> None:
        self.files: list[list[Event]] = [[]]

    @property
    def events(self) -> list[Event]:
        """Events since the last checkpoint."""
        return self.files[-1]

    def after(self, number: int) -> list[Event]:
        """Return the events from the file of this number on."""
        return [event for file in self.files[number:] for event in file]

    def record(self, event: Event) -> None:
        self.events.append(event)

    async def written(self) -> None: ...

    def begin(self, version: int) -> int:
        self.files.append([])
        return len(self.files) - 1


NO_JOURNAL = NoJournal()
