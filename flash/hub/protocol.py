"""The messages between the hub and its peers, and the functions with which a trainer rank fetches its shard.

A peer is a rollout node, a trainer rank, a guest or a messenger. A *guest* is a process that is not part of the run
yet. A *messenger* is the launcher of a machine with trainer ranks. The base class of a request says which peer sends
it, and its type argument is the reply. `flash.hub.gate` refuses it from any other peer, and `flash.hub.hub.Hub.handle`
answers it. A *lease* assigns one task to one node. An *incarnation* is the set of trainer ranks that run from one
restart of the ranks to the next. The *shard* of a rank is the part of a batch that it trains. An *activity* is
something that a worker did, which the run's page draws as a bar of the timeline.

Timeouts: the caller of a request gives up after a timeout of its own and gets a DeadlineError. The hub answers a
request that waits for news (leases, cancels, versions) at the latest after `flash.config.waits.long_poll_s` (a *long
poll*). The reply may be empty, and the node asks again at once.

Retries: no peer sends a request twice to one hub. A node whose call times out, or whose connection ends, treats the hub
as lost. The node joins the next hub, presents its leases there (`ClaimRequest`) and repeats the call with its new
number. A trainer rank exits when its connection ends; its launcher starts it again as part of the next incarnation. The
hub may have carried out a call that failed.
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
        """Send one request and wait for its reply, for `timeout` seconds at most.

        Raises DeadlineError if no reply came in time, PeerLostError if the connection has ended, and the error with
        which the hub refuses the request.
        """
        ...


class BlockingHubCaller(Protocol):
    """A connection to the hub whose calls block their thread, such as `flash.transport.client.BlockingClient`."""

    def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send one request and wait for its reply, for `timeout` seconds at most. Raises as `HubCaller.call` does."""
        ...


class NodeRequest(Request[ReplyT], frozen=True):
    """Base of the requests of a rollout node."""

    node: int
    """Number of the sending node, given by `JoinReply`."""


class RankRequest(Request[ReplyT], frozen=True):
    """Base of the requests of any rank. They fail with IncarnationOverError when the rank's incarnation ends."""

    rank: int
    """Number of the sending trainer rank in the process group."""


class FirstRankRequest(Request[ReplyT], frozen=True):
    """Base of the requests of rank 0 for all ranks. They fail with IncarnationOverError when its incarnation ends."""


