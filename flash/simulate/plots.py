"""Plots for `flash simulate --plot`, as PNG bytes.

`draw_run` shows the time and the ages of one run, `draw_sweep` the throughput over the values of a sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flash.observe.plots import BLUE, ORANGE, new_figure, png
from flash.simulate.report import SimReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flash.simulate.report import SweepCell

HEIGHT = 3.4
"""Height of a figure, in inches."""
IDLE_COLOURS = ("#d9d9d9", "#e69f00", "#cc79a7", "#56b4e9", "#f0e442")
"""Colours of the causes of idleness; they repeat if there are more causes."""


def draw_sweep(cells: Sequence[SweepCell]) -> bytes:
    """Plot throughput over the values of the last key, with one line for each combination of the other keys' values."""
    figure, axes = _figure(1)
    *others, last = cells[0].values
    lines: dict[tuple[str, ...], list[SweepCell]] = {}
    for cell in cells:
        lines.setdefault(tuple(cell.values[key] for key in others), []).append(cell)
    numbers = _numbers([cell.values[last] for cell in cells])
    for values, line in lines.items():
        label = ", ".join(f"{_short(key)} {value}" for key, value in zip(others, values, strict=True))
        places = [numbers[cell.values[last]] for cell in line]
        axes[0].plot(places, [cell.report.tokens_per_s for cell in line], marker="o", label=label or None)
    axes[0].set_xticks(list(numbers.values()), list(numbers))
    axes[0].set_xlabel(_short(last))
    axes[0].set_ylabel("trained tokens per second")
    axes[0].set_ylim(0, None)
    if others:
        axes[0].legend(frameon=False, fontsize=8)
    return png(figure)


def draw_run(report: SimReport) -> bytes:
    """Plot how engines and trainers spent their time, and the ages of the trained tokens."""
    figure, (time, ages) = _figure(2)
    causes = sorted({*report.engine_idle, *report.trainer_idle})
    rows = [("trainers", report.trainer_busy, report.trainer_idle), ("engines", report.engine_busy, report.engine_idle)]
    names = [name for name, _, _ in rows]
    start = [busy for _, busy, _ in rows]
    time.barh(names, start, color=BLUE, label="busy")
    for place, cause in enumerate(causes):
        shares = [idle.get(cause, 0.0) for _, _, idle in rows]
        time.barh(names, shares, left=start, color=IDLE_COLOURS[place % len(IDLE_COLOURS)], label=f"idle: {cause}")
        start = [at + share for at, share in zip(start, shares, strict=True)]
    time.set_xlabel("share of the time")
    time.set_xlim(0, 1)
    time.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=3)
    total = sum(report.ages.values()) or 1
    ages.bar(
        [str(age) for age in sorted(report.ages)], [report.ages[a] / total for a in sorted(report.ages)], color=ORANGE
    )
    ages.set_xlabel("age of trained tokens, in versions")
    ages.set_ylabel("share")
    return png(figure)


def _numbers(values: Sequence[str]) -> dict[str, float]:
    """Return the position of each value on the axis: the value itself, or 0, 1, 2, … if a value is not a number."""
    try:
        return {value: float(value) for value in values}
    except ValueError:
        return {value: float(place) for place, value in enumerate(dict.fromkeys(values))}


def _short(key: str) -> str:
    """Return the last part of a dotted key."""
    return key.rpartition(".")[2]


def _figure(columns: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with this many plots side by side, and the plots."""
    figure = new_figure(HEIGHT)
    axes = list(figure.subplots(1, columns, squeeze=False).flat)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes
