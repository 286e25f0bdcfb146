"""The hub's state of the rollout nodes and their engines: numbers, versions, heartbeats, statuses. Pure state.

`NodeRegistry` gives numbers to nodes and engines. `Fleet` knows which engine has which version. `Heartbeats` knows
which nodes are silent. `NodeStatuses` keeps the nodes' reports about themselves, for people. `flash.hub.nodes` and
`flash.hub.work` call these classes when a node sends a request, is lost or leaves. A *guest* is a process that asks to
become a node.

Laws: no two living nodes have the same number, and no two engines have the same number. Engines are at most one version
behind, because the next version is announced only when `Fleet.up_to_date` is True.
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
from flash.observe.cluster import EVENT_TEXT, MOST_GONE, NodeNow, NodeStatus, shortened

# -- numbers of nodes and engines ------------------------------------------------------------------------------------

HUB_NODE = 0
"""Number of the node whose event loop runs the hub."""


class RunOrigin(msgspec.Struct, frozen=True):
    """Place in which the run was started. Relative paths and imports of the run start there."""

    folder: str = ""
    """Working directory of the first node."""
    imports: tuple[str, ...] = ()
    """Folders of the user's modules."""
    launch: str = ""
    """Identity of the first node's launch, as in `error.json`."""


NO_ORIGIN = RunOrigin()
"""Origin of a hub that no process joins."""


def config_digest(config_text: str) -> str:
    """Return a digest of a configuration (TOML). Different configurations have different digests.

    A guest that joins repeats the digest, by which the hub sees that it starts its engines with this configuration.
    """
    return sha256(config_text.encode()).hexdigest()[:16]


class NodeRegistry:
    """Registry of the nodes of the run, and of the numbers of the engines.

    Node 0 is registered from the start, because it runs the hub. Every other node is registered when it joins. When a
    node has left, its number and the numbers of its engines are free again. A node with trainer ranks keeps the number
    that it has in the job.

    Args:
        config: the configuration of the run.
        origin: the place where the run was started.
    """

    def __init__(self, config: Config, origin: RunOrigin) -> None:
        self._config = config
        self._origin = origin
        self._engines = {HUB_NODE: range(config.engines_on(HUB_NODE))}
        """Numbers of the engines of each node. The keys are the registered nodes."""

    @cached_property
    def _config_text(self) -> str:
        """The run's configuration as TOML."""
        return dump(self._config)

    @property
    def engines(self) -> int:
        """Number of engines of all nodes, started or not."""
        return sum(map(len, self._engines.values()))

    @property
    def numbers(self) -> list[int]:
        """Numbers of all nodes, ascending."""
        return sorted(self._engines)

    @property
    def joined(self) -> list[int]:
        """Numbers of the nodes that have joined: all but the hub's own node."""
        return [node for node in self._engines if node != HUB_NODE]

    def describe_run(self, request: p.RunRequest, version: int, *, ending: bool) -> p.RunReply:
        """Return the facts that a guest needs to join, such as the configuration with which it starts engines.

        The hub calls this for each `RunRequest`. A launcher without a hub sends one every second.

        Args:
            request: the request, with the version of the messages that the guest speaks.
            version: the version of the weights that the run has reached. Engines of the guest that already run, from an
                earlier hub, cannot serve this hub if they have a newer version.
            ending: True if the run needs no more nodes. The guest then ends without joining.

        Raises:
            ConfigError: the guest runs a version of Flash with other messages.
        """
        if request.code != p.dialect():
            raise ConfigError(
                f"the hub speaks version {p.dialect()} of the messages, and this node version {request.code}: install "
                "the same version of Flash on both"
            )
        return p.RunReply(
            self._config_text,
            config_digest(self._config_text),
            self._origin.folder,
            list(self._origin.imports),
            self._origin.launch,
            ending,
            version,
        )

    def join(self, request: p.JoinRequest) -> p.JoinReply:
        """Register a node: give it and its engines numbers that are free.

        A node with trainer ranks asks for the number that it has in the job. Other nodes get a number above the numbers
        of all nodes with trainer ranks, so that these stay free. So does a node that asks for a number which is taken:
        its earlier connection may not have ended yet.

        Raises:
            ConfigError: engines of this run must be on the trainers' machine.
            PeerLostError: the hub has restarted with another configuration than the one the guest was given.
        """
        if request.digest != config_digest(self._config_text):
            raise PeerLostError("the hub has restarted with another configuration")
        cluster = self._config.cluster
        if self._config.weights_backend == "ipc":
            raise ConfigError(
                "weights.backend = ipc works only on the trainers' machine: a run that nodes join needs tcp or nccl"
            )
        free = (number for number in count(cluster.trainer_nodes) if number not in self._engines)
        own = request.node  # 0 if the node has no trainer ranks
        node = own if 0 < own < cluster.trainer_nodes and own not in self._engines else next(free)
        # Engines of a node have consecutive numbers: take the first gap between other nodes that is wide enough.
        first = 0
        for taken in sorted(self._engines.values(), key=lambda engines: engines.start):
            if first + request.engines <= taken.start:
                break
            first = max(first, taken.stop)
        self._engines[node] = range(first, first + request.engines)
        return p.JoinReply(node, first)

    def check_joined(self, node: int) -> None:
        """Raise ConfigError if no node of this number has joined. The hub's own node does not count as joined."""
        if node not in self.joined:
            known = ", ".join(map(str, self.joined)) or "none"
            raise ConfigError(f"no node {node} has joined this run (those that have: {known})")

    def left(self, node: int) -> None:
        """Free the numbers of a node that is gone. The hub's own node stays registered: it ends with the hub."""
        if node != HUB_NODE:
            self._engines.pop(node, None)


