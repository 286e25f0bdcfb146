"""The gate between the hub's port and the hub: it checks each request before the hub sees it.

A peer is a rollout node, a trainer rank, a messenger or a guest. A *messenger* is the launcher of a node with trainer
ranks, which asks for the state of the rank processes. A *guest* is a process that is not part of the run yet, and
becomes a node when it joins. A peer may send only valid requests of its kind, and only for itself. For example, a node
delivers results only for the *leases* that it holds (a lease assigns one task to one node), each once, and each
complete. A peer that breaks a rule runs different code or is an attacker. The peer is disconnected with a
ProtocolError, and the hub never sees the request.

An *incarnation* is the set of trainer ranks that run from one restart of the ranks to the next. A trainer rank belongs
to the incarnation in which it has connected, and is answered only until this incarnation is over.

Lifecycle: for a new connection `flash.transport.server.serve` asks `connection_to_replace` and ends the connection that
it names. Then the server calls `arrived`, `handle` for each request, and `left` when the connection has ended. `handle`
checks the request and calls `flash.hub.hub.Hub.handle`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import ge
from typing import Any, Literal

import anyio
import msgspec

from flash.config.section import MOST
from flash.config.tree import Config
from flash.config.waits import SILENT_S
from flash.errors import IncarnationOverError, ProtocolError
from flash.hub import protocol as p
from flash.hub.hub import Hub
from flash.hub.trainers import INCARNATION_OVER
from flash.observe.cluster import FAILURE_TEXT, NodeStatus
from flash.observe.columns.table import columns
from flash.transport.frames import Request
from flash.transport.server import Peer
from flash.types import Activity, Failure, Outcome, Task, Trajectory

PeerKind = Literal["node", "trainer", "messenger", "guest"]
"""Kind of a peer. A `trainer` is a trainer rank."""

_PEER_NAME = re.compile(r"(node|trainer|messenger|guest)-(0|[1-9][0-9]{0,8})")
"""Name of a peer: its kind and its number, such as `node-3`. More than nine digits are refused."""

FINISHED = (Outcome.OK, Outcome.TRUNCATED)
"""Outcomes of finished samples. A `Trajectory` has one of these outcomes, and a `Failure` one of the others."""

SENDERS: dict[type[Request[Any]], tuple[PeerKind, ...]] = {
    p.NodeRequest: ("node",),
    p.RankRequest: ("trainer",),
    p.FirstRankRequest: ("trainer",),
    p.GuestRequest: ("guest",),
    p.RanksRequest: ("messenger",),
    p.Interrupt: ("node", "trainer", "messenger"),
    p.Fatal: ("node", "trainer", "messenger"),
}
"""Kinds of peers that may send a request. To find the entry of a request, the class of the request is looked up first,
and then the base classes in order."""
MOST_HOST = 255
"""Largest number of characters in a host's name, or in the address of the store at which trainer ranks meet. A DNS name
has at most 253 characters; the limit bounds the memory that a faulty peer can fill."""
MOST_ENGINES = 1024
"""Largest number of engines of one node; far above what a machine holds."""
MOST_STOCKS = 64
"""Largest number of stocks in a status. A stock is a resource that the environments of one node share, such as a pool
of sandboxes. The limit bounds the memory that a faulty node can fill."""
ENGINE_FIGURES = {column.name for column in columns("engine")}
"""Names of the figures (numbers for people) that an engine may report."""


class _ConnectedPeer(msgspec.Struct):
    """Identity of a connected peer, and the leases that it holds."""

    kind: PeerKind
    number: int
    """Number of the node or of the trainer rank."""
    heard_at: float
    """Time, on anyio's clock, at which the peer connected or sent its last request."""
    incarnation: int = 0
    """Incarnation of a trainer rank; 0 for other peers."""
    leases: dict[int, Task] = {}
    """Tasks whose results the node has not delivered yet, by the number of their lease. A task that the hub withdraws
    stays here, because the node still delivers a failure for its lease. Empty for peers that are no nodes."""

    @property
    def name(self) -> str:
        """Name by which the hub knows the peer."""
        return f"{self.kind}-{self.number}"

    @property
    def silence(self) -> float:
        """Seconds since the peer connected or sent its last request."""
        return anyio.current_time() - self.heard_at


