"""Makes a batch of a step's groups, splits it among the trainer ranks, and computes its metrics. Pure functions.

`flash.hub.steps` gathers the groups of `SampleBuffer.next_round` into a `Batch` and splits it into shards: a *shard* is
the part of a round that one trainer rank trains. (Ranks that compute the same sequences together get the same shard.)
Each shard travels in parts, one message each. Shards have about equally many tokens, and each carries the counts of the
whole round. Supervised fine-tuning and replays of recorded batches split their batches here, too.

A step trains its batch in one *round*, or in several if the groups come while the ranks train. A step may also divide
its batch into *minibatches*, after each of which the weights change. A group is in one round and in one minibatch.

Functions that take long are generators. They yield after each slice of their work, so that the event loop can run other
tasks in between (`flash.waiting.run_in_slices`), and return their result in the end.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from flash.branches import IntArray, count_trained_branches, sort_by_prefix
from flash.samples.groups import Group
from flash.types import ONLY_ROUND, Batch, BatchSample, Round, Shard, ShardSample, Trajectory

SAMPLES_PER_SLICE = 512
"""Number of samples that are split or measured in one slice. Each sample takes up to ten microseconds."""
ATTEMPTS_PER_SHARD = 4
"""Largest number of assignments that `_balance` tries, per shard. More would balance better, but take longer."""
PART_BYTES = 1 << 26
"""Approximate number of bytes of samples in one part of a shard, far below the limit of a message. It also bounds the
memory on the hub, which encodes one part for each rank at a time."""
ENV_PREFIX = "env/"
"""Prefix of the names of the environment's metrics, so that they differ from all other metrics."""


def gather(groups: Sequence[Group], step: int, min_version: int) -> Batch:
    """Return the batch of a step that trains these groups. Only tokens of `min_version` or newer will be trained.

    `Batch.earlier` gets the members of these groups that earlier steps have trained, because advantages compare the
    rewards of the whole group.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories()]
    return Batch(step, min_version, trajectories, [entry for group in groups for entry in group.earlier])


def next_place(batch: Batch, place: Round, *, groups: int) -> Round:
    """Return the place of the round after `batch`, whose own place is `place`, in a step of `groups` groups.

    The caller sets `Round.last` when it knows that no round follows. The result has the default, True.
    """
    before = len({trajectory.task.group_id for trajectory in batch.trajectories})
    return Round(place.samples_before + len(batch.trajectories), place.groups_before + before, groups)


def join_rounds(rounds: Sequence[Batch]) -> Batch:
    """Return the whole batch of a step, whose rounds are given in order. `split_rounds` is the inverse."""
    first, *others = rounds
    if not others:
        return first
    return Batch(
        first.step,
        first.min_version,
        [trajectory for batch in rounds for trajectory in batch.trajectories],
        [entry for batch in rounds for entry in batch.earlier],
        [len(batch.trajectories) for batch in rounds],
    )


def split_rounds(batch: Batch) -> list[tuple[Batch, Round]]:
    """Return the rounds of a batch with their places, so that ranks that train the batch again make the same sums."""
    if not batch.rounds:
        return [(batch, ONLY_ROUND)]
    # `Round.groups` leaves out groups that earlier steps have trained in part.
    earlier = {entry.group_id for entry in batch.earlier}
    groups = len({trajectory.task.group_id for trajectory in batch.trajectories} - earlier)
    rounds: list[tuple[Batch, Round]] = []
    place, stop = Round(groups=groups), 0
    for size in batch.rounds:
        start, stop = stop, stop + size
        trajectories = batch.trajectories[start:stop]
        own = {trajectory.task.group_id for trajectory in trajectories}
        known = [entry for entry in batch.earlier if entry.group_id in own]
        one = Batch(batch.step, batch.min_version, trajectories, known)
        rounds.append((one, msgspec.structs.replace(place, last=stop == len(batch.trajectories))))
        place = next_place(one, place, groups=groups)
    return rounds


class MinibatchPlace(NamedTuple):
    """Position of a round's groups among the minibatches of the step."""

    number: int
    """Number of the minibatch, from 0."""
    ends: bool
    """True if no later round has a group of the minibatch."""
    share: float
    """Share of the minibatch's groups that are in the round."""


