"""Batches are dealt to trainer ranks: balanced, complete, and with the facts about the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from flash.branches import TOKENS_PER_SLICE, sort_by_prefix
from flash.samples.batches import (
    gather,
    join_rounds,
    minibatch_of,
    next_place,
    split_into_messages,
    split_into_shards,
    split_rounds,
)
from flash.samples.groups import Group, Member
from flash.types import Batch, BatchSample, Round, Shard, Span, Task, Trajectory, Turn, VersionRun
from flash.waiting import run_to_end
from tests.samples.cases import trajectory


def group_of(group_id: int, runs: list[list[VersionRun]], earlier: list[BatchSample]) -> Group:
    """Return a group with a finished member for each entry of `runs`, the versions of the member's tokens.

    The reward of a member is its index. `earlier` are members that earlier steps have trained.
    """
    members = []
    for index, versions in enumerate(runs):
        task = Task(10 * group_id + index, group_id, index, seed=0)
        tokens = sum(run.count for run in versions)
        done: Trajectory = trajectory(task, 0, tokens, reward=float(index), versions=versions)
        members.append(Member(task, "done", trajectory=done))
    return Group(group_id, len(members), members, earlier)


def dealt(ranks: int) -> list[Shard]:
    """Return the shards of a batch of two groups, one of which was trained in part before."""
    before = BatchSample(5, 0.5, 1, 3, False, [0.5])
    groups = [
        group_of(4, [[VersionRun(1, 2), VersionRun(2, 4)], [VersionRun(1, 3)]], []),
        group_of(5, [[VersionRun(3, 5)]], [before]),
    ]
    return run_to_end(split_into_shards(gather(groups, 3, 2), ranks))


def test_every_rank_knows_all_samples_of_the_batch_and_those_trained_earlier() -> None:
    shards = dealt(2)
    assert all(shard.batch == shards[0].batch for shard in shards)
    assert [entry.group_id for entry in shards[0].batch] == [4, 4, 5]
    assert [entry.reward for entry in shards[0].batch] == [0.0, 1.0, 0.0]
    assert [entry.tokens for entry in shards[0].batch] == [6, 3, 5]
    assert [entry.reward for entry in shards[1].earlier] == [0.5]
    assert sorted(sample.index for shard in shards for sample in shard.samples) == [0, 1, 2]


@pytest.mark.parametrize(("part_bytes", "parts"), [(1, [1, 1, 1]), (10_000, [3]), (130, [2, 1])])
def test_a_shard_is_cut_into_parts_that_are_the_whole(part_bytes: int, parts: list[int]) -> None:
    (shard,) = dealt(1)
    cuts = run_to_end(split_into_messages(shard, part_bytes))
    assert [len(part.samples) for part in cuts] == parts
    assert [sample for part in cuts for sample in part.samples] == shard.samples
    assert msgspec.structs.replace(cuts[0], samples=shard.samples) == shard
    assert all((part.batch, part.earlier) == ([], []) for part in cuts[1:])


def test_a_shard_without_samples_is_one_part() -> None:
    empty = dealt(4)[3]
    assert empty.samples == []
    assert run_to_end(split_into_messages(empty, 1)) == [empty]


def test_the_age_of_a_sample_is_that_of_its_oldest_trained_token() -> None:
    (shard,) = dealt(1)
    oldest = [entry.oldest_version for entry in shard.batch]
    assert oldest[0] == 2, "its tokens of version 1 are masked"
    assert oldest[1] < shard.min_version, "it has none that is trained"
    assert oldest[2] == 3
    assert (shard.total_tokens, shard.total_sequences) == (9, 2)


def forked(groups: int, members: int, length: int, own: int, lengths: Sequence[int] = ()) -> Batch:
    """Make samples of `length` tokens, or of `lengths` by group. Only the last `own` tokens differ within a group."""
    rng = np.random.default_rng(groups)
    made: list[Trajectory] = []
    for group, tokens in enumerate(lengths or [length] * groups):
        begun = rng.integers(0, 1000, tokens)
        for member in range(members):
            one = trajectory(Task(10 * group + member, group, member, seed=0), 0, tokens - 2)
            ids = np.concatenate([begun[:-own], rng.integers(0, 1000, own)]).astype("<i4")
            made.append(msgspec.structs.replace(one, token_ids=ids.tobytes()))
    return Batch(0, 0, made, [])


def computed(shard: Shard) -> int:
    """Return the number of tokens that a rank computes for a shard: shared beginnings count once."""
    order, known = run_to_end(sort_by_prefix([sample.trajectory.tokens() for sample in shard.samples]))
    return sum(shard.samples[place].trajectory.length - same for place, same in zip(order, known, strict=True))


@pytest.mark.parametrize(
    ("groups", "members", "own", "shards", "fullest"),
    [
        (4, 8, 10, 2, 2 * (100 + 7 * 10)),
        (1, 8, 10, 2, 100 + 3 * 10),
        (1, 8, 90, 4, 100 + 90),
        (3, 8, 10, 2, 100 + 7 * 10 + 100 + 3 * 10),
        (1, 3, 50, 4, 100),
    ],
    ids=["groups stay whole", "a group is halved", "or quartered", "one of three is halved", "a rank may have none"],
)
def test_ranks_compute_equally_much(groups: int, members: int, own: int, shards: int, fullest: int) -> None:
    batch = forked(groups, members, 100, own)
    dealt = run_to_end(split_into_shards(batch, shards))
    assert sorted(sample.index for shard in dealt for sample in shard.samples) == list(range(groups * members))
    assert max(map(computed, dealt)) <= fullest + own


def test_ranks_compute_equally_much_in_each_minibatch() -> None:
    batch = forked(4, 4, 0, 50, lengths=(400, 100, 100, 400))
    dealt = run_to_end(split_into_shards(batch, 2, minibatches=2))
    assert sorted(sample.index for shard in dealt for sample in shard.samples) == list(range(16))
    for minibatch in (range(8), range(8, 16)):
        some = [[one for one in shard.samples if one.index in minibatch] for shard in dealt]
        assert max(computed(msgspec.structs.replace(dealt[0], samples=samples)) for samples in some) <= 400 + 3 * 50


def test_a_group_of_many_branches_is_dealt_in_slices() -> None:
    branches, length = 64, 1 << 15
    one = trajectory(Task(0, 0, 0, seed=0), 0, branches * length - 2)
    spans = [Span(at * length + 2, (at + 1) * length) for at in range(branches)]
    acted = sum(span.stop - span.start for span in spans)
    whole = msgspec.structs.replace(
        one,
        action_spans=spans,
        logprobs=bytes(4 * acted),
        versions=[VersionRun(0, acted)],
        turns=[Turn("p", "c", 0.0, 0.0, 0.0, 0.0, branch=number) for number in range(branches)],
        branches=tuple(range(0, branches * length, length)),
    )
    slices = list(split_into_shards(Batch(0, 0, [whole, one], []), 2))
    assert len(slices) > 2 * branches * length // TOKENS_PER_SLICE


def test_a_batch_in_rounds_is_split_into_the_same_rounds_again() -> None:
    sizes = [2, 1, 3]
    dealt: list[Batch] = []
    places: list[Round] = []
    place = Round(groups=6)
    for number, size in enumerate(sizes):
        first = sum(sizes[:number])
        groups = [group_of(group_id, [[VersionRun(2, 2)]] * 2, []) for group_id in range(first, first + size)]
        dealt.append(gather(groups, 3, 2))
        places.append(msgspec.structs.replace(place, last=number == len(sizes) - 1))
        place = next_place(dealt[-1], place, groups=6)
    whole = join_rounds(dealt)
    assert whole.rounds == [4, 2, 6]
    assert split_rounds(whole) == list(zip(dealt, places, strict=True))
    assert join_rounds(dealt[:1]) is dealt[0]


def test_minibatches_lie_in_rounds_as_in_the_whole_batch() -> None:
    whole, _ = minibatch_of([0, 0, 1, 2, 3, 3], 2)
    first, begun = minibatch_of([0, 0, 1, 2], 2, Round(groups=4, last=False))
    second, ended = minibatch_of([3, 3], 2, Round(samples_before=4, groups_before=3, groups=4))
    assert first | second == whole == {0: 0, 1: 0, 2: 1, 3: 1}
    assert begun == [(0, True, 1.0), (1, False, 0.5)]
    assert ended == [(1, True, 0.5)]