class GuestRequest(Request[ReplyT], frozen=True):
    """Base of the requests of a guest: a process that is not part of the run yet."""


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Reply without content: the hub has received the request and acted on it."""


# -- rollout nodes: tasks and results --------------------------------------------------------------------------------


class LeaseReply(msgspec.Struct, frozen=True, tag=True):
    """Reply to `LeaseRequest`: the tasks that the node must run, empty if the long poll ended without any."""

    leases: list[Lease]
    """New leases. With `group` in `rollout.barriers`, whole groups are leased, which may be more than the requested
    capacity."""
    done: bool
    """True if the run is over and no more tasks will come; the node may leave."""


class LeaseRequest(NodeRequest[LeaseReply], frozen=True, tag=True):
    """A node with room asks for tasks.

    The hub answers as soon as the node's share of the available tasks (`flash.hub.shares.NodeShares`) has at least one,
    or empty after the long poll. A node sends one such request at a time. If its connection ends before the reply, the
    tasks of the leases in that reply are queued again.
    """

    capacity: int
    """Number of tasks that the node could start now."""


class ClaimReply(msgspec.Struct, frozen=True, tag=True):
    """Reply to `ClaimRequest`: the node keeps the named leases, and drops all other presented leases without a
    report."""

    lease_ids: list[int]
    """Numbers of the leases that the node keeps."""


class ClaimRequest(NodeRequest[ClaimReply], frozen=True, tag=True):
    """A node that outlived the previous hub presents the leases that it still holds, about a thousand in a message.

    The node sends it right after it has joined the next hub, before any other request. The hub answers at once. If no
    node claims a lease within `flash.config.waits.claim_s`, its task is queued again. A repeated claim gets an empty
    reply, because each lease can be claimed only once.
    """

    leases: list[Lease]
    """Leases of the previous hub whose results that hub has not acknowledged."""


class EndedLease(msgspec.Struct, frozen=True, gc=False):
    """Result of one lease."""

    lease_id: int
    """Number of the lease."""
    result: Trajectory | Failure
    """Finished sample, or the reason why there is none."""


class DeliverRequest(NodeRequest[Ack], frozen=True, tag=True):
    """A node delivers the results of leases.

    The hub answers once the results are counted and stored in the journal, a file with every change of the samples.
    After the reply the node forgets the results. If the hub is lost before the reply, the node delivers the results to
    the next hub. It does this only for leases that the next hub lets it keep.
    """

    ended: list[EndedLease]
    """Results, one for each lease. The node holds all of these leases."""
    capacity: int
    """Number of tasks that the node could start now. The number may be larger than `capacity` in the `LeaseRequest` of
    this node that waits at the hub."""


class CancelReply(msgspec.Struct, frozen=True, tag=True):
    """Reply to `CancelRequest`: leases whose episodes the node must end at once; empty if the long poll ended.

    The hub has already counted the tasks as given up. For each lease the node still delivers a `Failure` with the
    outcome `cancelled`, so that the tokens that were sampled are counted.
    """

    lease_ids: list[int]
    """Numbers of the leases to cancel."""
    done: bool
    """True if the run is over: the node ends its episodes and leaves."""
    leave: bool = False
    """True if a person asked this node to leave in order (`DrainRequest`)."""


class CancelRequest(NodeRequest[CancelReply], frozen=True, tag=True):
    """A node asks which of its leases have become useless.

    The hub answers when there is such a lease, or empty after the long poll. A living node always has this request
    waiting at the hub, so it is also the node's heartbeat: a node that does not ask again within `deadlines.request` of
    the last reply counts as silent and loses its leases.
    """


# -- rollout nodes: weights and status -------------------------------------------------------------------------------


class VersionReply(msgspec.Struct, frozen=True, tag=True):
    """Reply to `VersionRequest`."""

    published: Published | None
    """Newest published version; None if the long poll ended without a newer one."""
    done: bool
    """True if the run is over and no more versions will come."""


class VersionRequest(NodeRequest[VersionReply], frozen=True, tag=True):
    """A node asks, for one of its engines, for a version newer than the one that the engine has.

    The hub answers when there is a newer version and the ranks that published it are alive, or empty after the long
    poll. After the reply the hub announces no further version until the node has reported that it has loaded this one.
    """

    after: int
    """Version that the engine has; -1 if it has none."""


class LoadFailedReply(msgspec.Struct, frozen=True, tag=True):
    """Reply to `LoadFailed`."""

    gone: bool
    """True if the trainer ranks that published the version are gone. Then the engine is healthy, and it waits for the
    next ranks to publish. False if the engine itself is at fault."""


class LoadFailed(NodeRequest[LoadFailedReply], frozen=True, tag=True):
    """A node whose engine could not load a version asks if the trainer ranks that published it are gone.

    The engine may notice the loss of a trainer rank before the hub does. So before the hub answers that the engine is
    at fault, it waits up to `flash.config.waits.echo_s` for such a loss.
    """

    incarnation: int
    """Incarnation of the trainer ranks that published the version: `Published.incarnation`."""


class EngineStatus(msgspec.Struct, frozen=True):
    """State of one engine, as its node sees it."""

    index: int
    """Number of the engine in the run."""
    version: int
    """Weight version that the engine has; -1 if it has none yet."""
    idle_s: float
    """Seconds without a running request since the engine got its first version."""
    lifetime_s: float
    """Seconds since the engine got its first version."""
    canary_error: float
    """Mean absolute difference of engine's and trainer's log-probs in the last canary, a fixed text, in nats."""
    drafted: int = 0
    """Number of tokens that speculative decoding has drafted (guessed) since the engine started."""
    accepted: int = 0
    """Number of drafted tokens that the engine accepted since it started."""


class EngineReport(NodeRequest[Ack], frozen=True, tag=True):
    """A node reports its engines after each load of a version, death and restart, and when it has moved to another hub.

    The hub answers at once. Reports may overtake each other on the way; `number` orders them.
    """

    number: int
    """Counter of the node's reports. The hub ignores the engines of a report that is older than the last one."""
    engines: list[EngineStatus]
    """All living engines of the node."""
    activities: list[Activity]
    """Activities of the engines since the last report."""
    notes: list[str] = msgspec.field(default_factory=list[str])
    """Lines to show to people."""
    restarts: int = 0
    """Number of engines that died and start again, since the last report."""
    blocked_s: float = 0.0
    """Seconds since the last report for which user code blocked the node's event loop."""
    abandoned: int = 0
    """Number of calls of user code since the last report that went on although they were cancelled."""


