"""Statuses: what nodes last told of themselves, and which are gone, for people to see. Pure state."""

from __future__ import annotations

from collections import deque

from flash.observe.cluster import EVENT_TEXT, MOST_GONE, NodeNow, NodeStatus, shortened

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
                node=node,
                state="gone",
                heard_at=heard_at,
                status=status,
                gone_at=now,
                why=shortened(why, EVENT_TEXT),
            )
        )
        return "" if leaving == "" else f"node {node}: {why}"