def minibatch_of(
    groups: Sequence[int], minibatches: int, place: Round = ONLY_ROUND
) -> tuple[dict[int, int], list[MinibatchPlace]]:
    """Return the minibatch of each group of a round, by the number of the group, and the minibatches of the round.

    The hub and the trainer ranks compute this independently from the same round, so the result must depend on nothing
    else. Consecutive groups of the step share a minibatch.

    Args:
        groups: group of each sample of the round, in the order of the batch.
        minibatches: number of minibatches of the step.
        place: position of the round in its step.
    """
    ordered = list(dict.fromkeys(groups))  # Each group once, in the order of the batch.
    total = max(place.groups or len(ordered), 1)

    def minibatch_at(position: int) -> int:
        # Groups that earlier steps have trained in part are not in `total`, so the last minibatch may be larger.
        return min(position * minibatches // total, minibatches - 1)

    found = {group: minibatch_at(place.groups_before + index) for index, group in enumerate(ordered)}
    # Minibatch of the first group after this round; past all minibatches if no round follows.
    after = minibatches if place.last else minibatch_at(place.groups_before + len(ordered))
    counts = Counter(found.values())
    places = [
        MinibatchPlace(number, number < after, min(count * minibatches / total, 1.0))
        for number, count in sorted(counts.items())
    ]
    return found, places


def split_into_shards(
    batch: Batch, shards: int, minibatches: int = 1, place: Round = ONLY_ROUND, slice_size: int = SAMPLES_PER_SLICE
) -> Generator[None, None, list[Shard]]:
    """Split a round into shards that have about the same number of tokens to compute in each minibatch.

    Every sample is in exactly one shard, and every shard has the facts and the counts of the whole round. Tokens with
    which several samples of a shard begin count once, because a trainer rank computes them once. Each minibatch is
    balanced on its own, because the ranks wait for each other at its end.

    Args:
        batch: the samples of the round.
        shards: number of shards.
        minibatches: number of minibatches of the step.
        place: position of the round in its step.
        slice_size: number of samples after which this generator yields.
    """
    # Collect facts about each sample, and the denominators of the loss.
    entries: list[BatchSample] = []
    tokens = sequences = 0
    for trajectory in batch.trajectories:
        entries.append(trajectory.batch_sample(batch.min_version))
        tokens += trajectory.trained_tokens(batch.min_version)
        sequences += count_trained_branches(trajectory, batch.min_version)
        if len(entries) % slice_size == 0:
            yield
    # Assign the samples, by their indices, to shards.
    assigned = [list(range(len(entries)))]
    if shards > 1:
        minibatch, _ = minibatch_of([entry.group_id for entry in entries], minibatches, place)
        members: list[list[int]] = [[] for _ in range(minibatches)]
        for index, entry in enumerate(entries):
            members[minibatch[entry.group_id]].append(index)
        assigned = [[] for _ in range(shards)]
        for indices in members:
            for shard, more in zip(assigned, (yield from _balance(batch.trajectories, indices, shards)), strict=True):
                shard += more
    return [
        Shard(
            step=batch.step,
            min_version=batch.min_version,
            samples=[ShardSample(index, batch.trajectories[index]) for index in indices],
            batch=entries,
            total_tokens=tokens,
            total_sequences=sequences,
            earlier=batch.earlier,
            round=place,
        )
        for indices in assigned
    ]


class _SortedGroup(NamedTuple):
    """The samples of a group, ordered so that samples with a long common beginning are neighbours.

    A sample has one token sequence, or several if its episode has branches. Samples are in the order of their first
    sequences in the sorted order of all sequences of the group.
    """

    indices: list[int]
    """Index of each sample in the batch."""
    sample_of: list[int]
    """Sample of each sequence of the group, as a position in `indices`. The sequences are sorted by their tokens."""
    lengths: list[int]
    """Number of tokens of each sequence."""
    shared: list[int]
    """Number of leading tokens that each sequence shares with the sequence before it (`sort_by_prefix`)."""

    def block(self, samples: range) -> _Block:
        """Return the samples at the positions `samples` of the group, with the number of tokens to compute for them.

        A sequence costs its length without the tokens that it shares with the previous sequence of the block.
        """
        tokens = common = 0
        for sample, length, shared in zip(self.sample_of, self.lengths, self.shared, strict=True):
            # `common` is the number of tokens that this sequence shares with the last sequence of the block. The
            # sequences are sorted, so it is the smallest value of `shared` since that sequence.
            common = min(common, shared)
            if sample in samples:
                tokens, common = tokens + length - common, length
        return _Block(tokens, self, samples)


class _Block(NamedTuple):
    """Neighbouring samples of a group, which go to one shard together: a whole group, or a part after a cut."""

    tokens: int
    """Number of tokens to compute for these samples; shared beginnings count once."""
    group: _SortedGroup
    samples: range
    """Positions of the samples in `group.indices`."""


def _whole_group(trajectories: Sequence[Trajectory], indices: list[int]) -> Generator[None, None, _Block]:
    """Return all samples of a group as one block, ordered by their tokens.

    `indices` has the index in `trajectories` of each sample of the group.
    """
    # Each sequence (branch) of the group, with the index of its sample.
    sequences: list[tuple[int, IntArray]] = []
    for index in indices:
        trajectory = trajectories[index]
        tokens, ends = trajectory.tokens(), (*trajectory.branches, trajectory.length)
        sequences += [(index, tokens[begin:end]) for begin, end in pairwise(ends)]
    order, shared = yield from sort_by_prefix([tokens for _, tokens in sequences])
    ordered_sequences = [sequences[at] for at in order]
    ordered_indices = list(dict.fromkeys(index for index, _ in ordered_sequences))
    position = {index: place for place, index in enumerate(ordered_indices)}
    sample_of = [position[index] for index, _ in ordered_sequences]
    lengths = [len(tokens) for _, tokens in ordered_sequences]
    return _SortedGroup(ordered_indices, sample_of, lengths, shared).block(range(len(ordered_indices)))


def _balance(
    trajectories: Sequence[Trajectory], chosen: Sequence[int], shards: int
) -> Generator[None, None, list[list[int]]]:
    """Divide the samples with the indices `chosen` among the shards. Returns the indices of each shard's samples.

    At first whole groups are assigned, the largest first, each to the shard with the fewest tokens so far. Then the
    largest group of the fullest shard is halved, and all groups are assigned again. This is repeated several times. The
    result is the assignment whose fullest shard has the fewest tokens. Groups are cut as little as possible, because
    samples of one group share the tokens of their prompt only within a shard.
    """
    members: dict[int, list[int]] = {}
    for index in chosen:
        members.setdefault(trajectories[index].task.group_id, []).append(index)
    blocks: list[_Block] = []
    for indices in members.values():
        blocks.append((yield from _whole_group(trajectories, indices)))
        yield
    best, fullest = list[list[_Block]](), math.inf
    for _ in range(ATTEMPTS_PER_SHARD * shards):
        assigned: list[list[_Block]] = [[] for _ in range(shards)]
        loads = [(0, shard) for shard in range(shards)]  # A heap: the shard with the fewest tokens is first.
        for block in sorted(blocks, key=lambda block: -block.tokens):
            load, shard = loads[0]
            assigned[shard].append(block)
            heapq.heapreplace(loads, (load + block.tokens, shard))
        load, shard = max(loads)
        if load < fullest:
            best, fullest = assigned, load
        yield
        divisible = [block for block in assigned[shard] if len(block.samples) > 1]
        if not divisible:
            break  # The fullest shard has only single samples, so no cut can make it smaller.
        largest = max(divisible, key=lambda block: block.tokens)
        middle = len(largest.samples) // 2
        halves = [largest.group.block(half) for half in (largest.samples[:middle], largest.samples[middle:])]
        blocks = [*(block for block in blocks if block is not largest), *halves]
    return [[block.group.indices[sample] for block in each for sample in block.samples] for each in best]


def split_into_messages(
    shard: Shard, part_bytes: int = PART_BYTES, slice_size: int = SAMPLES_PER_SLICE
) -> Generator[None, None, list[Shard]]:
    """Split a shard into parts of about `part_bytes`, one message each. The trainer rank joins them again.

    A part has at least one sample, so a large sample makes a large part. A shard without samples is one part without
    samples. Only the first part holds the facts about the whole batch: `Shard.batch` and `Shard.earlier`.
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
    """Return the metrics of one sample: the environment's metrics and, if the sample has a kind, two more metrics.

    The two are the reward and the number of action tokens, which are the tokens that the policy sampled. A kind is a
    name that the environment gives a problem, such as one environment of a mixture. `mean_metrics` takes the means over
    the samples of a batch or of an evaluation.
    """
    row = {ENV_PREFIX + name: value for name, value in trajectory.env_metrics().items()}
    if kind := trajectory.task.kind:
        row[f"domain/{kind}/reward"] = trajectory.reward
        row[f"domain/{kind}/tokens"] = trajectory.action_count
    return row


def mean_metrics(rows: Iterable[Mapping[str, float]]) -> Generator[None, None, dict[str, float]]:
    """Return the mean of each metric over the samples that have it, in alphabetical order. A row is of one sample."""
    values: dict[str, list[float]] = {}
    for number, metrics in enumerate(rows, start=1):
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
        if number % SAMPLES_PER_SLICE == 0:
            yield
    # Each value is divided before the sum, so that the sum of large values cannot overflow.
    return {name: math.fsum(value / len(each) for value in each) for name, each in sorted(values.items())}
