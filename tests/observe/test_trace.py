"""The trace for Perfetto: it has every bar once, and bars of one track never overlap."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flash.observe.timeline import lane_order, trace
from flash.types import Activity
from tests.observe.sample_rows import STARTED, metrics_row, spans


def complete(made: dict[str, Any], process: int) -> list[dict[str, Any]]:
    """Return the bars of one process of a trace."""
    return [event for event in made["traceEvents"] if event["ph"] == "X" and event["pid"] == process]


def test_lanes_are_threads_with_names_and_steps_carry_their_rows() -> None:
    made = trace(spans(3), [metrics_row(step, entropy=float("nan")) for step in range(3)])
    names = [event["args"]["name"] for event in made["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["engine 0", "trainer 0"]
    first = complete(made, 1)[0]
    assert (first["name"], first["ts"], first["dur"]) == ("generate", 0, 2_000_000)
    steps = complete(made, 2)
    assert [(event["name"], event["ts"], event["dur"]) for event in steps] == [
        (f"step {step}", 2_000_000 * step, 2_000_000) for step in range(3)
    ]
    assert steps[2]["args"]["reward_mean"] == 0.27
    assert "entropy" not in steps[2]["args"]
    counted = [event for event in made["traceEvents"] if event["ph"] == "C" and event["name"] == "reward_mean"]
    assert [event["args"]["reward_mean"] for event in counted] == [0.25, 0.26, 0.27]


whole = st.integers(0, 30)


@given(st.lists(st.tuples(st.sampled_from("ab"), whole, whole), max_size=30))
def test_every_bar_is_there_once_and_on_a_track_bars_lie_apart_or_inside(bars: list[tuple[str, int, int]]) -> None:
    given_bars = [Activity(lane, "x", STARTED + start, STARTED + start + length) for lane, start, length in bars]
    events = complete(trace(given_bars, []), 1)
    lasting = sorted(length * 1_000_000 for _, _, length in bars if length)
    assert sorted(event["dur"] for event in events) == lasting
    assert min((event["ts"] for event in events), default=0) == 0
    for one, other in combinations(events, 2):
        if one["tid"] == other["tid"]:
            first, second = sorted((one, other), key=lambda event: (event["ts"], -event["dur"]))
            end = first["ts"] + first["dur"]
            assert second["ts"] >= end or second["ts"] + second["dur"] <= end


def test_lanes_are_ordered_by_numbers_whatever_their_names() -> None:
    names = ["²", "trainer 0", "engine 10", "engine 2"]
    assert sorted(names, key=lane_order) == ["engine 2", "engine 10", "trainer 0", "²"]
