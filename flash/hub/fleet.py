"""The nodes and their engines as the hub knows them: versions, silence, and what each told of itself. Pure state.

A node counts from the moment in which it is given its first version: the trainers keep that one until it has loaded it.
Engines are at most one version behind: the next one is announced when all of them are `up_to_date`.
A node that lives always has a question about cancels waiting at the hub. One that has not asked again some time after
its last answer is silent, though its connection stands: its event loop is blocked, or its machine is stopped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import count

import msgspec

from flash.config.load import dump
from flash.config.tree import Config
from flash.errors import ConfigError, PeerLostError
from flash.hub import protocol as p
from flash.hub.protocol import EngineReport, EngineStatus
from flash.observe.cluster import EVENT_TEXT, MOST_GONE, NodeNow, NodeStatus, shortened


class _Node:
    """What a node last said of its engines."""

    def __init__(self, report: EngineReport) -> None:
        self.number = report.number
        self.engines = report.engines
        self.versions = [engine.version for engine in report.engines]
        self.oldest = min(self.versions, default=math.inf)


class Fleet:
    """The engines."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        """Those that have reported."""
        self._joining: set[int] = set()
        """Those that load their first version."""
        self.able: set[int] = set()
        """Nodes with an engine that has a version: all others can run nothing now."""
        self.started = False
        """Whether an engine has ever had a version."""

    def __bool__(self) -> bool:
        """Whether a node has engines."""
        return bool(self._nodes or self._joining)

    def has_beside(self, node: int) -> bool:
        """Whether another node has engines."""
        return any(other != node for other in (*self._nodes, *self._joining))

    def engines(self) -> Iterator[EngineStatus]:
        """Every engine that has been reported."""
        return (engine for node in self._nodes.values() for engine in node.engines)

    def engines_of(self, node: int) -> Sequence[EngineStatus]:
        """Those of a node, as it has reported them."""
        known = self._nodes.get(node)
        return known.engines if known is not None else ()

    @property
    def waits_for_engines(self) -> bool:
        """Whether nodes that had engines have none now, and stay to start others."""
        return bool(self._nodes) and next(self.engines(), None) is None

    def versions(self, node: int) -> list[int]:
        """The versions of a node's engines."""
        known = self._nodes.get(node)
        return known.versions if known is not None else []

    def report(self, report: EngineReport) -> bool:
        """A node tells of all engines that it has left. False: a later report has overtaken this one."""
        known = self._nodes.get(report.node)
        if known is not None and known.number >= report.number:
            return False
        node = self._nodes[report.node] = _Node(report)
        self._joining.discard(report.node)
        self.able.discard(report.node)
        if max(node.versions, default=-1) >= 0:
            self.able.add(report.node)
            self.started = True
        return True

    def given(self, node: int) -> None:
        """A node was given the newest version to load."""
        if node not in self._nodes:
            self._joining.add(node)

    def lost(self, node: int) -> None:
        """A node is gone, or its silence was noticed."""
        self._nodes.pop(node, None)
        self.able.discard(node)
        self._joining.discard(node)

    # -- versions ----------------------------------------------------------------------------------------------------

    def up_to_date(self, newest: int) -> bool:
        """Return True if no engine needs the trainers' weights any more: all of them have version `newest`."""
        return not self._joining and all(node.oldest >= newest for node in self._nodes.values())

    def behind(self, newest: int) -> str:
        """Name the engines that have not loaded version `newest`, for people."""
        late = [
            f"engine {engine.index} of node {number} (it has version {engine.version})"
            for number, node in self._nodes.items()
            for engine in node.engines
            if engine.version < newest
        ]
        return ", ".join([*late, *(f"the engines of node {node} (they have none)" for node in sorted(self._joining))])


