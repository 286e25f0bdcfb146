"""The pictures of a run, drawn from the files of its run directory and nothing else.

    reward.png     reward of the trained samples and held-out accuracy, over steps and over time
    ages.png       how old the trained tokens were
    offpolicy.png  how far the trained tokens were from the policy that trained on them
    domains.png    what each of several domains earns, and its share of what is trained
    mismatch.png   how far engine and trainer are apart at equal weights, by environment
    timeline.png   who was busy when (flash.observe.plots.timeline)

Drawn for 800 pixels of width, at twice that resolution. matplotlib is imported on the first call; no global state of
it is touched, so that drawing may happen in a worker thread. A number that is not known is NaN, and a gap.

Legend: S steps, E evaluations, K ages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flash.observe.columns.column import LIMITS
from flash.observe.columns.table import named
from flash.observe.plots.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    new_figure,
    outside_legend,
    plain_axes,
    png,
    time_unit,
)
from flash.observe.plots.timeline import BINS, Floats, draw_timeline, timeline
from flash.observe.rundir.rundir import RunDirectory, write_atomically, writing
from flash.observe.rundir.summary import by_step, domains_of, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

SMALL_MISMATCH = 1e-9
"""Below this the axis of the mismatch is linear, down to 0: float32 makes less."""
SEVERAL = (BLUE, PURPLE, GREEN, "#e69f00", ORANGE)
"""Colours of curves of one kind."""
RATIO_TICKS = (
    (0.12, (1.02, 1.05, 1.1)),
    (0.5, (1.1, 1.25, 1.5)),
    (1.5, (1.5, 2.0, 4.0)),
    (4.0, (2.0, 5.0, 20.0)),
    (np.inf, (10.0, 1e2, 1e3, 1e4, 1e6, 1e8)),
)
"""Largest logarithm of a ratio in the picture, and the ratios above 1 that get a tick; their inverses do too."""
SMOOTH_FROM = 20
"""Steps from which a running mean is drawn over the rewards."""
MOST_POINTS = 40
"""Evaluations up to which each is marked by a point."""
MAX_AGES = 8
"""Ages shown one by one; older ones share the last place."""
MASKS = tuple(map(named, ("masked_old_share", "masked_correction_share", "masked_cap_share")))
"""Shares of tokens that were left out."""
MISMATCH, BY_ENVIRONMENT = named("mismatch_k3_age_0"), named("mismatch_k3_env_NAME")
_AGE_KEY = re.compile(r"age_(\d+)")
_RATIO_KEY = re.compile(r"ratio_p50_age_(\d+)")


def write_plots(run_dir: Path) -> list[Path]:
    """Draw what the run directory has rows for, into its `plots/`; returns the files.

    Raises RunDirectoryError when they cannot be written.
    """
    directory = RunDirectory(run_dir)
    metrics, evaluations = by_step(directory.read_metrics()), by_step(directory.read_evaluations())
    bars = timeline(directory.read_spans(), metrics)
    drawn = {
        "reward.png": draw_rewards(metrics, evaluations),
        "domains.png": draw_domains(metrics, evaluations),
        "ages.png": draw_ages(metrics),
        "offpolicy.png": draw_offpolicy(metrics),
        "mismatch.png": draw_mismatch(metrics),
        "timeline.png": None if bars is None else draw_timeline(bars),
    }
    figures = {directory.plots / name: figure for name, figure in drawn.items() if figure is not None}
    if figures:
        with writing(directory.plots):
            directory.plots.mkdir(exist_ok=True)
    for path, figure in figures.items():
        write_atomically(path, png(figure))
    return list(figures)


def draw_rewards(metrics: Sequence[Row], evaluations: Sequence[Row]) -> Figure | None:
    """Reward and held-out accuracy, over steps on the left and over time on the right."""
    if not metrics and not evaluations:
        return None
    figure = new_figure(3.4)
    left, right = plain_axes(figure, 1, 2, sharey=True)
    times, eval_times = run_times(metrics, evaluations)
    known = np.concatenate([times, eval_times])
    scale, unit = time_unit(float(np.nanmax(known)) if np.isfinite(known).any() else 0.0)
    _curves(left, (column(metrics, "step"), column(evaluations, "step")), metrics, evaluations)
    _curves(right, (times / scale, eval_times / scale), metrics, evaluations)
    _over_steps(left)
    right.set_xlabel(unit)
    if left.get_ylim()[0] > 0 and left.get_ylim()[1] <= 1.3:
        left.set_ylim(0, None)
    _legend(figure, left)
    return figure


def run_times(metrics: Sequence[Row], evaluations: Sequence[Row]) -> tuple[Floats, Floats]:
    """Seconds since the run began, of each step [S] and each evaluation [E]; without them, since the first row."""
    origin = min((at for row in (*metrics, *evaluations) if (at := number(row, "time")) is not None), default=0.0)

    def times(rows: Sequence[Row]) -> Floats:
        walls = column(rows, "wall_s")
        return np.where(np.isnan(walls), column(rows, "time") - origin, walls)

    return times(metrics), times(evaluations)


def draw_domains(metrics: Sequence[Row], evaluations: Sequence[Row]) -> Figure | None:
    """Rewards by domain on the left, dashed on held-out problems; shares of the groups trained so far on the right."""
    names = domains_of(*metrics, *evaluations)
    if not names:
        return None
    figure = new_figure(3.4)
    left, right = plain_axes(figure, 1, 2)
    steps, eval_steps = column(metrics, "step"), column(evaluations, "step")
    for name, colour in zip(names, cycle(SEVERAL)):
        reward, share = (column(metrics, f"domain/{name}/{what}") for what in ("reward", "share"))
        held_out = column(evaluations, f"domain/{name}/reward")
        if (known := np.isfinite(held_out)).any():
            left.plot(eval_steps[known], held_out[known], color=colour, linestyle="--", marker="o", markersize=3)
        if np.isfinite(reward).any():
            _line(left, steps, reward, colour, name)
        if np.isfinite(share).any():
            right.plot(steps, 100 * share, color=colour, linewidth=2)
    left.set_ylabel("mean reward; dashed: held out")
    right.set_ylabel("% of the groups trained so far")
    right.set_ylim(0, 100)
    _over_steps(left, right)
    _legend(figure, left)
    return figure


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


def age_series(metrics: Sequence[Row]) -> AgeSeries | None:
    """Prepare the age histogram; None when no row has one. Steps weigh as much as the tokens they trained."""
    rows = [row for row in metrics if any(amount for _, amount in _ages(row))]
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
    return AgeSeries(column(rows, "step"), shares, weights @ shares / weights.sum(), labels)


def draw_ages(metrics: Sequence[Row]) -> Figure | None:
    """Share of trained tokens by age: over the whole run on the left, step by step on the right."""
    from matplotlib import colormaps

    if (series := age_series(metrics)) is None:
        return None
    figure = new_figure(3.2)
    left, right = plain_axes(figure, 1, 2, width_ratios=[2, 3])
    places = len(series.labels)
    shades = [colormaps["Blues"](0.35 + 0.6 * place / max(1, places - 1)) for place in range(places)]
    bars = left.bar(series.labels, 100 * series.total, color=shades, width=0.72)
    left.bar_label(bars, [_percent(share) for share in series.total], padding=2, color=INK, fontsize=10)
    left.set_ylim(0, 100 * float(series.total.max()) * 1.15)
    left.set_xlabel("age in versions")
    left.set_ylabel("% of all trained tokens")
    left.grid(visible=False, axis="x")
    steps, shares = _thinned(series.steps, series.shares)
    edges = np.append(steps, steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else 1.0))
    floor = np.zeros(len(steps))
    for place in range(places):
        top = floor + 100 * shares[:, place]
        right.stairs(top, edges, baseline=floor, fill=True, color=shades[place], linewidth=0)
        floor = top
    right.set_xlim(edges[0], edges[-1])
    right.set_ylim(0, 100)
    _over_steps(right)
    right.set_ylabel("% of the step's tokens")
    return figure


def draw_offpolicy(metrics: Sequence[Row]) -> Figure | None:
    """Effective sample size, ratios by age, tokens without a gradient, entropy and gradient norm."""
    rows = [row for row in metrics if number(row, "ess") is not None]
    if not rows:
        return None
    figure = new_figure(5.4)
    weights, ratios, shares, policy = plain_axes(figure, 2, 2)
    steps = column(rows, "step")
    _line(weights, steps, 100 * column(rows, "ess"), BLUE)
    weights.set_ylim(0, 105)
    weights.set_ylabel(named("ess").axis)
    _draw_ratios(ratios, *ratio_quantiles(rows))
    _line(shares, steps, 100 * column(rows, "clip_fraction"), ORANGE, named("clip_fraction").label)
    masked = {mask.label: values for mask in MASKS if np.nan_to_num(values := column(rows, mask.name)).any()}
    for (reason, share), colour in zip(masked.items(), SEVERAL[1:], strict=False):
        _line(shares, steps, 100 * share, colour, f"masked: {reason}")
    shares.set_ylim(0, max(1.0, 1.1 * shares.get_ylim()[1]))
    shares.set_ylabel("% of tokens")
    shares.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, labelcolor=INK, fontsize=9, handlelength=1.3
    )
    _line(policy, steps, column(rows, "entropy"), BLUE)
    policy.set_ylim(0, None)
    policy.set_ylabel(named("entropy").axis, color=BLUE)
    norms = policy.twinx()
    norms.spines[["top", "left"]].set_visible(False)
    norms.spines[["right", "bottom"]].set_color(FAINT)
    norms.tick_params(colors=INK, labelsize=10)
    _line(norms, steps, column(rows, "grad_norm"), ORANGE)
    norms.set_ylim(0, None)
    norms.set_ylabel(named("grad_norm").axis, color=ORANGE)
    _over_steps(weights, shares, policy)
    return figure


def draw_mismatch(metrics: Sequence[Row]) -> Figure | None:
    """Engine against trainer at equal weights, a line for each environment, and from where on people are warned."""
    rows = [row for row in metrics if number(row, MISMATCH.name) is not None]
    if not rows:
        return None
    figure = new_figure(3.0)
    (axes,) = plain_axes(figure, 1, 1, squeeze=False)
    axes.set_yscale("symlog", linthresh=SMALL_MISMATCH)
    kinds = {kind: key for row in rows for key in row if (kind := BY_ENVIRONMENT.kind(key)) is not None}
    for (name, key), colour in zip(sorted(kinds.items()) or [("", MISMATCH.name)], cycle(SEVERAL)):
        _line(axes, column(rows, "step"), column(rows, key), colour, name)
    limit = LIMITS.mismatch or 0.0
    axes.axhline(limit, color=FAINT, linewidth=1, linestyle="--")
    axes.set_ylim(0, 1.5 * max(limit, axes.get_ylim()[1]))
    axes.set_ylabel(MISMATCH.axis)
    _over_steps(axes)
    _legend(figure, axes)
    return figure


def ratio_quantiles(rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """Ages [K] with a ratio, and at each the 1 %, 50 % and 99 % quantile [K, 3] of the ratio at a step's start.

    A quantile over the run is the mean of the steps' quantiles, in logarithms; steps weigh as much as their tokens of
    that age.
    """
    ages = sorted({int(match[1]) for row in rows for key in row if (match := _RATIO_KEY.fullmatch(key)) is not None})
    ratios = [[_mean_ratio(rows, age, percent) for percent in (1, 50, 99)] for age in ages]
    return np.array(ages, dtype=np.float64), np.array(ratios).reshape(-1, 3)


def _mean_ratio(rows: Sequence[Row], age: int, percent: int) -> float:
    known = [
        (math.log(ratio), (number(row, f"age_{age}") or 0.0) * (number(row, "trained_tokens") or 0.0))
        for row in rows
        if (ratio := number(row, f"ratio_p{percent}_age_{age}"))
    ]
    total = sum(weight for _, weight in known)
    return math.exp(sum(ratio * weight for ratio, weight in known) / total) if total else math.nan


def _draw_ratios(axes: Axes, ages: Floats, ratios: Floats) -> None:
    """At each age the median of the ratio, and a bar from its 1 % to its 99 % quantile."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, median, high = ratios.T
    axes.set_yscale("log")
    axes.axhline(1.0, color=FAINT, linewidth=1)
    axes.vlines(ages, low, high, color=BLUE, linewidth=min(12.0, 120 / (1 + len(ages))), alpha=0.35)
    axes.plot(ages, median, color=BLUE, marker="o", markersize=5, linewidth=0)
    widest = float(np.nanmax(np.abs(np.log(ratios)), initial=0.05)) * 1.1
    axes.set_ylim(np.exp(-widest), np.exp(widest))
    ticks = next((ticks for span, ticks in RATIO_TICKS if widest < span), RATIO_TICKS[-1][1])
    axes.yaxis.set_major_locator(FixedLocator([*(1 / tick for tick in ticks), 1.0, *ticks]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:.3g}" if ratio < 1000 else f"{ratio:,.0f}"))
    axes.set_xlim(-0.6, float(ages.max(initial=0.0)) + 0.6)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.set_xlabel("age in versions")
    axes.set_ylabel("ratio: median, 1 to 99 %")


def _curves(axes: Axes, places: tuple[Floats, Floats], metrics: Sequence[Row], evaluations: Sequence[Row]) -> None:
    """Rewards as a line at these places, evaluations at theirs as points in the band of their intervals.

    Where nobody has sampled, losses take their place.
    """
    learned = any("nll" in row for row in metrics)
    what, held_out = ("nll", "held_out_nll") if learned else ("reward_mean", "mean_reward")
    _line(axes, places[0], column(metrics, what), BLUE, "loss" if learned else "reward of the trained samples")
    known = np.isfinite(column(evaluations, held_out))
    accuracy, low, high = (column(evaluations, key)[known] for key in (held_out, "low", "high"))
    at = places[1][known]
    axes.fill_between(at, low, high, color=ORANGE, alpha=0.18, linewidth=0)
    axes.plot(
        at,
        accuracy,
        color=ORANGE,
        linewidth=2,
        marker="o" if len(accuracy) <= MOST_POINTS else "",
        markersize=4.5,
        label="held-out loss" if learned else "held-out accuracy, 95 % interval",
    )


def _over_steps(*all_axes: Axes) -> None:
    for axes in all_axes:
        axes.set_xlabel("step")
        axes.locator_params(axis="x", integer=True)


def _legend(figure: Figure, axes: Axes) -> None:
    """What the curves of these axes are called, if they are."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        outside_legend(figure, handles, labels)


def _line(axes: Axes, x: Floats, values: Floats, colour: str, label: str = "") -> None:
    """One number per step; where there are many, thinly, with the running mean on top."""
    if len(x) < SMOOTH_FROM:
        axes.plot(x, values, color=colour, linewidth=2, label=label)
        return
    axes.plot(x, values, color=colour, linewidth=1, alpha=0.35)
    axes.plot(x, _running_mean(values), color=colour, linewidth=2, label=label)


def _running_mean(values: Floats) -> Floats:
    """Mean over a window centred on each value, of a twentieth of all values and at least five; skips NaN."""
    half = max(2, len(values) // 40)
    window = np.ones(2 * half + 1)
    known = np.isfinite(values)
    sums = np.convolve(np.where(known, values, 0.0), window)[half:-half]
    counts = np.convolve(known.astype(np.float64), window)[half:-half]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def _thinned(steps: Floats, shares: Floats) -> tuple[Floats, Floats]:
    """First step and mean shares of at most BINS runs of steps, so that thin bars do not flicker."""
    size = -(-len(steps) // BINS)
    starts = np.arange(0, len(steps), size)
    lengths = np.diff(np.append(starts, len(steps)))
    return steps[starts], np.add.reduceat(shares, starts, axis=0) / lengths[:, None]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else "< 1 %"


def _ages(row: Row) -> list[tuple[int, float]]:
    return [(int(match[1]), number(row, key) or 0.0) for key in row if (match := _AGE_KEY.fullmatch(key)) is not None]


def column(rows: Sequence[Row], key: str) -> Floats:
    """A number of each row."""
    values = [number(row, key) for row in rows]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
