"""The plots that a run draws at its end, from the files of its run directory alone, and the style of all plots.

    reward.png     reward of the trained samples and held-out accuracy, over steps and over time
    offpolicy.png  distance between the trained tokens' sampling policy and the policy that was trained on them
    timeline.png   activity of each worker over time (flash.observe.timeline)

`flash.observe.recorder` calls `write_plots` at the end of a run that was not interrupted, and `flash plot` calls it
for a run of any age. All other numbers are charts of `flash view`. `flash simulate --plot` and `flash rhythm --plot`
draw their own plots, and use `new_figure`, `png` and the colours of this file.

matplotlib is imported on the first call, because its import is slow and most commands draw nothing. Nothing here uses
matplotlib's global state (pyplot), because the recorder draws in a worker thread. A number that is not known is NaN,
which matplotlib draws as a gap.

A row is a line of `metrics.jsonl`, one for each step, or of `evals.jsonl`, one for each evaluation on held-out
problems. Legend of shapes: S steps, E evaluations, K ages (versions between sampling and training).
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flash.observe.columns.table import named
from flash.observe.rundir.rundir import RunDirectory, write_atomically, writing
from flash.observe.rundir.summary import by_step, number
from flash.observe.timeline import (
    COLOURS,
    IDLE,
    OTHER,
    Floats,
    TimelineLane,
    TimelineSeries,
    drawing_order,
    lane_shares,
    timeline,
)
from flash.types import Activity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH = 8.0
"""Width of a plot in inches. A README shows 100 pixels per inch."""
DPI = 200
"""Pixels per inch of the file, twice those of a README, for sharp text on fine screens."""
INK = "#333333"
"""Colour of text."""
FAINT = "#8c8c8c"
"""Colour of axes and of lines in the background."""
GRID = "#e6e6e6"
"""Colour of the grid."""
BLUE = "#0072b2"
"""BLUE, ORANGE, GREEN and PURPLE are colours of curves, from Okabe and Ito's palette for colour-blind readers."""
ORANGE = "#d55e00"
GREEN = "#009e73"
PURPLE = "#cc79a7"


Row = Mapping[str, Any]
"""A line of `metrics.jsonl` or `evals.jsonl`: numbers by the names of their columns."""
RATIO_TICKS = (
    (0.12, (1.02, 1.05, 1.1)),
    (0.5, (1.1, 1.25, 1.5)),
    (1.5, (1.5, 2.0, 4.0)),
    (4.0, (2.0, 5.0, 20.0)),
    (np.inf, (10.0, 1e2, 1e3, 1e4, 1e6, 1e8)),
)
"""Ticks of an axis of ratios: pairs of the largest |log ratio| that the axis shows, and the ratios above 1 that get a
tick. The inverses of these ratios get a tick too."""
LEAST_SMOOTHED = 20
"""Number of steps from which a running mean is drawn over a curve."""
MOST_POINTS = 40
"""Largest number of evaluations in a plot of which each gets a point. More evaluations are only a line."""
MASKED_COLUMNS = tuple(map(named, ("masked_old_share", "masked_correction_share", "masked_cap_share")))
"""Columns with shares of tokens that are left out of the loss or get weight 0."""
MASKED_COLOURS = (PURPLE, GREEN, "#e69f00")
"""Colours of the curves of MASKED_COLUMNS. Each curve that is drawn gets the next one."""
_RATIO_KEY = re.compile(r"ratio_p50_age_(\d+)")
"""Key in a row for the median ratio of the tokens of one age. The group is the age."""
BINS = 400
"""Number of time bins in the upper half of `timeline.png`, which shows the whole run."""
MAX_LANES = 24
"""Largest number of lanes in `timeline.png`. Of more lanes, evenly spaced ones are drawn."""


