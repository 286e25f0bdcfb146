"""What the plots show, as plain numbers: computed from recorded rows, drawn by `flash.observe.plots.plots`.

Legend: S steps, E evaluations, B bins of time, K ages. Times are seconds since the first thing recorded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flash.observe.columns.table import named
from flash.observe.rundir.summary import by_step, domains_of, number
from flash.types import Activity

Row = Mapping[str, Any]
Floats = npt.NDArray[np.float64]

ACTIVITIES = ("wait", "generate", "train", "evaluate", "publish", "swap", "checkpoint")
"""Known activities; where two overlap in one lane, it was really doing the later one of this list."""
IDLE = ("wait",)
"""Activities that do not count as work."""
ZOOM_STEPS = 8
"""Steps in the close-up of the timeline."""
MAX_AGES = 8
"""Ages shown one by one; older ones share the last place."""

MASKS = tuple(map(named, ("masked_old_share", "masked_correction_share", "masked_cap_share")))
"""Shares of tokens that were left out."""
MISMATCH, BY_ENVIRONMENT = named("mismatch_k3_age_0"), named("mismatch_k3_env_NAME")
_AGE_KEY = re.compile(r"age_(\d+)")
_RATIO_KEY = re.compile(r"ratio_p50_age_(\d+)")


class RewardSeries(NamedTuple):
    """Reward of the trained samples and accuracy on held-out problems. Unknown values are NaN."""

    steps: Floats
    """[S]"""
    times: Floats
    """[S]"""
    rewards: Floats
    """[S]"""
    eval_steps: Floats
    """[E]"""
    eval_times: Floats
    """[E]"""
    accuracy: Floats
    """[E]"""
    low: Floats
    """[E]"""
    high: Floats
    """[E]"""


class AgeSeries(NamedTuple):
    """How old the trained tokens were."""

    steps: Floats
    """[S]"""
    shares: Floats
    """[S, K]: share of the step's trained tokens by age; rows sum to 1."""
    total: Floats
    """[K]: share of all trained tokens by age; sums to 1."""
    labels: list[str]
    """[K]: `0`, `1`, …, and `8+` where older ages were put together."""


class OffPolicySeries(NamedTuple):
    """How far the trained tokens were from the policy that trained on them. Unknown values are NaN."""

    steps: Floats
    """[S]"""
    ess: Floats
    """[S]: effective sample size as a share of the tokens."""
    clipped: Floats
    """[S]: share of tokens."""
    masked: dict[str, Floats]
    """Reason → [S]: share of tokens; only reasons that occurred."""
    entropy: Floats
    """[S]: nats."""
    grad_norm: Floats
    """[S]"""
    ages: Floats
    """[K]: ages with a ratio."""
    ratios: Floats
    """[K, 3]: 1 %, 50 % and 99 % quantile of the ratio at the start of the step, at each age."""


class MismatchSeries(NamedTuple):
    """How far engine and trainer are apart at equal weights. Unknown values are NaN."""

    steps: Floats
    """[S]"""
    by_environment: dict[str, Floats]
    """Name → [S]: mean of w − 1 − log w over the tokens of age 0; the only name is "" where there is one."""


class DomainSeries(NamedTuple):
    """What each of several domains earns, and has of what is trained. Unknown values are NaN."""

    steps: Floats
    """[S]"""
    rewards: dict[str, Floats]
    """Name → [S]: mean reward of its trained samples."""
    shares: dict[str, Floats]
    """Name → [S]: its share of the groups trained so far; none where kinds have no shares."""
    eval_steps: Floats
    """[E]"""
    held_out: dict[str, Floats]
    """Name → [E]: mean reward on held-out problems."""


class TimelineLane(NamedTuple):
    """One row of the timeline."""

    name: str
    spans: list[Activity]
    busy: float
    """Share of the shown time spent on anything but waiting."""


class TimelineSeries(NamedTuple):
    """Who was busy when."""

    lanes: list[TimelineLane]
    start: float
    """Unix seconds."""
    stop: float
    zoom: tuple[float, float]
    """Unix seconds of the close-up."""
    zoom_steps: tuple[int, int] | None
    """First and last step of the close-up; None when no step was recorded."""