class Attendance:
    """Who is there, and who is silent.

    Args:
        silence_s: how long a node may take from an answer to its next question.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._here: set[int] = set()
        """Those that have asked about cancels, the first thing that a node does."""
        self._answered: dict[int, float] = {}

    def __bool__(self) -> bool:
        """Whether somebody is there."""
        return bool(self._here)

    def asked(self, node: int) -> None:
        """A node has a question waiting."""
        self._here.add(node)
        self._answered.pop(node, None)

    def answered(self, node: int, now: float) -> None:
        """A node has its answer, and should ask again."""
        self._answered[node] = now

    def silent(self, now: float) -> list[int]:
        """The nodes that are silent."""
        return [node for node, since in self._answered.items() if now - since >= self._silence_s]

    def next_silence(self, now: float) -> float:
        """Seconds in which no node can fall silent."""
        return max(0.0, min(self._answered.values(), default=now) + self._silence_s - now)

    def lost(self, node: int) -> None:
        """A node is gone, or its silence was noticed."""
        self._here.discard(node)
        self._answered.pop(node, None)


CUT_OFF = "its connection ended: its process, its machine or the network between is gone"
SILENT = "it was silent, and its connection ended then"
IN_ORDER = "it left in order"


class NodeStatuses:
    """See the module's docstring. Times are Unix seconds."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[float, NodeStatus]] = {}
        self.gone: deque[NodeNow] = deque(maxlen=MOST_GONE)
        """The last nodes that went, the newest last."""

    def told(self, node: int, status: NodeStatus, now: float) -> list[str]:
        """A node tells how it is; returns how engines of it have died since it did so before."""
        before = self.of(node)
        known = {} if before is None or before.since != status.since else {e.number: e.deaths for e in before.engines}
        self._told[node] = now, status
        return [engine.why for engine in status.engines if engine.deaths > known.get(engine.number, 0)]

    def of(self, node: int) -> NodeStatus | None:
        """What it told last."""
        return self._told[node][1] if node in self._told else None

    def heard_at(self, node: int) -> float | None:
        """When that was."""
        return self._told[node][0] if node in self._told else None

    def left(self, node: int, now: float, *, silent: bool, leaving: str | None) -> str:
        """A node is gone; `leaving` is why it said that it goes, empty in order, None without a word.

        Returns what is to be told of it as a failure; empty where it left in order.
        """
        heard_at, status = self._told.pop(node, (None, None))
        why = IN_ORDER if leaving == "" else leaving or (SILENT if silent else CUT_OFF)
        self.gone.append(
            NodeNow(
                node=node, state="gone", heard_at=heard_at, status=status, gone_at=now, why=shortened(why, EVENT_TEXT)
            )
        )
        return "" if leaving == "" else f"node {node}: {why}"


HUB_NODE = 0
"""The node whose loop shares the hub's process."""


class RunOrigin(msgspec.Struct, frozen=True):
    """Where a run was started: what its paths and import paths are relative to."""

    folder: str = ""
    imports: tuple[str, ...] = ()
    """Folders of the user's modules."""
    launch: str = ""
    """The launch of the first node, as in `error.json`."""


def config_digest(config_text: str) -> str:
    """Tells one configuration from another."""
    return sha256(config_text.encode()).hexdigest()[:16]


class NodeRegistry:
    """See the module's docstring.

    Args:
        config: the run.
        origin: where it was started.
    """

    def __init__(self, config: Config, origin: RunOrigin) -> None:
        self._config = config
        self._origin = origin
        self._engines = {HUB_NODE: range(config.engines_on(HUB_NODE))}
        """The numbers of each member's engines."""

    @cached_property
    def _text(self) -> str:
        return dump(self._config)

    def has_joined(self, node: int) -> bool:
        """Whether this number is that of a node which came by itself, and may go."""
        return node != HUB_NODE

    @property
    def engines(self) -> int:
        """Engines of all members, started or not."""
        return sum(map(len, self._engines.values()))

    @property
    def numbers(self) -> list[int]:
        """All members, whether they have come yet or not."""
        return sorted(self._engines)

    @property
    def joined(self) -> list[int]:
        """The nodes that have come by themselves."""
        return [node for node in self._engines if self.has_joined(node)]

    def about(self, request: p.RunRequest, version: int, *, ending: bool) -> p.RunReply:
        """What a node has to know to become a member.

        Raises:
            ConfigError: it runs another version of Flash.
        """
        if request.code != p.dialect():
            raise ConfigError(
                f"the hub speaks version {p.dialect()} of the messages, and this node version {request.code}: install "
                "the same version of Flash on both"
            )
        return p.RunReply(
            self._text,
            config_digest(self._text),
            self._origin.folder,
            list(self._origin.imports),
            self._origin.launch,
            ending,
            version,
        )

    def join(self, request: p.JoinRequest) -> p.JoinReply:
        """Number a new member and its engines.

        Raises:
            ConfigError: there is no room for it.
            PeerLostError: it has heard of another incarnation of this run.
        """
        if request.digest != config_digest(self._text):
            raise PeerLostError("the hub has started again, with another configuration")
        cluster = self._config.cluster
        if self._config.weights_backend == "ipc":
            raise ConfigError("weights.backend = ipc ends at the trainers' machine: nodes join with tcp or nccl")
        free = (number for number in count(cluster.trainer_nodes) if number not in self._engines)
        own = request.node
        node = own if 0 < own < cluster.trainer_nodes and own not in self._engines else next(free)
        first = 0
        for taken in sorted(self._engines.values(), key=lambda engines: engines.start):
            if first + request.engines <= taken.start:
                break
            first = max(first, taken.stop)
        self._engines[node] = range(first, first + request.engines)
        return p.JoinReply(node, first)

    def may_leave(self, node: int) -> None:
        """Raises ConfigError: the run has no such node."""
        if node not in self.joined:
            known = ", ".join(map(str, self.joined)) or "none"
            raise ConfigError(f"no node {node} has joined this run (those that have: {known})")

    def left(self, node: int) -> None:
        """A member is gone; its numbers are free. The hub's own node ends with the hub."""
        if self.has_joined(node):
            self._engines.pop(node, None)
