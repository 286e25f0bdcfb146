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

from flash.hub.progress import RunProgress
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
    """The engines. `progress` says which version is the newest."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
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

    @property
    def up_to_date(self) -> bool:
        """Whether no engine needs the trainers' weights any more."""
        return not self._joining and all(node.oldest >= self._progress.newest for node in self._nodes.values())

    def behind(self) -> str:
        """Which engines have not loaded the newest version."""
        late = [
            f"engine {engine.index} of node {number} (it has version {engine.version})"
            for number, node in self._nodes.items()
            for engine in node.engines
            if engine.version < self._progress.newest
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


class Statuses:
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
