"""Packing of samples into micro-batches: budgets, shared beginnings, masks, kept sets and damaged samples.

The *kept set* of a token has the tokens that settings such as top_k, or a grammar, left in the distribution from which
it was drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from flash.branches import spans_by_turn, split_branches
from flash.errors import ContractError
from flash.sampling import Kept, Sampling
from flash.trainer.kept import kept_tokens
from flash.trainer.model.packed import packed_row
from flash.trainer.packing import DUMMY, MicroBatch, pack, select_sequences, split_minibatches
from flash.types import ShardSample, Span, VersionRun
from tests.trainer.trainer_cases import (
    branched_shard,
    drawn_from_some,
    drawn_under_grammar,
    make_shard,
    make_trajectory,
    part_of,
    partly_kept,
    random_shard,
    sampled_at,
    with_tokens,
)


def trained_tokens(micro_batches: list[MicroBatch]) -> list[tuple[int, float, int, int]]:
    """Return token id, behaviour log-prob, sample and turn of each trained token, sorted."""
    return sorted(
        (int(target), float(logp), int(index), int(turn))
        for micro in micro_batches
        for target, logp, index, turn in zip(
            micro.target_T[micro.mask_T],
            micro.behaviour_T[micro.mask_T],
            micro.index_T[micro.mask_T],
            micro.turn_T[micro.mask_T],
            strict=True,
        )
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(46, 300))
@settings(deadline=None)
def test_every_trained_token_is_in_exactly_one_micro_batch_under_the_budget(counts: list[int], budget: int) -> None:
    rng = np.random.default_rng(0)
    trajectories = [
        make_trajectory(0, i, [VersionRun(0, n // 2), VersionRun(1, n - n // 2)], rng, reward=0.0)
        for i, n in enumerate(counts)
    ]
    shard = make_shard(trajectories, step=1, min_version=1)
    packed = pack(shard.samples, min_version=1, max_tokens=budget)

    expected = []
    for index, one in enumerate(trajectories):
        positions = np.flatnonzero(one.action_mask())
        for place, version in enumerate(one.action_versions()):
            if version >= 1:
                turn = sum(positions[place] >= span.stop for span in one.action_spans)
                token = int(one.tokens()[positions[place]])
                expected.append((token, float(one.behaviour()[place]), index, turn))
    assert trained_tokens(packed) == sorted(expected)
    for micro in packed:
        assert micro.offset_S[-1] == len(micro.input_P)
        assert len(micro.computed.place_U) <= budget
        assert (np.diff(micro.sequence_T) >= 0).all()


def test_branches_are_packed_as_sequences_with_the_place_of_their_sample() -> None:
    shard = branched_shard()
    packed = pack(shard.samples, min_version=2, max_tokens=40)
    expected = []
    for sample in shard.samples:
        one = sample.trajectory
        turns = [turn for turn, span in enumerate(spans_by_turn(one)) for _ in range(span.start, span.stop)]
        by_token = sorted(zip((at for span in spans_by_turn(one) for at in range(*astuple(span))), turns, strict=True))
        for (at, turn), logp, version in zip(by_token, one.behaviour(), one.action_versions(), strict=True):
            if version >= 2:
                expected.append((int(one.tokens()[at]), float(logp), sample.index, turn))
    assert trained_tokens(packed) == sorted(expected)
    branches: Counter[int] = Counter()
    for micro in packed:
        branches.update(micro.index_S.tolist())
        starts = np.searchsorted(micro.sequence_T, np.arange(micro.sequences))
        assert (micro.before_T[starts] >= micro.offset_S[:-1]).all(), "each has a prompt of its own"
    assert branches.total() == shard.total_sequences
    assert max(branches.values()) == 3


def test_positions_restart_and_each_kept_position_precedes_its_target() -> None:
    shard = random_shard()
    for micro in pack(shard.samples, min_version=0, max_tokens=64):
        for start, stop in zip(micro.offset_S[:-1], micro.offset_S[1:], strict=True):
            assert micro.position_P[start:stop].tolist() == list(range(stop - start))
        assert (micro.input_P[micro.before_T + 1] == micro.target_T).all()
        starts, stops = micro.offset_S[micro.sequence_T], micro.offset_S[micro.sequence_T + 1]
        assert ((starts <= micro.before_T) & (micro.before_T + 1 < stops)).all()


def test_tokens_older_than_min_version_are_masked_and_a_sample_of_only_those_is_left_out() -> None:
    rng = np.random.default_rng(0)
    mixed = make_trajectory(0, 0, [VersionRun(1, 3), VersionRun(2, 4)], rng, reward=1.0)
    old = make_trajectory(0, 1, [VersionRun(1, 5)], rng, reward=0.0)
    shard = make_shard([mixed, old], step=3, min_version=2)
    (micro,) = pack(shard.samples, min_version=2, max_tokens=64)
    assert micro.sequences == 1
    assert micro.mask_T.tolist() == [False] * 3 + [True] * 4


def test_one_long_sequence_does_not_pad_many_short_ones() -> None:
    rng = np.random.default_rng(0)
    long = make_trajectory(0, 0, [VersionRun(0, 200)], rng, reward=0.0)
    short = [make_trajectory(i, i, [VersionRun(0, 1)], rng, reward=0.0) for i in range(1, 100)]
    (micro,) = pack(make_shard([long, *short]).samples, min_version=0, max_tokens=1000)
    parts = packed_row(micro, torch.device("cpu")).layout.attention.padded
    assert sum(part.place_SQ.numel() for part in parts) <= 2 * len(micro.input_P)


def test_a_tree_is_cut_where_the_fewest_tokens_are_computed_twice() -> None:
    """Two groups of three sequences with 10 tokens each. All share 2 tokens, and each group shares its first 6."""
    rng = np.random.default_rng(0)
    everybody, groups = rng.integers(0, 9, 2), rng.integers(0, 9, (2, 4))
    trajectories = [
        with_tokens(
            make_trajectory(group, member, [VersionRun(0, 5)], rng, reward=0.0),
            np.concatenate([everybody, [20 + group], groups[group][1:], [30 + member], rng.integers(0, 9, 3)]),
        )
        for member in range(3)
        for group in range(2)
    ]
    packed = pack(make_shard(trajectories).samples, min_version=0, max_tokens=20)
    assert [len(micro.computed.place_U) for micro in packed] == [18, 18]
    assert [sorted(micro.index_S.tolist()) for micro in packed] == [[0, 2, 4], [1, 3, 5]]
    (whole,) = pack(make_shard(trajectories).samples, min_version=0, max_tokens=34)
    assert len(whole.computed.place_U) == 34


def test_a_sample_over_the_budget_is_refused_by_name() -> None:
    shard = random_shard()
    with pytest.raises(ContractError, match=r"sample \d+ has \d+ tokens.*max_tokens_per_microbatch = 8"):
        pack(shard.samples, min_version=0, max_tokens=8)


def test_a_trajectory_whose_counts_differ_is_refused() -> None:
    sample = random_shard().samples[0]
    trajectory = msgspec.structs.replace(sample.trajectory, logprobs=b"\0" * 4)
    broken = msgspec.structs.replace(sample, trajectory=trajectory)
    with pytest.raises(ContractError, match="1 log-probs"):
        pack([broken], min_version=0, max_tokens=64)


def test_an_action_token_without_a_prompt_is_refused() -> None:
    sample = random_shard().samples[0]
    trajectory = msgspec.structs.replace(
        sample.trajectory,
        action_spans=[Span(0, 1)],
        logprobs=b"\0" * 4,
        versions=[VersionRun(0, 1)],
    )
    broken = msgspec.structs.replace(sample, trajectory=trajectory)
    with pytest.raises(ContractError, match="starts with an action token"):
        pack([broken], min_version=0, max_tokens=64)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_trained_token_without_a_behaviour_logprob_is_refused_by_name_and_a_masked_one_is_not(value: float) -> None:
    rng = np.random.default_rng(0)
    good = make_trajectory(7, 0, [VersionRun(1, 2), VersionRun(2, 4)], rng, reward=1.0)
    behaviour = good.behaviour().copy()
    behaviour[1] = value
    masked = msgspec.structs.replace(good, logprobs=behaviour.tobytes())
    behaviour[3] = value
    trained = msgspec.structs.replace(good, logprobs=behaviour.tobytes())
    pack(make_shard([good, masked]).samples, min_version=2, max_tokens=64)
    with pytest.raises(ContractError, match=r"sample 1 \(group 7\) has the behaviour log-prob .* action token 3;"):
        pack(make_shard([good, trained]).samples, min_version=2, max_tokens=64)


def test_minibatches_keep_groups_whole_on_all_ranks() -> None:
    shard = random_shard()
    ranks = [part_of(shard, list(range(rank, 13, 2))) for rank in (0, 1)]
    places: dict[int, set[int]] = {}
    for rank in ranks:
        parts = split_minibatches(rank, 2)
        assert sum(len(part) for _, part in parts) == len(rank.samples)
        for place, part in parts:
            for sample in part:
                places.setdefault(sample.trajectory.task.group_id, set()).add(place.number)
    assert places == {0: {0}, 1: {0}, 2: {1}, 3: {1}}


@given(st.lists(st.booleans(), min_size=13, max_size=13))
def test_a_part_of_a_micro_batch_equals_packing_its_samples_alone(keep: list[bool]) -> None:
    shard = partly_kept(sampled_at(random_shard(), 0.7, 1.0, 1.4))
    (micro,) = pack(shard.samples, min_version=0, max_tokens=10_000)
    part = select_sequences(micro, np.array(keep)[micro.index_S])
    if not any(keep):
        assert part is DUMMY
        return
    chosen = part_of(shard, [index for index, kept in enumerate(keep) if kept])
    (expected,) = pack(chosen.samples, min_version=0, max_tokens=10_000)
    assert by_sequence(part) == by_sequence(expected)
    found = [micro.input_P[micro.computed.place_U][micro.computed.row_P] for micro in (part, micro)]
    assert [ids.tolist() for ids in found] == [part.input_P.tolist(), micro.input_P.tolist()]


def test_kept_tokens_have_the_biases_and_penalties_of_the_settings() -> None:
    """A penalty applies to tokens that the context before the drawn token contains. The last bias of a token counts."""
    how = Sampling(top_k=4, logit_bias=((3, 1.0), (7, 9.0), (7, -2.0)), repetition_penalty=1.5)
    shard = branched_shard()
    drawn = [drawn_from_some(sample.trajectory, how) for sample in shard.samples]
    for branch in (branch for one in drawn for branch in split_branches(one)):
        tokens, positions = branch.tokens().tolist(), np.flatnonzero(branch.action_mask())
        found = kept_tokens(branch, positions)
        assert branch.kept is not None
        biases, sets = dict(how.logit_bias), [branch.kept.part(place, place + 1) for place in range(len(positions))]
        expected = [
            (token, biases.get(token, 0.0), 1.5 if token in tokens[:at] else 1.0)
            for at, kept in zip(positions, sets, strict=True)
            for token in (tokens[at], *kept.numbers()[0].tolist())
        ]
        found_N = zip(found.token_N.tolist(), found.bias_N.tolist(), found.penalty_N.tolist(), strict=True)
        assert list(found_N) == expected
        assert found.count_T.sum() == len(expected)


def test_law_4_kept_sets_of_a_grammar_are_unchanged_by_packing() -> None:
    """Small sets are lists of tokens, with the drawn token first, and large sets are masks."""
    shard = branched_shard()
    drawn = [drawn_under_grammar(sample.trajectory) for sample in shard.samples]
    for branch in (branch for one in drawn for branch in split_branches(one)):
        tokens, positions = branch.tokens().tolist(), np.flatnonzero(branch.action_mask())
        found = kept_tokens(branch, positions)
        starts = np.cumsum(found.count_T) - found.count_T
        assert branch.kept is not None
        for place, at in enumerate(positions):
            one = branch.kept.part(place, place + 1)
            ids, (count,) = one.numbers()
            start, size = starts[place], found.count_T[place]
            assert found.token_N[start : start + size].tolist() == ([tokens[at], *ids] if count >= 0 else [])
            mask = found.mask_T[place]
            assert ((mask >= 0) and found.mask_KB[mask].tobytes()) == (len(one.masks) > 0 and one.masks[0])
    (micro,) = pack([ShardSample(index, one) for index, one in enumerate(drawn)], min_version=0, max_tokens=10_000)
    packed_masks = {row.tobytes() for row in micro.kept.mask_KB}
    assert packed_masks == {mask for one in drawn if one.kept is not None for mask in one.kept.masks}


def test_a_sample_with_too_few_kept_sets_of_a_grammar_is_refused_by_name() -> None:
    one = make_trajectory(0, 0, [VersionRun(0, 7)], np.random.default_rng(0), reward=0.0)
    shard = make_shard([msgspec.structs.replace(one, kept=Kept.of([], [0, 0]))])
    with pytest.raises(ContractError, match=r"sample 0 was sampled with a grammar, .* 7 sampled tokens, but kept sets"):
        pack(shard.samples, min_version=0, max_tokens=64)


@pytest.mark.parametrize(
    ("kept", "why"), [(None, "there are no kept sets"), (Kept.of([], [0, 0]), "7 sampled tokens, but kept sets for 2")]
)
def test_a_sample_of_top_k_without_its_kept_sets_is_refused_by_name(kept: Kept | None, why: str) -> None:
    one = make_trajectory(0, 0, [VersionRun(0, 7)], np.random.default_rng(0), reward=0.0)
    shard = make_shard([msgspec.structs.replace(drawn_from_some(one, Sampling(top_k=4)), kept=kept)])
    with pytest.raises(ContractError, match=f"sample 0 was sampled with top_k = 4, .* are not known: {why}"):
        pack(shard.samples, min_version=0, max_tokens=64)


def test_a_greedy_sample_is_refused() -> None:
    shard = sampled_at(random_shard(), 0.0)
    with pytest.raises(ContractError, match=r"sample \d was sampled greedily"):
        pack(shard.samples, min_version=0, max_tokens=10_000)


def by_sequence(micro: MicroBatch) -> list[tuple[Any, ...]]:
    """Return all facts of each sequence, sorted. The order in a micro-batch depends on the prefixes that are shared."""
    found: list[tuple[Any, ...]] = []
    for place, (start, stop) in enumerate(pairwise(micro.offset_S)):
        mine_T = micro.sequence_T == place
        whole = (micro.input_P[start:stop], micro.position_P[start:stop], micro.before_T[mine_T] - start)
        names = ("target", "behaviour", "mask", "version", "turn", "temperature")
        tokens = [getattr(micro, f"{name}_T")[mine_T] for name in names]
        mine = micro.kept.select(mine_T)
        tokens += [mine.token_N, mine.count_T, mine.bias_N, mine.penalty_N]
        masks = [[] if mask < 0 else mine.mask_KB[mask].tolist() for mask in mine.mask_T]
        facts = (micro.index_S[place], micro.kinds_S[place])
        found.append((*facts, *(array.tolist() for array in (*whole, *tokens)), masks))
    return sorted(found)
