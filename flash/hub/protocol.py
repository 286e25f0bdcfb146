"""The messages between the hub and its peers.

The base of a request says who sends it: a rollout node, a trainer rank or its first one, or a guest, who may become a
node. The launcher that keeps a node's ranks sends `RanksRequest`; all but guests may send `Interrupt` and `Fatal`. Each
class names the struct that answers it. Requests of nodes that wait (leases, cancels, versions) are answered, possibly
empty, within `flash.config.waits.long_poll_s`.
"""

from __future__ import annotations

import sys
from functools import cache, reduce
from hashlib import sha256
from operator import or_
from typing import Any, Protocol

import msgspec

from flash import types
from flash.observe.cluster import NodeStatus
from flash.transport.frames import ReplyT, Request
from flash.types import Activity, Failure, Lease, Published, Shard, TrainedSample, Trajectory


class HubCaller(Protocol):
    """A connection to the hub, over the network or in its own process."""

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send one request and wait for its reply, for `timeout` seconds at most."""
        ...


class NodeRequest(Request[ReplyT], frozen=True):
    """A rollout node sends it."""

    node: int


class RankRequest(Request[ReplyT], frozen=True):
    """A trainer rank sends it."""

    rank: int


class FirstRankRequest(Request[ReplyT], frozen=True):
    """Trainer rank 0 sends it."""


class GuestRequest(Request[ReplyT], frozen=True):
    """Somebody sends it who is not of the run yet."""


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Received and acted upon."""


class LeaseReply(msgspec.Struct, frozen=True, tag=True):
    """Tasks to run. `done`: there will be no more; the node may leave."""

    leases: list[Lease]
    done: bool


class LeaseRequest(NodeRequest[LeaseReply], frozen=True, tag=True):
    """A node asks for tasks. It gets at least one unless the long poll ends."""

    capacity: int
    """Tasks that it could start now."""


class ClaimReply(msgspec.Struct, frozen=True, tag=True):
    """What the node may keep of what it has presented; it drops the rest, and says nothing more of it."""

    lease_ids: list[int]


class ClaimRequest(NodeRequest[ClaimReply], frozen=True, tag=True):
    """A node that has outlived the hub before this one presents what that one had lent it, delivered or not."""

    leases: list[Lease]


class EndedLease(msgspec.Struct, frozen=True, gc=False):
    """What became of one lease."""

    lease_id: int
    result: Trajectory | Failure


class DeliverRequest(NodeRequest[Ack], frozen=True, tag=True):
    """A node hands over ended leases."""

    ended: list[EndedLease]
    capacity: int
    """Tasks that it could start now: what it asked for while it waits may have become too little."""


class CancelReply(msgspec.Struct, frozen=True, tag=True):
    """Leases to cancel at once; their tasks are booked, and only the tokens are still to be reported, as a `Failure`
    with the outcome `cancelled`. Empty when the long poll ended. `done`: there will be no more."""

    lease_ids: list[int]
    done: bool
    leave: bool = False
    """Whether somebody wants the node to leave in order."""


class CancelRequest(NodeRequest[CancelReply], frozen=True, tag=True):
    """A node asks which of its leases have become pointless."""


class VersionReply(msgspec.Struct, frozen=True, tag=True):
    """The newest published version, or None when the long poll ended. `done`: there will be no more."""

    published: Published | None
    done: bool


class VersionRequest(NodeRequest[VersionReply], frozen=True, tag=True):
    """A node asks for a version newer than `after`."""

    after: int


class LoadFailedReply(msgspec.Struct, frozen=True, tag=True):
    """Whether those who published it are gone: the next ones publish it again, and the engine is well."""

    gone: bool


class LoadFailed(NodeRequest[LoadFailedReply], frozen=True, tag=True):
    """An engine could not load a version, and its node asks whether that is its own fault."""

    incarnation: int
    """As in what was published."""


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine as its node sees it."""

    index: int
    version: int
    idle_s: float
    """Seconds without a running request since its first version."""
    lifetime_s: float
    """Seconds since its first version."""
    canary_error: float
    """Mean log-prob difference of its last canary, in nats."""
    drafted: int = 0
    """Tokens that it has drafted since its start."""
    accepted: int = 0
    """Those of them that stayed."""


class EngineReport(NodeRequest[Ack], frozen=True, tag=True):
    """A node reports its engines after each swap, death and restart, and what happened to them since."""

    number: int
    """Counts the node's reports: of its engines an older one that comes later says nothing."""
    engines: list[EngineStatus]
    """Those that live."""
    activities: list[Activity]
    notes: list[str] = msgspec.field(default_factory=list[str])
    """What people should know."""
    restarts: int = 0
    """Engines that have died, and start again."""
    blocked_s: float = 0.0
    """Seconds in which a user's code blocked the node's event loop."""
    abandoned: int = 0
    """Calls of a user's code that went on though they were cancelled."""


