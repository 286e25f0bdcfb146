"""A run's timeline as a trace file for Perfetto (ui.perfetto.dev) and chrome://tracing. `flash trace` writes it.

The format is Chrome's "Trace Event Format": complete events (`X`) with times in microseconds, on threads that metadata
events (`M`) name, and counters (`C`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flash.observe.plots.timeline import lane_order
from flash.observe.rundir.summary import number
from flash.types import Activity

COUNTERS = ("reward_mean", "tokens_per_second", "age_mean", "queue_ready_groups", "in_flight")
"""Columns of `metrics.jsonl` that are drawn above the lanes."""
LANES, STEPS = 1, 2
"""Numbers of the two processes in a trace. Process LANES has the workers' lanes, process STEPS the steps."""


def trace(spans: Sequence[Activity], metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of the trace file. Its times count from `trace_begin`."""
    begin = trace_begin(spans, metrics)
    spans = [span for span in spans if span.stop > span.start]
    ended = [row for row in metrics if number(row, "time") is not None]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            _named("process_name", LANES, 0, "who was busy"),
            _named("process_name", STEPS, 0, "steps"),
            *_lanes(spans, begin),
            *_steps(ended, begin),
        ],
    }


def trace_begin(spans: Sequence[Activity], metrics: Sequence[Mapping[str, Any]]) -> float:
    """Return the start of the first recorded span or step, in Unix seconds; 0 if nothing is recorded."""
    begun = (span.start for span in spans if span.stop > span.start)
    return min((*begun, *(_begun(row) for row in metrics if number(row, "time") is not None)), default=0.0)


def _lanes(spans: Sequence[Activity], begin: float) -> Iterator[dict[str, Any]]:
    """Yield the events of each lane on a thread of its own.

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
    """Divide activities into tracks. Any two activities of a track do not overlap, or one lies inside the other."""
    tracks: list[list[Activity]] = []
    opened: list[list[Activity]] = []
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


def _steps(rows: Iterable[Mapping[str, Any]], begin: float) -> Iterator[dict[str, Any]]:
    for row in rows:
        start, seconds = _begun(row), number(row, "interval_s") or 0.0
        event = _complete(f"step {row.get('step')}", STEPS, 1, start - begin, seconds)
        yield {**event, "args": {key: value for key in row if (value := number(row, key)) is not None}}
        for key in COUNTERS:
            if (value := number(row, key)) is not None:
                at = _micros(row["time"] - begin)
                yield {"ph": "C", "name": key, "pid": STEPS, "ts": at, "args": {key: value}}


def _begun(row: Mapping[str, Any]) -> float:
    """Return the start of a step, in Unix seconds: the row's time is the end of the step."""
    return float(row["time"]) - (number(row, "interval_s") or 0.0)


def _complete(name: str, process: int, thread: int, start: float, seconds: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": _micros(start), "dur": _micros(seconds)}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
