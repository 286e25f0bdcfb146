"""The cluster at one moment: its nodes, engines, trainer ranks, samples on their way and failures, also as numbers.

Each node reports its status to the hub (`NodeStatus`). The hub adds its own state (`HubNow`), and gives it to the
recorder (`flash.observe.recorder`) every two seconds. The recorder adds failures and the lines printed for people. The
result is `cluster.json`. `flash view`, `flash watch` and Prometheus read it, and show the numbers of `CLUSTER_NUMBERS`
and `ENGINE_NUMBERS`. Times are Unix seconds.

Terms: a *lease* gives a sample to a node for a while. A *swap* loads the weights of a new policy version into an
engine. The *hub* may die and be started again, so a run may have several hub processes, one after another. Nodes,
engines and trainer ranks are numbered from 0 in the whole run.

Invariant: the size of the file is bounded by the number of nodes and engines, the `MOST_…` constants below, and the
lengths of texts.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from flash.errors import DECODE_ERRORS, RunDirectoryError
from flash.observe.columns.column import Column, capital, short, without_marks
from flash.observe.columns.table import columns
from flash.observe.rundir.rundir import RunDirectory, open_regular_file, write_atomically
from flash.types import Stock

EVERY_S = 2.0
"""Seconds between two writes of the file, and between two reports of a node. The web page reads as often."""
MOST_GONE = 32
"""Largest number of nodes that are gone and still in the file: the last ones."""
MOST_LEASES = 12
"""Largest number of leased samples that the file has one by one: the oldest ones."""
MOST_EVENTS = 100
"""Largest number of events in the file: the last ones."""
MOST_KINDS = 32
"""Largest number of kinds of failures that are counted apart. Failures of further kinds count as `other`."""
MOST_BYTES = 64 << 20
"""Largest number of bytes of the file that are read, so that a wrong file cannot fill the memory. A real file has about
a thousandth of it."""
EVENT_TEXT, FAILURE_TEXT = 2_000, 20_000
"""Largest number of characters of an event and of a failure's message. An environment's error may contain a whole web
page."""

HUB_VANISHED = "the previous hub ended without a last report: its process was killed, or its machine failed"
"""Message of the failure `hub_lost`, which counts hubs that died before they could write the end of the run."""

NodeState = Literal["starting", "here", "silent", "leaving", "gone"]
"""State of a node. `silent`: it has not reported for some time. `leaving`: it takes no more samples."""
EngineState = Literal["starting", "serving", "loading", "returning", "gone"]
"""State of an engine. `loading`: it swaps weights. `returning`: it died and is started again. `gone`: it died for
good."""


class EngineNow(msgspec.Struct, frozen=True, kw_only=True):
    """State of an engine, as its node reports it."""

    number: int
    """Number of the engine among all engines of the run."""
    state: EngineState
    version: int
    """Policy version of the engine's weights; −1 if it has none yet."""
    loaded_at: float | None
    """Time when the engine had loaded this version; None if it has none yet."""
    figures: dict[str, float] = {}
    """Numbers of the engine, by the names of `ENGINE` in `flash.observe.columns.table`."""
    deaths: int = 0
    """Number of times that the engine died."""
    died_at: float | None = None
    """Time of the last death; None if it never died."""
    why: str = ""
    """Reason of the last death; empty if it never died."""


class NodeStatus(msgspec.Struct, frozen=True):
    """Status that a node reports to the hub."""

    host: str
    """Name of the node's machine."""
    process: int
    """Process id of the node."""
    since: float
    """Time when the node's process started."""
    engines: list[EngineNow]
    """Engines of the node."""
    episodes: int
    """Number of live episodes, each with its environment."""
    asking: int
    """Number of responses that engines sample now."""
    waiting: int
    """Number of requests that wait for an engine."""
    stocks: list[Stock]
    """Resources that the node's environments share, such as pools of sandboxes."""


class NodeNow(msgspec.Struct, frozen=True, kw_only=True):
    """State of a node, as the hub sees it."""

    node: int
    """Number of the node."""
    state: NodeState
    heard_at: float | None
    """Time of the last report `status`; None if the node has not reported yet."""
    status: NodeStatus | None
    leases: int = 0
    """Number of samples that the node works on."""
    oldest_lease: float | None = None
    """Time when the node got the oldest of these samples; None if it works on none."""
    gone_at: float | None = None
    """Time when the node left the run; None if it has not left."""
    why: str = ""
    """Reason why it left; empty if it has not left."""