class Gate:
    """Admits peers by name and passes valid requests to the hub. The owner of the port gives the methods to `serve`."""

    def __init__(self, hub: Hub, config: Config) -> None:
        self._hub, self._incarnations = hub, hub.incarnations
        self._limits: dict[str, int] = {
            "node": 1,
            "trainer": config.trainer_world_size,
            "messenger": config.cluster.trainer_nodes,
        }
        """Number of peers of each kind that may connect by name. Only node 0, which runs the hub, connects as a node.
        Every other node connects as a guest, and becomes a node when it joins; guests have no limit."""
        self._peers: dict[int, _ConnectedPeer] = {}
        """Connected peers, by the id of their connection."""
        self._closed = False
        """True once the hub ends, so that lost connections are not reported to it any more."""

    def connection_to_replace(self, name: str) -> int | None:
        """Return the id of the silent connection that a new connection with this name replaces; None if there is none.

        `flash.transport.server.serve` calls this for each new connection, and ends the returned connection before it
        calls `arrived`. A connection is silent if no request has arrived in it for `SILENT_S`. The connection may be
        dead without the hub knowing it: if the network was cut, the end of the connection never arrives. Then the peer
        connects again while its old connection still seems open.

        There are three cases in which nothing is replaced:
        - No node or trainer rank of this name is connected. `arrived` then admits the new peer. Messengers and guests
          are always in this case, because several of one name may be connected: the hub keeps no state for them.
        - A trainer rank of this name is connected, but its incarnation is over. The hub does not answer that connection
          any more, so `arrived` admits the new rank into the next incarnation.
        - The connected peer is not silent. `arrived` then refuses the new one.
        """
        connection = self._find(name)
        return connection if connection is not None and self._peers[connection].silence > SILENT_S else None

    def _find(self, name: str) -> int | None:
        """Return the id of the connection of the node, or current trainer rank, of this name; None if there is none."""
        for connection, peer in self._peers.items():
            if peer.kind in ("node", "trainer") and peer.name == name and self._is_current(peer):
                return connection
        return None

    def arrived(self, connection: Peer) -> None:
        """Admit a peer that has connected.

        A trainer rank joins the newest incarnation. If that incarnation is over, the rank is the first one of the next
        incarnation.

        Raises:
            ProtocolError: the run has no peer of this name, or a node or trainer rank of this name is still connected.
                (Several messengers or guests may have one name.) The server has already ended a silent connection of
                this name (`connection_to_replace`).
        """
        match = _PEER_NAME.fullmatch(connection.name)
        if match is None or int(match[2]) >= self._limits.get(match[1], math.inf):
            known = ", ".join(f"{kind}-0 to {kind}-{limit - 1}" for kind, limit in self._limits.items())
            raise ProtocolError(f"no peer of this run is called {connection.name[:60]!r} (the run has {known})")
        kind: Any = match[1]
        number = int(match[2])
        if (connected_id := self._find(connection.name)) is not None:
            heard = f"and was heard {self._peers[connected_id].silence:.0f} s ago"
            raise ProtocolError(
                f"{connection.name} is connected already, {heard}; it must be silent for {SILENT_S:g} s. Has another "
                "node of the job the same FLASH_NODE_RANK?"
            )
        incarnation = self._incarnations.rank_arrived(number) if kind == "trainer" else 0
        self._peers[connection.id] = _ConnectedPeer(kind, number, anyio.current_time(), incarnation)

    def left(self, connection: Peer) -> None:
        """Forget a peer whose connection has ended, and report its loss to the hub.

        The hub gets no report on ranks of an incarnation that is over, nor any report after `close`. A connection that
        `arrived` has refused is unknown, and changes nothing.
        """
        peer = self._peers.pop(connection.id, None)
        if peer is not None and self._is_current(peer) and not self._closed:
            self._hub.peer_lost(peer.name)

    def close(self) -> None:
        """Stop reporting the ends of connections. The hub ends the connections itself, so their peers are not lost."""
        self._closed = True

    def _is_current(self, peer: _ConnectedPeer) -> bool:
        """Return False for a trainer rank whose incarnation is over, and True for every other peer.

        The requests of such a rank, and the end of its connection, must not reach the hub, which already serves the
        next incarnation.
        """
        return peer.kind != "trainer" or self._incarnations.is_current(peer.incarnation)

    async def handle(self, connection: Peer, request: Request[Any]) -> msgspec.Struct:
        """Check a request and return the hub's reply.

        The method also keeps track of the leases that a node holds. A guest becomes a node with the reply to its
        `JoinRequest`, and may send the requests of nodes from then on. The server runs one task for each request. It
        cancels these tasks when the connection ends, and calls `left` only after they have ended.

        Raises:
            ProtocolError: the peer may not send this request.
            IncarnationOverError: the peer is a trainer rank whose incarnation is over.
            FlashError: the hub refuses the request.
        """
        peer = self._peers[connection.id]
        peer.heard_at = anyio.current_time()
        if not self._is_current(peer):
            raise IncarnationOverError(INCARNATION_OVER)
        fault = self._fault(peer, request)
        if fault is not None:
            raise ProtocolError(f"{peer.name} sent a {type(request).__name__}: {fault}")
        if isinstance(request, p.DeliverRequest):
            # The leases are removed before the hub handles the request, so that a second delivery of the same result
            # meanwhile is refused.
            for ended in request.ended:
                del peer.leases[ended.lease_id]
        reply = await self._hub.handle(request)
        if isinstance(reply, p.JoinReply) and reply.node is not None:
            peer.kind, peer.number = "node", reply.node
        if isinstance(reply, p.LeaseReply):
            peer.leases.update((lease.lease_id, lease.task) for lease in reply.leases)
        if isinstance(request, p.ClaimRequest) and isinstance(reply, p.ClaimReply):
            kept = set(reply.lease_ids)
            peer.leases.update((lease.lease_id, lease.task) for lease in request.leases if lease.lease_id in kept)
        return reply

    def _fault(self, peer: _ConnectedPeer, request: Request[Any]) -> str | None:
        """Return why this peer may not send this request, as a phrase for the error message; None if it may."""
        if peer.kind not in next(SENDERS[base] for base in type(request).__mro__ if base in SENDERS):
            return f"a {peer.kind} may not"
        if isinstance(request, p.NodeRequest | p.RanksRequest) and request.node != peer.number:
            return f"it speaks for node {request.node}"
        if isinstance(request, p.RankRequest) and request.rank != peer.number:
            return f"it speaks for trainer {request.rank}"
        if isinstance(request, p.FirstRankRequest) and peer.number != 0:
            return "only rank 0 may"
        match request:
            case p.DeliverRequest():
                return next(self._delivery_faults(request, peer.leases), None)
            case p.EngineReport():
                return self._report_fault(request)
            case p.StatusReport():
                return _status_fault(request.status)
            case p.IncarnationRequest() if (longest := max(len(request.host), len(request.store))) > MOST_HOST:
                return f"a host's name of {longest} characters"
            case p.BatchRequest() | p.Goodbye():
                return _activity_fault(request.activities)
            case p.JoinRequest() if not 0 < request.engines <= MOST_ENGINES:
                return f"{request.engines} engines"
            case p.PublishRequest() if request.published.version != (held := self._hub.progress.trainer_version):
                return f"version {request.published.version}, and the ranks hold {held}"
            case _:
                return None

    def _delivery_faults(self, request: p.DeliverRequest, leases: Mapping[int, Task]) -> Iterator[str]:
        """Yield the faults of a delivery, as phrases. `leases`: tasks that the peer holds, by number of the lease."""
        seen: set[int] = set()
        # A node that has outlived the previous hub may deliver tokens of versions that this run has yet to make again.
        newest = max(self._hub.progress.newest, self._hub.progress.newest_before)
        for ended in request.ended:
            task = leases.get(ended.lease_id)
            if task is None or ended.lease_id in seen:
                yield f"it does not hold lease {ended.lease_id}"
            elif (fault := _result_fault(task, ended.result, newest)) is not None:
                yield f"lease {ended.lease_id}: {fault}"
            seen.add(ended.lease_id)

    def _report_fault(self, request: p.EngineReport) -> str | None:
        """Return a phrase for the first impossible number in a report on engines; None if there is none.

        The hub grants tasks by the reported versions. The other numbers only go into the metrics.
        """
        newest = self._hub.progress.newest
        for engine in request.engines:
            if not -1 <= engine.version <= newest:
                return f"engine {engine.index} at version {engine.version}, and the newest is {newest}"
            if engine.index < 0 or not _finite((engine.idle_s, engine.lifetime_s, engine.canary_error)):
                return f"engine {engine.index} with impossible numbers"
            if not 0 <= engine.accepted <= engine.drafted:
                return f"engine {engine.index} with {engine.accepted} of {engine.drafted} drafted tokens"
        if len({engine.index for engine in request.engines}) < len(request.engines):
            return "an engine twice"
        # `MOST` is the largest value of any count in Flash, so no honest node reports a larger one.
        if not 0 <= request.restarts <= MOST:
            return f"{request.restarts} restarts"
        if not (0 <= request.blocked_s < math.inf and 0 <= request.abandoned <= MOST):
            return f"{request.blocked_s} s in which its loop was blocked, and {request.abandoned} abandoned calls"
        return _activity_fault(request.activities)


