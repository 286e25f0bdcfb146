"""How far a run has come, how it will end, and waiting for it to go on. The parts of the hub share it.

A thousand engines wait for their next version while results come in by the thousand; each change wakes one or two
waiters, those whom it concerns.
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
from flash.samples.admission import AgeContract
from flash.samples.batches import PART_BYTES
from flash.samples.buffer import MEMBERS_AT_ONCE, SampleBuffer
from flash.samples.evaluation import Evaluations
from flash.types import Published


class RunEnd(msgspec.Struct, frozen=True):
    """How the run ended."""

    reason: Literal["finished", "interrupted"]
    version: int
    ledger: dict[str, int]
    unfinished: str = ""
    """What did not end within `deadlines.shutdown` of an interrupt, in words."""


class RunProgress:
    """All versions of the policy are kept here. Signals are not remembered: a waiter looks at its condition first.

    Args:
        version: what the run has reached; the trainer ranks may be on their way to it.
        newest: the version that engines are to have, perhaps still one of a former hub; −1: there is none.
    """

    def __init__(self, version: int, newest: int = -1) -> None:
        self.version = version
        self.held = version
        """What the trainer ranks hold: less while they train again what the run has trained."""
        self.newest = newest
        self.published: Published | None = None
        """The newest version that this hub has announced."""
        self.reachable = False
        """Whether those live who published it: else nobody can fetch it."""
        self.stopping: Literal["finished", "interrupted"] | None = None
        self.done = False
        """Whether everybody may leave."""
        self.stages_ended = 0
        """Counts what ends a stage."""
        self.error: FlashError | None = None
        """What ended the run."""
        self.batch: Literal["none", "forming", "dealt"] = "none"
        """What the trainer ranks have of the running step."""
        self._events: dict[Signal, anyio.Event] = {}

    async def until(self, signal: Signal, condition: Callable[[], bool]) -> None:
        """Wait, under the caller's deadline, until the condition is true or the run has failed.

        Whatever may make it true has to send the signal.
        """
        while not condition():
            if self.error is not None:
                raise self.error
            await self.wait(signal)

    async def wait(self, signal: Signal) -> None:
        """Wait, under the caller's deadline, for the next one."""
        event = self._events.get(signal)
        if event is None:
            event = self._events[signal] = anyio.Event()
        await event.wait()

    def send(self, *signals: Signal) -> None:
        """Wake those who wait for any of these."""
        for signal in signals:
            if (event := self._events.pop(signal, None)) is not None:
                event.set()

    def fail(self, error: FlashError) -> None:
        """End the run with this error; the first one wins."""
        self.error = self.error or error
        self.send(*list(self._events))

    @property
    def behind(self) -> bool:
        """Whether the trainer ranks have steps to train again."""
        return self.held < self.version

    @property
    def published_version(self) -> int:
        """That of `published`; −1 before the first."""
        return self.published.version if self.published is not None else -1

    @property
    def ending(self) -> bool:
        """Whether nobody needs another node: the evaluation of the last version may still do."""
        return self.done or self.stopping == "interrupted"

    def refuse_at_end(self) -> None:
        """Raises PeerLostError: the run has failed, and who comes now is to wait for the next hub."""
        if self.error is not None:
            raise PeerLostError("this hub is about to end")

    def interrupt(self) -> None:
        """Stop after the running step; a run that has trained everything ends at once."""
        self.stopping = "interrupted"
        self.send("run", "batches", "engines")

    def end(self) -> None:
        """Let everybody leave."""
        self.done = True
        self.send(*list(self._events))


Signal = Literal["run", "batches", "engines", "versions", "put off", "ranks"] | tuple[Literal["leases", "cancels"], int]
"""What may have changed: the run's progress, whether a batch can be formed, the versions of engines, the published one,
what was put off, which processes the trainer ranks are, what a node may have, what it is to cancel."""


class SliceLimits(NamedTuple):
    """How much the hub does in one go."""

    members: int = MEMBERS_AT_ONCE
    """Samples whose groups are dealt with in one slice."""
    part_bytes: int = PART_BYTES
    """Of a trainer rank's shard, what one message may hold."""


class HubContext(NamedTuple):
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
    persistence: Persistence
    metrics: StepMetrics
    fleet: Fleet
    """The engines."""


class HubPart:
    """One part of the hub, with what all of them are given."""

    def __init__(self, parts: HubContext) -> None:
        self._config, self._observer, self._now = parts.config, parts.observer, parts.now
        self._progress, self._fleet, self._metrics = parts.progress, parts.fleet, parts.metrics
        self._contract, self._buffer, self._samples = parts.contract, parts.buffer, parts.buffer.samples
        self._evaluations = parts.evaluations
        self._keep_state, self._journal, self._past = parts.persistence