def new_figure(height: float) -> Figure:
    """Return an empty figure with the width of all plots and a height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def plain_axes(figure: Figure, rows: int, columns: int, **options: Any) -> list[Axes]:
    """Fill a figure with a grid of axes in the style of all plots, and return them row by row.

    `options` go to matplotlib's `subplots`.
    """
    grid = list(figure.subplots(rows, columns, **options).flat)
    for axes in grid:
        style_axes(axes)
    return grid


def style_axes(axes: Axes) -> None:
    """Give axes the style of all plots: two spines, and a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=10)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def outside_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Add a legend without a box, as one line above the axes."""
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=len(labels),
        frameon=False,
        labelcolor=INK,
        fontsize=10,
        handlelength=1.3,
        columnspacing=1.6,
    )


def png(figure: Figure) -> bytes:
    """Return the figure as the content of a PNG file."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DPI, facecolor="white")
    return image.getvalue()


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit of a time axis of this length: the seconds in one unit, and the unit's name."""
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def write_plots(run_dir: Path) -> list[Path]:
    """Draw the plots that the run directory has rows for into its folder `plots/`, and return their paths.

    Without any rows it makes no folder and returns an empty list. The run may still go on.

    Raises:
        RunDirectoryError: a file of the run cannot be read, or the plots cannot be written.
    """
    directory = RunDirectory(run_dir)
    metrics, evaluations = by_step(directory.read_metrics()), by_step(directory.read_evaluations())
    series = timeline(directory.read_spans(), metrics)
    drawn = {
        "reward.png": draw_rewards(metrics, evaluations),
        "offpolicy.png": draw_offpolicy(metrics),
        "timeline.png": None if series is None else draw_timeline(series),
    }
    figures = {directory.plots / name: figure for name, figure in drawn.items() if figure is not None}
    if figures:
        with writing(directory.plots):
            directory.plots.mkdir(exist_ok=True)
    for path, figure in figures.items():
        write_atomically(path, png(figure))
    return list(figures)


def draw_rewards(metrics: Sequence[Row], evaluations: Sequence[Row]) -> Figure | None:
    """Return `reward.png`: reward and held-out accuracy, over steps on the left and over time on the right.

    Returns None if there are no rows.
    """
    if not metrics and not evaluations:
        return None
    figure = new_figure(3.4)
    left, right = plain_axes(figure, 1, 2, sharey=True)
    times, eval_times = run_times(metrics, evaluations)
    all_times = np.concatenate([times, eval_times])
    scale, unit = time_unit(float(np.nanmax(all_times)) if np.isfinite(all_times).any() else 0.0)
    _draw_reward_curves(left, (column(metrics, "step"), column(evaluations, "step")), metrics, evaluations)
    _draw_reward_curves(right, (times / scale, eval_times / scale), metrics, evaluations)
    _label_steps(left)
    right.set_xlabel(unit)
    # Values between 0 and about 1 are probably shares, such as accuracies: an axis from 0 shows how large they are.
    if left.get_ylim()[0] > 0 and left.get_ylim()[1] <= 1.3:
        left.set_ylim(0, None)
    _add_legend(figure, left)
    return figure


def run_times(metrics: Sequence[Row], evaluations: Sequence[Row]) -> tuple[Floats, Floats]:
    """Return the seconds from the start of the run to the end of each step [S] and each evaluation [E].

    `wall_s` of a row has these seconds, without pauses between an end of the run and its resume. A row without it gets
    the seconds since the earliest `time` of all rows.
    """
    origin = min((at for row in (*metrics, *evaluations) if (at := number(row, "time")) is not None), default=0.0)

    def times(rows: Sequence[Row]) -> Floats:
        """Return these seconds for each row; NaN for a row with neither number."""
        walls = column(rows, "wall_s")
        return np.where(np.isnan(walls), column(rows, "time") - origin, walls)

    return times(metrics), times(evaluations)


