"""Timeline of a window of time, for the page of `flash view`: bars, or shares of time if bars would be too thin to see.

`flash.view.app` calls `show_window` for each request of the page. The page asks again when the user zooms, and from
time to time while the run goes on. A *lane* has the activities of one worker, such as an engine or a trainer rank.
`flash.observe.timeline` computes the shares of time that a lane spent on each activity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from flash.observe.timeline import COLOURS, IDLE, OTHER, drawing_order, lane_order, lane_shares
from flash.types import Activity

MOST_BARS = 3000
"""Number of bars of all lanes that a browser can still draw at once. It is divided among the lanes."""
FEWEST_BARS = 60
"""Number of bars that each lane may have, however many lanes there are. With more than 50 lanes, all lanes together may
have more than MOST_BARS."""
BARS_PER_BIN = 4
"""Expected number of activities in one bin of time, each of which is a bar. It determines the number of bins."""


class LaneBar(msgspec.Struct, frozen=True, array_like=True):
    """Rectangle of a lane: `start` in Unix seconds, `seconds` long, from `low` to `high` of the lane's height.

    Heights are shares from 0, which is below, to 1.
    """

    name: str
    """Name of the activity, such as `generate`."""
    start: float
    seconds: float
    low: float
    high: float


class ShownLane(msgspec.Struct, frozen=True):
    """Row of the timeline: the activities of one worker in the window."""

    name: str
    """Name of the worker, such as `engine 0`."""
    busy: float
    """Share of the window in which the lane did anything but wait."""
    bars: list[LaneBar]
    exact: bool
    """True if each bar is one activity. False: the heights of bars are shares of a bin of time."""


class Window(msgspec.Struct, frozen=True):
    """Part of a run's time, in Unix seconds."""

    start: float
    stop: float
    lanes: list[ShownLane]
    """Lanes of all workers of the run, also of those without an activity in the window."""
    colours: dict[str, str]
    """Colour of each activity in the window. The page's legend has the same order."""


def show_window(spans: Sequence[Activity], start: float | None, stop: float | None) -> Window | None:
    """Return the lanes of a run between two moments; None if no activity is recorded or `stop` is not after `start`.

    `spans` are all activities of the run. `start` None is the start of the recorded time, and `stop` None its end.
    """
    spans = [span for span in spans if span.stop > span.start]
    if not spans:
        return None
    start = min(span.start for span in spans) if start is None else start
    stop = max(span.stop for span in spans) if stop is None else stop
    if stop <= start:
        return None
    # Each worker of the run keeps its lane, so that rows do not jump when the user zooms.
    lanes: dict[str, list[Activity]] = {span.lane: [] for span in spans}
    for span in spans:
        if span.stop > start and span.start < stop:
            lanes[span.lane].append(span)
    most = max(FEWEST_BARS, MOST_BARS // len(lanes))
    shown = [_lane(name, lanes[name], start, stop, most) for name in sorted(lanes, key=lane_order)]
    names = drawing_order(bar.name for lane in shown for bar in lane.bars)
    return Window(start, stop, shown, {name: COLOURS.get(name, OTHER) for name in names})


def _lane(name: str, spans: Sequence[Activity], start: float, stop: float, most: int) -> ShownLane:
    """Return a lane of the window: a bar for each activity if there are at most `most`, else shares of bins of time.

    `spans` are the activities of the lane `name` that overlap the window from `start` to `stop`.
    """
    whole = lane_shares(spans, np.array([start, stop]))  # the whole window is one bin
    busy = sum(float(share[0]) for activity, share in whole.items() if activity not in IDLE)
    if len(spans) <= most:
        bars = [
            LaneBar(span.name, max(span.start, start), min(span.stop, stop) - max(span.start, start), 0.0, 1.0)
            for span in spans
        ]
        return ShownLane(name, busy, bars, exact=True)
    edges = np.linspace(start, stop, most // BARS_PER_BIN + 1)
    return ShownLane(name, busy, list(_stacked(lane_shares(spans, edges), edges)), exact=False)


def _stacked(shares: dict[str, np.ndarray], edges: np.ndarray) -> Iterator[LaneBar]:
    """Yield the bars of each bin: shares of its activities, stacked with work below and waiting on top.

    Args:
        shares: share of each of the B bins, by activity.
        edges: the B + 1 edges of the bins, in Unix seconds.
    """
    width = float(edges[1] - edges[0])
    floor = np.zeros(len(edges) - 1)  # height of each bin that is filled already
    for name in sorted(shares, key=lambda name: name in IDLE):  # False, which is work, comes first
        top = floor + shares[name]
        for i in np.flatnonzero(shares[name] > 0):
            yield LaneBar(name, float(edges[i]), width, float(floor[i]), float(top[i]))
        floor = top
