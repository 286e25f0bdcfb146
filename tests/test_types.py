"""What crosses a boundary keeps its meaning on the way."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flash.branches import branch_tokens, divide_versions, sequences, spans_by_turn, trained_branches
from flash.types import Task, VersionRun, append_versions
from tests.branching import joined
from tests.samples.cases import trajectory

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
    whole = joined(parts)
    alone = sequences(whole)
    assert [one.tokens().tolist() for one in alone] == [part.tokens().tolist() for part in parts]
    assert [one.action_versions().tolist() for one in alone] == [part.action_versions().tolist() for part in parts]
    assert [one.action_spans for one in alone] == [part.action_spans for part in parts]
    assert [one.branches for one in alone] == [(0,)] * len(parts)
    assert branch_tokens(whole) == [part.action_count for part in parts]
    for version in range(5):
        trained = [part.trained_tokens(version) for part in parts]
        assert whole.trained_tokens(version) == sum(trained)
        assert trained_branches(whole, version) == np.count_nonzero(trained)
    begins = accumulate((part.length for part in parts), initial=0)
    assert [span.start for span in spans_by_turn(whole)] == [begin + 2 for begin in begins][:-1]
