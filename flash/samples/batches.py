"""Dealing a step's groups to data shards: token-balanced, with the denominators of the whole batch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from flash.branches import IntArray, in_common, trained_branches
from flash.samples.groups import Group
from flash.types import Batch, BatchSample, Shard, ShardSample, Trajectory

SAMPLES_AT_ONCE = 512
"""Samples dealt in one slice: each takes up to ten microseconds."""
HALVED = 4
"""Times the number of shards that a part of a group is halved at most, to give each shard equally much."""
PART_BYTES = 1 << 26
"""Bytes of samples in one part of a shard, about: far below what a frame may have, and what lies encoded for each rank
beside the batch itself."""


def gather(groups: Sequence[Group], step: int, min_version: int) -> Batch:
    """The batch that these groups are."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories()]
    return Batch(step, min_version, trajectories, [entry for group in groups for entry in group.earlier])


def minibatch_of(groups: Sequence[int], minibatches: int) -> dict[int, int]:
    """Which minibatch each group of a batch is in, in the order of its samples' groups."""
    ordered = list(dict.fromkeys(groups))
    return {group: index * minibatches // len(ordered) for index, group in enumerate(ordered)}


def deal(
    batch: Batch, shards: int, minibatches: int = 1, at_once: int = SAMPLES_AT_ONCE
) -> Generator[None, None, list[Shard]]:
    """Each shard about equally many tokens that it computes: what samples begin with alike counts once in each.

    So it is in each minibatch, at whose end shards wait for one another.

    Returns them in the end; it yields after each slice of the work, so that others can be served in between.
    """
    entries: list[BatchSample] = []
    tokens = count = 0
    for trajectory in batch.trajectories:
        entries.append(trajectory.entry(batch.min_version))
        tokens += trajectory.trained_tokens(batch.min_version)
        count += trained_branches(trajectory, batch.min_version)
        if len(entries) % at_once == 0:
            yield
    dealt = [list(range(len(entries)))]
    if shards > 1:
        place = minibatch_of([entry.group_id for entry in entries], minibatches)
        parts: list[list[int]] = [[] for _ in range(minibatches)]
        for index, entry in enumerate(entries):
            parts[place[entry.group_id]].append(index)
        dealt = [[] for _ in range(shards)]
        for part in parts:
            for mine, more in zip(dealt, (yield from _balanced(batch.trajectories, part, shards)), strict=True):
                mine += more
    return [
        Shard(
            step=batch.step,
            min_version=batch.min_version,
            samples=[ShardSample(index, batch.trajectories[index]) for index in mine],
            batch=entries,
            total_tokens=tokens,
            total_sequences=count,
            earlier=batch.earlier,
        )
        for mine in dealt
    ]


class _Group(NamedTuple):
    """The samples of a group, those with the most in common beside each other."""

    places: list[int]
    """In the batch."""
    sample_of: list[int]
    """Of each of their sequences, in order of tokens, which of the samples it belongs to."""
    lengths: list[int]
    known: list[int]
    """As of `in_common`."""

    def run(self, samples: range) -> _Run:
        """These samples of it."""
        tokens = alike = 0
        for sample, length, known in zip(self.sample_of, self.lengths, self.known, strict=True):
            # What a sequence has in common with an earlier one: the least of all in between.
            alike = min(alike, known)
            if sample in samples:
                tokens, alike = tokens + length - alike, length
        return _Run(tokens, self, samples)


class _Run(NamedTuple):
    """Samples of a group that stay together."""

    tokens: int
    """To compute for them."""
    group: _Group
    samples: range


def _grouped(trajectories: Sequence[Trajectory], places: list[int]) -> Generator[None, None, _Run]:
    """A whole group."""
    parts: list[tuple[int, IntArray]] = []
    for place in places:
        whole = trajectories[place]
        tokens, ends = whole.tokens(), (*whole.branches, whole.length)
        parts += [(place, tokens[begin:end]) for begin, end in pairwise(ends)]
    order, known = yield from in_common([one for _, one in parts])
    ordered = list(dict.fromkeys(parts[each][0] for each in order))
    number = {place: count for count, place in enumerate(ordered)}
    sample_of, lengths = ([number[parts[each][0]] for each in order], [len(parts[each][1]) for each in order])
    return _Group(ordered, sample_of, lengths, known).run(range(len(ordered)))


def _balanced(
    trajectories: Sequence[Trajectory], among: Sequence[int], shards: int
) -> Generator[None, None, list[list[int]]]:
    """The places of each shard's samples, of those at some places.

    Whole groups, the largest first, each to the shard with the fewest tokens so far. Then the largest of the fullest
    shard is halved and all are dealt again, some times; what left the fullest shard the least is taken.
    """
    members: dict[int, list[int]] = {}
    for place in among:
        members.setdefault(trajectories[place].task.group_id, []).append(place)
    runs: list[_Run] = []
    for places in members.values():
        runs.append((yield from _grouped(trajectories, places)))
        yield
    best, fullest = list[list[_Run]](), math.inf
    for _ in range(HALVED * shards):
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
    return [[run.group.places[sample] for run in each for sample in run.samples] for each in best]


def cut(
    shard: Shard, part_bytes: int = PART_BYTES, at_once: int = SAMPLES_AT_ONCE
) -> Generator[None, None, list[Shard]]:
    """A shard in parts, each with one sample at least if there are any.

    What a rank must know of the whole batch is in the first one. Slices as of `deal`.
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
        if number % at_once == 0:
            yield
    later = msgspec.structs.replace(shard, batch=[], earlier=[])
    return [
        msgspec.structs.replace(later if number else shard, samples=samples) for number, samples in enumerate(parts)
    ]
