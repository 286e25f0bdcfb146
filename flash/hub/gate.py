"""The gate between the hub's port and the hub: what a peer says is checked before the hub hears it.

A peer is a rollout node, a trainer rank, a messenger that a node sends on an errand, or a guest, who may become a node
that joins the run: the hub numbers it then. A trainer rank belongs to the incarnation of the ranks in which it has
connected, and is heard as long as that lasts. A peer speaks for itself alone, says what its kind may say, hands over
what it was given a lease on, once, and whole. Whoever does otherwise runs other code than we do, or means harm: it is
disconnected (`ProtocolError`), and the hub never sees what it said.
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

Kind = Literal["node", "trainer", "messenger", "guest"]

_NAME = re.compile(r"(node|trainer|messenger|guest)-(0|[1-9][0-9]{0,8})")

FINISHED = (Outcome.OK, Outcome.TRUNCATED)
"""Outcomes of trajectories; all others are those of failures."""

SAID_BY: dict[type[Request[Any]], tuple[Kind, ...]] = {
    p.NodeRequest: ("node",),
    p.RankRequest: ("trainer",),
    p.FirstRankRequest: ("trainer",),
    p.GuestRequest: ("guest",),
    p.RanksRequest: ("messenger",),
    p.Interrupt: ("node", "trainer", "messenger"),
    p.Fatal: ("node", "trainer", "messenger"),
}
"""Who may say what."""
MOST_HOST = 255
"""Characters of a host's name."""
MOST_ENGINES = 1024
"""Of one node: far above what a machine holds."""
MOST_STOCKS = 64
"""Kinds of things that environments of one node borrow."""
ENGINE_FIGURES = {column.name for column in columns("engine")}
"""What an engine may tell."""


class _Speaker(msgspec.Struct):
    """Who a peer is."""

    kind: Kind
    number: int
    """Of the node, or of the trainer rank."""
    heard_at: float
    """Seconds, of anyio's clock: when it came or last said something."""
    incarnation: int = 0
    """Of the trainer ranks, that this one belongs to."""
    given: dict[int, Task] = {}
    """What it was given and has not handed over, by lease: also what the hub expects no more."""

    @property
    def name(self) -> str:
        """As the hub knows it."""
        return f"{self.kind}-{self.number}"

    @property
    def silence(self) -> float:
        """Seconds since it came, or said something."""
        return anyio.current_time() - self.heard_at