class StatusReport(NodeRequest[Ack], frozen=True, tag=True):
    """A node tells every few seconds how it is, for people: nothing is decided by it."""

    status: NodeStatus


class IncarnationReply(msgspec.Struct, frozen=True, tag=True):
    """What the rank is to begin with: the same for all ranks of this incarnation."""

    number: int
    """Of the incarnation, over all hubs of the run."""
    checkpoint: str | None
    """The folder to load; empty: version 0, the model as it is. None: there is nothing left to do."""
    store: str = ""
    """HOST:PORT of the store in which the ranks of this incarnation meet, as rank 0 has said."""


class IncarnationRequest(RankRequest[IncarnationReply], frozen=True, tag=True):
    """A trainer rank has started."""

    process: int
    """Its process id on its node, whose launcher ends it with its incarnation."""
    host: str
    """That node's name, for people."""
    store: str = ""
    """HOST:PORT of the store that rank 0 has opened for all ranks of its incarnation."""


class IncarnationWatch(RankRequest[Ack], frozen=True, tag=True):
    """Answered every `BEAT_S` seconds, so that the hub hears that the process runs, and the rank asks again. The call
    fails when the incarnation of this rank is over, since another rank of it is gone, or one hangs."""


class RanksReply(msgspec.Struct, frozen=True, tag=True):
    """The trainer ranks of a node, by their process ids."""

    number: int
    """Grows with each change."""
    living: list[int]
    """Those of the newest incarnation."""
    ended: list[int]
    """Those whose incarnation is over: nobody listens to them any more."""
    causes: list[int]
    """Of these, those by which it ended: they were gone, or silent, or in a collective that failed."""
    missing: str = ""
    """The ranks of that incarnation that had never come, as a sentence for people; empty if all had come."""


class RanksRequest(Request[RanksReply], frozen=True, tag=True):
    """A launcher asks what became of its ranks. Answered when there is news of any rank."""

    node: int
    after: int
    """`number` of the last reply; -1 before the first."""


class BatchReply(msgspec.Struct, frozen=True, tag=True):
    """The rank's shard; None ends training: save a checkpoint, and when `finished` also export the model.

    A long shard travels in parts (`flash.hub.protocol`); what they know of the whole batch is in the first."""

    shard: Shard | None
    finished: bool = False
    keeps: bool = True
    """Whether the ranks may write a checkpoint of what they hold after this. Not on their way back to the run's
    version, as the hub's part of a checkpoint is of that one."""
    left: int = 0
    """Parts to come after this one."""
    saves: bool = False
    """Whether the ranks write a checkpoint after this, whatever `checkpoint.every` says."""


class BatchRequest(RankRequest[BatchReply], frozen=True, tag=True):
    """A trainer rank asks for its shard of a step, and reports what it was busy with since."""

    step: int
    activities: list[Activity]
    part: int = 0
    """Of the shard, from 0 on."""


class Commit(FirstRankRequest[Ack], frozen=True, tag=True):
    """Rank 0 has trained on a step's batch."""

    step: int
    metrics: dict[str, float]
    seen: list[TrainedSample] = msgspec.field(default_factory=list)
    """Of the samples that the run shows."""


class PublishRequest(FirstRankRequest[Ack], frozen=True, tag=True):
    """Rank 0 announces a version. Answered once no engine is still busy with an older one."""

    published: Published


class SnapshotReply(msgspec.Struct, frozen=True, tag=True):
    """The hub's state is in the file, forced to the disk."""

    size: int
    crc32: int


class SnapshotRequest(FirstRankRequest[SnapshotReply], frozen=True, tag=True):
    """Rank 0 asks the hub to write its state into the folder of the checkpoint that the ranks are writing.

    They share the machine, and so the file system: no state is too large for a message."""