class StatusReport(NodeRequest[Ack], frozen=True, tag=True):
    """A node reports its state every few seconds, for people only.

    The hub decides nothing by the status, and answers at once. A report that fails is not repeated, because the next
    one follows soon.
    """

    status: NodeStatus
    """State of the node's engines, episodes and environments."""


# -- trainer ranks ---------------------------------------------------------------------------------------------------


class IncarnationReply(msgspec.Struct, frozen=True, tag=True):
    """Reply to `IncarnationRequest`: the starting point, equal for all ranks of this incarnation."""

    number: int
    """Number of the incarnation, unique over all hubs of the run."""
    checkpoint: str | None
    """Folder of the checkpoint to load. Empty: start from the model as it is, as version 0. None: nothing is left to
    do, and the rank exits."""
    store: str = ""
    """HOST:PORT of the torch store in which the ranks of this incarnation meet, as rank 0 reported it."""


class IncarnationRequest(RankRequest[IncarnationReply], frozen=True, tag=True):
    """A trainer rank that has just started reports itself and asks for its starting point.

    The hub answers once a checkpoint is chosen and rank 0 has reported its store. The rank waits for at most
    `deadlines.rendezvous`.
    """

    process: int
    """Process id of the rank on its machine, by which its launcher can kill it."""
    host: str
    """Name of the rank's machine, for people."""
    store: str = ""
    """HOST:PORT of the store that rank 0 has opened for all ranks; empty from any other rank."""


class RankHeartbeat(RankRequest[Ack], frozen=True, tag=True):
    """Heartbeat of a trainer rank. A thread of the rank sends the next one after each reply.

    The hub answers after `flash.config.waits.BEAT_S` seconds. A rank that does not ask again for several such periods
    counts as silent. The call fails when the incarnation of the rank is over because a rank of it is gone or hangs.
    """


class RanksReply(msgspec.Struct, frozen=True, tag=True):
    """Reply to `RanksRequest`: the trainer processes of one node."""

    number: int
    """Counter of changes, to be sent as the next `RanksRequest.after`."""
    living: list[int]
    """Process ids of the ranks in the newest incarnation."""
    ended: list[int]
    """Process ids of ranks whose incarnation is over: the hub ignores them, and the launcher kills them."""
    causes: list[int]
    """Process ids among `ended` that caused the end of their incarnation: they were gone or silent, or a collective
    failed."""
    missing: str = ""
    """Sentence for people that names the ranks which had not connected when the incarnation ended; empty if all had."""


class RanksRequest(Request[RanksReply], frozen=True, tag=True):
    """The launcher of a node with trainer ranks (a *messenger*) asks for the state of the rank processes on its node.

    The hub answers when a rank of any node has started or ended. If nothing changes, it answers after
    `flash.config.waits.news_s`, which shows that the hub is alive. If no reply comes within five times
    `deadlines.request`, the launcher of the hub's machine restarts the hub.
    """

    node: int
    """Number of the messenger's node in the job."""
    after: int
    """`RanksReply.number` of the last reply; -1 before the first."""


class BatchReply(msgspec.Struct, frozen=True, tag=True):
    """Reply to `BatchRequest`: one part of the rank's shard of a round, or the end of training.

    A long shard travels in several parts, one message each (`fetch_shard_blocking`). The facts about the whole round
    are in the first part. `Shard.round` says if another round follows.
    """

    shard: Shard | None
    """Part of the shard. None ends training: the rank saves a checkpoint, and exports the model if `finished`. If the
    rank has trained some rounds of the step, it drops their gradient."""
    finished: bool = False
    """True if the run has trained all of its steps; False if it was interrupted."""
    may_save: bool = True
    """True if the ranks may write a checkpoint after this step. False while they train earlier steps again, since the
    hub's part of a checkpoint belongs to the version that the run has reached. With `shard` None also False if the
    ranks have made some updates of a step that they cannot finish, and so hold weights between two versions."""
    parts_left: int = 0
    """Number of parts that follow this one."""
    must_save: bool = False
    """True if the ranks must write a checkpoint after this step even if `checkpoint.every` does not ask for one."""


