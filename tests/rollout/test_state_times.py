"""Time by state: no time is lost, and none is counted twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.rollout.engine_state import StateTimes

CHANGES = st.lists(st.tuples(st.sampled_from(["busy", "idle", "swap"]), st.integers(0, 9)), min_size=1, max_size=12)
"""States, and the duration of each."""


@given(CHANGES, st.integers(0, 100))
def test_conservation_the_seconds_of_all_states_add_up_to_the_time_since_the_first(
    changes: list[tuple[str, int]], start: int
) -> None:
    times, now = StateTimes(), float(start)
    assert times.seconds(now) == {}
    for state, lasts in changes:
        times.enter(state, now)
        now += lasts
    seconds = times.seconds(now)
    assert sum(seconds.values()) == now - times.begun == now - start
    assert seconds.get("busy", 0.0) == sum(lasts for state, lasts in changes if state == "busy")


def test_what_was_before_is_forgotten_and_the_state_goes_on() -> None:
    times = StateTimes()
    times.enter("idle", 1.0)
    assert times.enter("busy", 4.0) == pytest.approx(3.0)
    times.forget()
    assert times.seconds(6.0) == {"busy": 2.0}
    assert times.begun == 4.0