class RankNow(msgspec.Struct, frozen=True):
    """State of a trainer rank."""

    rank: int
    """Number of the rank among all trainer ranks."""
    node: int
    """Number of the node whose machine the rank runs on."""
    process: int | None
    """Process id of the rank; None if the rank does not run."""
    since: float | None
    """Time when the process connected to the hub; None if the rank does not run."""
    host: str = ""
    """Name of the rank's machine; empty if the rank has not run yet."""


class LeaseNow(msgspec.Struct, frozen=True):
    """Sample that a node works on."""

    node: int
    """Number of the node."""
    group_id: int
    """Number of the sample's group: the samples with the same problem, whose rewards are compared."""
    sample_index: int
    """Index of the sample in its group."""
    split: str
    """`train`, or `eval` for an answer of an evaluation."""
    attempt: int
    """Number of earlier attempts at this sample, which have failed."""
    since: float
    """Time when the node got the sample."""


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of samples between their issue and the step that trains them."""

    in_flight: int
    """Number of samples that are issued and not yet trained or given up."""
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
    """Number of groups that a step trains."""


class HubNow(msgspec.Struct, frozen=True, kw_only=True):
    """State of the run, as the hub knows it."""

    at: float
    """Time of this state."""
    doing: str
    """Phrase for the event that the run waits for, for people."""
    version: int
    """Policy version that the run has reached."""
    published: int
    """Policy version that engines should have; −1 if there is none yet."""
    nodes: list[NodeNow]
    """Nodes of the run, and the last MOST_GONE of those that are gone."""
    ranks: list[RankNow]
    trainer_restarts: int
    """Number of restarts of the trainer ranks since this hub started."""
    flow: Flow
    leases: list[LeaseNow]
    """Oldest leased samples, at most MOST_LEASES."""


class FailureKind(msgspec.Struct, frozen=True):
    """Failures of one kind in the whole run, restarts included."""

    kind: str
    """Short name, such as `env_error` or `engine_died`; `other` for the kinds after the first MOST_KINDS."""
    count: int
    first: float
    """Time of the first failure."""
    last: float
    """Time of the last failure."""
    message: str
    """Message of the last failure."""


class Event(msgspec.Struct, frozen=True):
    """Line that was printed for people."""

    at: float
    """Time when it was printed."""
    text: str


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `cluster.json`."""

    at: float
    """Time when the content was made."""
    hub: HubNow | None
    """State of the run; None until the hub has reported it."""
    host: str
    """Name of the hub's machine."""
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
    """Error that ended the run; empty if none did."""


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters as it is, and of a longer one the beginning with a note.

    The note has the number of characters that are left out.
    """
    return text if len(text) <= most else f"{text[:most]} … and {len(text) - most:,} characters more"


class FailureTally:
    """Failures by kind, and the last events, for `ClusterFile`. It has no clock and touches no file.

    Args:
        failures: failures under earlier hubs of the run.
        events: events under earlier hubs of the run.
    """

    def __init__(self, failures: Iterable[FailureKind] = (), events: Iterable[Event] = ()) -> None:
        self._kinds = {each.kind: each for each in failures}
        """Failures by the name of their kind."""
        self._events = deque(events, maxlen=MOST_EVENTS)

    def failed(self, kind: str, message: str, now: float) -> None:
        """Count a failure of this kind, and keep its message as the last one. `now` is in Unix seconds."""
        # The number of kinds is bounded, so that the file stays small.
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
        # `sorted` copies the values in one operation, since another thread may count a failure meanwhile.
        return sorted(self._kinds.values(), key=lambda each: -each.last)

    @property
    def events(self) -> list[Event]:
        """Last events, the oldest first."""
        return list(self._events)


class ClusterFile:
    """Writes `cluster.json`: the newest state of the cluster, and the failures of the whole run.

    The recorder owns it, and calls `show` with each state, `failed` and `event` as these happen, and `end` at last. The
    recorder's thread writes the file, one state at a time. A state that comes while another is being written is
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
        """Last state of the run that the hub has reported."""
        self._writing: Future[None] | None = None
        """Last write; None before the first one."""
        self._warned = False
        """True if a failed write was reported."""
        self._ended = False
        """True after `end`; `show` writes nothing any more."""
        self._lock = threading.Lock()
        """Guards `_ended` and `_writing`: `end` runs in a thread, while the event loop still calls `show`."""
        earlier: Cluster | None = None
        with suppress(RunDirectoryError):  # The failures of earlier hubs are lost then. The run must still start.
            earlier = read_cluster(directory)
        self._hub_processes = 1 if earlier is None else earlier.lives + 1
        self._tally = FailureTally() if earlier is None else FailureTally(earlier.failures, earlier.events)
        if earlier is not None and not earlier.ended:
            self._tally.failed("hub_lost", HUB_VANISHED, self._since)

    def failed(self, kind: str, message: str) -> None:
        """Count a failure of this kind, such as `env_error`, for the next write of the file."""
        self._tally.failed(kind, message, self._now())

    def event(self, text: str) -> None:
        """Add a line that was printed for people, for the next write of the file."""
        self._tally.event(text, self._now())

    def show(self, hub: HubNow) -> str:
        """Start to write a new state in the thread, unless one is being written or the run has ended.

        Returns a warning once, after the first write that has failed, else an empty text.
        """
        with self._lock:
            # A later state has no end of the run, so it would show an ended run as a live one.
            if self._ended:
                return ""
            self._hub = hub
            if self._writing is not None and not self._writing.done():
                return ""
            failed = None if self._writing is None else self._writing.exception()
            self._writing = self._writer.submit(_write, self._path, self._content())
        if failed is None or self._warned:
            return ""
        self._warned = True
        return f"the state of the cluster cannot be written: {failed}"

    def end(self, ended: Literal["finished", "interrupted", "failed"], error: str = "") -> None:
        """Write the last state with the end of the run, and wait until it is written.

        May be called in any thread, and again if an error follows, which replaces the end. `error` is the error that
        ended the run, or empty.
        """
        if error:
            self.failed("run_failed", error)
        with self._lock:
            self._ended = True
        # From here on `show` starts no write.
        if self._writing is not None:
            # This waits for the write in progress, so that an older state cannot replace the last one.
            self._writing.exception()
        # The run's other files are on the same disk, so their writers report the error.
        with suppress(RunDirectoryError):
            _write(self._path, self._content(ended, error))

    def _content(self, ended: Literal["", "finished", "interrupted", "failed"] = "", error: str = "") -> Cluster:
        """Return the content of the file at this moment. `ended` and `error` are fields of it."""
        return Cluster(
            at=self._now(),
            hub=self._hub,
            host=self._host,
            process=self._process,
            since=self._since,
            lives=self._hub_processes,
            failures=self._tally.failures,
            events=self._tally.events,
            ended=ended,
            error=error,
        )


def read_cluster(directory: RunDirectory) -> Cluster | None:
    """Return the newest state of a run's cluster; None if there is no file or its content is not a state.

    Raises:
        RunDirectoryError: `cluster.json` is no regular file, or it may not be read.
    """
    try:
        with open_regular_file(directory.cluster) as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=Cluster)
    except (OSError, *DECODE_ERRORS):
        return None


def _write(path: Path, content: Cluster) -> None:
    """Replace the file `path`, `cluster.json`."""
    # Not durable: after a crash of the machine the content is out of date in any case.
    write_atomically(path, msgspec.json.encode(content), durably=False)


# -- numbers of a cluster ----------------------------------------------------------------------------------------------


KIND = "kind"
"""Label in monitoring systems, such as Prometheus, for the kinds of a number, if there is no better word."""


class ClusterNumber(NamedTuple):
    """Number of a cluster, or several numbers, one of each kind, such as the engines in each state."""

    name: str
    """Name for programs; in Prometheus it follows `flash_cluster_`."""
    title: str
    """Name for people."""
    means: str
    """Meaning, as whole sentences of plain text."""
    worry: str
    """Plain text that completes "worry when", and advice."""
    of: Callable[[Cluster], Mapping[str, float]]
    """Function that computes the numbers by kind. A single number has the empty kind. If the result is empty, there is
    nothing to count."""
    unit: str = ""
    """`share` for a share of 1; otherwise the title names the unit."""
    label: str = KIND
    """Label of the kinds in monitoring systems."""
    listed: bool = False
    """True if `text` has only the sum, since people see each kind elsewhere with details."""
    of_the_run: bool = False
    """True if the number counts the whole run. False if it describes one moment."""

    def text(self, cluster: Cluster) -> str:
        """Return the numbers as people read them, such as `3 here, 1 silent`; empty if there is nothing to count.

        Kinds with the number 0 are left out.
        """
        values = self.of(cluster)
        if self.listed:
            return short(sum(values.values()))
        parts = (f"{short(value)} {kind}".rstrip() for kind, value in values.items() if value)
        return (", ".join(parts) or "0") if values else ""

    def holds(self, cluster: Cluster) -> bool:
        """Return True if the number still holds: it counts the whole run, or the run has not ended.

        `flash watch` and Prometheus leave out the others. The cluster page shows all numbers, and says that they are
        those of the end.
        """
        return self.of_the_run or not cluster.ended


