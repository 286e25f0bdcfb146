"""What the hub is made of: what it is given, and what all of its own parts are given of the run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import msgspec

from flash.config.tree import Config
from flash.hub.metrics import StepMetrics
from flash.hub.nodes.fleet import Fleet
from flash.hub.progress import RunProgress
from flash.hub.state import HubState, KeepState, weigh
from flash.observe.observer import Observer
from flash.samples.batches import PART_BYTES
from flash.samples.buffer import MEMBERS_AT_ONCE, SampleBuffer
from flash.samples.evaluation import Evaluations
from flash.samples.journal import NO_JOURNAL, Journal
from flash.samples.rules import AgeContract
from flash.types import Batch, Published


class Start(msgspec.Struct, frozen=True):
    """What an incarnation of the trainer ranks begins with."""

    version: int
    checkpoint: str
    """The folder that all of them load; empty: version 0, the model as it was."""


class RunHistory(Protocol):
    """Reads what the run has left on the disk, beside the event loop."""

    async def start(self, version: int) -> Start:
        """The newest whole checkpoint from which the run's version can be reached.

        Raises:
            FlashError: there is none, or a batch since then is missing.
        """
        ...

    async def batch(self, step: int) -> Batch:
        """What a step has trained. Raises RecordingError."""
        ...

    def same_weights(self, one: Published, other: Published) -> bool:
        """Whether two publications hold the same weights, bit for bit."""
        ...


class Inheritance(NamedTuple):
    """What the hubs before this one have left of the run."""

    state: HubState | None = None
    evaluated: Collection[int] = ()
    """Versions whose evaluations stand."""
    start: Start | None = None
    """What the trainer ranks begin with, perhaps an earlier version than the run's; None: the run's, and no
    checkpoint."""
    incarnation: int = 0
    """The number of this hub: no other one of the run has it, and those before it have lower ones."""


class Records(NamedTuple):
    """Where the run keeps what is to be known after a restart."""

    keep_state: KeepState = weigh
    """Writes the hub's state into the checkpoint of a version."""
    journal: Journal = NO_JOURNAL
    """Keeps what happens between two checkpoints."""
    past: RunHistory | None = None
    """What trainer ranks that start again train again; None: when one is lost, the run ends."""


class Pieces(NamedTuple):
    """How much the hub does in one go."""

    members: int = MEMBERS_AT_ONCE
    """Samples whose groups are dealt with in one slice."""
    part_bytes: int = PART_BYTES
    """Of a trainer rank's shard, what one message may hold."""


class Parts(NamedTuple):
    """What all parts of the hub are given."""

    config: Config
    observer: Observer
    """Is told of everything."""
    now: Callable[[], float]
    """Gives Unix seconds on the loop's clock."""
    progress: RunProgress
    """How far the run has come."""
    contract: AgeContract
    buffer: SampleBuffer
    """The training tasks."""
    evaluations: Evaluations
    """The others."""
    records: Records
    metrics: StepMetrics
    fleet: Fleet
    """The engines."""


class HubPart:
    """One part of the hub, with what all of them are given."""

    def __init__(self, parts: Parts) -> None:
        self._config, self._observer, self._now = parts.config, parts.observer, parts.now
        self._progress, self._fleet, self._metrics = parts.progress, parts.fleet, parts.metrics
        self._contract, self._buffer, self._samples = parts.contract, parts.buffer, parts.buffer.samples
        self._evaluations = parts.evaluations
        self._keep_state, self._journal, self._past = parts.records
