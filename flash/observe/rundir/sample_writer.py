"""A run's readable samples, from the batch that a step is given until they are on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from flash.config.tree import RunConfig
from flash.errors import RecordingError, RunDirectoryError
from flash.observe.rundir.recording import read_batch
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.sample_files import sampled_steps, samples_of, thin_samples, write_samples
from flash.observe.rundir.samples import readable
from flash.trained import TrainedSample, shown_places
from flash.types import Batch, Trajectory

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


class SampleWriter:
    """Holds what is to be shown of a batch until its step is committed, and writes it then. For one thread."""

    def __init__(self, directory: RunDirectory, config: RunConfig, tokenizer: TokenText) -> None:
        self._directory = directory
        self._count = config.log_samples
        self._most_bytes = config.log_samples_mb * MEGABYTE
        self._tokenizer = tokenizer
        self._held: dict[int, list[_Shown]] = {}
        self._bytes: int | None = None
        """Of the files that are there; None: not looked at yet."""

    def hold(self, batch: Batch) -> None:
        """A step is given this batch."""
        if self._count > 0:
            self._held[batch.step] = self._shown(batch)

    def commit(self, step: int, seen: Sequence[TrainedSample]) -> None:
        """A step is committed: write its samples.

        Of a batch that a hub before this one has held there is what is recorded; without it the step shows none.

        Raises:
            RunDirectoryError: they cannot be written.
        """
        if self._count == 0:
            return
        shown = self._held.pop(step, None)
        if shown is None:
            with suppress(RecordingError):
                shown = self._shown(read_batch(self._directory.batches, step))
        self._write(step, shown or [], seen)

    def end(self) -> None:
        """Write what no trainer will tell of any more, as of a step that failed; an error is left to who ends."""
        with suppress(RunDirectoryError):
            for step, shown in self._held.items():
                self._write(step, shown, ())

    def _shown(self, batch: Batch) -> list[_Shown]:
        rewards: dict[int, list[float]] = {}
        for one in batch.trajectories:
            rewards.setdefault(one.task.group_id, []).append(one.reward)
        places = shown_places((one.trained_tokens(batch.min_version) > 0 for one in batch.trajectories), self._count)
        chosen = [(place, batch.trajectories[place]) for place in places]
        return [_Shown(place, one, rewards[one.task.group_id]) for place, one in chosen]

    def _write(self, step: int, shown: Sequence[_Shown], seen: Sequence[TrainedSample]) -> None:
        if not shown:
            return
        told = {sample.index: sample for sample in seen}
        samples = (
            readable(
                one.trajectory,
                step,
                self._tokenizer.token_texts(one.trajectory.tokens().tolist()),
                group_rewards=one.group_rewards,
                seen=told.get(one.place),
            )
            for one in shown
        )
        if self._bytes is None:
            self._bytes = sum(
                samples_of(self._directory, there).stat().st_size for there in sampled_steps(self._directory)
            )
        self._bytes += write_samples(self._directory, step, samples).stat().st_size
        if self._bytes > self._most_bytes:
            self._bytes = thin_samples(self._directory, self._most_bytes)
