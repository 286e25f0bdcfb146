"""Losses and double counts of a run that was broken on purpose, read from the files that it left.

`benchmarks.real.chaos` calls `left_by`, which reads a run directory, and `judge`, which counts. All functions except
`left_by` and `trained` touch no file. The run must have ended in order: then nothing is in flight, and every task and
token is counted in one place of the ledger.
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


class Trained(msgspec.Struct, frozen=True):
    """The batch of a step, as it was recorded."""

    step: int
    min_version: int
    """Oldest version whose tokens the step trained."""
    tasks: list[tuple[int, list[VersionRun]]]
    """Task number and versions of each sample."""

    def tokens(self, versions: Iterable[VersionRun]) -> int:
        """Count the tokens of a sample that were trained."""
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
    """Rows of steps that a restart repeated."""
    samples: Mapping[int, int]
    """Number of lines of `samples.jsonl`, by step."""
    batches: Sequence[Trained]
    """Recorded batches of all steps."""

    @property
    def times(self) -> list[float]:
        """Unix seconds at which steps ended, with those that were repeated."""
        return sorted(row["time"] for row in (*self.rows, *self.redone))


class Verdict(msgspec.Struct, frozen=True):
    """Counts of the things that must not happen. NaN if the run did not end, because then they cannot be known."""

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
    times_trained: Counter[int] = Counter()
    found: set[int] = set()
    tokens = beyond = 0
    for batch in left.batches:
        for task, versions in batch.tasks:
            times_trained[task] += 1
            if (count := batch.tokens(versions)) > 0:
                found.add(task)
                tokens += count
            oldest = max(batch.min_version, batch.step - left.max_age)
            beyond += count - Trained(batch.step, oldest, []).tokens(versions)
    steps = Counter(int(row["step"]) for row in left.rows)
    recorded = {batch.step: sum(batch.tokens(versions) > 0 for _, versions in batch.tasks) for batch in left.batches}
    known = range(max([*steps, *recorded, *left.samples], default=-1) + 1)
    surplus = [left.samples.get(step, 0) - recorded.get(step, 0) for step in known]
    ended = ledger["in_flight"] == 0
    booked = ledger["filtered"] + ledger["given_up"]
    unplaced = ledger["generated_tokens"] - ledger["trained_tokens"] - ledger["discarded_tokens"]
    return Verdict(
        tasks_lost=abs(ledger["issued"] - len(found) - booked) if ended else math.nan,
        tasks_doubled=times_trained.total() - len(times_trained),
        tokens_unaccounted=abs(unplaced) + abs(ledger["trained_tokens"] - tokens) if ended else math.nan,
        tokens_beyond_alpha=beyond,
        rows_doubled=steps.total() - len(steps) + sum(more for more in surplus if more > 0),
        rows_lost=len(known) - len(steps) - sum(less for less in surplus if less < 0),
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
