"""The timeline of a run: a lane of activities for each worker, their shares of time, and the lanes as a trace.

An *activity* is something that a worker was busy with from one time to another; the recorder writes each as a line of
`spans.jsonl`, so it is also called a *span*. A worker is an engine, a trainer rank, or `evaluation`, which stands for
all evaluations of the run. A lane has the name of its worker. `flash.observe.plots` draws the lanes for `timeline.png`,
with `timeline`; `flash view` draws them with `lane_shares`; `flash calibrate` measures the time of swaps with
`covered_until`.

`flash trace` writes the result of `trace`, which Perfetto (ui.perfetto.dev) and chrome://tracing open. A trace has
Chrome's "Trace Event Format": complete events (`X`) with times in microseconds, on threads that metadata events (`M`)
name, and counters (`C`).

Legend: B bins of time. Times are Unix seconds, but those of a trace count from its begin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flash.observe.rundir.summary import by_step, number
from flash.types import Activity

Row = Mapping[str, Any]
"""A line of `metrics.jsonl`, for one step: numbers by the names of their columns."""
Floats = npt.NDArray[np.float64]

COLOURS = {
    "wait": "#d9d9d9",
    "generate": "#0072b2",
    "train": "#009e73",
    "evaluate": "#56b4e9",
    "publish": "#f0e442",
    "swap": "#d55e00",
    "checkpoint": "#cc79a7",
}
"""Known activities with their colours, from Okabe and Ito's palette, which colour-blind readers can tell apart too.

