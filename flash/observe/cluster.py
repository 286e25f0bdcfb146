"""The cluster at one moment: its nodes, engines and trainer ranks, the samples on their way, and what has failed.

Nodes tell the hub of themselves (`NodeStatus`), the hub adds what it alone knows (`HubNow`), and the recorder what
people were told; the whole is `cluster.json`, which each next one replaces. Times are Unix seconds.

Invariant: it is bounded, whatever a run does: by its nodes and engines, by the `MOST_…` below, and by lengths of texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

import msgspec

from flash.types import Stock

EVERY_S = 2.0
"""Between two pictures, and between two of a node's reports: as often as the page asks."""
MOST_GONE = 32
"""Nodes that are gone and still shown, the last ones."""
MOST_LEASES = 12
"""Samples on their way that are shown one by one, the oldest."""
MOST_EVENTS = 100
MOST_KINDS = 32
EVENT_TEXT, FAILURE_TEXT = 2_000, 20_000
"""Characters of a text that are kept: an environment's error may hold a whole web page."""

NodeState = Literal["starting", "here", "silent", "leaving", "gone"]
EngineState = Literal["starting", "serving", "loading", "returning", "gone"]


class EngineNow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as its node sees it."""

    number: int
    state: EngineState
    """`loading`: it swaps weights; `returning`: it died and starts again; `gone`: it died for good."""
    version: int
    """−1: it has none yet."""
    loaded_at: float | None
    """When it had its version."""
    figures: dict[str, float]
    """What else it tells, by the names of `flash.observe.columns.engine`."""
    deaths: int = 0
    died_at: float | None = None
    why: str = ""
    """It died the last time."""


class NodeStatus(msgspec.Struct, frozen=True):
    """What a node tells of itself."""

    host: str
    process: int
    since: float
    engines: list[EngineNow]
    episodes: int
    """Alive, each with its environment."""
    asking: int
    """Of their responses, those that an engine samples."""
    waiting: int
    """Those that wait for an engine."""
    stocks: list[Stock]


class NodeNow(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as the hub sees it."""

    node: int
    state: NodeState
    heard_at: float | None
    """When it told `status`; None: it has told nothing yet."""
    status: NodeStatus | None
    leases: int = 0
    """Samples that it works on."""
    oldest_lease: float | None = None
    """Since when it has had the oldest of them."""
    gone_at: float | None = None
    why: str = ""


class RankNow(msgspec.Struct, frozen=True):
    """One trainer rank; `process` is None where it is not there."""

    rank: int
    node: int
    process: int | None
    since: float | None
    host: str = ""
    """Empty: it has not been there yet."""


class LeaseNow(msgspec.Struct, frozen=True):
    """One sample on its way."""

    node: int
    group_id: int
    sample_index: int
    split: str
    attempt: int
    since: float


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Samples between their issue and their step."""

    in_flight: int
    most: int
    """That the age contract lets be on their way."""
    queued: int
    """That wait for a node."""
    leased: int
    """That nodes work on."""
    evaluating: int
    """Answers of an evaluation that nodes work on or that wait for one."""
    ready_groups: int
    """Complete groups that wait for their step."""
    groups_per_batch: int


class HubNow(msgspec.Struct, frozen=True, kw_only=True):
    """What the hub knows."""

    at: float
    doing: str
    version: int
    """That the run has reached."""
    published: int
    """That engines should have; −1: none yet."""
    nodes: list[NodeNow]
    ranks: list[RankNow]
    trainer_restarts: int
    """Times that the trainer ranks have come back under this hub."""
    flow: Flow
    leases: list[LeaseNow]
    """The oldest."""


class FailureKind(msgspec.Struct, frozen=True):
    """Failures of one kind, over all incarnations of the run."""

    kind: str
    count: int
    first: float
    last: float
    message: str
    """The last one."""


class Event(msgspec.Struct, frozen=True):
    """What people were told."""

    at: float
    text: str


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    at: float
    hub: HubNow | None
    """None: nothing was heard of it yet."""
    host: str
    process: int
    """Of the hub."""
    since: float
    """When this hub began."""
    lives: int
    """How many hubs the run has had."""
    failures: list[FailureKind]
    """Over all of these, the newest first."""
    events: list[Event]
    """The oldest first."""
    ended: Literal["", "finished", "interrupted", "failed"] = ""
    """Empty: it goes on, or was killed."""
    error: str = ""
    """What it failed with."""


def shortened(text: str, most: int) -> str:
    """At most so many characters, and how many are left out."""
    return text if len(text) <= most else f"{text[:most]} … and {len(text) - most:,} characters more"


class FailureTally:
    """Failures by kind, and the last events. Pure state.

    Args:
        failures: of earlier incarnations.
        events: theirs.
    """

    def __init__(self, failures: Iterable[FailureKind] = (), events: Iterable[Event] = ()) -> None:
        self._kinds = {each.kind: each for each in failures}
        self._events = deque(events, maxlen=MOST_EVENTS)

    def failed(self, kind: str, message: str, now: float) -> None:
        """Something has failed."""
        kind = kind if kind in self._kinds or len(self._kinds) < MOST_KINDS else "other"
        before = self._kinds.get(kind)
        count, first = (before.count, before.first) if before is not None else (0, now)
        self._kinds[kind] = FailureKind(kind, count + 1, first, now, shortened(message, FAILURE_TEXT))

    def told(self, text: str, now: float) -> None:
        """People were told this."""
        self._events.append(Event(now, shortened(text, EVENT_TEXT)))

    @property
    def failures(self) -> list[FailureKind]:
        """The newest first."""
        return sorted(self._kinds.values(), key=lambda each: -each.last)

    @property
    def events(self) -> list[Event]:
        """The oldest first."""
        return list(self._events)