class Gate:
    """Admits peers by their names, and passes on to the hub what they may say."""

    def __init__(self, hub: Hub, config: Config) -> None:
        self._hub, self._incarnations = hub, hub.incarnations
        self._limits: dict[str, int] = {
            "node": 1,
            "trainer": config.trainer_world_size,
            "messenger": config.cluster.trainer_nodes,
        }
        self._speakers: dict[int, _Speaker] = {}
        self._closed = False

    def former(self, name: str) -> int | None:
        """The peer whose place a new one of this name takes: it is silent, as behind a network that was cut one way."""
        there = self._connected(name)
        return there if there is not None and self._speakers[there].silence > SILENT_S else None

    def _connected(self, name: str) -> int | None:
        """The peer of this name, of which there may be one."""
        for peer, speaker in self._speakers.items():
            if speaker.kind in ("node", "trainer") and speaker.name == name and self._heard(speaker):
                return peer
        return None

    def arrived(self, peer: Peer) -> None:
        """A connection stands.

        Raises:
            ProtocolError: nobody of this name is awaited, or one is there who is not silent.
        """
        match = _NAME.fullmatch(peer.name)
        if match is None or int(match[2]) >= self._limits.get(match[1], math.inf):
            known = ", ".join(f"{kind}-0 to {kind}-{limit - 1}" for kind, limit in self._limits.items())
            raise ProtocolError(f"nobody in this run is called {peer.name[:60]!r} ({known})")
        kind: Any = match[1]
        number = int(match[2])
        if (there := self._connected(peer.name)) is not None:
            heard = f"and was heard {self._speakers[there].silence:.0f} s ago"
            raise ProtocolError(
                f"{peer.name} is connected already, {heard}; it must be silent for {SILENT_S:g} s. Has another node of "
                "the job the same FLASH_NODE_RANK?"
            )
        incarnation = self._incarnations.arrives(number) if kind == "trainer" else 0
        self._speakers[peer.id] = _Speaker(kind, number, anyio.current_time(), incarnation)

    def left(self, peer: Peer) -> None:
        """A connection ended."""
        speaker = self._speakers.pop(peer.id, None)
        if speaker is not None and self._heard(speaker) and not self._closed:
            self._hub.peer_lost(speaker.name)

    def close(self) -> None:
        """The hub ends: who leaves from now on leaves with it, and nobody is lost."""
        self._closed = True

    def _heard(self, speaker: _Speaker) -> bool:
        """Not a rank of an incarnation that is over: the next incarnation has begun, or soon does."""
        return speaker.kind != "trainer" or self._incarnations.counts(speaker.incarnation)

    async def handle(self, peer: Peer, request: Request[Any]) -> msgspec.Struct:
        """The hub's answer.

        Raises:
            ProtocolError: the peer may not say this.
            IncarnationOverError: it is a trainer rank whose incarnation is over.
            FlashError: the hub refuses.
        """
        speaker = self._speakers[peer.id]
        speaker.heard_at = anyio.current_time()
        if not self._heard(speaker):
            raise IncarnationOverError(INCARNATION_OVER)
        fault = self._fault(speaker, request)
        if fault is not None:
            raise ProtocolError(f"{speaker.name} sent a {type(request).__name__}: {fault}")
        if isinstance(request, p.DeliverRequest):
            for ended in request.ended:
                del speaker.given[ended.lease_id]
        reply = await self._hub.handle(request)
        if isinstance(reply, p.JoinReply) and reply.node is not None:
            speaker.kind, speaker.number = "node", reply.node
        if isinstance(reply, p.LeaseReply):
            speaker.given.update((lease.lease_id, lease.task) for lease in reply.leases)
        if isinstance(request, p.ClaimRequest) and isinstance(reply, p.ClaimReply):
            kept = set(reply.lease_ids)
            speaker.given.update((lease.lease_id, lease.task) for lease in request.leases if lease.lease_id in kept)
        return reply

    def _fault(self, speaker: _Speaker, request: Request[Any]) -> str | None:
        """Why this speaker may not say this."""
        if speaker.kind not in next(SAID_BY[base] for base in type(request).__mro__ if base in SAID_BY):
            return f"a {speaker.kind} may not"
        if isinstance(request, p.NodeRequest | p.RanksRequest) and request.node != speaker.number:
            return f"it speaks for node {request.node}"
        if isinstance(request, p.RankRequest) and request.rank != speaker.number:
            return f"it speaks for trainer {request.rank}"
        if isinstance(request, p.FirstRankRequest) and speaker.number != 0:
            return "rank 0 alone does"
        match request:
            case p.DeliverRequest():
                return next(self._delivery_faults(request, speaker.given), None)
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
            case p.PublishRequest() if request.published.version != (held := self._hub.progress.held):
                return f"version {request.published.version}, and the ranks hold {held}"
            case _:
                return None

    def _delivery_faults(self, request: p.DeliverRequest, given: Mapping[int, Task]) -> Iterator[str]:
        seen: set[int] = set()
        for ended in request.ended:
            task = given.get(ended.lease_id)
            if task is None or ended.lease_id in seen:
                yield f"it does not hold lease {ended.lease_id}"
            elif (fault := _result_fault(task, ended.result, self._hub.progress.newest)) is not None:
                yield f"lease {ended.lease_id}: {fault}"
            seen.add(ended.lease_id)

    def _report_fault(self, request: p.EngineReport) -> str | None:
        newest = self._hub.progress.newest
        for engine in request.engines:
            if not -1 <= engine.version <= newest:
                return f"engine {engine.index} at version {engine.version}, and the newest is {newest}"
            if engine.index < 0 or not _finite((engine.idle_s, engine.lifetime_s, engine.canary_error)):
                return f"engine {engine.index} with numbers that cannot be"
            if not 0 <= engine.accepted <= engine.drafted:
                return f"engine {engine.index} with {engine.accepted} of {engine.drafted} drafted tokens"
        if len({engine.index for engine in request.engines}) < len(request.engines):
            return "an engine twice"
        if not 0 <= request.restarts <= MOST:
            return f"{request.restarts} restarts"
        if not (0 <= request.blocked_s < math.inf and 0 <= request.abandoned <= MOST):
            return f"{request.blocked_s} s in which its loop was blocked, and {request.abandoned} abandoned calls"
        return _activity_fault(request.activities)


