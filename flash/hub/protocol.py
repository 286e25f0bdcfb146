"""The messages between the hub and its peers.

Rollout nodes send `LeaseRequest`, `DeliverRequest`, `CancelRequest`, `VersionRequest` and `EngineReport`; trainer ranks
send `BatchRequest`, and rank 0 also `PublishRequest`, `Commit` and `SnapshotRequest`. Any peer may send `Goodbye`,
`Interrupt` or `Fatal`. Each class names the struct that answers it.
Requests that wait (leases, cancels, versions) are answered, possibly empty, within `LONG_POLL_S`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from flash.transport.request import ReplyT, Request
from flash.types import Activity, Failure, Lease, Published, Shard, Trajectory

LONG_POLL_S = 20.0
"""Seconds after which a waiting request is answered empty, so that the peer sees that the hub is alive."""


class HubCaller(Protocol):
    """A connection to the hub, over the network or in its own process."""

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send one request and wait for its reply, for `timeout` seconds at most."""
        ...


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Received and acted upon."""


class LeaseReply(msgspec.Struct, frozen=True, tag=True):
    """Tasks to run. `done`: there will be no more; the node may leave."""

    leases: list[Lease]
    done: bool


class LeaseRequest(Request[LeaseReply], frozen=True, tag=True):
    """A node asks for up to `capacity` tasks. It gets at least one unless the long poll ends."""

    node: int
    capacity: int


class EndedLease(msgspec.Struct, frozen=True):
    """What became of one lease."""

    lease_id: int
    result: Trajectory | Failure


class DeliverRequest(Request[Ack], frozen=True, tag=True):
    """A node hands over ended leases."""

    node: int
    ended: list[EndedLease]


class CancelReply(msgspec.Struct, frozen=True, tag=True):
    """Leases to cancel at once; their tasks are booked, and only the tokens are still to be reported, as a `Failure`
    with the outcome `cancelled`. Empty when the long poll ended. `done`: there will be no more."""

    lease_ids: list[int]
    done: bool


class CancelRequest(Request[CancelReply], frozen=True, tag=True):
    """A node asks which of its leases have become pointless."""

    node: int


class VersionReply(msgspec.Struct, frozen=True, tag=True):
    """The newest published version, or None when the long poll ended. `done`: there will be no more."""

    published: Published | None
    done: bool


class VersionRequest(Request[VersionReply], frozen=True, tag=True):
    """A node asks for a version newer than `after`."""

    node: int
    after: int


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


class EngineReport(Request[Ack], frozen=True, tag=True):
    """A node reports its engines after each swap, and what they were busy with since."""

    node: int
    engines: list[EngineStatus]
    activities: list[Activity]


class BatchReply(msgspec.Struct, frozen=True, tag=True):
    """The rank's shard; None ends training: save a checkpoint, and when `finished` also export the model."""

    shard: Shard | None
    finished: bool = False


class BatchRequest(Request[BatchReply], frozen=True, tag=True):
    """A trainer rank asks for its shard of a step, and reports what it was busy with since."""

    rank: int
    step: int
    activities: list[Activity]


class Commit(Request[Ack], frozen=True, tag=True):
    """Rank 0 has trained on a step's batch."""

    step: int
    metrics: dict[str, float]


class PublishRequest(Request[Ack], frozen=True, tag=True):
    """Rank 0 announces a version. Answered once no engine is still busy with an older one."""

    published: Published


class SnapshotReply(msgspec.Struct, frozen=True, tag=True):
    """The hub's state as bytes."""

    state: bytes


class SnapshotRequest(Request[SnapshotReply], frozen=True, tag=True):
    """Rank 0 asks for the hub's state, to store in a checkpoint."""


class Goodbye(Request[Ack], frozen=True, tag=True):
    """A trainer rank leaves in order."""

    rank: int
    activities: list[Activity]


class Interrupt(Request[Ack], frozen=True, tag=True):
    """Someone asks the run to stop and to stay resumable."""

    reason: str


class Fatal(Request[Ack], frozen=True, tag=True):
    """A peer met an error that ends the run. Never answered: the hub shows the error and closes the connection."""

    error: str
    """Name of the error's class in `flash.errors`."""
    message: str


HubRequest = (
    LeaseRequest
    | DeliverRequest
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
"""Everything that the hub's server reads."""