def _status_fault(status: NodeStatus) -> str | None:
    """Return a phrase for the first fault of a node's status; None if there is none.

    A status is only shown to people, and the hub decides nothing by it. So this function looks only for faults that
    would break the display or fill the memory.
    """
    if len(status.engines) > MOST_ENGINES or len(status.stocks) > MOST_STOCKS:
        return f"{len(status.engines)} engines and {len(status.stocks)} stocks"
    texts = [status.host, *(engine.why for engine in status.engines), *(stock.name for stock in status.stocks)]
    # A node shortens its texts to `FAILURE_TEXT` characters. Twice as many are allowed, as a margin.
    if (longest := max(map(len, texts))) > 2 * FAILURE_TEXT:
        return f"a text of {longest} characters"
    times = (time for engine in status.engines for time in (engine.loaded_at, engine.died_at) if time is not None)
    if any(not engine.figures.keys() <= ENGINE_FIGURES for engine in status.engines):
        return "a figure of an engine with an unknown name"
    figures = (value for engine in status.engines for value in engine.figures.values())
    return None if _finite((status.since, *times, *figures)) else "a number that is not finite"


def _activity_fault(activities: Iterable[Activity]) -> str | None:
    """Return a phrase for the first activity whose times are impossible; None if all are possible.

    An activity is something that a worker did, which the run's page draws as a bar of the timeline. JSON, in which
    activities are stored, has no number that is not finite, and a bar cannot end before its start.
    """
    for activity in activities:
        if not (_finite((activity.start, activity.stop)) and activity.start <= activity.stop):
            return f"an activity from {activity.start} to {activity.stop}"
    return None


