"""The messages between the hub and its peers.

Rollout nodes send `LeaseRequest`, `Results`, `CancelRequest`, `VersionRequest` and `EngineReport`; trainer ranks send
`BatchRequest`, and rank 0 also `PublishRequest`, `Commit` and `SnapshotRequest`. Any peer may send `Goodbye`,
`Interrupt` or `Fatal`.
Requests that wait (leases, cancels, versions) are answered, possibly empty, within `LONG_POLL_S`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from flash.types import Activity, Failure, Lease, Published, Shard, Trajectory

LONG_POLL_S = 20.0
"""Seconds after which a waiting request is answered empty, so that the peer sees that the hub is alive."""


class LeaseRequest(msgspec.Struct, frozen=True, tag=True):
    """A node asks for up to `capacity` tasks. → `Leases`, at least one unless the long poll ends."""

    node: int
    capacity: int


class Leases(msgspec.Struct, frozen=True, tag=True):
    """Tasks to run. `done`: there will be no more; the node may leave."""

    leases: list[Lease]
    done: bool


class Result(msgspec.Struct, frozen=True):
    """How one lease ended."""

    lease_id: int
    outcome: Trajectory | Failure


class Results(msgspec.Struct, frozen=True, tag=True):
    """A node hands over ended leases. → `Ack`"""

    node: int
    results: list[Result]


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    """A node asks which of its leases have become pointless. → `Cancels`"""

    node: int


class Cancels(msgspec.Struct, frozen=True, tag=True):
    """Leases to cancel at once; their tasks are booked, and only the tokens are still to be reported, as a `Failure`
    with the outcome `cancelled`. Empty when the long poll ended. `done`: there will be no more."""

    lease_ids: list[int]
    done: bool


class VersionRequest(msgspec.Struct, frozen=True, tag=True):
    """A node asks for a version newer than `after`. → `VersionReply`"""

    node: int
    after: int


class VersionReply(msgspec.Struct, frozen=True, tag=True):
    """The newest published version, or None when the long poll ended. `done`: there will be no more."""

    published: Published | None
    done: bool


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine as its node sees it."""

    index: int
    version: int
    idle_s: float
    """Seconds without a running request since its first version."""
    lifetime_s: float
    """Seconds since its first version."""
    canary_error: float
    """Largest log-prob difference of its last canary."""


class EngineReport(msgspec.Struct, frozen=True, tag=True):
    """A node reports its engines after each swap, and what they were busy with since. → `Ack`"""

    node: int
    engines: list[EngineStatus]
    activities: list[Activity]


class BatchRequest(msgspec.Struct, frozen=True, tag=True):
    """A trainer rank asks for its shard of a step, and reports what it was busy with since. → `BatchReply`"""

    rank: int
    step: int
    activities: list[Activity]


class BatchReply(msgspec.Struct, frozen=True, tag=True):
    """The rank's shard; None ends training: save a checkpoint, and when `finished` also export the model."""

    shard: Shard | None
    finished: bool = False


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 has trained on a step's batch. → `Ack`"""

    step: int
    metrics: dict[str, float]


class PublishRequest(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 announces a version. → `Ack`, once no engine is still busy with an older one."""

    published: Published


class SnapshotRequest(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 asks for the hub's state, to store in a checkpoint. → `Snapshot`"""


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """The hub's state as bytes."""

    state: bytes


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """A trainer rank leaves in order. → `Ack`"""

    rank: int
    activities: list[Activity]


class Interrupt(msgspec.Struct, frozen=True, tag=True):
    """Someone asks the run to stop and to stay resumable. → `Ack`"""

    reason: str


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """A peer met an error that ends the run. Never answered: the hub shows the error and closes the connection."""

    error: str
    """Name of the error's class in `flash.errors`."""
    message: str


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Received and acted upon."""


Request = (
    LeaseRequest
    | Results
    | CancelRequest
    | VersionRequest
    | EngineReport
    | BatchRequest
    | Commit
    | PublishRequest
    | SnapshotRequest
    | Goodbye
    | Interrupt
    | Fatal
)
Reply = Leases | Cancels | VersionReply | BatchReply | Snapshot | Ack
REPLY: Any = Reply
"""`Reply` as a value that a decoder takes: the type checkers have no name for the type of a union."""
