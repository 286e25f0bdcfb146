"""The pictures of a run, drawn from the files of its run directory and nothing else.

    reward.png     reward of the trained samples and held-out accuracy, over steps and over time
    ages.png       how old the trained tokens were
    offpolicy.png  how far the trained tokens were from the policy that trained on them
    domains.png    what each of several domains earns, and its share of what is trained
    mismatch.png   how far engine and trainer are apart at equal weights, by environment
    timeline.png   who was busy when: the whole run, and a few steps of it close up

Drawn for 800 pixels of width, at twice that resolution. matplotlib is imported on the first call; no global
state of it is touched, so that drawing may happen in a worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flash.observe.columns.column import LIMITS
from flash.observe.columns.table import named
from flash.observe.plots.series import (
    IDLE,
    AgeSeries,
    DomainSeries,
    Floats,
    MismatchSeries,
    OffPolicySeries,
    RewardSeries,
    TimelineLane,
    TimelineSeries,
    age_series,
    domain_series,
    drawing_order,
    lane_shares,
    mismatch_series,
    offpolicy_series,
    reward_series,
    timeline,
)
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
)
from flash.observe.rundir.rundir import RunDirectory, write_atomically, writing
from flash.types import Activity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL_MISMATCH = 1e-9
"""Below this the axis of the mismatch is linear, down to 0: float32 makes less."""
MASK_COLOURS = (PURPLE, GREEN, "#e69f00")
RATIO_TICKS = (
    (0.12, (1.02, 1.05, 1.1)),
    (0.5, (1.1, 1.25, 1.5)),
    (1.5, (1.5, 2.0, 4.0)),
    (4.0, (2.0, 5.0, 20.0)),
    (np.inf, (10.0, 1e2, 1e3, 1e4, 1e6, 1e8)),
)
"""Largest logarithm of a ratio in the picture, and the ratios above 1 that get a tick; their inverses do too."""
COLOURS = {
    "wait": "#d9d9d9",
    "generate": "#0072b2",
    "train": "#009e73",
    "evaluate": "#56b4e9",
    "publish": "#f0e442",
    "swap": "#d55e00",
    "checkpoint": "#cc79a7",
}
"""Okabe and Ito's palette: told apart by colour-blind readers too."""
OTHER = "#000000"
"""Colour of an activity that COLOURS does not know."""
BINS = 400
"""Bins of time in the view of the whole run: about two pixels each."""
SMOOTH_FROM = 20
"""Steps from which a running mean is drawn over the rewards."""
MOST_POINTS = 40
"""Evaluations up to which each is marked by a point."""
MAX_LANES = 24
"""Lanes drawn; of more, evenly chosen ones are."""


def write_plots(run_dir: Path) -> list[Path]:
    """Draw what the run directory has rows for, into its `plots/`; returns the files.

    Raises RunDirectoryError when they cannot be written.
    """
    directory = RunDirectory(run_dir)
    metrics, evaluations = directory.read_metrics(), directory.read_evaluations()
    figures: dict[str, Figure] = {}
    rewards = reward_series(metrics, evaluations)
    if rewards.steps.size or rewards.eval_steps.size:
        figures["reward.png"] = draw_rewards(rewards)
    if (domains := domain_series(metrics, evaluations)) is not None:
        figures["domains.png"] = draw_domains(domains)
    if (ages := age_series(metrics)) is not None:
        figures["ages.png"] = draw_ages(ages)
    if (offpolicy := offpolicy_series(metrics)) is not None:
        figures["offpolicy.png"] = draw_offpolicy(offpolicy)
    if (mismatch := mismatch_series(metrics)) is not None:
        figures["mismatch.png"] = draw_mismatch(mismatch)
    if (bars := timeline(directory.read_spans(), metrics)) is not None:
        figures["timeline.png"] = draw_timeline(bars)
    if figures:
        with writing(directory.plots):
            directory.plots.mkdir(exist_ok=True)
    paths: list[Path] = []
    for name, figure in figures.items():
        write_atomically(directory.plots / name, png(figure))
        paths.append(directory.plots / name)
    return paths


def draw_rewards(series: RewardSeries) -> Figure:
    """Reward and held-out accuracy, over steps on the left and over time on the right."""
    figure = new_figure(3.4)
    left, right = plain_axes(figure, 1, 2, sharey=True)
    known = np.concatenate([series.times, series.eval_times])
    longest = float(np.nanmax(known)) if np.isfinite(known).any() else 0.0
    scale, unit = _time_unit(longest)
    _curves(left, series.steps, series.eval_steps, series)
    _curves(right, series.times / scale, series.eval_times / scale, series)
    left.set_xlabel("step")
    left.locator_params(axis="x", integer=True)
    right.set_xlabel(unit)
    if left.get_ylim()[0] > 0 and left.get_ylim()[1] <= 1.3:
        left.set_ylim(0, None)
    handles, labels = left.get_legend_handles_labels()
    outside_legend(figure, handles, labels)
    return figure


