"""Writing of each step's batch, by a thread in the order of the steps, so that the hub does not wait for the disk.

Three files get it: the exact batch (`recording`), lengths and times of all samples (`samples.jsonl`), and a few samples
in readable form (`samples`). `flash.observe.recorder` owns the `Batches` of a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, ParamSpec, Protocol

from flash.config.tree import Config
from flash.observe.rundir import recording
from flash.observe.rundir.rundir import RunDirectory, sample_times
from flash.observe.rundir.samples import readable, sampled_steps, samples_of, thin_samples, write_samples
from flash.types import Batch, TrainedSample, Trajectory, samples_to_show

P = ParamSpec("P")

MOST_BYTES = 10**9
"""Largest size of all readable samples of a run together, in bytes. A person reads far fewer."""


class TokenText(Protocol):
    """Text of single tokens, for readable samples. The tokenizer of the model has this method."""

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        ...


class _Shown(NamedTuple):
    """Sample of a batch that is written in readable form."""

    place: int
    """Index of the sample in the batch."""
    trajectory: Trajectory
    group_rewards: list[float]
    """Rewards of all samples of the group in the batch."""


class Batches:
    """Writes batches in a thread, and reads them back. `begin`, `commit` and `end` do not block; the other methods do.

    The recorder calls `begin` when a step gets its batch, and `commit` when the step is committed. If trainer ranks
    restart from a checkpoint, the hub reads the batches of later steps with `steps` and `of`, and the ranks train these
    steps again. The process of the hub calls `written` in another thread before a checkpoint, since a run that is
    resumed from it does not write these files again.

    Args:
        config: configuration of the run.
        directory: run directory.
        tokenizer: decodes the tokens of the readable samples.
        writer: executor with one thread, in which all files are written and read, one after the other.
        most_bytes: largest size of all readable samples together, in bytes.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        tokenizer: TokenText,
        writer: ThreadPoolExecutor,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._keep = config.checkpoint.batches
        """Exact batches to keep: `none`, `all`, or `kept`: those since the oldest checkpoint."""
        self._count = config.run.log_samples
        """Number of samples of each step that are written in readable form."""
        self._most_bytes = most_bytes
        self._directory = directory
        self._tokenizer = tokenizer
        self._writer = writer
        self._writing: deque[Future[None]] = deque()
        """Writes in the order of their calls, without those that were seen to have ended."""
        # Only the thread uses the next two.
        self._uncommitted: dict[int, list[_Shown]] = {}
        """Samples to write in readable form, by step, of steps that are not committed yet."""
        self._bytes: int | None = None
        """Bytes of all files with readable samples; None until they are first counted."""

    def begin(self, batch: Batch) -> None:
        """Start to write the batch of a step. Raises the error of an earlier write."""
        self._write(self._write_batch, batch)

    def commit(self, step: int, seen: Sequence[TrainedSample]) -> None:
        """Start to write a few readable samples of a committed step, with the trainer's values of their tokens.

        `seen` has the values that the trainer ranks have reported. Raises the error of an earlier write.
        """
        self._write(self._write_shown, step, seen)

    def steps(self) -> list[int]:
        """Return the steps whose batches are recorded, in order. Blocks until all earlier writes are done."""
        return self._writer.submit(recording.recorded_steps, self._directory.batches).result()

    def of(self, step: int) -> Batch:
        """Return the batch of a step. Blocks until all earlier writes are done. Raises RecordingError."""
        return self._writer.submit(recording.read_batch, self._directory.batches, step).result()

    def written(self) -> None:
        """Block until all writes so far are done. Raises the error of a write."""
        # A thread waits here before a checkpoint, while the event loop may call `begin`. So this removes no entries.
        for write in self._writing.copy():
            write.result()

    def end(self) -> None:
        """Start to write the readable samples of steps that were not committed, at the end of the run."""
        # Nobody reads the result of this call, and the run is over, so an error of this write is lost.
        self._writer.submit(self._write_rest)

    def _write(self, write: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Let the thread call `write`. Raises the error of an earlier write that has ended, which ends the run."""
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()
        self._writing.append(self._writer.submit(write, *args, **kwargs))

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _write_batch(self, batch: Batch) -> None:
        """Do the work of `begin`: write lengths and times of the samples, then the exact batch.

        Keeps the samples that are written in readable form until `commit`.
        """
        step = batch.step
        # A sample whose tokens are all too old has no row: it counts only in the baseline of its group, and the ledger
        # counts it as given up.
        trained = [t for t in batch.trajectories if t.trained_tokens(batch.min_version) > 0]
        self._directory.append_samples(sample_times(t, step) for t in trained)
        if self._count > 0:
            self._uncommitted[step] = self._shown(batch)
        # The batch is last: a restart that finds it may rely on the rows.
        if self._keep != "none":
            self._directory.write_batch(batch, keep_all=self._keep == "all")

    def _write_shown(self, step: int, seen: Sequence[TrainedSample]) -> None:
        """Do the work of `commit`: write the readable samples of a step, with the trainer's values (`seen`)."""
        # A hub that was started again forms the batch of its first step again, so `begin` has left the samples here.
        shown = self._uncommitted.pop(step) if self._count > 0 else []
        self._write_readable(step, shown, seen)

    def _write_rest(self) -> None:
        """Do the work of `end`: write the readable samples of uncommitted steps, without the trainer's values."""
        for step, shown in self._uncommitted.items():
            self._write_readable(step, shown, ())

    def _shown(self, batch: Batch) -> list[_Shown]:
        """Choose the samples of a batch that are written in readable form.

        The trainer ranks choose with the same function, so they report values of the same samples.
        """
        group_rewards: dict[int, list[float]] = {}
        for one in batch.trajectories:
            group_rewards.setdefault(one.task.group_id, []).append(one.reward)
        places = samples_to_show((one.trained_tokens(batch.min_version) > 0 for one in batch.trajectories), self._count)
        chosen = [(place, batch.trajectories[place]) for place in places]
        return [_Shown(place, one, group_rewards[one.task.group_id]) for place, one in chosen]

    def _write_readable(self, step: int, shown: Sequence[_Shown], seen: Sequence[TrainedSample]) -> None:
        """Write the readable samples of a step, and delete files if all of them together are too large.

        `seen` has the trainer's values of tokens. Each entry names its sample by the index in the batch.
        """
        if not shown:
            return
        seen_at = {sample.index: sample for sample in seen}
        texts = self._tokenizer.token_texts
        samples = (
            readable(one, step, texts(one.tokens().tolist()), group_rewards=rewards, seen=seen_at.get(place))
            for place, one, rewards in shown
        )
        # A resumed run has files already.
        if self._bytes is None:
            files = (samples_of(self._directory, there) for there in sampled_steps(self._directory))
            self._bytes = sum(file.stat().st_size for file in files)
        self._bytes += write_samples(self._directory, step, samples).stat().st_size
        if self._bytes > self._most_bytes:
            self._bytes = thin_samples(self._directory, self._most_bytes)
