"""The picture of `benchmarks.sandbox.run`: one bar per time, on a logarithmic axis, ours beside swe-rex's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.form import Row

OURS, OVER_HTTP, PEER, ENGINE = "Flash", "Flash, over its HTTP service", "swe-rex 1.4.0", "the engine alone"
COLORS = {OURS: "#2f6fb0", OVER_HTTP: "#8fb6da", PEER: "#d98032", ENGINE: "#a8a8a8"}
GAP = 0.7
"""Between two groups, in bars."""
TITLES = {
    "command in a session": ("a command in a shell\nthat stays open", ""),
    "fresh command": ("a command as a\nprocess of its own", ""),
    "start to first command, one ready": ("a sandbox, one ready\nin the pool, and\nits first command", " (no pool)"),
    "start to first command, from nothing": ("a new sandbox, and\nits first command", ""),
}
"""What is said of the groups, and of the peer in them."""
LOWEST_MS, HIGHEST_MS = 0.1, 30_000


class Bar(msgspec.Struct, frozen=True):
    """One bar: what a system takes."""

    system: str
    ms: float


class Group(msgspec.Struct, frozen=True):
    """Bars that are compared with each other."""

    title: str
    bars: list[Bar]
    goal_ms: float | None = None
    remark: str = ""
    """On the peer."""


def groups(rows: Sequence[Row]) -> list[Group]:
    """The medians of the rows, as far as they are there."""
    found = {row.case: row for row in rows if row.metric.endswith("_ms_median")}
    out: list[Group] = []
    for case, (title, remark) in TITLES.items():
        if (row := found.get(case)) is None:
            continue
        others = [(OVER_HTTP, getattr(found.get(f"{case}, over HTTP"), "ours", None))]
        others += [(ENGINE, row.bound), (PEER, row.reference)]
        bars = [Bar(OURS, row.ours), *(Bar(system, ms) for system, ms in others if ms is not None)]
        out.append(Group(title, bars, row.goal, remark))
    return out


def shown(ms: float) -> str:
    """Two or three significant digits, in the unit that people would use."""
    if ms >= 1000:
        return f"{ms / 1000:.2g} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2g} ms"


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw the medians of a report as bars, and write the picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.6, 4.6), dpi=110)
    place, ticks, named = 0.0, list[tuple[float, str]](), set[str]()
    for group in groups(rows):
        first = place
        for bar in group.bars:
            goal = group.goal_ms if bar is group.bars[0] else None
            label = None if bar.system in named else bar.system
            named.add(bar.system)
            axes.barh(place, bar.ms, 0.86, color=COLORS[bar.system], label=label)
            axes.text(1.13 * max(bar.ms, goal or 0.0), place, annotation(group, bar), va="center", fontsize=8.5)
            if goal is not None:
                axes.plot([goal] * 2, [place - 0.43, place + 0.43], color="black", lw=1.8)
            place += 1
        ticks.append(((first + place - 1) / 2, group.title))
        place += GAP
    axes.plot([], [], color="black", lw=1.8, label="goal")
    axes.set_yticks([at for at, _ in ticks], [title for _, title in ticks], fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(LOWEST_MS, HIGHEST_MS)
    axes.set_xticks([0.1, 1, 10, 100, 1000], ["0.1 ms", "1 ms", "10 ms", "100 ms", "1 s"], fontsize=8.5)
    axes.minorticks_off()
    axes.set_title("Time until the answer: median, logarithmic, shorter is better", fontsize=10.5)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=8.5, frameon=False, loc="lower center", ncol=len(named) + 1)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(file)
    pyplot.close(figure)


def annotation(group: Group, bar: Bar) -> str:
    """The figure beside a bar: for ours with its goal, for the peer with how many times ours it is."""
    factor = bar.ms / group.bars[0].ms
    if bar.system == PEER and factor >= 2:
        return f"{shown(bar.ms)}, {factor:.0f}×{group.remark}"
    if bar.system == OURS and group.goal_ms is not None:
        return f"{shown(bar.ms)} (goal {shown(group.goal_ms)})"
    return shown(bar.ms)
