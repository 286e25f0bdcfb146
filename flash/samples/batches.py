"""Batches: a step's groups as a batch, dealt to data shards, and the metrics of its samples. Pure functions.

`flash.hub.steps` gathers the groups of `SampleBuffer.next_batch`, deals the batch, and sends each rank its shard
in parts. Shards are balanced by tokens, and each carries the denominators of the whole batch.

Functions that take long are generators, which yield after each slice of the work so that the event loop can serve
others in between (`flash.waiting.run_in_slices`). They return their result in the end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from flash.branches import IntArray, count_trained_branches, sort_by_prefix
from flash.samples.groups import Group
from flash.types import Batch, BatchSample, Shard, ShardSample, Trajectory

SAMPLES_AT_ONCE = 512
"""Samples in one slice of dealing or measuring. Each takes up to ten microseconds."""
HALVINGS_PER_SHARD = 4
"""Largest number of times that a part of a group is halved to balance the shards, per shard."""
PART_BYTES = 1 << 26
"""Bytes of samples in one part of a shard, about. It is far below the limit of a frame, and it bounds the memory that
encoded parts take on the hub, one for each rank, beside the batch itself."""
ENV_PREFIX = "env/"
"""Prefix of the names of the environment's metrics, so that they differ from all other metrics."""


def gather(groups: Sequence[Group], step: int, min_version: int) -> Batch:
    """Return the batch of a step that trains these groups, on tokens of `min_version` or newer."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories()]
    return Batch(step, min_version, trajectories, [entry for group in groups for entry in group.earlier])


def minibatch_of(groups: Sequence[int], minibatches: int) -> dict[int, int]:
    """Return the minibatch of each group. `groups` has the group of each sample, in the order of the batch."""
    ordered = list(dict.fromkeys(groups))
    return {group: index * minibatches // len(ordered) for index, group in enumerate(ordered)}


def deal(
    batch: Batch, shards: int, minibatches: int = 1, slice_size: int = SAMPLES_AT_ONCE
) -> Generator[None, None, list[Shard]]:
    """Deal a batch to shards, each with about the same number of tokens to compute, in each minibatch.

    Tokens with which several samples of a shard begin are computed once, and so count once. Minibatches are balanced
    one by one, because the shards wait for each other at the end of each.
    """
    entries: list[BatchSample] = []
    tokens = sequences = 0
    for trajectory in batch.trajectories:
        entries.append(trajectory.entry(batch.min_version))
        tokens += trajectory.trained_tokens(batch.min_version)
        sequences += count_trained_branches(trajectory, batch.min_version)
        if len(entries) % slice_size == 0:
            yield
    dealt = [list(range(len(entries)))]
    if shards > 1:
        minibatch = minibatch_of([entry.group_id for entry in entries], minibatches)
        parts: list[list[int]] = [[] for _ in range(minibatches)]
        for index, entry in enumerate(entries):
            parts[minibatch[entry.group_id]].append(index)
        dealt = [[] for _ in range(shards)]
        for part in parts:
            for indices, more in zip(dealt, (yield from _balanced(batch.trajectories, part, shards)), strict=True):
                indices += more
    return [
        Shard(
            step=batch.step,
            min_version=batch.min_version,
            samples=[ShardSample(index, batch.trajectories[index]) for index in indices],
            batch=entries,
            total_tokens=tokens,
            total_sequences=sequences,
            earlier=batch.earlier,
        )
        for indices in dealt
    ]


class _Group(NamedTuple):
    """The samples of a group, ordered so that samples with a long common beginning are neighbours."""

    indices: list[int]
    """Index of each sample in the batch."""
    sample_of: list[int]
    """For each sequence of the group, sorted by tokens, its sample: a position in `indices`."""
    lengths: list[int]
    """Tokens of each sequence."""
    known: list[int]
    """Tokens of each sequence that the one before it has in common with it (`sort_by_prefix`)."""

    def run(self, samples: range) -> _Run:
        """Return some neighbouring samples of the group, with the tokens to compute for them."""
        tokens = common = 0
        for sample, length, known in zip(self.sample_of, self.lengths, self.known, strict=True):
            # What a sequence has in common with an earlier one is the least of what all neighbours in between have.
            common = min(common, known)
            if sample in samples:
                tokens, common = tokens + length - common, length
        return _Run(tokens, self, samples)


class _Run(NamedTuple):
    """Samples of a group that go to one shard."""

    tokens: int
    """Tokens to compute for them."""
    group: _Group
    samples: range
    """Positions of the samples in `group.indices`."""


def _whole_group(trajectories: Sequence[Trajectory], indices: list[int]) -> Generator[None, None, _Run]:
    """Return all samples of a group, ordered by their tokens."""
    parts: list[tuple[int, IntArray]] = []
    for index in indices:
        trajectory = trajectories[index]
        tokens, ends = trajectory.tokens(), (*trajectory.branches, trajectory.length)
        parts += [(index, tokens[begin:end]) for begin, end in pairwise(ends)]
    order, known = yield from sort_by_prefix([tokens for _, tokens in parts])
    ordered = list(dict.fromkeys(parts[each][0] for each in order))
    position = {index: count for count, index in enumerate(ordered)}
    sample_of, lengths = ([position[parts[each][0]] for each in order], [len(parts[each][1]) for each in order])
    return _Group(ordered, sample_of, lengths, known).run(range(len(ordered)))


def _balanced(
    trajectories: Sequence[Trajectory], among: Sequence[int], shards: int
) -> Generator[None, None, list[list[int]]]:
    """Deal the samples with the indices `among` to shards. Returns the indices of each shard's samples.

    Whole groups are dealt, the largest first, each to the shard with the fewest tokens so far. Then the largest group
    of the fullest shard is halved and all are dealt again, several times. The deal whose fullest shard has the fewest
    tokens is taken.
    """
    members: dict[int, list[int]] = {}
    for index in among:
        members.setdefault(trajectories[index].task.group_id, []).append(index)
    runs: list[_Run] = []
    for indices in members.values():
        runs.append((yield from _whole_group(trajectories, indices)))
        yield
    best, fullest = list[list[_Run]](), math.inf
    for _ in range(HALVINGS_PER_SHARD * shards):
        dealt: list[list[_Run]] = [[] for _ in range(shards)]
        loads = [(0, shard) for shard in range(shards)]
        for run in sorted(runs, key=lambda run: -run.tokens):
            load, shard = loads[0]
            dealt[shard].append(run)
            heapq.heapreplace(loads, (load + run.tokens, shard))
        load, shard = max(loads)
        if load < fullest:
            best, fullest = dealt, load
        yield
        divisible = [run for run in dealt[shard] if len(run.samples) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda run: run.tokens)
        middle = len(largest.samples) // 2
        halves = [largest.group.run(half) for half in (largest.samples[:middle], largest.samples[middle:])]
        runs = [*(run for run in runs if run is not largest), *halves]
    return [[run.group.indices[sample] for run in each for sample in run.samples] for each in best]


def cut(
    shard: Shard, part_bytes: int = PART_BYTES, slice_size: int = SAMPLES_AT_ONCE
) -> Generator[None, None, list[Shard]]:
    """Cut a shard into parts of about `part_bytes`, each with at least one sample if the shard has any.

    The first part alone holds what a rank must know of the whole batch.
    """
    parts: list[list[ShardSample]] = [[]]
    room = part_bytes
    for number, sample in enumerate(shard.samples, start=1):
        size = sample.trajectory.size
        if size > room and parts[-1]:
            parts.append([])
            room = part_bytes
        parts[-1].append(sample)
        room -= size
        if number % slice_size == 0:
            yield
    later = msgspec.structs.replace(shard, batch=[], earlier=[])
    return [
        msgspec.structs.replace(later if number else shard, samples=samples) for number, samples in enumerate(parts)
    ]


def sample_metrics(trajectory: Trajectory) -> dict[str, float]:
    """Return the metrics of one sample: those of its environment and, if it has a kind, those of its kind."""
    row = {ENV_PREFIX + name: value for name, value in trajectory.env_metrics().items()}
    if kind := trajectory.task.kind:
        row[f"domain/{kind}/reward"] = trajectory.reward
        row[f"domain/{kind}/tokens"] = trajectory.action_count
    return row


def mean_metrics(rows: Iterable[Mapping[str, float]]) -> Generator[None, None, dict[str, float]]:
    """Return the mean of each metric over the samples that have it, by name in alphabetical order."""
    values: dict[str, list[float]] = {}
    for number, metrics in enumerate(rows, start=1):
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
        if number % SAMPLES_AT_ONCE == 0:
            yield
    # Each value is divided before the sum, so that the sum of large values cannot overflow.
    return {name: math.fsum(value / len(each) for value in each) for name, each in sorted(values.items())}
