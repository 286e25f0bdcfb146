"""Timeline of a window of time: bars, or shares of time if single bars would be too thin to see.

A *lane* has the activities of one worker, such as an engine or a trainer rank. `flash.observe.timeline` computes the
shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from flash.observe.timeline import COLOURS, IDLE, OTHER, lane_order, lane_shares
from flash.types import Activity

MOST_BARS = 3000
"""Largest number of bars in one picture, which a browser can still draw at once."""
FEWEST_BARS = 60
"""Number of bars that each lane may have, even if there are many lanes."""
SHARES = 4
"""Expected number of bars per bin of time; it determines the number of bins."""


class LaneBar(msgspec.Struct, frozen=True, array_like=True):
    """Rectangle: start in Unix seconds, length in seconds, and its part of the lane's height, from 0 to 1."""

    name: str
    start: float
    seconds: float
    low: float
    high: float


class ShownLane(msgspec.Struct, frozen=True):
    """Row of the timeline."""

    name: str
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
    colours: dict[str, str]
    """Colour of each activity in the window."""


def show_window(spans: Sequence[Activity], start: float | None, stop: float | None) -> Window | None:
    """Return the activities between two moments; None if no activity is recorded, or if `stop` is not after `start`.

    A bound of None is the start, or the end, of the recorded time.
    """
    spans = [span for span in spans if span.stop > span.start]
    if not spans:
        return None
    begin = min(span.start for span in spans) if start is None else start
    end = max(span.stop for span in spans) if stop is None else stop
    if end <= begin:
        return None
    lanes: dict[str, list[Activity]] = {span.lane: [] for span in spans}
    for span in spans:
        if span.stop > begin and span.start < end:
            lanes[span.lane].append(span)
    most = max(FEWEST_BARS, MOST_BARS // len(lanes))
    shown = [_lane(name, lanes[name], begin, end, most) for name in sorted(lanes, key=lane_order)]
    names = {bar.name for lane in shown for bar in lane.bars}
    known = [name for name in COLOURS if name in names]
    return Window(begin, end, shown, {name: COLOURS.get(name, OTHER) for name in [*known, *sorted(names - {*known})]})


def _lane(name: str, spans: Sequence[Activity], start: float, stop: float, most: int) -> ShownLane:
    """Return a lane of the window: a bar for each activity if there are at most `most`, else shares of bins of time."""
    whole = lane_shares(spans, np.array([start, stop]))
    busy = sum(float(share[0]) for activity, share in whole.items() if activity not in IDLE)
    if len(spans) <= most:
        bars = [
            LaneBar(span.name, max(span.start, start), min(span.stop, stop) - max(span.start, start), 0.0, 1.0)
            for span in spans
        ]
        return ShownLane(name, busy, bars, exact=True)
    edges = np.linspace(start, stop, max(FEWEST_BARS, most) // SHARES + 1)
    return ShownLane(name, busy, list(_stacked(lane_shares(spans, edges), edges)), exact=False)


def _stacked(shares: dict[str, np.ndarray], edges: np.ndarray) -> Iterator[LaneBar]:
    """Yield the bars of each bin: shares of its activities, stacked with work below and waiting on top."""
    width = float(edges[1] - edges[0])
    floor = np.zeros(len(edges) - 1)
    for name in sorted(shares, key=lambda name: name in IDLE):
        top = floor + shares[name]
        for place in np.flatnonzero(shares[name] > 0):
            yield LaneBar(name, float(edges[place]), width, float(floor[place]), float(top[place]))
        floor = top
