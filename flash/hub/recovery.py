"""What a checkpoint keeps of the hub, and for which runs it may be used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Generator
from typing import NamedTuple, Protocol

import msgspec
from anyio.lowlevel import checkpoint

from flash.config.tree import Config
from flash.errors import CheckpointError, ConfigError
from flash.hub.protocol import SnapshotReply
from flash.samples.journal import NO_JOURNAL, Journal
from flash.samples.store import BufferState
from flash.types import Batch, Published

SaveState = Callable[[int, Generator[bytearray]], Awaitable[SnapshotReply]]
"""Writes an encoded state into the checkpoint of a version. Each piece takes a millisecond or two to make, so that
others are to be served after each, and is gone when the next one is asked for."""


async def measure_state(version: int, pieces: Generator[bytearray]) -> SnapshotReply:
    """Keeps nothing: for a hub whose trainers write no checkpoints."""
    size = 0
    for piece in pieces:
        size += len(piece)
        await checkpoint()
    return SnapshotReply(size, crc32=0)


class HubState(msgspec.Struct):
    """What a checkpoint keeps of the hub."""

    version: int
    buffer: BufferState
    journal: int
    """The number of the journal's file with what came after it."""

    @classmethod
    def restore(cls, data: bytes | memoryview, config: Config) -> HubState:
        """Read what a checkpoint kept.

        Raises:
            CheckpointError: this version of Flash did not write it.
            ConfigError: as `belonging_to`.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls).belonging_to(config)
        except msgspec.DecodeError as error:
            raise CheckpointError(
                f"the checkpoint's hub.bin is of another version of Flash ({error}): go on with that version, or start "
                "a new run"
            ) from error

    def belonging_to(self, config: Config) -> HubState:
        """Itself. Raises ConfigError: the groups that it holds, and the places it counts, are of another size."""
        contract, rollout = self.buffer.settings.contract, config.rollout
        for name, held, wanted in (
            ("train.batch_size", contract.batch_size, config.train.batch_size),
            ("rollout.group_size", contract.group_size, rollout.group_size),
            ("rollout.extra_per_group", self.buffer.settings.rules.extra_per_group, rollout.extra_per_group),
        ):
            if held != wanted:
                raise ConfigError(
                    f"{name}: the checkpoint of version {self.version} was made with {held}, and its unfinished "
                    f"groups are counted by it; got {wanted}. Go on with {held}, or start a new run"
                )
        return self


class TrainerStart(msgspec.Struct, frozen=True):
    """What an incarnation of the trainer ranks begins with."""

    version: int
    checkpoint: str
    """The folder that all of them load; empty: version 0, the model as it was."""


class RunHistory(Protocol):
    """Reads what the run has left on the disk, beside the event loop."""

    async def start(self, version: int) -> TrainerStart:
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


class RecoveredState(NamedTuple):
    """What the hubs before this one have left of the run."""

    state: HubState | None = None
    evaluated: Collection[int] = ()
    """Versions whose evaluations stand."""
    start: TrainerStart | None = None
    """What the trainer ranks begin with, perhaps an earlier version than the run's; None: the run's, and no
    checkpoint."""
    hub_number: int = 0
    """The number of this hub: no other one of the run has it, and those before it have lower ones."""


class Persistence(NamedTuple):
    """Where the run keeps what is to be known after a restart."""

    save_state: SaveState = measure_state
    """Writes the hub's state into the checkpoint of a version."""
    journal: Journal = NO_JOURNAL
    """Keeps what happens between two checkpoints."""
    history: RunHistory | None = None
    """What trainer ranks that start again train again; None: when one is lost, the run ends."""
