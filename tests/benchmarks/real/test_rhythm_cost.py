from __future__ import annotations

import pytest

from benchmarks.real.objective_cost import apart
from benchmarks.real.rhythm_cost import PROMPT, WAYS, PassCase, StepsCase, config, pass_bytes, step_seconds


def test_the_ways_differ_in_rhythm_alone() -> None:
    tables = {name: config("model", rhythm) for name, rhythm in WAYS.items()}
    assert tables["none"].algorithm.rhythm is None
    assert [tables[name].algorithm.rhythm.heads for name in ("first", "batch")] == ["first", "batch"]  # type: ignore[union-attr]


@pytest.mark.integration
def test_steps_and_passes_of_every_way_are_measured() -> None:
    assert all(seconds > 0 for seconds in apart(step_seconds, StepsCase(1, tokens=64)).values())
    for way in ("blocks", "eager"):
        assert apart(pass_bytes, PassCase(way, PROMPT + 200)) >= 0
