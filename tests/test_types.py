"""What crosses a boundary keeps its meaning on the way."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from flash.types import VersionRun, append_versions

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