def engines_of(cluster: Cluster) -> list[EngineNow]:
    """Return the engines of all nodes that are not gone."""
    return [] if cluster.hub is None else _engines(cluster.hub)


def _of_hub(of: Callable[[HubNow], Mapping[str, float]]) -> Callable[[Cluster], Mapping[str, float]]:
    """Return `of`, a function of the hub's state, as a function of the whole cluster, for `ClusterNumber.of`.

    The result is empty before the hub has reported its state.
    """
    return lambda cluster: {} if cluster.hub is None else of(cluster.hub)


def _statuses(hub: HubNow) -> list[NodeStatus]:
    """Return the last reports of all nodes that are not gone."""
    return [node.status for node in hub.nodes if node.status is not None and node.state != "gone"]


def _engines(hub: HubNow) -> list[EngineNow]:
    """Return the engines of all nodes that are not gone."""
    return [engine for status in _statuses(hub) for engine in status.engines]


# Each function from here to `_restarts` computes one of CLUSTER_NUMBERS (`ClusterNumber.of`), by kind.


def _ranks(hub: HubNow) -> Mapping[str, float]:
    """Return the number of trainer ranks that run, and of those that do not."""
    here = sum(rank.process is not None for rank in hub.ranks)
    return {"here": here, "not there": len(hub.ranks) - here}


def _requests(hub: HubNow) -> Mapping[str, float]:
    """Return the number of responses that engines sample, and of requests that wait for an engine."""
    statuses = _statuses(hub)
    return {"running": sum(one.asking for one in statuses), "waiting": sum(one.waiting for one in statuses)}


def _samples(hub: HubNow) -> Mapping[str, float]:
    """Return the number of samples that nodes work on, that wait for a node, and that an evaluation needs."""
    flow = hub.flow
    return {"worked on": flow.leased, "queued": flow.queued, "evaluating": flow.evaluating}


def _episodes(hub: HubNow) -> Mapping[str, float]:
    """Return the number of live episodes, and of those whose environment works."""
    alive, requests = sum(one.episodes for one in _statuses(hub)), sum(_requests(hub).values())
    # Each other episode has a request at an engine. An agent's episode may have several: the number is a lower bound.
    return {"alive": alive, "in the environment": max(0.0, alive - requests)}


def _sandboxes(hub: HubNow) -> Mapping[str, float]:
    """Return the number of sandboxes of all nodes in use, ready and waited for; empty without sandboxes."""
    stocks = [stock for status in _statuses(hub) for stock in status.stocks]
    if not stocks:
        return {}
    sums = {"in use": sum(one.in_use for one in stocks), "warm": sum(one.ready for one in stocks)}
    return sums | {"waited for": sum(one.waiting for one in stocks)}


def _restarts(cluster: Cluster) -> Mapping[str, float]:
    """Return the number of restarts of the whole run, and of trainer ranks and engines under this hub."""
    trainers = 0 if cluster.hub is None else cluster.hub.trainer_restarts
    engines = sum(engine.deaths for engine in engines_of(cluster))
    return {"of the run": cluster.lives - 1, "of trainers": trainers, "of engines": engines}


