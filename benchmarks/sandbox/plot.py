"""Plot of `benchmarks.sandbox.run`: one bar for each time, on a logarithmic axis, with Flash beside swe-rex."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.form import Row, new_picture, save_picture

OURS, OVER_HTTP, PEER, ENGINE = "Flash", "Flash, over its HTTP service", "swe-rex 1.4.0", "the engine alone"
"""Names of the systems in the legend."""
COLORS = {OURS: "#2f6fb0", OVER_HTTP: "#8fb6da", PEER: "#d98032", ENGINE: "#a8a8a8"}
"""Colour of each system."""
GAP = 0.7
"""Space between two groups, in bars."""
NO_POOL = "start to first command, one ready"
"""The case in which the peer has nothing that corresponds to our pool."""
TITLES = {
    "command in a session": "a command in a shell\nthat stays open",
    "fresh command": "a command as a\nprocess of its own",
    NO_POOL: "a sandbox, one ready\nin the pool, and\nits first command",
    "start to first command, from nothing": "a new sandbox, and\nits first command",
}
"""Titles of the groups of bars, by the case of their rows."""
LOWEST_MS, HIGHEST_MS = 0.1, 30_000
"""Ends of the logarithmic axis, in milliseconds."""


class Group(msgspec.Struct, frozen=True):
    """Bars that are compared with each other."""

    case: str
    """Case of the rows, a key of `TITLES`."""
    goal_ms: float | None
    """Goal of Flash's time, in milliseconds; None if it has none."""
    ms: dict[str, float]
    """Time of each system, ours first."""


def groups(rows: Sequence[Row]) -> list[Group]:
    """Return the groups of the picture, from the medians of the rows, as far as they were measured."""
    found = {row.case: row for row in rows if row.metric.endswith("_ms_median")}
    out: list[Group] = []
    for case in TITLES:
        if case not in found:
            continue
        row, http = found[case], found.get(f"{case}, over HTTP")
        times = {OURS: row.ours, OVER_HTTP: http and http.ours, ENGINE: row.bound, PEER: row.reference}
        out.append(Group(case, row.at_most, {system: ms for system, ms in times.items() if ms is not None}))
    return out


def shown(ms: float) -> str:
    """Format a time: whole milliseconds from 10 ms to 1 s, otherwise two significant digits."""
    if ms >= 1000:
        return f"{ms / 1000:.2g} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2g} ms"


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw the medians of a report as bars. `benchmarks.form.main` calls this with the rows of the benchmark."""
    figure, (axes,) = new_picture(8.4, 5.1)
    y = 0.0  # position of the next bar on the vertical axis
    centres: list[float] = []  # centre of each group
    named: set[str] = set()  # systems that the legend has
    shown_groups = groups(rows)
    for group in shown_groups:
        first = y
        for system, ms in group.ms.items():
            goal, note = (group.goal_ms if system == OURS else None), shown(ms)
            if goal is not None:
                note += f" (goal {shown(goal)})"
                axes.plot([goal] * 2, [y - 0.43, y + 0.43], color="black", lw=1.8)
            if system == PEER and (factor := ms / group.ms[OURS]) >= 2:
                note += f", {factor:.0f}×" + (" (no pool)" if group.case == NO_POOL else "")
            axes.barh(y, ms, 0.86, color=COLORS[system], label=None if system in named else system)
            axes.text(1.13 * max(ms, goal or 0.0), y, note, va="center", fontsize=8.5)
            named.add(system)
            y += 1
        centres.append((first + y - 1) / 2)
        y += GAP
    axes.plot([], [], color="black", lw=1.8, label="goal")
    axes.set_yticks(centres, [TITLES[group.case] for group in shown_groups], fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(LOWEST_MS, HIGHEST_MS)
    axes.set_xticks([0.1, 1, 10, 100, 1000], ["0.1 ms", "1 ms", "10 ms", "100 ms", "1 s"], fontsize=8.5)
    axes.minorticks_off()
    axes.set_title("Time until the answer: median, logarithmic, shorter is better", fontsize=10.5)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(fontsize=8.5, frameon=False, loc="lower center", ncol=len(named) + 1)
    save_picture(figure, file, bottom=0.06)