def _status_fault(status: NodeStatus) -> str | None:
    """What could not be shown, or kept: whatever else it says is for people alone."""
    if len(status.engines) > MOST_ENGINES or len(status.stocks) > MOST_STOCKS:
        return f"{len(status.engines)} engines and {len(status.stocks)} stocks"
    texts = [status.host, *(engine.why for engine in status.engines), *(stock.name for stock in status.stocks)]
    if (longest := max(map(len, texts))) > 2 * FAILURE_TEXT:
        return f"a text of {longest} characters"
    times = (time for engine in status.engines for time in (engine.loaded_at, engine.died_at) if time is not None)
    if any(not engine.figures.keys() <= ENGINE_FIGURES for engine in status.engines):
        return "a number of an engine that nobody knows"
    figures = (value for engine in status.engines for value in engine.figures.values())
    return None if _finite((status.since, *times, *figures)) else "a number that is not finite"


def _activity_fault(activities: Iterable[Activity]) -> str | None:
    for activity in activities:
        if not (_finite((activity.start, activity.stop)) and activity.start <= activity.stop):
            return f"an activity from {activity.start} to {activity.stop}"
    return None


def _result_fault(task: Task, result: Trajectory | Failure, newest: int) -> str | None:
    """Why this cannot be what became of the task."""
    if result.task != task:
        return "it was for another task"
    if (result.outcome in FINISHED) != isinstance(result, Trajectory):
        return f"a {type(result).__name__} whose outcome is {result.outcome}"
    if isinstance(result, Failure):
        # The ledger adds them up, and a checkpoint holds 64 bits.
        return None if 0 <= result.tokens <= MOST else f"{result.tokens} tokens"
    return _trajectory_fault(result, newest)


def _trajectory_fault(made: Trajectory, newest: int) -> str | None:
    """What in a trajectory does not go together."""
    if len(made.token_ids) % 4 or len(made.logprobs) % 4:
        return "its arrays have parts of numbers"
    end, acted = 0, 0
    for span in made.action_spans:
        if not end <= span.start <= span.stop <= made.length:
            return f"tokens [{span.start}, {span.stop}) of {made.length}, after {end}"
        end, acted = span.stop, acted + span.stop - span.start
    if not 0 < acted == made.action_count == sum(run.count for run in made.versions):
        return f"{acted} sampled tokens, {made.action_count} log-probs, versions of another number"
    if not all(run.count >= 0 and 0 <= run.version <= newest for run in made.versions):
        return f"versions {made.versions[:4]}, and the newest is {newest}"
    if len(made.turns) != len(made.action_spans) or not made.turns:
        return f"{len(made.turns)} turns, {len(made.action_spans)} responses"
    if (fault := _branch_fault(made)) is not None:
        return fault
    numbers = (number for turn in made.turns for number in (turn.reward, turn.start, turn.generate_s, turn.env_s))
    measured = (number for turn in made.turns for number in turn.metrics.values())
    if not (math.isfinite(made.reward) and _finite(numbers) and _finite(measured)):
        return "a number that is not finite"
    if made.kept is None and made.task.sampling.keeps:
        return f"no kept sets, and drawn with top_k = {made.task.sampling.top_k}"
    if made.kept is not None and (fault := made.kept.fault(made.action_count)) is not None:
        return fault
    if made.routes is not None and (fault := made.routes.fault(made.length)) is not None:
        return fault
    if made.teacher is not None and len(made.teacher) != len(made.logprobs):
        return f"{made.action_count} sampled tokens, and {len(made.teacher)} bytes of their teacher's"
    if made.lost_tokens < 0:
        return f"{made.lost_tokens} lost tokens"
    if made.length and made.tokens().min() < 0:
        return "a token below 0"
    return None


def _branch_fault(made: Trajectory) -> str | None:
    """What in its branches does not go together with its responses."""
    if made.branches == (0,):
        return "a response in no branch" if any(turn.branch for turn in made.turns) else None
    ends = (*made.branches[1:], made.length)
    if not made.branches or made.branches[0] != 0 or any(map(ge, made.branches, ends)):
        return f"branches that begin at {made.branches[:4]} of {made.length} tokens"
    spans, turns = iter(made.action_spans), Counter(turn.branch for turn in made.turns)
    for number, (begin, end) in enumerate(zip(made.branches, ends, strict=True)):
        own = list(islice(spans, turns[number]))
        if not own or own[0].start <= begin or own[-1].stop > end or own[0].start == own[-1].stop:
            return f"branch {number} at tokens [{begin}, {end}) with the responses {own[:4]}"
    return "a response in no branch" if next(spans, None) is not None else None


def _finite(numbers: Iterable[float]) -> bool:
    return all(map(math.isfinite, numbers))
