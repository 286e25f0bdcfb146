"""Losses and double counts of a run that was broken on purpose, read from the files that it left.

`benchmarks.real.chaos` calls `left_by`, which reads a run directory, and `judge`, which counts. All functions except
`left_by` and `trained` touch no file. The run must have ended in order: then nothing is in flight, and the *ledger*
counts every task and every token in one place, by its fate. A *task* asks for one sample.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from flash.ages import max_age
from flash.observe.rundir.recording import read_batch, recorded_steps
from flash.observe.rundir.rundir import RunDirectory
from flash.types import VersionRun

Row = Mapping[str, Any]
"""Row of `metrics.jsonl`: the metrics of a step, by name."""


class Trained(msgspec.Struct, frozen=True):
    """Batch of a step, as the run has recorded it for replay."""

    step: int
    min_version: int
    """Oldest version whose tokens the step trained."""
    tasks: list[tuple[int, list[VersionRun]]]
    """Number of the task of each sample, and the versions of its tokens, run-length encoded."""

    def tokens(self, versions: Iterable[VersionRun]) -> int:
        """Return the number of tokens of a sample that were trained. `versions` are the versions of all its tokens."""
        return sum(run.count for run in versions if run.version >= self.min_version)


class Left(msgspec.Struct, frozen=True):
    """Content of the files of a run that has ended."""

    ledger: Mapping[str, int]
    """Counts of tasks and tokens by their fate, from `ledger.json`."""
    max_age: int
    """Largest age of a trained token that the run allows, in versions."""
    rows: Sequence[Row]
    """Rows of `metrics.jsonl`."""
    redone: Sequence[Row]
    """Rows of steps that a restart has repeated; `rows` has the rows of the repetition."""
    samples: Mapping[int, int]
    """Number of lines of `samples.jsonl`, by step."""
    batches: Sequence[Trained]
    """Recorded batches of all steps."""

    @property
    def times(self) -> list[float]:
        """Unix seconds at which steps ended, in order, including steps that were repeated later."""
        return sorted(row["time"] for row in (*self.rows, *self.redone))


class Verdict(msgspec.Struct, frozen=True):
    """Counts of the things that must not happen.

    The first word of a field's name is the unit of its row in the report. A `float` is NaN if the run did not end in
    order, because the count cannot be known then.
    """

    tasks_lost: float
    """Tasks that were issued, and neither trained, filtered, given up nor in flight."""
    tasks_doubled: int
    """Times that a task was trained beyond the first."""
    tokens_unaccounted: float
    """Tokens that were sampled, and neither trained nor discarded; or whose count differs from that of the batches."""
    tokens_beyond_alpha: int
    """Trained tokens that were older than the run allows."""
    rows_doubled: int
    """Lines of metrics and samples beyond the first."""
    rows_lost: int
    """Missing lines of metrics and samples."""


def left_by(run_dir: Path) -> Left:
    """Read a run directory."""
    directory = RunDirectory(run_dir)
    train = tomllib.loads(directory.config.read_text())["train"]
    redone = directory.read_earlier_metrics()
    return Left(
        ledger=json.loads(directory.ledger.read_text()),
        max_age=max_age(train["async_ratio"], train.get("max_token_age")),
        rows=directory.read_metrics(),
        redone=redone,
        samples=Counter(sample.step for sample in directory.read_samples()),
        batches=[trained(directory.batches, step) for step in recorded_steps(directory.batches)],
    )


def trained(folder: Path, step: int) -> Trained:
    """Read a recorded batch, without its texts."""
    batch = read_batch(folder, step)
    return Trained(step, batch.min_version, [(made.task.task_id, made.versions) for made in batch.trajectories])


def judge(left: Left) -> Verdict:
    """Compare the run's ledger with its recorded batches, and count what is missing or counted twice."""
    ledger = left.ledger
    times_in_batch: Counter[int] = Counter()  # number of batches that have each task
    trained_tasks: set[int] = set()  # tasks with at least one trained token
    trained_tokens = too_old = 0
    trained_samples = {batch.step: 0 for batch in left.batches}  # samples of each step with at least one trained token
    for batch in left.batches:
        # A step may train tokens of `min_version`, but the run allows none that are older than `max_age`.
        allowed = Trained(batch.step, max(batch.min_version, batch.step - left.max_age), [])
        for task, versions in batch.tasks:
            times_in_batch[task] += 1
            if (count := batch.tokens(versions)) > 0:
                trained_tasks.add(task)
                trained_tokens += count
                trained_samples[batch.step] += 1
            too_old += count - allowed.tokens(versions)
    rows_of_step = Counter(int(row["step"]) for row in left.rows)
    steps = range(max([*rows_of_step, *trained_samples, *left.samples], default=-1) + 1)
    # Lines of samples.jsonl that each step has too many; negative if lines are missing.
    surplus = [left.samples.get(step, 0) - trained_samples.get(step, 0) for step in steps]
    ended = ledger["in_flight"] == 0
    not_trained = ledger["filtered"] + ledger["given_up"]
    without_fate = ledger["generated_tokens"] - ledger["trained_tokens"] - ledger["discarded_tokens"]
    miscounted = ledger["trained_tokens"] - trained_tokens
    return Verdict(
        tasks_lost=abs(ledger["issued"] - len(trained_tasks) - not_trained) if ended else math.nan,
        tasks_doubled=times_in_batch.total() - len(times_in_batch),
        tokens_unaccounted=abs(without_fate) + abs(miscounted) if ended else math.nan,
        tokens_beyond_alpha=too_old,
        rows_doubled=rows_of_step.total() - len(rows_of_step) + sum(more for more in surplus if more > 0),
        rows_lost=len(steps) - len(rows_of_step) - sum(less for less in surplus if less < 0),
    )


def stretches(times: Iterable[float], begin: float, end: float, longest_s: float) -> list[float]:
    """Return the seconds of each time without a step that is longer than `longest_s`.

    `times` are the ends of steps. `begin` and `end` bound the time that counts. All are in Unix seconds.
    """
    inside = [begin, *(time for time in sorted(times) if begin < time < end), end]
    return [later - earlier for earlier, later in pairwise(inside) if later - earlier > longest_s]


def tokens_per_second(rows: Iterable[Row], begin: float, end: float) -> float:
    """Return the trained tokens per second of the time from `begin` to `end`, in Unix seconds.

    `rows` are the rows of the steps, without steps that a restart repeated.
    """
    return sum(row["trained_tokens"] for row in rows if begin < row["time"] <= end) / (end - begin)
