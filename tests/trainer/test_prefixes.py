"""Shared prefixes of sequences are computed once, and nothing else is shared."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flash.branches import LEAST_SHARED, Int64Array
from flash.trainer.packing import in_one_row, shared_prefixes

FEW = st.lists(st.integers(0, 2), min_size=1, max_size=12)
"""Sequences over three different tokens, so that many have a common prefix."""


def common(one: list[int], other: list[int]) -> int:
    """Return the number of leading tokens that two sequences share."""
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


@given(st.lists(FEW, min_size=1, max_size=12))
@settings(deadline=None)
def test_each_token_is_computed_in_a_place_with_the_same_tokens_before_it(drawn: list[list[int]]) -> None:
    """Check also that a shared beginning is computed once, if it is long enough to count."""
    sequences = [np.array(ids) for ids in drawn]
    packed = in_one_row(sequences)
    place_U, row_P = packed.computed
    beginnings = [tuple(ids[: end + 1]) for ids in drawn for end in range(len(ids))]
    assert [beginnings[place_U[row]] for row in row_P] == beginnings
    assert (row_P[place_U] == np.arange(len(place_U))).all(), "a place is computed for itself"
    in_order = sorted(drawn)
    known = [0, *(common(*pair) for pair in pairwise(in_order))]
    worth = [same if same >= LEAST_SHARED * len(ids) else 0 for ids, same in zip(in_order, known, strict=True)]
    assert len(place_U) == len(beginnings) - sum(worth)


def test_a_prompt_is_computed_once_for_its_group_and_a_system_prompt_once_for_all() -> None:
    def ids(*parts: int) -> Int64Array:
        # Return ten consecutive token ids from each start.
        return np.concatenate([np.arange(start, start + 10) for start in parts])

    groups = [[ids(0, 100 * group, 1000 * group + 50 * member) for member in (1, 2, 3)] for group in (1, 2)]
    place_U, _ = shared_prefixes([member for group in groups for member in group])
    assert len(place_U) == 10 + 2 * 10 + 6 * 10


def test_short_common_beginnings_are_not_shared() -> None:
    sequences = [np.array([0, *range(number, number + 20)]) for number in (60, 1, 30)]
    place_U, row_P = shared_prefixes(sequences)
    assert place_U.tolist() == row_P.tolist() == list(range(63))