class BatchRequest(RankRequest[BatchReply], frozen=True, tag=True):
    """A trainer rank asks for one part of its shard of a round.

    A round is the samples of a step that the ranks train before they ask for more; a step has one or several. The hub
    answers once enough groups are complete for the round, or the run stops; all ranks get the same rounds. The rank
    waits for at most `flash.config.waits.batch_s`. A part that is requested again is sent again.
    """

    step: int
    """Version that the rank holds, which is the number of the step to train."""
    activities: list[Activity]
    """Activities of the rank since the last round; empty in requests for later parts."""
    part: int = 0
    """Index of the part in the shard, from 0."""
    round: int = 0
    """Number of the round in the step, from 0."""


class Commit(FirstRankRequest[Ack], frozen=True, tag=True):
    """Rank 0 reports that all ranks have trained a step.

    The hub counts the step, unless an earlier incarnation has trained it before, and answers once the journal has it.
    """

    step: int
    """Number of the step that was trained."""
    metrics: dict[str, float]
    """Metrics of the step that the trainer measured."""
    seen: list[TrainedSample] = msgspec.field(default_factory=list)
    """Per-token findings for the few samples of the batch that the run shows to people."""
    trained: list[tuple[float, float]] = msgspec.field(default_factory=list[tuple[float, float]])
    """Start and end, in Unix seconds, of each block of time in which rank 0 trained a round."""


class PublishRequest(FirstRankRequest[Ack], frozen=True, tag=True):
    """Rank 0 announces a version that engines can load now.

    The hub answers once every engine has the version before this one, so engines are at most one version behind. Rank 0
    waits for at most `flash.config.waits.taken_s`. Ranks that train earlier steps again publish too, but engines are
    given only the run's version.
    """

    published: Published
    """Version, how to fetch it, and its canary."""


class SnapshotReply(msgspec.Struct, frozen=True, tag=True):
    """Reply to `SnapshotRequest`: the file with the state of the hub is written and forced to the disk."""

    size: int
    """Bytes of the file."""
    crc32: int
    """CRC-32 of the file's bytes."""


class SnapshotRequest(FirstRankRequest[SnapshotReply], frozen=True, tag=True):
    """Rank 0 asks the hub to write its state into the folder of the checkpoint that the ranks are writing.

    The hub writes the file itself, because the state may be too large for a message. This is possible because the hub
    shares the machine and the file system with rank 0. Rank 0 waits for at most `flash.config.waits.kept_s`.
    """


class Goodbye(RankRequest[Ack], frozen=True, tag=True):
    """A trainer rank that has saved everything leaves in order.

    The hub replies after the last evaluation, since until then an engine that starts needs the weights of the ranks;
    after an interrupt it replies at once. The rank waits for at most `flash.config.waits.leaving_s`.
    """

    activities: list[Activity]
    """Activities of the rank since the last `BatchRequest`."""


# -- any peer of the run ---------------------------------------------------------------------------------------------


class Interrupt(Request[Ack], frozen=True, tag=True):
    """A node, a rank or a messenger asks the hub to interrupt the run, which can be resumed afterwards.

    A step whose batch was dealt (divided among the trainer ranks) is still finished (`Hub.interrupt`). The hub replies
    at once. An interrupt that is repeated changes nothing.
    """

    reason: str
    """Reason for people, such as the signal that a machine received."""


class Fatal(Request[Ack], frozen=True, tag=True):
    """A node, a rank or a messenger reports an error. The error ends the run, or only the incarnation if a collective
    failed.

    The hub does not answer: it reports the error, and the connection ends with the run or the incarnation.
    """

    error: str
    """Name of the error's class in `flash.errors`."""
    message: str
    """Message of the error."""


# -- guests ----------------------------------------------------------------------------------------------------------


class RunReply(msgspec.Struct, frozen=True, tag=True):
    """Reply to `RunRequest`: the facts about a run that a node needs to join it."""

    config: str
    """The run's configuration with all its values, as TOML."""
    digest: str
    """Digest of the configuration, which the node repeats in `JoinRequest`."""
    folder: str
    """Folder in which the run was started; relative paths in the configuration start there."""
    imports: list[str]
    """Folders of the user's modules."""
    launch: str
    """Identity of the first node's launch, as in `error.json`."""
    ending: bool
    """True if the run is ending and needs no more nodes."""
    version: int
    """Version that the run has reached. A node whose engines have a newer one cannot serve this hub with them."""


class RunRequest(GuestRequest[RunReply], frozen=True, tag=True):
    """A guest asks for the facts about the run. The hub answers at once, or refuses a guest with another `dialect`.

    A launcher that waits for a hub asks again every second. Every version of Flash has this message with these fields,
    so that the hub can refuse a node of another version with an error message.
    """

    code: str
    """The guest's `dialect()`."""


