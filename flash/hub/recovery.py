"""The state that outlives a hub process, and the objects that save and restore it.

A checkpoint keeps a `HubState`; the *journal*, a file, keeps every change after the newest checkpoint. When a run
starts again, its owner reads both (`flash.run.restart`) and gives the new hub a `RecoveredState`. While it runs, the
hub saves through its `Persistence`. If trainer ranks are lost while the hub goes on, the next ranks load the checkpoint
that a `TrainerStart` names. These ranks train the recorded batches of later steps again, which the hub reads from the
`RunHistory`. An *incarnation* is the set of rank processes that run from one restart of the ranks to the next.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Generator
from typing import NamedTuple, Protocol

import msgspec
from anyio.lowlevel import checkpoint

from flash.config.tree import Config
from flash.errors import DECODE_ERRORS, CheckpointError, ConfigError
from flash.hub.protocol import SnapshotReply
from flash.samples.journal import NO_JOURNAL, Journal
from flash.samples.store import BufferState
from flash.types import Batch, Published

SaveState = Callable[[int, Generator[bytearray]], Awaitable[SnapshotReply]]
"""Function that writes the encoded state of the hub into the checkpoint of a version.

The arguments are the version and an iterator over the pieces of the state. A piece takes one or two milliseconds to
make, so the function must let other tasks run after each piece. A piece is valid only until the next piece is
requested.
"""


async def measure_state(version: int, pieces: Generator[bytearray]) -> SnapshotReply:
    """Return the size of an encoded state without saving it. Simulations and tests use this as `SaveState`.

    The simulated trainer ranks ask for snapshots of the hub's state, but keep no file. So the reply needs only the
    size, the checksum is 0, and `version` is not used.
    """
    size = 0
    for piece in pieces:
        size += len(piece)
        # `checkpoint` of anyio saves nothing: it lets other tasks run.
        await checkpoint()
    return SnapshotReply(size, crc32=0)


class HubState(msgspec.Struct):
    """State of the hub in a checkpoint."""

    version: int
    """Version that the run had reached."""
    buffer: BufferState
    """All training samples that are not trained yet, and the ledger, which counts all tasks and tokens of the run."""
    journal: int
    """Number of the journal file that begins after this state."""

    @classmethod
    def restore(cls, data: bytes | memoryview, config: Config) -> HubState:
        """Return the decoded state of a checkpoint, after a check that this run can continue from it.

        Raises:
            CheckpointError: another version of Flash wrote it.
            ConfigError: the configuration has another batch size or group size than the state.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls).belonging_to(config)
        except DECODE_ERRORS as error:
            raise CheckpointError(
                f"the checkpoint's hub.bin was written by another version of Flash ({error}). Go on with that version, "
                "or start a new run"
            ) from error

    def belonging_to(self, config: Config) -> HubState:
        """Return this state, after a check that the configuration has the sizes with which the state was made.

        Raises:
            ConfigError: the configuration has another batch size or group size. The unfinished groups in the state
                would have another size than the run expects. Admission numbers the groups in the order of issue,
                without the groups that ended untrained; these numbers would be wrong.
        """
        contract, rollout = self.buffer.settings.contract, config.rollout
        for name, held, wanted in (
            ("train.batch_size", contract.batch_size, config.train.batch_size),
            ("rollout.group_size", contract.group_size, rollout.group_size),
            ("rollout.extra_per_group", self.buffer.settings.rules.extra_per_group, rollout.extra_per_group),
        ):
            if held != wanted:
                raise ConfigError(
                    f"{name}: the checkpoint of version {self.version} was made with {held}, and its unfinished "
                    f"groups have that size; got {wanted}. Go on with {held}, or start a new run"
                )
        return self


class TrainerStart(msgspec.Struct, frozen=True):
    """Starting point of one incarnation of the trainer ranks."""

    version: int
    """Version that the ranks hold after they have loaded the checkpoint."""
    checkpoint: str
    """Folder of the checkpoint that all ranks load. Empty for version 0: the ranks start from the model itself."""


class RunHistory(Protocol):
    """Access to the checkpoints and recorded batches of earlier steps. The methods do not block the event loop for
    long."""

    async def choose_start(self, version: int) -> TrainerStart:
        """Return the newest complete checkpoint; without any, version 0, which is the model itself.

        From there the ranks train the recorded batches again, up to `version`. The hub calls this when the ranks of the
        next incarnation start after a loss.

        Raises:
            FlashError: a checkpoint cannot be read, or the batch of a step after the checkpoint is missing.
        """
        ...

    async def batch(self, step: int) -> Batch:
        """Return the batch that a step has trained. Raises RecordingError if it cannot be read."""
        ...

    def same_weights(self, one: Published, other: Published) -> bool:
        """Return True if two publications have the same weights, bit for bit.

        After ranks have trained earlier steps again, the hub reports to people whether this has made the same weights
        as the first time.
        """
        ...


class RecoveredState(NamedTuple):
    """State that the previous hub processes of the run have left. In a new run every field has its default."""

    state: HubState | None = None
    """State of the hub: the checkpoint with the journal replayed; None in a new run."""
    evaluated: Collection[int] = ()
    """Versions whose evaluations are finished and kept."""
    start: TrainerStart | None = None
    """Starting point of the trainer ranks. Its version may be lower than the version that the run has reached. None:
    the ranks start at the version of the run without a checkpoint."""
    hub_number: int = 0
    """Number of this hub process in the run, larger than the number of every earlier hub process. Numbers of leases
    begin with it, so that two hub processes never give the same number."""


NEW_RUN = RecoveredState()
"""Value for the first hub of a run, which has no earlier state."""


class Persistence(NamedTuple):
    """Places in which the hub saves the state that the next hub, or the next incarnation of the ranks, needs."""

    save_state: SaveState = measure_state
    """Writes the hub's state into the checkpoint of a version."""
    journal: Journal = NO_JOURNAL
    """Keeps every change of the samples between two checkpoints."""
    history: RunHistory | None = None
    """Checkpoints and batches for trainer ranks that start again. None: the run ends when a trainer rank is lost."""


NO_PERSISTENCE = Persistence()
"""Persistence of a run that starts from the beginning when its hub or a trainer rank is lost."""
