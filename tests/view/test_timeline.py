"""The timeline shows a window of time: bars as they were, or shares of time."""

from __future__ import annotations

import pytest

from flash.types import Activity
from flash.view.timeline import MOST_BARS, LaneBar, show_window


def test_bars_are_cut_at_the_window_and_lanes_without_any_stay() -> None:
    spans = [
        Activity("trainer 0", "wait", 0.0, 4.0),
        Activity("trainer 0", "train", 4.0, 10.0),
        Activity("engine 0", "generate", 20.0, 30.0),
    ]
    window = show_window(spans, 2.0, 6.0)
    assert window is not None
    assert [lane.name for lane in window.lanes] == ["engine 0", "trainer 0"]
    assert [lane.busy for lane in window.lanes] == [0.0, 0.5]
    assert window.lanes[1].bars == [LaneBar("wait", 2.0, 2.0, 0.0, 1.0), LaneBar("train", 4.0, 2.0, 0.0, 1.0)]
    assert list(window.colours) == ["wait", "train"]


def test_many_bars_become_shares_of_time() -> None:
    """Conservation: the heights of the bins are the time that was spent."""
    spans = [Activity("engine 0", "generate", place, place + 0.25) for place in range(2 * MOST_BARS)]
    window = show_window(spans, None, None)
    assert window is not None
    (lane,) = window.lanes
    assert not lane.exact
    assert len(lane.bars) < MOST_BARS
    assert sum(bar.seconds * (bar.high - bar.low) for bar in lane.bars) == pytest.approx(0.25 * 2 * MOST_BARS)
    near = show_window(spans, 10.0, 12.0)
    assert near is not None
    assert [(bar.start, bar.seconds) for bar in near.lanes[0].bars] == [(10.0, 0.25), (11.0, 0.25)]


def test_there_is_nothing_to_show_without_bars_or_time() -> None:
    assert show_window([], None, None) is None
    assert show_window([Activity("a", "b", 1.0, 1.0)], None, None) is None
    assert show_window([Activity("a", "b", 1.0, 2.0)], 5.0, 5.0) is None
