"""The cluster at one moment: its nodes, engines and trainer ranks, the samples on their way, and what has failed.

Nodes tell the hub of themselves (`NodeStatus`), the hub adds what it alone knows (`HubNow`), and the recorder what
people were told; the whole is `cluster.json`, which each next one replaces. Times are Unix seconds.

Invariant: it is bounded, whatever a run does: by its nodes and engines, by the `MOST_…` below, and by lengths of texts.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from flash.errors import RunDirectoryError
from flash.observe.rundir.follow import NO_ROW, opened
from flash.observe.rundir.rundir import RunDirectory, write_atomically
from flash.types import Stock

EVERY_S = 2.0
"""Between two pictures, and between two of a node's reports: as often as the page asks."""
MOST_GONE = 32
"""Nodes that are gone and still shown, the last ones."""
MOST_LEASES = 12
"""Samples on their way that are shown one by one, the oldest."""
MOST_EVENTS = 100
MOST_KINDS = 32
MOST_BYTES = 64 << 20
"""Of a picture that is read: ours are a thousandth of it."""
EVENT_TEXT, FAILURE_TEXT = 2_000, 20_000
"""Characters of a text that are kept: an environment's error may hold a whole web page."""

WITHOUT_A_WORD = "the hub before this one ended without a word: its process was killed, or its machine is gone"

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
    figures: dict[str, float] = {}
    """What else it tells, by the names of `ENGINE` in `flash.observe.columns.table`."""
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


class ClusterFile:
    """`cluster.json`: the newest picture, and what has failed in all incarnations of the run.

    A thread of its owner's writes it, never more than one picture at a time: one that comes while another is still to
    be written is left out, as the next one says more. That it cannot be written ends no run.

    Args:
        directory: the run's; a picture that is there is that of an earlier incarnation.
        writer: writes.
        now: Unix seconds, for any thread.
    """

    def __init__(self, directory: RunDirectory, writer: Executor, now: Callable[[], float] = time.time) -> None:
        self._path = directory.cluster
        self._writer = writer
        self._now = now
        self._host, self._process, self._since = socket.gethostname(), os.getpid(), now()
        self._hub: HubNow | None = None
        self._writing: Future[None] | None = None
        self._warned = False
        earlier: Cluster | None = None
        with suppress(RunDirectoryError):  # that no picture can be kept is told when one is written
            earlier = read_cluster(directory)
        self._incarnations = 1 if earlier is None else earlier.lives + 1
        self._tally = FailureTally() if earlier is None else FailureTally(earlier.failures, earlier.events)
        if earlier is not None and not earlier.ended:
            self._tally.failed("hub_lost", WITHOUT_A_WORD, self._since)

    def failed(self, kind: str, message: str) -> None:
        """Something has failed."""
        self._tally.failed(kind, message, self._now())

    def told(self, text: str) -> None:
        """People were told this."""
        self._tally.told(text, self._now())

    def show(self, hub: HubNow) -> str:
        """Have a picture written, unless one still is; a warning, where that has failed for the first time."""
        self._hub = hub
        if self._writing is not None and not self._writing.done():
            return ""
        failed = None if self._writing is None else self._writing.exception()
        self._writing = self._writer.submit(_write, self._path, self._picture())
        if failed is None or self._warned:
            return ""
        self._warned = True
        return f"the page of the cluster is not kept: {failed}"

    def end(self, ended: Literal["finished", "interrupted", "failed"], error: str = "") -> None:
        """Write the last picture, here and now."""
        if error:
            self.failed("run_failed", error)
        if self._writing is not None:
            self._writing.exception()  # waits: it must not come after the last one
        with suppress(RunDirectoryError):  # what the run itself leaves behind meets the same disk, and says so
            _write(self._path, self._picture(ended, error))

    def _picture(self, ended: Literal["", "finished", "interrupted", "failed"] = "", error: str = "") -> Cluster:
        return Cluster(
            at=self._now(),
            hub=self._hub,
            host=self._host,
            process=self._process,
            since=self._since,
            lives=self._incarnations,
            failures=self._tally.failures,
            events=self._tally.events,
            ended=ended,
            error=error,
        )


def read_cluster(directory: RunDirectory) -> Cluster | None:
    """The newest picture; None where there is none, or none that can be read.

    Raises:
        RunDirectoryError: what is in its place is no file.
    """
    try:
        with opened(directory.cluster) as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=Cluster)
    except (OSError, *NO_ROW):
        return None


def _write(path: Path, picture: Cluster) -> None:
    """Not forced to the disk: after a crash of the machine it is old in any case."""
    write_atomically(path, msgspec.json.encode(picture), durably=False)