def draw_domains(series: DomainSeries) -> Figure:
    """Rewards by domain on the left, dashed on held-out problems; shares of the trained groups on the right."""
    figure = new_figure(3.4)
    left, right = plain_axes(figure, 1, 2)
    names = sorted({*series.rewards, *series.held_out})
    for name, colour in zip(names, cycle((BLUE, *MASK_COLOURS, ORANGE))):
        if name in series.rewards:
            _line(left, series.steps, series.rewards[name], colour, name)
        if name in series.held_out:
            known = np.isfinite(series.held_out[name])
            held_out = series.held_out[name][known]
            left.plot(series.eval_steps[known], held_out, color=colour, linestyle="--", marker="o", markersize=3)
        if name in series.shares:
            right.plot(series.steps, 100 * series.shares[name], color=colour, linewidth=2)
    left.set_ylabel("mean reward; dashed: held out")
    right.set_ylabel("% of the groups trained so far")
    right.set_ylim(0, 100)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.locator_params(axis="x", integer=True)
    handles, labels = left.get_legend_handles_labels()
    if labels:
        outside_legend(figure, handles, labels)
    return figure


def draw_ages(series: AgeSeries) -> Figure:
    """Share of trained tokens by age: over the whole run on the left, step by step on the right."""
    from matplotlib import colormaps

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
    right.set_xlabel("step")
    right.locator_params(axis="x", integer=True)
    right.set_ylabel("% of the step's tokens")
    return figure


def draw_offpolicy(series: OffPolicySeries) -> Figure:
    """Effective sample size, ratios by age, tokens without a gradient, entropy and gradient norm."""
    figure = new_figure(5.4)
    weights, ratios, shares, policy = plain_axes(figure, 2, 2)
    _line(weights, series.steps, 100 * series.ess, BLUE)
    weights.set_ylim(0, 105)
    weights.set_ylabel(named("ess").axis)
    _draw_ratios(ratios, series)
    _line(shares, series.steps, 100 * series.clipped, ORANGE, named("clip_fraction").label)
    for (reason, share), colour in zip(series.masked.items(), MASK_COLOURS, strict=False):
        _line(shares, series.steps, 100 * share, colour, f"masked: {reason}")
    shares.set_ylim(0, max(1.0, 1.1 * shares.get_ylim()[1]))
    shares.set_ylabel("% of tokens")
    shares.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, labelcolor=INK, fontsize=9, handlelength=1.3
    )
    _line(policy, series.steps, series.entropy, BLUE)
    policy.set_ylim(0, None)
    policy.set_ylabel(named("entropy").axis, color=BLUE)
    norms = policy.twinx()
    norms.spines[["top", "left"]].set_visible(False)
    norms.spines[["right", "bottom"]].set_color(FAINT)
    norms.tick_params(colors=INK, labelsize=10)
    _line(norms, series.steps, series.grad_norm, ORANGE)
    norms.set_ylim(0, None)
    norms.set_ylabel(named("grad_norm").axis, color=ORANGE)
    for axes in (weights, shares, policy):
        axes.set_xlabel("step")
        axes.locator_params(axis="x", integer=True)
    return figure


def draw_mismatch(series: MismatchSeries) -> Figure:
    """Engine against trainer at equal weights, a line for each environment, and from where on people are warned."""
    figure = new_figure(3.0)
    (axes,) = plain_axes(figure, 1, 1, squeeze=False)
    axes.set_yscale("symlog", linthresh=SMALL_MISMATCH)
    for (name, values), colour in zip(series.by_environment.items(), cycle((BLUE, *MASK_COLOURS, ORANGE))):
        _line(axes, series.steps, values, colour, name)
    limit = LIMITS.mismatch or 0.0
    axes.axhline(limit, color=FAINT, linewidth=1, linestyle="--")
    axes.set_ylim(0, 1.5 * max(limit, axes.get_ylim()[1]))
    axes.set_xlabel("step")
    axes.set_ylabel(named("mismatch_k3_age_0").axis)
    axes.locator_params(axis="x", integer=True)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        outside_legend(figure, handles, labels)
    return figure