def _result_fault(task: Task, result: Trajectory | Failure, newest: int) -> str | None:
    """Return a phrase that says why `result` cannot be the task's result; None if it can.

    `newest`: newest version that engines can have, or have had under a previous hub.
    """
    if result.task != task:
        return "it was for another task"
    if (result.outcome in FINISHED) != isinstance(result, Trajectory):
        return f"a {type(result).__name__} whose outcome is {result.outcome}"
    if isinstance(result, Failure):
        # The ledger adds up these numbers and `lost_tokens` of trajectories. A checkpoint has 64 bits for the sum.
        return None if 0 <= result.tokens <= MOST else f"{result.tokens} tokens"
    return trajectory_fault(result, newest)


def trajectory_fault(trajectory: Trajectory, newest: int) -> str | None:
    """Return a phrase for the first inconsistency in a trajectory; None if there is none.

    The gate refuses such a sample and disconnects its node, because on a trainer rank the sample would end the run.
    `flash.run.bundle` refuses a recorded batch with such a sample. An action span is the range of the tokens of one
    response.

    `newest`: newest version that engines can have.
    """
    # The bytes are int32 token ids and float32 log-probs: four bytes each.
    if len(trajectory.token_ids) % 4 or len(trajectory.logprobs) % 4:
        return "its arrays end in the middle of a number"
    end, sampled = 0, 0
    for span in trajectory.action_spans:
        if not end <= span.start <= span.stop <= trajectory.length:
            return f"tokens [{span.start}, {span.stop}) of {trajectory.length}, after {end}"
        end, sampled = span.stop, sampled + span.stop - span.start
    if not 0 < sampled == trajectory.action_count == sum(run.count for run in trajectory.versions):
        versions = sum(run.count for run in trajectory.versions)
        return f"{sampled} sampled tokens, {trajectory.action_count} log-probs and {versions} versions"
    if not all(run.count >= 0 and 0 <= run.version <= newest for run in trajectory.versions):
        return f"versions {trajectory.versions[:4]}, and the newest is {newest}"
    if len(trajectory.turns) != len(trajectory.action_spans) or not trajectory.turns:
        return f"{len(trajectory.turns)} turns, {len(trajectory.action_spans)} responses"
    # `_branch_fault` relies on the checks above: spans are in order, and there are as many turns as spans.
    if (fault := _branch_fault(trajectory)) is not None:
        return fault
    turns = trajectory.turns
    numbers = (number for turn in turns for number in (turn.reward, turn.start, turn.generate_s, turn.env_s))
    metrics = (number for turn in turns for number in turn.metrics.values())
    if not (math.isfinite(trajectory.reward) and _finite(numbers) and _finite(metrics)):
        return "a number that is not finite"
    # A kept set has the tokens that could have been drawn in place of a sampled token, if `top_k` leaves tokens out.
    if trajectory.kept is None and trajectory.task.sampling.has_kept_sets:
        return f"no kept sets, and drawn with top_k = {trajectory.task.sampling.top_k}"
    if trajectory.kept is not None and (fault := trajectory.kept.fault(trajectory.action_count)) is not None:
        return fault
    # Routes are the experts that a mixture of experts has chosen for each token.
    if trajectory.routes is not None and (fault := trajectory.routes.fault(trajectory.length)) is not None:
        return fault
    if trajectory.teacher is not None and len(trajectory.teacher) != len(trajectory.logprobs):
        return f"{trajectory.action_count} sampled tokens, and {len(trajectory.teacher)} bytes of teacher log-probs"
    if not 0 <= trajectory.lost_tokens <= MOST:
        return f"{trajectory.lost_tokens} lost tokens"
    if trajectory.length and trajectory.tokens().min() < 0:
        return "a token below 0"
    return None


