"""The state that all parts of the hub share: the progress of the run, and the objects of the run.

All waiting in the hub uses `RunProgress`. A request waits for a *signal*, which is the name of a thing that may change.
Code that changes the thing sends the signal, which wakes the waiting requests. A thousand engines may wait for their
next version while thousands of results arrive. So there are several signals, and each wakes only the few waiters that
it concerns.

A *lease* assigns one task to one node. An *incarnation* is the set of trainer ranks that run from one restart of the
ranks to the next. A *round* is the samples of a step that the ranks train before they ask for more; a step has one or
several. A round, or the whole batch of a step, is *dealt* when its samples are divided among the trainer ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import anyio
import msgspec

from flash.config.tree import Config
from flash.errors import FlashError, PeerLostError
from flash.hub.fleet import Fleet
from flash.hub.metrics import StepMetrics
from flash.hub.recovery import Persistence
from flash.observe.observer import Observer
from flash.samples.batches import PART_BYTES
from flash.samples.buffer import MEMBERS_PER_SLICE, SampleBuffer
from flash.samples.evaluation import Evaluations
from flash.samples.rules import AgeContract
from flash.types import Published

Signal = Literal["run", "batches", "engines", "versions", "backlog", "ranks"] | tuple[Literal["leases", "cancels"], int]
"""Name of a thing that may have changed:

