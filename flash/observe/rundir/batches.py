"""The batches of a run, written by a thread in the order of its steps: as they are, and their samples in numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec

from flash.config.tree import Config
from flash.observe.rundir import recording
from flash.observe.rundir.rundir import RunDirectory, sample_times
from flash.observe.rundir.sample_writer import SampleWriter, TokenText
from flash.trained import TrainedSample
from flash.types import Batch

P = ParamSpec("P")


class Batches:
    """Hand it over what there is to write, read what is recorded. There may be much: only the readers block.

    Args:
        writer: the one thread in which all of it happens.
    """

    def __init__(
        self, config: Config, directory: RunDirectory, tokenizer: TokenText, writer: ThreadPoolExecutor
    ) -> None:
        self._keep = config.checkpoint.batches
        self._directory = directory
        self._samples = SampleWriter(directory, config.run, tokenizer)
        self._writer = writer
        self._writing: deque[Future[None]] = deque()

    def begin(self, batch: Batch) -> None:
        """What a step trains on. Raises what an earlier call met."""
        self._write(self._write_batch, batch)

    def commit(self, step: int, seen: Sequence[TrainedSample]) -> None:
        """A few samples of a step readably, with what the trainer found at their tokens. Raises as `begin`."""
        self._write(self._samples.commit, step, seen)

    def steps(self) -> list[int]:
        """The steps whose batches are recorded, those handed over so far included. Blocks until they are written."""
        return self._writer.submit(recording.recorded_steps, self._directory.batches).result()

    def of(self, step: int) -> Batch:
        """What a step has trained. Blocks as above. Raises RecordingError."""
        return self._writer.submit(recording.read_batch, self._directory.batches, step).result()

    def written(self) -> None:
        """Block until all that was handed over is written. Raises what the thread met."""
        while self._writing:
            self._writing.popleft().result()

    def end(self) -> None:
        """Leave the samples of a step that is not committed to be read."""
        self._writer.submit(self._samples.end)

    def _write(self, what: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()
        self._writing.append(self._writer.submit(what, *args, **kwargs))

    def _write_batch(self, batch: Batch) -> None:
        """The batch comes last: where it is there, so is the rest.

        A sample whose tokens are all too old counts in the baseline of its group alone: the ledger books it as given
        up, so it is no row.
        """
        step = batch.step
        trained = [t for t in batch.trajectories if t.trained_tokens(batch.min_version) > 0]
        self._directory.append_samples(sample_times(t, step) for t in trained)
        self._samples.hold(batch)
        if self._keep != "none":
            self._directory.write_batch(batch, keep_all=self._keep == "all")