CLUSTER_NUMBERS = (
    ClusterNumber(
        "nodes",
        "Nodes",
        "Processes that roll out samples or train, by their state. Nodes in the state gone have left the run.",
        "a node is silent or gone: the cluster page says since when, and why.",
        _of_hub(lambda hub: Counter(node.state for node in hub.nodes)),
    ),
    ClusterNumber(
        "engines",
        "Engines",
        "Engines of all nodes that are not gone, by their state.",
        "an engine returns again and again, or is gone. If no engine serves, nothing is sampled.",
        _of_hub(lambda hub: Counter(engine.state for engine in _engines(hub))),
    ),
    ClusterNumber(
        "trainer_ranks",
        "Trainer ranks",
        "The processes that train.",
        "a rank is not there: all ranks start again, and repeat the steps since the last checkpoint.",
        _of_hub(_ranks),
    ),
    ClusterNumber(
        "requests",
        "Requests",
        "Responses that engines sample now, and requests that wait for an engine.",
        "many requests wait, and the trainers wait as well: add engines. If none is running, the page says what the "
        "run waits for.",
        _of_hub(_requests),
    ),
    ClusterNumber(
        "tokens_per_second",
        "Tokens per second",
        "Response tokens per second of all engines, over the last seconds.",
        "it falls far below the throughput of the steps: an engine is gone, or loads weights.",
        _of_hub(lambda hub: {"": sum(one.figures.get("tokens_per_second", 0.0) for one in _engines(hub))}),
    ),
    ClusterNumber(
        "in_flight",
        "Samples on their way",
        "Samples that are issued and not yet trained or given up. The limit is 1 + train.async_ratio batches, plus "
        "redundant samples.",
        "it is at its limit while engines have no requests: trainers are too slow, or train.async_ratio is too low.",
        _of_hub(lambda hub: {"issued": hub.flow.in_flight, "at most": hub.flow.most}),
    ),
    ClusterNumber(
        "samples",
        "Samples with nodes",
        "Samples that nodes work on, samples that wait for a node, and unfinished answers of an evaluation.",
        "many are queued: nodes are full, or their engines are too old for them.",
        _of_hub(_samples),
    ),
    ClusterNumber(
        "groups",
        "Groups ready",
        "Complete groups that wait to be trained, and the number of groups that a step takes.",
        "it stays at a few: the trainers wait. If it is many times that of a step, the engines are ahead, and samples "
        "grow old.",
        _of_hub(lambda hub: {"ready": hub.flow.ready_groups, "make a step": hub.flow.groups_per_batch}),
    ),
    ClusterNumber(
        "episodes",
        "Environment sessions",
        "Live episodes, and how many of them have no request at an engine: their environment works, or they wait for a "
        "sandbox.",
        "most are in the environment while engines are idle: environments are slow, or rollout.max_concurrent is too "
        "low.",
        _of_hub(_episodes),
    ),
    ClusterNumber(
        "sandboxes",
        "Sandboxes",
        "Sandboxes of all nodes: in use, warm (ready to be used), and requested but not there yet.",
        "sandboxes are waited for all the time: raise the pool's parallel, or judge fewer samples at once.",
        _of_hub(_sandboxes),
    ),
    ClusterNumber(
        "failures",
        "Failures",
        "Attempts at samples, engines, nodes and trainer ranks that failed, by kind, over the whole run.",
        "a kind grows with each step: flash watch and the cluster page show the last message of each kind.",
        lambda cluster: {each.kind: each.count for each in cluster.failures},
        listed=True,
        of_the_run=True,
    ),
    ClusterNumber(
        "restarts",
        "Restarts",
        "Restarts of the whole run, of the trainer ranks since then, and of engines.",
        "one of them keeps growing: a part that dies again and again is broken, or too large for its memory.",
        _restarts,
        of_the_run=True,
    ),
)
"""All numbers, in the order in which they are shown."""


def _engine_number(column: Column) -> ClusterNumber:
    """Return the `ClusterNumber` that has the value of `column` for each engine. `column` is one of engines."""

    def of(cluster: Cluster) -> Mapping[str, float]:
        """Return the value of each engine that has reported it, by the engine's number."""
        values = ((str(engine.number), column.value_in(engine.figures)) for engine in engines_of(cluster))
        return {number: value for number, value in values if value is not None}

    worry = without_marks(". ".join(filter(None, (column.worry, capital(column.helps)))))
    title, means = f"Each engine: {column.label}", f"{capital(without_marks(column.meaning))}."
    return ClusterNumber(f"engine_{column.name}", title, means, worry, of, column.unit, "engine")


ENGINE_NUMBERS = tuple(map(_engine_number, columns("engine")))
"""Numbers that each engine reports, with the engine's number as the kind."""
