"""The journal: what changes a `SampleBuffer`, in the order in which it happened.

The buffer records each change before it makes it, with what it has decided itself: which task a lease is for, which
groups a step trains. `flash.samples.replay` makes the same changes to the state of a checkpoint, and comes to the same
state. Backlog are done in slices, each of which is recorded, so that they mix with results as they did.

Law: nothing is acknowledged before it is `written`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from flash.samples.rules import AgeContract, BufferRules
from flash.samples.tasks import Problem
from flash.types import Failure, Trajectory


class Made(msgspec.Struct, frozen=True):
    """What a buffer decides by."""

    contract: AgeContract
    rules: BufferRules
    at_once: int
    """Groups in a slice of backlog."""


class Began(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A hub has begun, and what was trained from `step` on is booked again. Leases before it are out until they end."""

    step: int
    """The version that the run went on from."""
    made: Made


class Issued(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The next group was issued."""

    problem: Problem


class Lent(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Waiting members of a group went out."""

    group_id: int
    node: int
    leases: list[tuple[int, int, int]]
    """The lease's number, the member, and the version of which no token is older."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A lease has brought something home."""

    lease_id: int
    node: int
    result: Trajectory | Failure


class Wasted(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """So did one that was out no more: of its result only the tokens count."""

    lease_id: int
    tokens: int


class Revoked(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The node of these leases is gone, or nobody has claimed them."""

    lease_ids: list[int]


class Tidied(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A slice was done of what was put off."""


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """These groups are a step's batch, with those that were in parts; none where a former incarnation formed it."""

    step: int
    groups: list[int]


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """A step was trained."""

    step: int
    books: tuple[int, int, int]
    """Before it: tasks issued, tasks in flight, tokens generated. A replay has to come to the same."""


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The last step was committed."""


Event = Began | Issued | Lent | Ended | Wasted | Revoked | Tidied | Taken | Committed | Closed


class Journal(Protocol):
    """Keeps events; `flash.run.restart.journal` does so in files."""

    def record(self, event: Event) -> None:
        """What is about to happen. Returns at once."""
        ...

    async def written(self) -> None:
        """Wait, under the deadline of whoever waits for our answer, until all that was recorded so far is safe."""
        ...

    def begin(self, version: int) -> int:
        """The state of this moment goes into the checkpoint of a version; the number of the file for what follows."""
        ...


class NoJournal:
    """Keeps nothing: a restart goes back to the checkpoint."""

    def record(self, event: Event) -> None: ...

    async def written(self) -> None: ...

    def begin(self, version: int) -> int:
        return 0


class MemoryJournal:
    """Keeps everything, for tests."""

    def __init__(self) -> None:
        self.files: list[list[Event]] = [[]]

    @property
    def events(self) -> list[Event]:
        """Those since the last checkpoint."""
        return self.files[-1]

    def after(self, number: int) -> list[Event]:
        """Those from the file of this number on."""
        return [event for file in self.files[number:] for event in file]

    def record(self, event: Event) -> None:
        self.events.append(event)

    async def written(self) -> None: ...

    def begin(self, version: int) -> int:
        self.files.append([])
        return len(self.files) - 1


NO_JOURNAL = NoJournal()