def draw_offpolicy(metrics: Sequence[Row]) -> Figure | None:
    """Return `offpolicy.png`: effective sample size, ratios by age, tokens without a gradient, entropy, gradient norm.

    Returns None if no row has an effective sample size, as in `flash sft`.
    """
    rows = [row for row in metrics if number(row, "ess") is not None]
    if not rows:
        return None
    figure = new_figure(5.4)
    weights, ratios, shares, policy = plain_axes(figure, 2, 2)
    steps = column(rows, "step")
    _draw_line(weights, steps, 100 * column(rows, "ess"), BLUE)
    weights.set_ylim(0, 105)
    weights.set_ylabel(named("ess").axis)
    _draw_ratios(ratios, *ratio_quantiles(rows))
    _draw_line(shares, steps, 100 * column(rows, "clip_fraction"), ORANGE, named("clip_fraction").label)
    # A reason for which no token was masked in the whole run gets no curve, so that the legend stays short.
    masked = {mask.label: values for mask in MASKED_COLUMNS if np.nan_to_num(values := column(rows, mask.name)).any()}
    for (reason, share), colour in zip(masked.items(), MASKED_COLOURS, strict=False):
        _draw_line(shares, steps, 100 * share, colour, f"masked: {reason}")
    shares.set_ylim(0, max(1.0, 1.1 * shares.get_ylim()[1]))
    shares.set_ylabel("% of tokens")
    shares.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, labelcolor=INK, fontsize=9, handlelength=1.3
    )
    _draw_line(policy, steps, column(rows, "entropy"), BLUE)
    policy.set_ylim(0, None)
    policy.set_ylabel(named("entropy").axis, color=BLUE)
    norms = policy.twinx()
    norms.spines[["top", "left"]].set_visible(False)
    norms.spines[["right", "bottom"]].set_color(FAINT)
    norms.tick_params(colors=INK, labelsize=10)
    _draw_line(norms, steps, column(rows, "grad_norm"), ORANGE)
    norms.set_ylim(0, None)
    norms.set_ylabel(named("grad_norm").axis, color=ORANGE)
    _label_steps(weights, shares, policy)
    return figure