# -- engines and their weight versions -------------------------------------------------------------------------------


class _ReportedNode:
    """Engines of a node as in the node's newest report.

    `oldest` is the lowest version of these engines. A node without living engines has infinity there, so that no new
    version waits for the node.
    """

    def __init__(self, report: p.EngineReport) -> None:
        self.number = report.number
        self.engines = report.engines
        self.versions = [engine.version for engine in report.engines]
        self.oldest = min(self.versions, default=math.inf)


class Fleet:
    """State of the engines of all nodes, with the weight version of each.

    A node counts as soon as it is given its first version to load, and not only from its first report. The trainer
    ranks hold only the newest versions. If a further version was announced before the node has loaded its first one,
    the node could not fetch the first one any more.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, _ReportedNode] = {}
        """Nodes that have reported their engines."""
        self._joining: set[int] = set()
        """Nodes that load their first version and have not reported yet."""
        self.able_nodes: set[int] = set()
        """Nodes with an engine that has a version. No other node can run a task now."""
        self.started = False
        """True from the moment at which the first engine has reported a version."""

    def __bool__(self) -> bool:
        """Return True if any node has engines or loads its first version."""
        return bool(self._nodes or self._joining)

    def others_have_engines(self, node: int) -> bool:
        """Return True if a node other than `node` has engines or loads its first version."""
        return any(other != node for other in (*self._nodes, *self._joining))

    def engines(self) -> Iterator[p.EngineStatus]:
        """Iterate over all reported engines."""
        return (engine for node in self._nodes.values() for engine in node.engines)

    def engines_of(self, node: int) -> Sequence[p.EngineStatus]:
        """Return the reported engines of a node; empty if it has reported none."""
        known = self._nodes.get(node)
        return known.engines if known is not None else ()

    @property
    def waits_for_engines(self) -> bool:
        """True if all engines have died, while their nodes are present and can start new engines."""
        return bool(self._nodes) and next(self.engines(), None) is None

    def versions(self, node: int) -> list[int]:
        """Return the versions of a node's engines; -1 for an engine without a version. Empty without a report."""
        known = self._nodes.get(node)
        return known.versions if known is not None else []

    def report(self, report: p.EngineReport) -> bool:
        """Replace the engines of a node by the engines in its report.

        Returns False, and changes nothing, if a later report of the node has arrived before this one. Reports may
        overtake each other on the way.
        """
        known = self._nodes.get(report.node)
        if known is not None and known.number >= report.number:
            return False
        node = self._nodes[report.node] = _ReportedNode(report)
        self._joining.discard(report.node)
        self.able_nodes.discard(report.node)
        if max(node.versions, default=-1) >= 0:
            self.able_nodes.add(report.node)
            self.started = True
        return True

    def given_version(self, node: int) -> None:
        """Count a node that was given a version to load as one that loads it, if it has not reported yet."""
        if node not in self._nodes:
            self._joining.add(node)

    def lost(self, node: int) -> None:
        """Forget a node that is gone or silent, so that no new version waits for its engines."""
        self._nodes.pop(node, None)
        self.able_nodes.discard(node)
        self._joining.discard(node)

    def up_to_date(self, newest: int) -> bool:
        """Return True if every engine has version `newest`, so that the next version may be announced."""
        return not self._joining and all(node.oldest >= newest for node in self._nodes.values())

    def describe_behind(self, newest: int) -> str:
        """Return a phrase that names the engines which have not loaded version `newest`, for people."""
        late = [
            f"engine {engine.index} of node {number} (it has version {engine.version})"
            for number, node in self._nodes.items()
            for engine in node.engines
            if engine.version < newest
        ]
        return ", ".join([*late, *(f"the engines of node {node} (they have none)" for node in sorted(self._joining))])


