"""The cluster at one moment: its nodes, engines and trainer ranks, the samples on their way, and what has failed.

Each node reports its status to the hub (`NodeStatus`). The hub adds its own state (`HubNow`), and the recorder adds
failures and the lines printed for people. The result is `cluster.json`, which is replaced every two seconds. `flash
view`, `flash watch` and Prometheus read it. Times are Unix seconds.

Invariant: the size of the file is bounded by the number of nodes and engines, the `MOST_…` constants below, and the
lengths of texts.
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
"""Seconds between two writes of the file, and between two reports of a node. The web page asks as often."""
MOST_GONE = 32
"""Largest number of nodes that are gone and still shown: the last ones."""
MOST_LEASES = 12
"""Largest number of leased samples that are shown one by one: the oldest ones."""
MOST_EVENTS = 100
"""Largest number of events in the file: the last ones."""
MOST_KINDS = 32
"""Largest number of kinds of failures. Failures of further kinds count as `other`."""
MOST_BYTES = 64 << 20
"""Largest number of bytes of the file that are read. A real file has about a thousandth of it."""
EVENT_TEXT, FAILURE_TEXT = 2_000, 20_000
"""Largest number of characters of an event and of a failure's message. An environment's error may contain a whole web
page."""

HUB_VANISHED = "the previous hub ended without a last report: its process was killed, or its machine failed"
"""Message of the failure `hub_lost`."""

NodeState = Literal["starting", "here", "silent", "leaving", "gone"]
EngineState = Literal["starting", "serving", "loading", "returning", "gone"]


class EngineNow(msgspec.Struct, frozen=True, kw_only=True):
    """State of an engine, as its node reports it."""

    number: int
    state: EngineState
    """`loading`: the engine swaps weights. `returning`: it died and is started again. `gone`: it died for good."""
    version: int
    """Policy version of the engine's weights; −1 if it has none yet."""
    loaded_at: float | None
    """Time when the engine had loaded this version."""
    figures: dict[str, float] = {}
    """Numbers of the engine, by the names of `ENGINE` in `flash.observe.columns.table`."""
    deaths: int = 0
    died_at: float | None = None
    why: str = ""
    """Reason of the last death."""


class NodeStatus(msgspec.Struct, frozen=True):
    """Status that a node reports to the hub."""

    host: str
    process: int
    since: float
    engines: list[EngineNow]
    episodes: int
    """Number of live episodes, each with its environment."""
    asking: int
    """Number of responses that engines sample now."""
    waiting: int
    """Number of requests that wait for an engine."""
    stocks: list[Stock]


class NodeNow(msgspec.Struct, frozen=True, kw_only=True):
    """State of a node, as the hub sees it."""

    node: int
    state: NodeState
    heard_at: float | None
    """Time of the last report `status`; None if the node has not reported yet."""
    status: NodeStatus | None
    leases: int = 0
    """Number of samples that the node works on."""
    oldest_lease: float | None = None
    """Time when the node got the oldest of these samples."""
    gone_at: float | None = None
    why: str = ""


class RankNow(msgspec.Struct, frozen=True):
    """State of a trainer rank. `process` is None if the rank does not run."""

    rank: int
    node: int
    process: int | None
    since: float | None
    host: str = ""
    """Name of the rank's machine; empty if the rank has not run yet."""


class LeaseNow(msgspec.Struct, frozen=True):
    """Sample that a node works on."""

    node: int
    group_id: int
    sample_index: int
    split: str
    attempt: int
    since: float


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of samples between their issue and the step that trains them."""

    in_flight: int
    most: int
    """Largest number of samples that the limit on ages allows in flight."""
    queued: int
    """Number of samples that wait for a node."""
    leased: int
    """Number of samples that nodes work on."""
    evaluating: int
    """Number of answers of an evaluation that nodes work on or that wait for a node."""
    ready_groups: int
    """Number of complete groups that wait to be trained."""
    groups_per_batch: int


class HubNow(msgspec.Struct, frozen=True, kw_only=True):
    """State of the run, as the hub knows it."""

    at: float
    doing: str
    version: int
    """Policy version that the run has reached."""
    published: int
    """Policy version that engines should have; −1 if there is none yet."""
    nodes: list[NodeNow]
    ranks: list[RankNow]
    trainer_restarts: int
    """Number of restarts of the trainer ranks since this hub started."""
    flow: Flow
    leases: list[LeaseNow]
    """Oldest leased samples, at most MOST_LEASES."""


class FailureKind(msgspec.Struct, frozen=True):
    """Failures of one kind in the whole run, restarts included."""

    kind: str
    count: int
    first: float
    last: float
    message: str
    """Message of the last failure."""


class Event(msgspec.Struct, frozen=True):
    """Line that was printed for people."""

    at: float
    text: str


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `cluster.json`."""

    at: float
    hub: HubNow | None
    """State of the run; None until the hub has reported it."""
    host: str
    process: int
    """Process id of the hub."""
    since: float
    """Time when this hub started."""
    lives: int
    """Number of hub processes that the run has had."""
    failures: list[FailureKind]
    """Failures over all hub processes, the newest kind first."""
    events: list[Event]
    """Last events, the oldest first."""
    ended: Literal["", "finished", "interrupted", "failed"] = ""
    """End of the run. Empty if the run goes on or was killed."""
    error: str = ""
    """Error that ended the run."""


