"""What the simulated figures share: their comparisons, their plots, and the tables of docs/figures.md.

A figure compares four numbers for each case: the published one, a peer's rules, our own code, and a bound that no
schedule exceeds, the last three in the same simulation of the same workload. Speed-ups are over the same simulated
baseline. `python -m benchmarks.simulated.figure` writes the tables of docs/figures.md from benchmarks/results/*.json.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.form import RESULTS, ROOT, Row

CLOSE = 0.15
"""How far a simulated peer may be from the published figure, as a share of it."""
TIE = 0.99
"""Ours is as fast as a peer from this share of its speed on: where both do the same, the order of events differs."""
NAMES = {"reference": "published", "peer": "ROLL Flash rules", "ours": "ours", "bound": "bound"}
COLORS = {"reference": "#8c8c8c", "peer": "#d98032", "ours": "#2f6fb0", "bound": "#9ac29a"}


# -- rows ------------------------------------------------------------------------------------------------------------


def speedup(
    case: str, baseline_s: float, ours_s: float, peer_s: float, bound_s: float | None, published: float | None
) -> list[Row]:
    """The speed-up over a baseline, and how well the peer's rules reproduce the published one."""
    peer = baseline_s / peer_s
    bound = None if bound_s is None else baseline_s / bound_s
    rows = [Row(case, "speedup", "x", baseline_s / ours_s, published, TIE * peer, peer, bound)]
    if published is not None:
        rows.append(Row(case, "reproduction_error", "share", abs(peer / published - 1), None, CLOSE))
    return rows


# -- plots -----------------------------------------------------------------------------------------------------------


def bars(title: str, unit: str, metric: str = "speedup") -> Callable[[Sequence[Row], Path], None]:
    """A plot of one metric: a group of bars per case, one bar per number that it has."""

    def plot(rows: Sequence[Row], file: Path) -> None:
        chosen = [row for row in rows if row.metric == metric]
        figure, axes = _canvas(title)
        columns = [name for name in NAMES if any(getattr(row, name) is not None for row in chosen)]
        width = 0.8 / len(columns)
        for i, name in enumerate(columns):
            places = [j + (i - (len(columns) - 1) / 2) * width for j in range(len(chosen))]
            heights = [getattr(row, name) or 0.0 for row in chosen]
            drawn = axes.bar(places, heights, width * 0.92, label=NAMES[name], color=COLORS[name])
            axes.bar_label(drawn, [f"{height:.2f}" if height else "" for height in heights], fontsize=7, padding=1)
        axes.set_xticks(range(len(chosen)), [row.case.replace(", ", "\n") for row in chosen], fontsize=8)
        axes.set_ylabel(unit)
        _save(figure, axes, file)

    return plot


def lines(title: str, across: str, unit: str, metric: str) -> Callable[[Sequence[Row], Path], None]:
    """A plot of one metric over the number in the case; cases that differ in more than the number are lines of their
    own."""

    def plot(rows: Sequence[Row], file: Path) -> None:
        figure, axes = _canvas(title)
        series: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for row in rows:
            number = re.search(r"\d+(\.\d+)?", row.case)
            if row.metric != metric or number is None:
                continue
            rest = row.case.partition(", ")[2]
            for name in NAMES:
                value = getattr(row, name)
                if value is not None:
                    series.setdefault((name, rest), []).append((float(number[0]), value))
        marks = dict(zip(dict.fromkeys(rest for _, rest in series), "os^D", strict=False))
        for (name, rest), points in series.items():
            label = f"{NAMES[name]}, {rest}" if rest else NAMES[name]
            style = {"reference": "none", "bound": "--"}.get(name, "-")
            axes.plot(*zip(*points, strict=True), style, marker=marks[rest], ms=4, color=COLORS[name], label=label)
        axes.set_xlabel(across)
        axes.set_ylabel(unit)
        _save(figure, axes, file)

    return plot


def _canvas(title: str) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.4), dpi=100)
    axes.set_title(f"{title} (simulated)", fontsize=10)
    return figure, axes


def _save(figure: Any, axes: Any, file: Path) -> None:
    from matplotlib import pyplot

    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


# -- the page --------------------------------------------------------------------------------------------------------


def write_tables(page: Path, results: Path) -> list[str]:
    """Put the table of each `<!-- table: NAME -->` … `<!-- end -->` into a page; returns the names without results."""
    missing: list[str] = []

    def table(match: re.Match[str]) -> str:
        name = match[1]
        file = results / f"{name}.json"
        if not file.exists():
            missing.append(name)
            return match[0]
        rows = msgspec.json.decode(file.read_bytes(), type=list[Row])
        return f"<!-- table: {name} -->\n{as_markdown(rows)}\n<!-- end -->"

    text = re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, page.read_text(), flags=re.DOTALL)
    page.write_text(text)
    return missing


def as_markdown(rows: Sequence[Row]) -> str:
    """The rows as a table, without the reproduction errors: who reads the page sees both numbers."""
    out = ["| case | metric | published | ROLL Flash rules simulated | ours | bound |", "|---|---|--:|--:|--:|--:|"]
    out += [
        f"| {row.case} | {row.metric} [{row.unit}] | {_cell(row.reference)} | {_cell(row.peer)} | {_cell(row.ours)} "
        f"| {_cell(row.bound)} |"
        for row in rows
        if row.metric != "reproduction_error"
    ]
    return "\n".join(out)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    for absent in write_tables(ROOT / "docs" / "figures.md", RESULTS):
        sys.stderr.write(f"no results of {absent}: run python -m benchmarks {absent}\n")