# -- heartbeats ------------------------------------------------------------------------------------------------------


class Heartbeats:
    """Record of the nodes that are present, and of the nodes that are silent. Times are seconds of
    `anyio.current_time`.

    A living node always has a `CancelRequest` waiting at the hub. A node is *silent* if it does not send the next
    request within `silence_s` after the last reply, although its connection is open. The event loop of a silent node is
    blocked, or the machine is stopped.

    Args:
        silence_s: seconds that a node may take from a reply to its next request.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._present: set[int] = set()
        """Nodes that have sent a `CancelRequest`, which is the first request of a node."""
        self._answered: dict[int, float] = {}
        """Time of the last reply to each node that has sent no request since then."""

    def __bool__(self) -> bool:
        """Return True if any node is present."""
        return bool(self._present)

    def asked(self, node: int) -> None:
        """Note that a node has a request waiting."""
        self._present.add(node)
        self._answered.pop(node, None)

    def answered(self, node: int, now: float) -> None:
        """Note that a node's request was answered, so that the node should send the next request soon."""
        self._answered[node] = now

    def silent(self, now: float) -> list[int]:
        """Return the nodes that are silent now. `Nodes.watch` takes their leases back."""
        # `next_silence` computes the same sum. The condition `now - since >= silence_s` is rounded in another way: it
        # could still be false at the moment that `next_silence` gives. The caller would then ask again and again.
        return [node for node, since in self._answered.items() if now >= since + self._silence_s]

    def next_silence(self, now: float) -> float:
        """Return the seconds until a node can become silent at the earliest. `Nodes.watch` sleeps that long.

        If no node has to send its next request, none can become silent before `silence_s` seconds have passed.
        """
        return max(0.0, min(self._answered.values(), default=now) + self._silence_s - now)

    def lost(self, node: int) -> None:
        """Forget a node that is gone, or whose silence was handled. With its next request, the node counts as present
        again."""
        self._present.discard(node)
        self._answered.pop(node, None)


# -- statuses, for people --------------------------------------------------------------------------------------------

CUT_OFF = "its connection ended: its process, its machine or the network between is gone"
"""Reason why a node is gone that had not announced that it leaves. People read it."""
SILENT = "it was silent, and then its connection ended"
"""Reason why a silent node is gone. People read it."""
IN_ORDER = "it left in order"
"""Reason why a node is gone that had announced that it leaves. People read it."""


class NodeStatuses:
    """Record of the newest status of each node, and of the nodes that left last. Times are Unix seconds."""

    def __init__(self) -> None:
        self._reported: dict[int, tuple[float, NodeStatus]] = {}
        """Newest status of each node, with the time of its report."""
        self.gone: deque[NodeNow] = deque(maxlen=MOST_GONE)
        """The last nodes that left, in the order in which they left."""

    def report(self, node: int, status: NodeStatus, now: float) -> list[str]:
        """Keep the status of a node. Returns an error message for each engine that has died since the status before."""
        before = self.of(node)
        # Another `since` means another process of the node, so the counts of deaths have begun again at 0.
        known = {} if before is None or before.since != status.since else {e.number: e.deaths for e in before.engines}
        self._reported[node] = now, status
        return [engine.why for engine in status.engines if engine.deaths > known.get(engine.number, 0)]

    def of(self, node: int) -> NodeStatus | None:
        """Return the newest status of a node; None if it has reported none."""
        return self._reported[node][1] if node in self._reported else None

    def heard_at(self, node: int) -> float | None:
        """Return the time of a node's newest status; None if it has reported none."""
        return self._reported[node][0] if node in self._reported else None

    def left(self, node: int, now: float, *, silent: bool, leaving: str | None) -> str:
        """Move a node to `gone`, with the reason why it is gone, for people.

        Args:
            node: the node.
            now: the time.
            silent: True if the node was silent before.
            leaving: the reason that the node announced; empty if it left in order, None if it announced nothing.

        Returns:
            A failure message for people; empty if the node left in order.
        """
        heard_at, status = self._reported.pop(node, (None, None))
        why = IN_ORDER if leaving == "" else leaving or (SILENT if silent else CUT_OFF)
        self.gone.append(
            NodeNow(
                node=node, state="gone", heard_at=heard_at, status=status, gone_at=now, why=shortened(why, EVENT_TEXT)
            )
        )
        return "" if leaving == "" else f"node {node}: {why}"