def reward_series(metrics: Sequence[Row], evaluations: Sequence[Row]) -> RewardSeries:
    """Prepare reward and accuracy over steps and time."""
    steps, evals = by_step(metrics), by_step(evaluations)
    origin = min((at for row in (*steps, *evals) if (at := number(row, "time")) is not None), default=0.0)

    def times(rows: Sequence[Row]) -> Floats:
        walls = _column(rows, "wall_s")
        return np.where(np.isnan(walls), _column(rows, "time") - origin, walls)

    return RewardSeries(
        steps=_column(steps, "step"),
        times=times(steps),
        rewards=_column(steps, "reward_mean"),
        eval_steps=_column(evals, "step"),
        eval_times=times(evals),
        accuracy=_column(evals, "mean_reward"),
        low=_column(evals, "low"),
        high=_column(evals, "high"),
    )


def age_series(metrics: Sequence[Row]) -> AgeSeries | None:
    """Prepare the age histogram; None when no row has one. Steps weigh as much as the tokens they trained."""
    rows = [row for row in by_step(metrics) if any(amount for _, amount in _ages(row))]
    if not rows:
        return None
    oldest = max(age for row in rows for age, amount in _ages(row) if amount)
    places = min(oldest, MAX_AGES) + 1
    counts = np.zeros((len(rows), places))
    for place, row in enumerate(rows):
        for age, amount in _ages(row):
            counts[place, min(age, places - 1)] += amount
    shares = counts / counts.sum(axis=1, keepdims=True)
    weights = np.array([number(row, "trained_tokens") or 0.0 for row in rows])
    if not weights.any():
        weights = counts.sum(axis=1)
    labels = [str(age) for age in range(places)]
    if oldest > MAX_AGES:
        labels[-1] += "+"
    return AgeSeries(_column(rows, "step"), shares, weights @ shares / weights.sum(), labels)


def offpolicy_series(metrics: Sequence[Row]) -> OffPolicySeries | None:
    """Prepare what off-policy training shows; None when no row has an effective sample size.

    A quantile over the run is the mean of the steps' quantiles, in logarithms; steps weigh as much as their tokens of
    that age.
    """
    rows = [row for row in by_step(metrics) if number(row, "ess") is not None]
    if not rows:
        return None
    ages = sorted({int(match[1]) for row in rows for key in row if (match := _RATIO_KEY.fullmatch(key)) is not None})
    masked = {column.label: _column(rows, column.name) for column in MASKS}
    return OffPolicySeries(
        steps=_column(rows, "step"),
        ess=_column(rows, "ess"),
        clipped=_column(rows, "clip_fraction"),
        masked={reason: share for reason, share in masked.items() if np.nan_to_num(share).any()},
        entropy=_column(rows, "entropy"),
        grad_norm=_column(rows, "grad_norm"),
        ages=np.array(ages, dtype=np.float64),
        ratios=np.array([[_mean_ratio(rows, age, percent) for percent in (1, 50, 99)] for age in ages]).reshape(-1, 3),
    )


def mismatch_series(metrics: Sequence[Row]) -> MismatchSeries | None:
    """Prepare the mismatch; None when no step trained a token of age 0."""
    rows = [row for row in by_step(metrics) if number(row, MISMATCH.name) is not None]
    if not rows:
        return None
    kinds = {kind: key for row in rows for key in row if (kind := BY_ENVIRONMENT.kind(key)) is not None}
    shown = {kind: kinds[kind] for kind in sorted(kinds)} or {"": MISMATCH.name}
    return MismatchSeries(_column(rows, "step"), {kind: _column(rows, key) for kind, key in shown.items()})


def domain_series(metrics: Sequence[Row], evaluations: Sequence[Row]) -> DomainSeries | None:
    """Prepare the domains; None where there are none."""
    rows, evals = by_step(metrics), by_step(evaluations)
    names = domains_of(*rows, *evals)
    if not names:
        return None

    def columns(of: Sequence[Row], what: str) -> dict[str, Floats]:
        found = {name: _column(of, f"domain/{name}/{what}") for name in names}
        return {name: values for name, values in found.items() if np.isfinite(values).any()}

    return DomainSeries(
        steps=_column(rows, "step"),
        rewards=columns(rows, "reward"),
        shares=columns(rows, "share"),
        eval_steps=_column(evals, "step"),
        held_out=columns(evals, "reward"),
    )