class JoinReply(msgspec.Struct, frozen=True, tag=True):
    """Reply to `JoinRequest`: from now on the guest is a rollout node of the run."""

    node: int | None
    """Number of the node; None if the run is ending and the node is not needed."""
    first_engine: int
    """Number of the node's first engine; its other engines follow."""


class JoinRequest(GuestRequest[JoinReply], frozen=True, tag=True):
    """A guest asks to become a rollout node. The hub answers at once.

    A guest with another digest is refused, and asks with `RunRequest` again: the hub has restarted with another
    configuration meanwhile.
    """

    digest: str
    """Digest of the configuration, which the guest got in `RunReply`."""
    engines: int
    """Number of engines that the node will start."""
    node: int = 0
    """Number that a node with trainer ranks has in the job, and keeps; 0 for a node without trainer ranks."""


class DrainRequest(GuestRequest[Ack], frozen=True, tag=True):
    """A person asks (`flash drain`) that a node leaves. The hub replies at once, and asks the node by `CancelReply`."""

    node: int
    """Number of the node that is to leave."""


class Leave(NodeRequest[Ack], frozen=True, tag=True):
    """A node that has joined announces that it leaves.

    The hub answers at once and gives the node no more leases. The node finishes its leases or gives them back. The
    tasks of leases that remain are queued again when its connection ends. A node that cannot reach the hub leaves
    without an answer.
    """

    error: str = ""
    """Name of the error's class in `flash.errors` if an error is the reason; empty if the node leaves in order."""
    message: str = ""
    """Message of that error."""


# The base classes have no tag, and are not sent.
_REQUESTS = [each for each in vars().values() if isinstance(each, type) and issubclass(each, Request)]
HubRequest: Any = reduce(or_, [each for each in _REQUESTS if each.__struct_config__.tag])
"""Union of all requests that the hub's server decodes."""


@cache
def dialect() -> str:
    """Return a digest of the fields of all messages, and of the types that these messages contain.

    A node and a hub whose digests differ run versions of Flash that would not understand each other. So a guest sends
    its digest (`RunRequest`), and the hub refuses a digest that differs from its own.
    """
    structs = {
        value
        for module in (sys.modules[__name__], types)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    fields = {
        struct.__name__: [(field.name, str(field.type)) for field in msgspec.structs.fields(struct)]
        for struct in structs
    }
    return sha256(str(sorted(fields.items())).encode()).hexdigest()[:12]


# -- fetching a shard ------------------------------------------------------------------------------------------------


async def fetch_shard(hub: HubCaller, rank: int, step: int, timeout: float, number: int = 0) -> BatchReply:
    """Fetch a rank's whole shard of a round, in parts. Each part may take `timeout` seconds. Simulations use this.

    The shard travels in parts because a long one does not fit one message of the transport. Also, both ends would
    otherwise hold it encoded and decoded at the same time. `number` is the number of the round in the step. The reply
    has no shard if training ends. Raises the errors of `HubCaller.call`.
    """
    parts = [await hub.call(BatchRequest(rank, step, [], 0, number), timeout)]
    while parts[-1].parts_left:
        parts.append(await hub.call(BatchRequest(rank, step, [], len(parts), number), timeout))
    return _join_parts(parts)


def fetch_shard_blocking(
    hub: BlockingHubCaller, rank: int, step: int, number: int, activities: list[Activity], timeout: float
) -> BatchReply:
    """Fetch a rank's whole shard of a round with blocking calls, each for at most `timeout` seconds.

    `number` is the number of the round in the step. `activities` are the activities of the rank since the last round;
    they are sent with the first part. Trainer ranks use this function; simulations use `fetch_shard`. The reply has no
    shard if training ends. Raises the errors of `HubCaller.call`.
    """
    parts = [hub.call(BatchRequest(rank, step, activities, 0, number), timeout)]
    while parts[-1].parts_left:
        parts.append(hub.call(BatchRequest(rank, step, [], len(parts), number), timeout))
    return _join_parts(parts)


def _join_parts(parts: list[BatchReply]) -> BatchReply:
    """Return the first part with the samples of all parts. A reply that ends training is returned unchanged."""
    first, shards = parts[0], [part.shard for part in parts if part.shard is not None]
    if first.shard is None:
        return first
    samples = [sample for shard in shards for sample in shard.samples]
    return msgspec.structs.replace(first, shard=msgspec.structs.replace(first.shard, samples=samples), parts_left=0)
