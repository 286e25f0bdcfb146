"""The batches of a run, written by a thread in the order of its steps: as they are, in numbers, and a few readably."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, ParamSpec, Protocol

from flash.config.tree import Config
from flash.errors import RecordingError, RunDirectoryError
from flash.observe.rundir import recording
from flash.observe.rundir.rundir import RunDirectory, sample_times
from flash.observe.rundir.sample_files import sampled_steps, samples_of, thin_samples, write_samples
from flash.observe.rundir.samples import readable
from flash.types import Batch, TrainedSample, Trajectory, samples_to_show

P = ParamSpec("P")

MEGABYTE = 1_000_000


class TokenText(Protocol):
    """Text of single tokens, for readable samples."""

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token."""
        ...


class _Shown(NamedTuple):
    """A sample that the run shows."""

    place: int
    """In the batch."""
    trajectory: Trajectory
    group_rewards: list[float]


class Batches:
    """Hand it over what there is to write, read what is recorded. There may be much: only the readers block.

    Args:
        writer: the one thread in which all of it happens.
    """

    def __init__(
        self, config: Config, directory: RunDirectory, tokenizer: TokenText, writer: ThreadPoolExecutor
    ) -> None:
        self._keep = config.checkpoint.batches
        self._count = config.run.log_samples
        self._most_bytes = config.run.log_samples_mb * MEGABYTE
        self._directory = directory
        self._tokenizer = tokenizer
        self._writer = writer
        self._writing: deque[Future[None]] = deque()
        self._held: dict[int, list[_Shown]] = {}
        """What is to be shown of the batches of steps that are not committed."""
        self._bytes: int | None = None
        """Of the files of samples that are there; None: not looked at yet."""

    def begin(self, batch: Batch) -> None:
        """What a step trains on. Raises what an earlier call met."""
        self._write(self._write_batch, batch)

    def commit(self, step: int, seen: Sequence[TrainedSample]) -> None:
        """A few samples of a step readably, with what the trainer found at their tokens. Raises as `begin`."""
        self._write(self._write_shown, step, seen)

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
        self._writer.submit(self._write_rest)

    def _write(self, what: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()
        self._writing.append(self._writer.submit(what, *args, **kwargs))

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _write_batch(self, batch: Batch) -> None:
        """The batch comes last: where it is there, so is the rest.

        A sample whose tokens are all too old counts in the baseline of its group alone: the ledger books it as given
        up, so it is no row.
        """
        step = batch.step
        trained = [t for t in batch.trajectories if t.trained_tokens(batch.min_version) > 0]
        self._directory.append_samples(sample_times(t, step) for t in trained)
        if self._count > 0:
            self._held[step] = self._shown(batch)
        if self._keep != "none":
            self._directory.write_batch(batch, keep_all=self._keep == "all")

    def _write_shown(self, step: int, seen: Sequence[TrainedSample]) -> None:
        """Of a batch that a hub before this one has held there is what is recorded; without it the step shows none."""
        shown = self._held.pop(step, None)
        if shown is None and self._count > 0:
            with suppress(RecordingError):
                shown = self._shown(recording.read_batch(self._directory.batches, step))
        self._write_readable(step, shown or [], seen)

    def _write_rest(self) -> None:
        """Write what no trainer will tell of any more, as of a step that failed; an error is left to who ends."""
        with suppress(RunDirectoryError):
            for step, shown in self._held.items():
                self._write_readable(step, shown, ())

    def _shown(self, batch: Batch) -> list[_Shown]:
        rewards: dict[int, list[float]] = {}
        for one in batch.trajectories:
            rewards.setdefault(one.task.group_id, []).append(one.reward)
        places = samples_to_show((one.trained_tokens(batch.min_version) > 0 for one in batch.trajectories), self._count)
        chosen = [(place, batch.trajectories[place]) for place in places]
        return [_Shown(place, one, rewards[one.task.group_id]) for place, one in chosen]

    def _write_readable(self, step: int, shown: Sequence[_Shown], seen: Sequence[TrainedSample]) -> None:
        if not shown:
            return
        told = {sample.index: sample for sample in seen}
        texts = self._tokenizer.token_texts
        samples = (
            readable(one, step, texts(one.tokens().tolist()), group_rewards=rewards, seen=told.get(place))
            for place, one, rewards in shown
        )
        if self._bytes is None:
            files = (samples_of(self._directory, there) for there in sampled_steps(self._directory))
            self._bytes = sum(file.stat().st_size for file in files)
        self._bytes += write_samples(self._directory, step, samples).stat().st_size
        if self._bytes > self._most_bytes:
            self._bytes = thin_samples(self._directory, self._most_bytes)