def _mean_ratio(rows: Sequence[Row], age: int, percent: int) -> float:
    known = [
        (math.log(ratio), (number(row, f"age_{age}") or 0.0) * (number(row, "trained_tokens") or 0.0))
        for row in rows
        if (ratio := number(row, f"ratio_p{percent}_age_{age}"))
    ]
    total = sum(weight for _, weight in known)
    return math.exp(sum(ratio * weight for ratio, weight in known) / total) if total else math.nan


def timeline(spans: Sequence[Activity], metrics: Sequence[Row]) -> TimelineSeries | None:
    """Prepare the timeline; None without spans."""
    spans = [span for span in spans if span.stop > span.start]
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
    """Each name once, in the order of ACTIVITIES, unknown ones last."""
    return sorted(set(names), key=_priority)


def lane_shares(spans: Sequence[Activity], edges: Floats) -> dict[str, Floats]:
    """Share of each bin [B] that a lane spent on each activity, for B + 1 edges.

    No instant counts twice: where activities overlap, time belongs to the one that is later in ACTIVITIES.
    Law: the shares of a bin sum to at most 1.
    """
    width = np.diff(edges)
    taken: list[Activity] = []
    shares: dict[str, Floats] = {}
    covered = np.zeros(len(width))
    for name in reversed(drawing_order(span.name for span in spans)):
        taken.extend(span for span in spans if span.name == name)
        union = np.diff(covered_until(taken, edges)) / width
        shares[name] = np.clip(union - covered, 0.0, 1.0)
        covered = union
    return shares


def covered_until(spans: Sequence[Activity], times: Floats) -> Floats:
    """Seconds before each time that lie inside at least one span."""
    starts: list[float] = []
    stops: list[float] = []
    for span in sorted(spans, key=lambda span: span.start):
        if stops and span.start <= stops[-1]:
            stops[-1] = max(stops[-1], span.stop)
        else:
            starts.append(span.start)
            stops.append(span.stop)
    knots = np.array([knot for pair in zip(starts, stops, strict=True) for knot in pair])
    lengths = np.array(stops) - np.array(starts)
    before = np.concatenate([[0.0], np.cumsum(lengths)])
    return np.interp(times, knots, np.repeat(before, 2)[1:-1])


def _priority(name: str) -> tuple[int, str]:
    return (ACTIVITIES.index(name) if name in ACTIVITIES else len(ACTIVITIES), name)


def lane_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Engines first, then trainers, then the rest; numbers in names count as numbers."""
    kinds = ("engine", "trainer")
    kind = next((place for place, word in enumerate(kinds) if word in name), len(kinds))
    return kind, [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def _zoom(steps: Sequence[Row], start: float, stop: float) -> tuple[tuple[float, float], tuple[int, int] | None]:
    """The window of ZOOM_STEPS steps in the middle of the run, or of half of a shorter run.

    A row's time is when its step ended, so the window reaches from the end of the step before the first one.
    """
    ended = [row for row in steps if (at := number(row, "time")) is not None and start <= at <= stop + 1]
    if len(ended) < 2:
        middle, quarter = (start + stop) / 2, (stop - start) / 4
        return (middle - quarter, middle + quarter), None
    count = min(ZOOM_STEPS, max(1, len(ended) // 2))
    first = (len(ended) - count) // 2
    last = first + count - 1
    begin = float(ended[first - 1]["time"]) if first else start
    return (begin, float(ended[last]["time"])), (int(ended[first]["step"]), int(ended[last]["step"]))


def _ages(row: Row) -> list[tuple[int, float]]:
    return [(int(match[1]), number(row, key) or 0.0) for key in row if (match := _AGE_KEY.fullmatch(key)) is not None]


def _column(rows: Sequence[Row], key: str) -> Floats:
    values = [number(row, key) for row in rows]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