def shortened(text: str, most: int) -> str:
    """Return at most `most` characters of a text, and a note about the number of characters that are left out."""
    return text if len(text) <= most else f"{text[:most]} … and {len(text) - most:,} characters more"


class FailureTally:
    """Failures by kind, and the last events. Pure state.

    Args:
        failures: failures under earlier hubs of the run.
        events: events under earlier hubs of the run.
    """

    def __init__(self, failures: Iterable[FailureKind] = (), events: Iterable[Event] = ()) -> None:
        self._kinds = {each.kind: each for each in failures}
        self._events = deque(events, maxlen=MOST_EVENTS)

    def failed(self, kind: str, message: str, now: float) -> None:
        """Count a failure. `now` is in Unix seconds."""
        kind = kind if kind in self._kinds or len(self._kinds) < MOST_KINDS else "other"
        before = self._kinds.get(kind)
        count, first = (before.count, before.first) if before is not None else (0, now)
        self._kinds[kind] = FailureKind(kind, count + 1, first, now, shortened(message, FAILURE_TEXT))

    def event(self, text: str, now: float) -> None:
        """Add a line that was printed for people. `now` is in Unix seconds."""
        self._events.append(Event(now, shortened(text, EVENT_TEXT)))

    @property
    def failures(self) -> list[FailureKind]:
        """Failures by kind, the kind of the newest failure first."""
        return sorted(self._kinds.values(), key=lambda each: -each.last)

    @property
    def events(self) -> list[Event]:
        """Last events, the oldest first."""
        return list(self._events)


class ClusterFile:
    """Writes `cluster.json`: the newest state of the cluster, and the failures of the whole run.

    A thread of the owner writes the file, one state at a time. A state that comes while another is being written is
    skipped, since the next one follows soon. A write error does not end the run.

    Args:
        directory: directory of the run. A `cluster.json` in it is from an earlier hub.
        writer: executor that writes the file.
        now: gives Unix seconds, in any thread.
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
        with suppress(RunDirectoryError):  # `show` warns of it when it cannot write either
            earlier = read_cluster(directory)
        self._incarnations = 1 if earlier is None else earlier.lives + 1
        self._tally = FailureTally() if earlier is None else FailureTally(earlier.failures, earlier.events)
        if earlier is not None and not earlier.ended:
            self._tally.failed("hub_lost", HUB_VANISHED, self._since)

    def failed(self, kind: str, message: str) -> None:
        """Count a failure."""
        self._tally.failed(kind, message, self._now())

    def event(self, text: str) -> None:
        """Add a line that was printed for people."""
        self._tally.event(text, self._now())

    def show(self, hub: HubNow) -> str:
        """Write a new state, unless one is being written. Returns a warning at the first write that failed, else ''."""
        self._hub = hub
        if self._writing is not None and not self._writing.done():
            return ""
        failed = None if self._writing is None else self._writing.exception()
        self._writing = self._writer.submit(_write, self._path, self._picture())
        if failed is None or self._warned:
            return ""
        self._warned = True
        return f"the state of the cluster cannot be written: {failed}"

    def end(self, ended: Literal["finished", "interrupted", "failed"], error: str = "") -> None:
        """Write the last state, and wait until it is written."""
        if error:
            self.failed("run_failed", error)
        if self._writing is not None:
            self._writing.exception()  # waits, so that an older state cannot replace the last one
        with suppress(RunDirectoryError):  # the run's other files are on the same disk: their writers report it
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
    """Return the newest state of a run's cluster; None if there is none that can be read.

    Raises:
        RunDirectoryError: `cluster.json` is no regular file.
    """
    try:
        with opened(directory.cluster) as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=Cluster)
    except (OSError, *NO_ROW):
        return None


def _write(path: Path, picture: Cluster) -> None:
    """Write the file without forcing it to the disk: after a crash of the machine it is out of date in any case."""
    write_atomically(path, msgspec.json.encode(picture), durably=False)