def _branch_fault(trajectory: Trajectory) -> str | None:
    """Return a phrase for the first contradiction between a trajectory's branches and responses; None if none exists.

    A branch is one of the token sequences of a sample. Each branch begins with a prompt and holds one or more
    responses. `trajectory.branches` has the position of the first token of each branch.
    """
    # Almost all trajectories have only one branch, and need no further check.
    if trajectory.branches == (0,):
        return "a response in no branch" if any(turn.branch for turn in trajectory.turns) else None
    ends = (*trajectory.branches[1:], trajectory.length)
    if not trajectory.branches or trajectory.branches[0] != 0 or any(map(ge, trajectory.branches, ends)):
        return f"branches that begin at {trajectory.branches[:4]} of {trajectory.length} tokens"
    spans, responses = iter(trajectory.action_spans), Counter(turn.branch for turn in trajectory.turns)
    for number, (begin, end) in enumerate(zip(trajectory.branches, ends, strict=True)):
        own = list(islice(spans, responses[number]))
        # A branch begins with a prompt, and at least one token was sampled in it.
        if not own or own[0].start <= begin or own[-1].stop > end or own[0].start == own[-1].stop:
            return f"branch {number} at tokens [{begin}, {end}) with the responses {own[:4]}"
    return "a response in no branch" if next(spans, None) is not None else None


def _finite(numbers: Iterable[float]) -> bool:
    """Return True if no number is infinite or NaN."""
    return all(map(math.isfinite, numbers))
