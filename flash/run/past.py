"""What a run has left on the disk, for trainer ranks that start again while it goes on (`flash.hub.past`)."""

from __future__ import annotations

from pathlib import Path

from anyio.to_thread import run_sync

from flash.errors import RecordingError
from flash.hub.past import Start
from flash.observe.recorder import Recorder
from flash.trainer.stored import choose, read_manifest
from flash.types import Batch, Published
from flash.weights.update import decode_update


class RecordedPast:
    """Checkpoints and batches of a run directory.

    Args:
        run_dir: has the checkpoints.
        recorder: has the batches.
    """

    def __init__(self, run_dir: Path, recorder: Recorder) -> None:
        self._run_dir = run_dir
        self._recorder = recorder

    async def start(self, version: int) -> Start:
        """The newest whole checkpoint, whose every byte is read. Errors as of `choose`.

        Raises:
            RecordingError: batches since then are missing.
        """
        checkpoint, notes = await run_sync(choose, self._run_dir)
        for note in notes:
            self._recorder.note(note)
        held = read_manifest(checkpoint).version if checkpoint is not None else 0
        recorded = await run_sync(self._recorder.recorded_steps)
        if missing := sorted(set(range(held, version)) - set(recorded)):
            steps = ", ".join(map(str, missing))
            raise RecordingError(
                f"the newest checkpoint is of version {held}, and no batch of step {steps} is recorded"
            )
        return Start(held, str(checkpoint or ""))

    async def batch(self, step: int) -> Batch:
        """What a step has trained. Raises RecordingError."""
        return await run_sync(self._recorder.recorded_batch, step)

    def same_weights(self, one: Published, other: Published) -> bool:
        """Whether the fingerprints of both are equal."""
        return decode_update(one.update_info).fingerprint == decode_update(other.update_info).fingerprint