def ratio_quantiles(rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """Return the ages [K] that the rows have a ratio for, and its 1 %, 50 % and 99 % quantiles [K, 3] over the run.

    The ratio of a token is its probability under the policy that is trained, divided by its probability under the
    policy that sampled it. A row has the quantiles at the start of its step, by age. A quantile over the run is the
    geometric mean of the steps' quantiles. The weight of a step is its number of trained tokens of that age.
    """
    ages = sorted({int(match[1]) for row in rows for key in row if (match := _RATIO_KEY.fullmatch(key)) is not None})
    ratios = [[_mean_ratio(rows, age, percent) for percent in (1, 50, 99)] for age in ages]
    return np.array(ages, dtype=np.float64), np.array(ratios).reshape(-1, 3)


def _mean_ratio(rows: Sequence[Row], age: int, percent: int) -> float:
    """Return one quantile of `ratio_quantiles`: a weighted geometric mean over all rows; NaN if no row has it."""
    # `age_2` is the share of the trained tokens that have age 2. A ratio that is not positive has no logarithm.
    weighted = [
        (math.log(ratio), (number(row, f"age_{age}") or 0.0) * (number(row, "trained_tokens") or 0.0))
        for row in rows
        if (ratio := number(row, f"ratio_p{percent}_age_{age}") or 0.0) > 0
    ]
    total = sum(weight for _, weight in weighted)
    return math.exp(sum(log_ratio * weight for log_ratio, weight in weighted) / total) if total else math.nan


def _draw_ratios(axes: Axes, ages: Floats, ratios: Floats) -> None:
    """Draw the median of the ratio at each age, and a bar from its 1 % to its 99 % quantile.

    `ages` [K] and `ratios` [K, 3] come from `ratio_quantiles`.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, median, high = ratios.T
    # The axis is logarithmic and symmetric around 1, where both policies agree: 2 is as far from 1 as one half.
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


def _draw_reward_curves(
    axes: Axes, places: tuple[Floats, Floats], metrics: Sequence[Row], evaluations: Sequence[Row]
) -> None:
    """Draw one half of `reward.png`: rewards as a line, and evaluations as points in the band of their intervals.

    `places` has the x values of the steps [S] and of the evaluations [E]. A run of `flash sft` has no rewards: its
    losses are drawn instead.
    """
    supervised = any("nll" in row for row in metrics)
    trained_key, held_out_key = ("nll", "held_out_nll") if supervised else ("reward_mean", "mean_reward")
    label = "loss" if supervised else "reward of the trained samples"
    _draw_line(axes, places[0], column(metrics, trained_key), BLUE, label)
    # Evaluations without a value are dropped, so that the line joins the others instead of having a gap.
    known = np.isfinite(column(evaluations, held_out_key))
    held_out, low, high = (column(evaluations, key)[known] for key in (held_out_key, "low", "high"))
    at = places[1][known]
    axes.fill_between(at, low, high, color=ORANGE, alpha=0.18, linewidth=0)
    axes.plot(
        at,
        held_out,
        color=ORANGE,
        linewidth=2,
        marker="o" if len(held_out) <= MOST_POINTS else "",
        markersize=4.5,
        label="held-out loss" if supervised else "held-out accuracy, 95 % interval",
    )


def _label_steps(*all_axes: Axes) -> None:
    """Label the x axis of these axes as steps, with whole numbers."""
    for axes in all_axes:
        axes.set_xlabel("step")
        axes.locator_params(axis="x", integer=True)


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Add a legend with the labels of these axes above the figure, if they have labels."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        outside_legend(figure, handles, labels)


def _draw_line(axes: Axes, x: Floats, values: Floats, colour: str, label: str = "") -> None:
    """Draw `values` of the steps over `x` (steps or times). From LEAST_SMOOTHED steps on, draw the values pale, with
    their running mean on top. Of fewer steps, a value without a known neighbour is a point."""
    if len(x) < LEAST_SMOOTHED:
        # A line of one value has no length: without a point, nothing would be drawn after the first step of a run.
        known = np.pad(np.isfinite(values), 1)
        alone = np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:]).tolist()
        points: dict[str, Any] = {"marker": "o", "markersize": 4.5, "markevery": alone} if alone else {}
        axes.plot(x, values, color=colour, linewidth=2, label=label, **points)
        return
    axes.plot(x, values, color=colour, linewidth=1, alpha=0.35)
    axes.plot(x, _running_mean(values), color=colour, linewidth=2, label=label)


def _running_mean(values: Floats) -> Floats:
    """Return the mean of the known values in a window around each value; NaN where the window has none.

    The window is about a twentieth of all values long, and at least five values.
    """
    half = max(2, len(values) // 40)  # values on each side of the middle one
    window = np.ones(2 * half + 1)
    known = np.isfinite(values)
    # The full convolution is 2 · half longer than `values`. Without both ends, entry i is the window around value i.
    sums = np.convolve(np.where(known, values, 0.0), window)[half:-half]
    counts = np.convolve(known.astype(np.float64), window)[half:-half]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def column(rows: Sequence[Row], key: str) -> Floats:
    """Return the number under `key` of each row [S]; NaN where a row has no finite number."""
    values = [number(row, key) for row in rows]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


# -- the timeline ------------------------------------------------------------------------------------------------------


def draw_timeline(series: TimelineSeries) -> Figure:
    """Return `timeline.png`: the whole run on top, and below it the close-up, a few steps in detail.

    In the whole run, a lane with more than BINS spans is drawn as shares of time, because its bars would be too thin to
    see.
    """
    lanes = _drawn_lanes(series.lanes)
    figure = new_figure(1.7 + 2 * 0.34 * len(lanes))
    whole, close = plain_axes(figure, 2, 1)
    scale, unit = time_unit(series.stop - series.start)
    edges = np.linspace(series.start, series.stop, BINS + 1)
    first, last = series.zoom
    for place, lane in enumerate(lanes):
        if len(lane.spans) > BINS:
            _draw_shares(whole, place, lane_shares(lane.spans, edges), (edges - series.start) / scale)
        else:
            _draw_bars(whole, place, lane.spans, (series.start, series.stop), scale)
        _draw_bars(close, place, lane.spans, series.zoom, 1.0)
        whole.text(
            1.01,
            place,
            f"{100 * lane.busy:.0f} % busy",
            transform=whole.get_yaxis_transform(),
            va="center",
            color=INK,
            fontsize=9,
        )
    # A grey band with two lines marks the close-up in the whole run.
    marks = ((first - series.start) / scale, (last - series.start) / scale)
    whole.axvspan(*marks, color=INK, alpha=0.15, linewidth=0, zorder=0)
    whole.vlines(marks, -0.55, len(lanes) - 0.45, color=INK, linewidth=1)
    whole.set_xlim(0, (series.stop - series.start) / scale)
    whole.set_xlabel(f"whole run, {unit}")
    close.set_xlim(0, last - first)
    close.set_xlabel(f"{_close_up_title(series.zoom_steps)} (marked above), seconds")
    for axes in (whole, close):
        axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
        axes.set_ylim(len(lanes) - 0.45, -0.55)  # the larger end first, which puts lane 0 on top
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
    _add_activity_legend(figure, lanes)
    return figure


def _draw_shares(axes: Axes, place: int, shares: dict[str, Floats], edges: Floats) -> None:
    """Draw a lane as the shares of its activities in each time bin, with work below and waiting on top.

    Args:
        axes: axes to draw on. Their y axis points down.
        place: row of the lane, counted from 0 at the top.
        shares: share of each bin by activity, from `lane_shares`.
        edges: edges of the bins, one more than bins, in the unit of the x axis.
    """
    floor = np.full(len(edges) - 1, place + 0.4)
    for name in sorted(shares, key=lambda name: name in IDLE):
        top = floor - 0.8 * shares[name]
        axes.stairs(top, edges, baseline=floor, fill=True, color=COLOURS.get(name, OTHER), linewidth=0)
        floor = top


def _draw_bars(axes: Axes, place: int, spans: Sequence[Activity], window: tuple[float, float], scale: float) -> None:
    """Draw a lane with a bar for each activity. Where bars overlap, the activity that is later in COLOURS is on top.

    Args:
        axes: axes to draw on.
        place: row of the lane, counted from 0 at the top.
        spans: activities of the lane.
        window: first and last second that the axes show, in Unix seconds.
        scale: seconds in one unit of the x axis.
    """
    first, last = window
    seen = [span for span in spans if span.stop > first and span.start < last]
    for name in drawing_order(span.name for span in seen):
        bars = [((span.start - first) / scale, (span.stop - span.start) / scale) for span in seen if span.name == name]
        # The edge keeps bars visible that are thinner than a pixel.
        colour = COLOURS.get(name, OTHER)
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolor=colour, edgecolor=colour, linewidth=0.4)


def _add_activity_legend(figure: Figure, lanes: Sequence[TimelineLane]) -> None:
    """Add a legend with the colours of the activities that occur in these lanes."""
    from matplotlib.patches import Patch

    names = drawing_order(span.name for lane in lanes for span in lane.spans)
    outside_legend(figure, [Patch(color=COLOURS.get(name, OTHER)) for name in names], names)


def _drawn_lanes(lanes: Sequence[TimelineLane]) -> list[TimelineLane]:
    """Return the lanes that `draw_timeline` draws: all, or MAX_LANES evenly spaced ones."""
    if len(lanes) <= MAX_LANES:
        return list(lanes)
    return [lanes[place * len(lanes) // MAX_LANES] for place in range(MAX_LANES)]


def _close_up_title(steps: tuple[int, int] | None) -> str:
    """Return the words for the part of the run in the close-up.

    `steps` are its first and last step; None if too few steps were recorded, when the close-up is the middle of the
    run's time.
    """
    if steps is None:
        return "the middle"
    return f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"
