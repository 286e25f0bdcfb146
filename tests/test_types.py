"""Types that cross a boundary keep their meaning when they are encoded, cut and joined."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flash.branches import branch_tokens, count_trained_branches, divide_versions, spans_by_turn, split_branches
from flash.sampling import FIRST_MASK, WHOLE, Kept, Routes, join_kept
from flash.types import Task, VersionRun, append_versions
from tests.branching import joined
from tests.samples.cases import trajectory


def kept_of(tokens: int, number: int) -> Kept:
    counts = [(number + place) % 4 for place in range(tokens)]
    return Kept.of(range(sum(counts)), counts)


RUNS = st.lists(st.builds(VersionRun, st.integers(0, 3), st.integers(1, 4)), max_size=6)


@given(st.lists(RUNS, max_size=4))
def test_appended_versions_keep_each_token_in_as_few_runs_as_can_be(
    pieces: list[list[VersionRun]],
) -> None:
    whole: list[VersionRun] = []
    for piece in pieces:
        append_versions(whole, piece)
    tokens = [run.version for piece in pieces for run in piece for _ in range(run.count)]
    assert [run.version for run in whole for _ in range(run.count)] == tokens
    assert all(one.version != two.version for one, two in pairwise(whole))


@given(RUNS, st.data())
def test_versions_that_were_divided_are_the_whole_again(runs: list[VersionRun], data: st.DataObject) -> None:
    total = sum(run.count for run in runs)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)))
    counts = [stop - start for start, stop in pairwise((0, *cuts, total))]
    parts = divide_versions(runs, counts)
    assert [sum(run.count for run in part) for part in parts] == counts
    tokens = [run.version for run in runs for _ in range(run.count)]
    assert [run.version for part in parts for run in part for _ in range(run.count)] == tokens


@given(
    st.lists(st.lists(st.builds(VersionRun, st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3), min_size=1)
)
def test_the_branches_of_a_trajectory_are_what_it_was_joined_from(runs: list[list[VersionRun]]) -> None:
    task = Task(1, 1, 0, 1)
    parts = [trajectory(task, 0, sum(run.count for run in each), versions=each) for each in runs]
    parts = [
        replace(part, kept=kept_of(part.action_count, number), routes=Routes.of(np.full((part.length, 1, 2), number)))
        for number, part in enumerate(parts)
    ]
    whole = joined(parts)
    alone = split_branches(whole)
    assert [one.tokens().tolist() for one in alone] == [part.tokens().tolist() for part in parts]
    assert [one.action_versions().tolist() for one in alone] == [part.action_versions().tolist() for part in parts]
    assert [one.action_spans for one in alone] == [part.action_spans for part in parts]
    assert [one.branches for one in alone] == [(0,)] * len(parts)
    assert [one.kept for one in alone] == [part.kept for part in parts]
    assert [one.routes for one in alone] == [part.routes for part in parts]
    assert branch_tokens(whole) == [part.action_count for part in parts]
    for version in range(5):
        trained = [part.trained_tokens(version) for part in parts]
        assert whole.trained_tokens(version) == sum(trained)
        assert count_trained_branches(whole, version) == np.count_nonzero(trained)
    begins = accumulate((part.length for part in parts), initial=0)
    assert [span.start for span in spans_by_turn(whole)] == [begin + 2 for begin in begins][:-1]


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_kept_sets_that_were_divided_are_the_whole_again(counts: list[int], data: st.DataObject) -> None:
    whole = Kept.of(range(sum(counts)), counts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(counts)), max_size=4)))
    parts = [whole.part(start, stop) for start, stop in pairwise((0, *cuts, len(counts)))]
    assert join_kept(parts, [part.tokens for part in parts]) == whole
    assert all(part.fault(part.tokens) is None for part in parts)
    assert whole.size == 4 * (len(counts) + sum(counts))


MASK_BITS = 64
"""Number of tokens of the vocabulary whose kept sets are masks."""


@given(st.lists(st.none() | st.sets(st.integers(0, MASK_BITS - 1), min_size=1), max_size=12), st.data())
def test_large_kept_sets_are_stored_once_and_each_part_has_those_of_its_own_tokens(
    sets: list[set[int] | None], data: st.DataObject
) -> None:
    masks = [None if one is None else sum(1 << token for token in one).to_bytes(8, "little") for one in sets]
    drawn = [0 if one is None else data.draw(st.sampled_from(sorted(one))) for one in sets]
    whole = Kept.of_masks(masks, drawn)
    assert whole.fault(len(sets)) is None
    assert len(set(whole.masks)) == len(whole.masks)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sets)), max_size=4)))
    bounds = list(pairwise((0, *cuts, len(sets))))
    parts = [whole.part(start, stop) for start, stop in bounds]
    assert join_kept(parts, [part.tokens for part in parts]) == (whole if parts else None)
    for part, (start, stop) in zip(parts, bounds, strict=True):
        assert part.fault(stop - start) is None
        found = [tokens_of(part, place, token) for place, token in enumerate(drawn[start:stop])]
        assert found == sets[start:stop]
        assert len(part.masks) == len({mask for mask in masks[start:stop] if mask in part.masks})


def tokens_of(kept: Kept, place: int, drawn: int) -> set[int] | None:
    """Return the tokens that could have been drawn at a place where `drawn` was; None if all could have been."""
    one = kept.part(place, place + 1)
    ids, counts = one.numbers()
    if counts[0] == WHOLE:
        return None
    if counts[0] <= FIRST_MASK:
        mask = int.from_bytes(one.masks[FIRST_MASK - counts[0]], "little")
        return {token for token in range(MASK_BITS) if mask >> token & 1}
    return {drawn, *ids.tolist()}


def test_tokens_without_kept_sets_are_drawn_from_the_whole_vocabulary() -> None:
    kept = Kept.of([5], [1])
    joined_sets = join_kept([None, kept, None], [2, 1, 1])
    assert joined_sets is not None
    assert joined_sets.numbers()[1].tolist() == [WHOLE, WHOLE, 1, WHOLE]
    assert join_kept([None, None], [2, 1]) is None


def test_kept_sets_that_cannot_be_those_of_the_tokens_are_told() -> None:
    good = Kept.of([5, 6, 7], [2, 0, 1])
    assert good.fault(3) is None
    assert good.fault(2) == "2 sampled tokens, but kept sets for 3, with 3 tokens"
    for wrong in (
        Kept(good.ids[:-1], good.counts),
        Kept(good.ids, good.counts[:-2]),
        Kept.of([5, 6], [2, 0, 1]),
        Kept.of([5, 6, 7], [4, 0, -1]),
        Kept.of([5, -6, 7], [2, 0, 1]),
        replace(good, counts=Kept.of([], [2, FIRST_MASK, 1]).counts),
        replace(good, masks=(b"12345678", b"1234")),
    ):
        assert wrong.fault(3) is not None
