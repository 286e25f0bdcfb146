"""The engines of all nodes as the hub knows them: their versions, and which nodes have fallen silent. Pure state.

A node counts from the moment in which it is given its first version: the trainers keep that one until it has loaded it.
A node that lives always has a question about cancels waiting at the hub. One that has not asked again some time after
its last answer is silent, though its connection stands: its event loop is blocked, or its machine is stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flash.hub.protocol import EngineReport, EngineStatus


class _Node:
    """What a node last said of its engines."""

    def __init__(self, report: EngineReport) -> None:
        self.number = report.number
        self.engines = report.engines
        self.versions = [engine.version for engine in report.engines]
        self.oldest = min(self.versions, default=math.inf)


class Fleet:
    """The engines.

    Args:
        silence_s: how long a node may take from an answer to its next question.
        newest: the version that engines may have of a former hub; −1: none.
    """

    def __init__(self, silence_s: float, newest: int) -> None:
        self._silence_s = silence_s
        self._nodes: dict[int, _Node] = {}
        """Those that have reported."""
        self._joining: set[int] = set()
        """Those that load their first version."""
        self._here: set[int] = set()
        """Those that have asked about cancels, the first thing that a node does."""
        self._answered: dict[int, float] = {}
        self.able: set[int] = set()
        """Nodes with an engine that has a version: all others can run nothing now."""
        self.newest = newest
        """The version that the engines should have."""
        self.started = False
        """Whether an engine has ever had a version."""

    def __bool__(self) -> bool:
        """Whether a node has engines."""
        return bool(self._nodes or self._joining)

    @property
    def deserted(self) -> bool:
        """Whether no node is there, not even one whose engines start."""
        return not (self or self._here)

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
        self._here.discard(node)
        self._answered.pop(node, None)

    # -- versions ----------------------------------------------------------------------------------------------------

    @property
    def up_to_date(self) -> bool:
        """Whether no engine needs the trainers' weights any more."""
        return not self._joining and all(node.oldest >= self.newest for node in self._nodes.values())

    def behind(self) -> str:
        """Which engines have not loaded the newest version."""
        late = [
            f"engine {engine.index} of node {number} (it has version {engine.version})"
            for number, node in self._nodes.items()
            for engine in node.engines
            if engine.version < self.newest
        ]
        return ", ".join([*late, *(f"the engines of node {node} (they have none)" for node in sorted(self._joining))])

    # -- silence -----------------------------------------------------------------------------------------------------

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