Where two activities of one lane overlap, the worker is counted as doing the one that is later in this table.
"""
OTHER = "#000000"
"""Colour of an unknown activity."""
IDLE = ("wait",)
"""Activities that do not count as work."""
ZOOM_STEPS = 8
"""Largest number of steps in the close-up, the part of the run that `timeline.png` draws a second time in detail."""
TRACE_COUNTERS = ("reward_mean", "tokens_per_second", "age_mean", "queue_ready_groups", "in_flight")
"""Columns of `metrics.jsonl` that the trace draws as curves above the lanes."""
LANES, STEPS = 1, 2
"""Numbers of the two processes in a trace. Viewers show each process as a block of rows: LANES has the workers' lanes,
STEPS the steps and counters."""


class TimelineLane(NamedTuple):
    """Activities of one worker, a row of the timeline."""

    name: str
    """Name of the worker, such as `trainer 0`."""
    spans: list[Activity]
    busy: float
    """Share of the recorded time of all lanes that this worker spent on activities other than waiting."""


class TimelineSeries(NamedTuple):
    """Lanes of a run with the times to draw, in Unix seconds."""

    lanes: list[TimelineLane]
    """Lanes of all workers, from top to bottom."""
    start: float
    """Start of the first activity of all lanes."""
    stop: float
    """End of the last activity of all lanes."""
    zoom: tuple[float, float]
    """First and last second of the close-up."""
    zoom_steps: tuple[int, int] | None
    """First and last step of the close-up; None if too few steps were recorded."""


def timeline(spans: Sequence[Activity], metrics: Sequence[Row]) -> TimelineSeries | None:
    """Sort the spans into lanes and choose the close-up, for `timeline.png`; None if there are no spans.

    `metrics` are the rows of the steps, which say when each step ended.
    """
    spans = [span for span in spans if span.stop > span.start]  # drop activities that took no time
    if not spans:
        return None
    start, stop = min(span.start for span in spans), max(span.stop for span in spans)
    lanes: dict[str, list[Activity]] = {}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    edges = np.array([start, stop])
    prepared: list[TimelineLane] = []
    for name in sorted(lanes, key=lane_order):
        shares = lane_shares(lanes[name], edges)
        busy = sum(float(share[0]) for activity, share in shares.items() if activity not in IDLE)
        prepared.append(TimelineLane(name, lanes[name], busy))
    zoom, steps = _zoom(by_step(metrics), start, stop)
    return TimelineSeries(prepared, start, stop, zoom, steps)


def drawing_order(names: Iterable[str]) -> list[str]:
    """Return each name once, in the order of COLOURS, with unknown names last."""
    return sorted(set(names), key=_priority)


def lane_shares(spans: Sequence[Activity], edges: Floats) -> dict[str, Floats]:
    """Return the share of each time bin [B] that a lane spent on each activity, by the name of the activity.

    `edges` are the B + 1 edges of the bins in Unix seconds, ascending. No instant counts twice: where activities
    overlap, the time belongs to the one that is later in COLOURS. Law: the shares of a bin sum to at most 1.
    """
    width = np.diff(edges)
    counted: list[Activity] = []
    shares: dict[str, Floats] = {}
    covered = np.zeros(len(width))
    # From the last activity in COLOURS to the first: each one gets the time that it adds to those before it.
    for name in reversed(drawing_order(span.name for span in spans)):
        counted.extend(span for span in spans if span.name == name)
        union = np.diff(covered_until(counted, edges)) / width
        shares[name] = np.clip(union - covered, 0.0, 1.0)
        covered = union
    return shares


def covered_until(spans: Sequence[Activity], times: Floats) -> Floats:
    """Return, for each time, the number of seconds before it that lie inside at least one span.

    `spans` must not be empty.
    """
    # Merge spans that overlap or touch, so that no second counts twice.
    starts: list[float] = []
    stops: list[float] = []
    for span in sorted(spans, key=lambda span: span.start):
        if stops and span.start <= stops[-1]:
            stops[-1] = max(stops[-1], span.stop)
        else:
            starts.append(span.start)
            stops.append(span.stop)
    # The answer grows by one second per second inside a merged span, and stays constant outside. So it is linear
    # between the starts and stops. At the start of merged span i it is `before[i]`, and at its stop `before[i + 1]`.
    knots = np.array([knot for pair in zip(starts, stops, strict=True) for knot in pair])
    lengths = np.array(stops) - np.array(starts)
    before = np.concatenate([[0.0], np.cumsum(lengths)])
    return np.interp(times, knots, np.repeat(before, 2)[1:-1])


def _priority(name: str) -> tuple[int, str]:
    """Return the sort key of an activity for `drawing_order`: its place in COLOURS, then its name."""
    return ([*COLOURS].index(name) if name in COLOURS else len(COLOURS), name)


def lane_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Return the key that sorts the names of lanes: engines first, then trainers, then the rest.

    Plots, traces and `flash view` sort by it. Digits in names are compared as numbers, so that `engine 2` comes before
    `engine 10`.
    """
    workers = ("engine", "trainer")
    block = next((place for place, word in enumerate(workers) if word in name), len(workers))
    return block, [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


def _zoom(steps: Sequence[Row], start: float, stop: float) -> tuple[tuple[float, float], tuple[int, int] | None]:
    """Choose the window of the close-up: ZOOM_STEPS steps in the middle of the run, or half of a shorter run's steps.

    Returns its first and last second, and its first and last step. A row's time is the end of its step, so the window
    begins at the end of the step before the first one. With fewer than two steps, the window is the middle half of the
    time, and the steps are None.

    Args:
        steps: rows of the steps, in order.
        start: start of the first activity, in Unix seconds.
        stop: end of the last activity, in Unix seconds.
    """
    # The hub writes the row of a step a moment after the step's last activity, so one second more is allowed.
    ended = [row for row in steps if (at := number(row, "time")) is not None and start <= at <= stop + 1]
    if len(ended) < 2:
        middle, quarter = (start + stop) / 2, (stop - start) / 4
        return (middle - quarter, middle + quarter), None
    count = min(ZOOM_STEPS, max(1, len(ended) // 2))
    first = (len(ended) - count) // 2
    last = first + count - 1
    begin = float(ended[first - 1]["time"]) if first else start
    return (begin, float(ended[last]["time"])), (int(ended[first]["step"]), int(ended[last]["step"]))


# -- the trace ---------------------------------------------------------------------------------------------------------


def trace(spans: Sequence[Activity], metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of the trace file, for `flash trace`: the lanes of the workers, and a row of steps.

    `metrics` are the rows of the steps. The times of the trace count from `trace_begin`.
    """
    begin = trace_begin(spans, metrics)
    spans = [span for span in spans if span.stop > span.start]
    ended = [row for row in metrics if number(row, "time") is not None]  # a row without a time has no place
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            _named("process_name", LANES, 0, "activities of workers"),
            _named("process_name", STEPS, 0, "steps"),
            *_lane_events(spans, begin),
            *_step_events(ended, begin),
        ],
    }


def trace_begin(spans: Sequence[Activity], metrics: Sequence[Mapping[str, Any]]) -> float:
    """Return the start of the first recorded span or step, in Unix seconds; 0 if nothing is recorded."""
    begun = (span.start for span in spans if span.stop > span.start)
    return min((*begun, *(_begun(row) for row in metrics if number(row, "time") is not None)), default=0.0)


def _lane_events(spans: Sequence[Activity], begin: float) -> Iterator[dict[str, Any]]:
    """Yield the events of each lane on a thread of its own, for process LANES. `begin` is the start of the trace.

    A lane has more threads if activities overlap and neither lies inside the other: viewers cannot show these on one.
    """
    by_lane: dict[str, list[Activity]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    thread = 0
    for name in sorted(by_lane, key=lane_order):
        for place, track in enumerate(_tracks(by_lane[name])):
            thread += 1
            yield _named("thread_name", LANES, thread, name if place == 0 else f"{name} ({place + 1})")
            yield {"ph": "M", "name": "thread_sort_index", "pid": LANES, "tid": thread, "args": {"sort_index": thread}}
            for span in track:
                yield _complete(span.name, LANES, thread, span.start - begin, span.stop - span.start)


def _tracks(spans: Iterable[Activity]) -> list[list[Activity]]:
    """Divide the activities of a lane into tracks, each for one thread of a trace.

    Any two activities of a track do not overlap, or one lies inside the other.
    """
    tracks: list[list[Activity]] = []
    # For each track, the activities that are not over at the current start, each inside the one before it.
    opened: list[list[Activity]] = []
    # Of activities with one start, the longest comes first, so that the others can lie inside it.
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        for track, inside in zip(tracks, opened, strict=True):
            while inside and inside[-1].stop <= span.start:
                inside.pop()
            if not inside or span.stop <= inside[-1].stop:
                track.append(span)
                inside.append(span)
                break
        else:
            tracks.append([span])
            opened.append([span])
    return tracks


def _step_events(rows: Iterable[Mapping[str, Any]], begin: float) -> Iterator[dict[str, Any]]:
    """Yield an event for each step, with the numbers of its row, and its counters at the end of the step.

    `rows` have a time. `begin` is the start of the trace, in Unix seconds.
    """
    for row in rows:
        start, seconds = _begun(row), number(row, "interval_s") or 0.0
        event = _complete(f"step {row.get('step')}", STEPS, 1, start - begin, seconds)
        yield {**event, "args": {key: value for key in row if (value := number(row, key)) is not None}}
        for key in TRACE_COUNTERS:
            if (value := number(row, key)) is not None:
                at = _micros(row["time"] - begin)
                yield {"ph": "C", "name": key, "pid": STEPS, "ts": at, "args": {key: value}}


def _begun(row: Mapping[str, Any]) -> float:
    """Return the start of a row's step, in Unix seconds. The row's `time` is the end of the step, and `interval_s` its
    length; a row without a length gets its end."""
    return float(row["time"]) - (number(row, "interval_s") or 0.0)


def _complete(name: str, process: int, thread: int, start: float, seconds: float) -> dict[str, Any]:
    """Return a complete event, which viewers draw as a bar.

    `start` is in seconds since the start of the trace, and `seconds` is the length.
    """
    return {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": _micros(start), "dur": _micros(seconds)}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """Return a metadata event that names a process or a thread. `kind` is `process_name` or `thread_name`."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _micros(seconds: float) -> int:
    """Return seconds as whole microseconds, the unit of a trace."""
    return round(seconds * 1e6)
