"""What a run keeps of its past, for trainer ranks that start again, and the shards of what they are to train again."""

from __future__ import annotations

from typing import Protocol

import msgspec

from flash.hub.progress import RunProgress
from flash.samples.batches import cut, deal
from flash.samples.slices import in_slices
from flash.types import Batch, Published, Shard


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


class RepeatedStep:
    """The shards of the step that is trained again, read and dealt once for all data shards.

    Args:
        past: has the batches.
        progress: whoever waits is woken by.
        count: of data shards.
        part_bytes: of a shard, what one message may hold.
    """

    def __init__(self, past: RunHistory, progress: RunProgress, count: int, part_bytes: int) -> None:
        self._past = past
        self._progress = progress
        self._count = count
        self._part_bytes = part_bytes
        self.step = -1
        """The step that a rank has asked for last."""
        self.keeps = False
        """Whether a checkpoint may follow it."""
        self.shards: list[list[Shard]] = []
        """In parts; empty while they are read."""

    async def read(self, step: int, *, keeps: bool) -> None:
        """Have the shards of a step here. The first rank that asks has them read. Raises RecordingError."""
        if self.step != step:
            self.step, self.keeps, self.shards = step, keeps, []
            batch = await self._past.batch(step)
            dealt = await in_slices(deal(batch, self._count))
            self.shards = [await in_slices(cut(shard, self._part_bytes)) for shard in dealt]
            self._progress.send("batches")
        await self._progress.until("batches", lambda: bool(self.shards))