def _draw_ratios(axes: Axes, series: OffPolicySeries) -> None:
    """At each age the median of the ratio, and a bar from its 1 % to its 99 % quantile."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, median, high = series.ratios.T
    axes.set_yscale("log")
    axes.axhline(1.0, color=FAINT, linewidth=1)
    axes.vlines(series.ages, low, high, color=BLUE, linewidth=min(12.0, 120 / (1 + len(series.ages))), alpha=0.35)
    axes.plot(series.ages, median, color=BLUE, marker="o", markersize=5, linewidth=0)
    widest = float(np.nanmax(np.abs(np.log(series.ratios)), initial=0.05)) * 1.1
    axes.set_ylim(np.exp(-widest), np.exp(widest))
    ticks = next((ticks for span, ticks in RATIO_TICKS if widest < span), RATIO_TICKS[-1][1])
    axes.yaxis.set_major_locator(FixedLocator([*(1 / tick for tick in ticks), 1.0, *ticks]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:.3g}" if ratio < 1000 else f"{ratio:,.0f}"))
    axes.set_xlim(-0.6, float(series.ages.max(initial=0.0)) + 0.6)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.set_xlabel("age in versions")
    axes.set_ylabel("ratio: median, 1 to 99 %")


def draw_timeline(series: TimelineSeries) -> Figure:
    """The whole run on top, as shares of time where single bars would be too thin; the close-up below."""
    lanes = _chosen(series.lanes)
    figure = new_figure(1.7 + 2 * 0.34 * len(lanes))
    whole, close = plain_axes(figure, 2, 1)
    scale, unit = _time_unit(series.stop - series.start)
    edges = np.linspace(series.start, series.stop, BINS + 1)
    first, last = series.zoom
    for place, lane in enumerate(lanes):
        if len(lane.spans) > BINS:
            _stack(whole, place, lane_shares(lane.spans, edges), (edges - series.start) / scale)
        else:
            _bars(whole, place, lane.spans, (series.start, series.stop), scale)
        _bars(close, place, lane.spans, series.zoom, 1.0)
        whole.text(
            1.01,
            place,
            f"{100 * lane.busy:.0f} % busy",
            transform=whole.get_yaxis_transform(),
            va="center",
            color=INK,
            fontsize=9,
        )
    marks = ((first - series.start) / scale, (last - series.start) / scale)
    whole.axvspan(*marks, color=INK, alpha=0.15, linewidth=0, zorder=0)
    whole.vlines(marks, -0.55, len(lanes) - 0.45, color=INK, linewidth=1)
    whole.set_xlim(0, (series.stop - series.start) / scale)
    whole.set_xlabel(f"whole run, {unit}")
    close.set_xlim(0, last - first)
    close.set_xlabel(f"{_steps_named(series.zoom_steps)} (marked above), seconds")
    for axes in (whole, close):
        axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
        axes.set_ylim(len(lanes) - 0.45, -0.55)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
    _activity_legend(figure, lanes)
    return figure


def _curves(axes: Axes, x: Floats, eval_x: Floats, series: RewardSeries) -> None:
    """Rewards as a line, evaluations as points in the band of their intervals."""
    _line(axes, x, series.rewards, BLUE, "reward of the trained samples")
    known = np.isfinite(series.accuracy)
    accuracy, eval_x = series.accuracy[known], eval_x[known]
    axes.fill_between(eval_x, series.low[known], series.high[known], color=ORANGE, alpha=0.18, linewidth=0)
    axes.plot(
        eval_x,
        accuracy,
        color=ORANGE,
        linewidth=2,
        marker="o" if len(accuracy) <= MOST_POINTS else "",
        markersize=4.5,
        label="held-out accuracy, 95 % interval",
    )


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


def _stack(axes: Axes, place: int, shares: dict[str, Floats], edges: Floats) -> None:
    """One lane of the whole run: in each bin the shares of its activities, work below, waiting on top."""
    floor = np.full(len(edges) - 1, place + 0.4)
    for name in sorted(shares, key=lambda name: name in IDLE):
        top = floor - 0.8 * shares[name]
        axes.stairs(top, edges, baseline=floor, fill=True, color=COLOURS.get(name, OTHER), linewidth=0)
        floor = top


def _bars(axes: Axes, place: int, spans: Sequence[Activity], window: tuple[float, float], scale: float) -> None:
    """One lane, bar by bar; where bars overlap, the activity that matters more lies on top."""
    first, last = window
    seen = [span for span in spans if span.stop > first and span.start < last]
    for name in drawing_order(span.name for span in seen):
        bars = [((span.start - first) / scale, (span.stop - span.start) / scale) for span in seen if span.name == name]
        # The edge keeps bars visible that are thinner than a pixel.
        colour = COLOURS.get(name, OTHER)
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolor=colour, edgecolor=colour, linewidth=0.4)


def _activity_legend(figure: Figure, lanes: Sequence[TimelineLane]) -> None:
    from matplotlib.patches import Patch

    names = drawing_order(span.name for lane in lanes for span in lane.spans)
    outside_legend(figure, [Patch(color=COLOURS.get(name, OTHER)) for name in names], names)


def _chosen(lanes: Sequence[TimelineLane]) -> list[TimelineLane]:
    if len(lanes) <= MAX_LANES:
        return list(lanes)
    return [lanes[place * len(lanes) // MAX_LANES] for place in range(MAX_LANES)]


def _steps_named(steps: tuple[int, int] | None) -> str:
    if steps is None:
        return "the middle"
    return f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"


def _time_unit(seconds: float) -> tuple[float, str]:
    """Seconds in the unit that reads best, and its name."""
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else "< 1 %"