class Goodbye(RankRequest[Ack], frozen=True, tag=True):
    """A trainer rank leaves in order."""

    activities: list[Activity]


class Interrupt(Request[Ack], frozen=True, tag=True):
    """Someone asks the run to stop and to stay resumable."""

    reason: str


class Fatal(Request[Ack], frozen=True, tag=True):
    """A peer met an error that ends the run. Never answered: the hub shows the error and closes the connection."""

    error: str
    """Name of the error's class in `flash.errors`."""
    message: str


class RunReply(msgspec.Struct, frozen=True, tag=True):
    """What a node has to know of a run to join it."""

    config: str
    """All of it, as TOML."""
    digest: str
    """Of the configuration: the node says it when it joins."""
    folder: str
    """Where the run was started: its relative paths begin there."""
    imports: list[str]
    """Folders of the user's modules."""
    launch: str
    """The launch of the first node, as in `error.json`."""
    ending: bool
    """Whether there is nothing left to do."""
    version: int
    """What the run has reached: who has a newer one cannot go on with it."""


class RunRequest(GuestRequest[RunReply], frozen=True, tag=True):
    """A node asks what the run is. All versions of Flash have this message, as it is."""

    code: str
    """Its `dialect`."""


class JoinReply(msgspec.Struct, frozen=True, tag=True):
    """The peer is a rollout node from here on, with this number."""

    node: int | None
    """None: the run is ending, and there is nothing left to do."""
    first_engine: int
    """The number of its first engine."""


class JoinRequest(GuestRequest[JoinReply], frozen=True, tag=True):
    """A peer wants to be a rollout node."""

    digest: str
    """Of the configuration that it has been told."""
    engines: int
    """How many it will start."""
    node: int = 0
    """The number in the job of a node that has trainer ranks, which it keeps; 0: it has none."""


class DrainRequest(GuestRequest[Ack], frozen=True, tag=True):
    """A person wants a node that has joined to leave in order."""

    node: int


class Leave(NodeRequest[Ack], frozen=True, tag=True):
    """A node that has joined is about to go: it asks for no more leases, ends what it has or hands it back."""

    error: str = ""
    """Name of the error's class in `flash.errors`, where one is the reason."""
    message: str = ""


_REQUESTS = [each for each in vars().values() if isinstance(each, type) and issubclass(each, Request)]
HubRequest: Any = reduce(or_, [each for each in _REQUESTS if each.__struct_config__.tag])
"""Everything that the hub's server reads."""


@cache
def dialect() -> str:
    """Tells versions of Flash apart whose messages differ: their nodes and hubs would not understand each other."""
    structs = {
        value
        for home in (sys.modules[__name__], types)
        for value in vars(home).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    fields = {
        struct.__name__: [(field.name, str(field.type)) for field in msgspec.structs.fields(struct)]
        for struct in structs
    }
    return sha256(str(sorted(fields.items())).encode()).hexdigest()[:12]


class BlockingHubCaller(Protocol):
    """A connection to the hub that blocks its thread, as `flash.transport.BlockingClient`."""

    def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send one request and wait for its reply, for `timeout` seconds at most."""
        ...


async def fetch_shard(hub: HubCaller, rank: int, step: int, timeout: float) -> BatchReply:
    """A rank's whole shard. Waits for the batch, and up to `timeout` seconds for each part."""
    parts = [await hub.call(BatchRequest(rank, step, []), timeout)]
    while parts[-1].left:
        parts.append(await hub.call(BatchRequest(rank, step, [], len(parts)), timeout))
    return _whole(parts)


def fetch_shard_blocking(
    hub: BlockingHubCaller, rank: int, step: int, activities: list[Activity], timeout: float
) -> BatchReply:
    """The same for a thread; the hub is also told what the rank was busy with."""
    parts = [hub.call(BatchRequest(rank, step, activities), timeout)]
    while parts[-1].left:
        parts.append(hub.call(BatchRequest(rank, step, [], len(parts)), timeout))
    return _whole(parts)


def _whole(parts: list[BatchReply]) -> BatchReply:
    """The first of them, with the samples of all."""
    first, shards = parts[0], [part.shard for part in parts if part.shard is not None]
    if first.shard is None:
        return first
    samples = [sample for shard in shards for sample in shard.samples]
    return msgspec.structs.replace(first, shard=msgspec.structs.replace(first.shard, samples=samples), left=0)
