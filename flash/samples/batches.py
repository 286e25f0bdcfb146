"""Dealing a step's groups to data shards: token-balanced, with the denominators of the whole batch."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence

import msgspec
import numpy as np

from flash.branches import trained_branches
from flash.samples.groups import Group
from flash.types import Batch, BatchSample, Shard, ShardSample

SAMPLES_AT_ONCE = 512
"""Samples dealt in one slice: each takes up to ten microseconds."""
PART_BYTES = 1 << 26
"""Bytes of samples in one part of a shard, about: far below what a frame may have, and what lies encoded for each rank
beside the batch itself."""


def gather(groups: Sequence[Group], step: int, min_version: int) -> Batch:
    """The batch that these groups are."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories()]
    return Batch(step, min_version, trajectories, [entry for group in groups for entry in group.earlier])


def deal(batch: Batch, shards: int, at_once: int = SAMPLES_AT_ONCE) -> Generator[None, None, list[Shard]]:
    """Longest samples first, each to the shard with the fewest tokens so far.

    Returns them in the end; it yields after each slice of the work, so that others can be served in between.
    """
    entries: list[BatchSample] = []
    lengths: list[int] = []
    tokens = sequences = 0
    for trajectory in batch.trajectories:
        lengths.append(trajectory.length)
        entries.append(trajectory.entry(batch.min_version))
        tokens += trajectory.trained_tokens(batch.min_version)
        sequences += trained_branches(trajectory, batch.min_version)
        if len(entries) % at_once == 0:
            yield
    longest_first: list[int] = np.argsort(np.negative(lengths), kind="stable").tolist()
    dealt: list[list[ShardSample]] = [[] for _ in range(shards)]
    loads = [(0, shard) for shard in range(shards)]
    for number, index in enumerate(longest_first, start=1):
        load, shard = loads[0]
        dealt[shard].append(ShardSample(index, batch.trajectories[index]))
        heapq.heapreplace(loads, (load + lengths[index], shard))
        if number % at_once == 0:
            yield
    return [
        Shard(
            step=batch.step,
            min_version=batch.min_version,
            samples=samples,
            batch=entries,
            total_tokens=tokens,
            total_sequences=sequences,
            earlier=batch.earlier,
        )
        for samples in dealt
    ]


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
