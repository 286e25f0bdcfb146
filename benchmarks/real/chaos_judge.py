"""What a run that was broken on purpose has lost, doubled and cost: read from what it left behind, nothing else.

`left_by` reads a run directory; everything else is a pure function, so that each thing that must not happen can be
shown to it. The run has come to its end in order: then nothing is in flight, and every task and token has one place.
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
    """What a step trained, as it was recorded."""

    step: int
    min_version: int
    tasks: list[tuple[int, list[VersionRun]]]
    """Number and versions of each sample."""

    def tokens(self, versions: Iterable[VersionRun]) -> int:
        """How many of a sample's tokens were trained."""
        return sum(run.count for run in versions if run.version >= self.min_version)


class Left(msgspec.Struct, frozen=True):
    """What a run has left behind."""

    ledger: Mapping[str, int]
    max_age: int
    """The most versions that a trained token may be old."""
    rows: Sequence[Row]
    """Of `metrics.jsonl`."""
    redone: Sequence[Row]
    """The same of steps that a restart did again."""
    samples: Mapping[int, int]
    """By step, the lines of `samples.jsonl`."""
    batches: Sequence[Trained]

    @property
    def times(self) -> list[float]:
        """When steps ended, in Unix seconds, those included that were done again."""
        return sorted(row["time"] for row in (*self.rows, *self.redone))


class Verdict(msgspec.Struct, frozen=True):
    """What must not happen, counted. Not a number: the run did not come to its end, so that nobody can tell."""

    tasks_lost: float
    """Issued, and neither trained, filtered, given up nor in flight."""
    tasks_doubled: int
    """Trained more than once: each time beyond the first."""
    tokens_unaccounted: float
    """Sampled, and neither trained nor thrown away; or booked as trained, and in no batch; or the other way round."""
    tokens_beyond_alpha: int
    """Trained, and older than ⌈α⌉ versions."""
    rows_doubled: int
    """Lines of metrics and samples that are there more than once."""
    rows_lost: int
    """Those that are missing."""


def left_by(run_dir: Path) -> Left:
    """Read a run directory."""
    directory = RunDirectory(run_dir)
    train = tomllib.loads(directory.config.read_text())["train"]
    redone = [row for life in sorted(directory.earlier.glob("[0-9]*")) for row in RunDirectory(life).read_metrics()]
    return Left(
        ledger=json.loads(directory.ledger.read_text()),
        max_age=max_age(train["async_ratio"], train.get("max_token_age")),
        rows=directory.read_metrics(),
        redone=redone,
        samples=Counter(sample.step for sample in directory.read_samples()),
        batches=[trained(directory.batches, step) for step in recorded_steps(directory.batches)],
    )


def trained(folder: Path, step: int) -> Trained:
    """One recorded batch, without its texts."""
    batch = read_batch(folder, step)
    return Trained(step, batch.min_version, [(made.task.task_id, made.versions) for made in batch.trajectories])


def judge(left: Left) -> Verdict:
    """Compare what the run booked with what it recorded."""
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
    """The spans of time without a step that are too long, in seconds."""
    inside = [begin, *(time for time in sorted(times) if begin < time < end), end]
    return [later - earlier for earlier, later in pairwise(inside) if later - earlier > longest_s]


def tokens_per_second(rows: Iterable[Row], begin: float, end: float) -> float:
    """Trained tokens that counted in the end, over a span of time."""
    return sum(row["trained_tokens"] for row in rows if begin < row["time"] <= end) / (end - begin)