- `run`: the stage of the run (the event that it waits for), or its end.
- `batches`: a round may be formed or fetched now, or the start of an incarnation is known.
- `engines`: the versions of engines.
- `versions`: the published version.
- `backlog`: work was postponed that `NodeWork.work_off_backlog` does.
- `ranks`: the processes of the trainer ranks.
- `("leases", node)`: the leases in the reply to a node. `("cancels", node)`: the leases that a node must cancel.
"""


class RunEnd(msgspec.Struct, frozen=True):
    """Result of a run that has ended without an error."""

    reason: Literal["finished", "interrupted"]
    """`finished`: all steps are trained. `interrupted`: the run has ended early, and can be resumed."""
    version: int
    """Version that the run has reached."""
    ledger: dict[str, int]
    """Total numbers of samples and tokens, by name."""
    unfinished: str = ""
    """Phrase for the work that did not end within `deadlines.shutdown` after an interrupt; empty if all work ended."""


class RunProgress:
    """State of the run: its versions, its end, and the signals of changes.

    Signals are not stored. So the code that waits must check its condition first, and must not await anything between
    this check and the wait. Otherwise it would miss a signal in between.

    Args:
        version: the version that the run has reached. The trainer ranks may hold an older version and train up to it.
        newest: the version that engines should have, perhaps published by a previous hub; -1 if there is none.
        newest_before: the newest version that engines may have had under a previous hub; -1 if there was none.
    """

    def __init__(self, version: int, newest: int = -1, newest_before: int = -1) -> None:
        self.version = version
        """Version that the run has reached: the number of committed steps."""
        self.trainer_version = version
        """Version that the trainer ranks hold; lower than `version` while they train earlier steps again."""
        self.newest = newest
        """Newest version that engines should have; -1 if there is none yet."""
        self.newest_before = newest_before
        """Newest version that engines may have had under a previous hub; -1 if there was none. It is newer than
        `newest` while the run trains steps again from a checkpoint. A node that has outlived the previous hub may
        deliver samples with tokens of such versions."""
        self.published: Published | None = None
        """Newest version that the ranks have published to this hub process; None before the first publication."""
        self.publisher_alive = False
        """True while the ranks that have published `published` are alive. Otherwise no engine can fetch it."""
        self.stopping: Literal["finished", "interrupted"] | None = None
        """Reason why no more batches are formed; None while the run goes on."""
        self.done = False
        """True once all peers may leave."""
        self.stages_ended = 0
        """Counter of the events that end a stage, so that two stages of the same kind are distinguished
        (`flash.hub.stages`)."""
        self.error: FlashError | None = None
        """Error that has ended the run; None if there is none."""
        self.batch: Literal["none", "forming", "open", "dealt"] = "none"
        """State of the batch of the running step. `forming`: the groups of a round are being collected. `open`: rounds
        were divided among the ranks, and others follow. `dealt`: all rounds were divided among the ranks, which fetch
        their parts or train on them."""
        self._events: dict[Signal, anyio.Event] = {}
        """Event of each signal for which tasks wait."""

    async def until(self, signal: Signal, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true. The caller may set a deadline.

        Every change that may make the condition true has to send the signal.

        Raises:
            FlashError: the condition is false, and an error has ended the run; this is that error.
        """
        while not condition():
            if self.error is not None:
                raise self.error
            await self.wait(signal)

    async def wait(self, signal: Signal) -> None:
        """Wait until the signal is sent the next time. This sets no deadline; the caller may set one."""
        event = self._events.get(signal)
        if event is None:
            event = self._events[signal] = anyio.Event()
        await event.wait()

    def send(self, *signals: Signal) -> None:
        """Wake all tasks that wait for these signals now. A task that waits later needs the next signal."""
        for signal in signals:
            if (event := self._events.pop(signal, None)) is not None:
                event.set()

    def fail(self, error: FlashError) -> None:
        """End the run with this error, unless an earlier error has ended it.

        Wakes all waiting tasks. In a task that waits in `until`, the error is raised if its condition is still false. A
        task that waits in `wait` goes on without an error and has to look at `error` itself.
        """
        self.error = self.error or error
        self.send(*list(self._events))

    @property
    def trainers_behind(self) -> bool:
        """True if the trainer ranks have to train steps again that the run has already committed."""
        return self.trainer_version < self.version

    @property
    def published_version(self) -> int:
        """Version of `published`; -1 if nothing was published yet."""
        return self.published.version if self.published is not None else -1

    @property
    def ending(self) -> bool:
        """True if the run needs no more nodes. A guest (a process that wants to become a node) then gets no number.

        A run that has trained all steps may still need nodes, for its last evaluation.
        """
        return self.done or self.stopping == "interrupted"

    def refuse_if_failed(self) -> None:
        """Raise PeerLostError if the run has failed. A peer that connects now gets this error and waits for the next
        hub."""
        if self.error is not None:
            raise PeerLostError("this hub is about to end")

    def interrupt(self) -> None:
        """Interrupt the run. If a batch is dealt, the ranks still train this step. The hub still deals groups that are
        being collected. If the batch is not whole with them, the step is given up and its groups are kept.

        No other step begins. This wakes the requests that wait for a batch, for engines, or for the stage of the run.
        """
        self.stopping = "interrupted"
        self.send("run", "batches", "engines")

    def end(self) -> None:
        """End the run without an error. Wakes all waiting tasks; the replies of the requests let their peers leave."""
        self.done = True
        self.send(*list(self._events))


class SliceLimits(NamedTuple):
    """Limits on the work that the hub does at once, before other tasks are served."""

    members: int = MEMBERS_PER_SLICE
    """Number of samples whose groups are processed in one slice."""
    part_bytes: int = PART_BYTES
    """Bytes of a trainer rank's shard (its part of a batch) that one message may hold."""


DEFAULT_LIMITS = SliceLimits()
"""Limits of a run; tests use smaller ones."""


class HubContext(NamedTuple):
    """The objects of a run that the parts of the hub share. `Hub` makes it once."""

    config: Config
    observer: Observer
    """Receives every row, note and failure of the run."""
    now: Callable[[], float]
    """Returns Unix seconds, on the loop's clock."""
    progress: RunProgress
    """Versions of the run, its end, and the signals of changes."""
    contract: AgeContract
    """Bounds on the age of tokens and on the samples in flight."""
    buffer: SampleBuffer
    """All training samples. At any time, issued = trained + filtered + given_up + in_flight."""
    evaluations: Evaluations
    """All evaluation samples."""
    persistence: Persistence
    """Saves the state that must survive a restart of the hub."""
    metrics: StepMetrics
    """Sums for the row of metrics of the next step."""
    fleet: Fleet
    """The engines of all nodes."""
