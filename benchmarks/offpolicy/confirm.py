"""A few cells of the off-policy comparison through the whole asynchronous system: `flash train`, engine included.

Three methods at α = 8, with model, task, batch, updates and learning rate of `benchmarks.offpolicy`. There the age of
every token is exactly α; here α bounds it, and what it was is measured. `reference` is the mean final accuracy of the
exact cells, from benchmarks/results/offpolicy_cells.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tomli_w

from benchmarks.form import ROOT, Args, Row, main
from benchmarks.offpolicy.cells import FINAL_POINTS, Cell, read_lines
from benchmarks.offpolicy.run import METHODS, QUICK, SETTING
from benchmarks.offpolicy.summary import KEPT, Summary, summarise
from benchmarks.training import PINNED, Measured, train

BASE = ROOT / "examples" / "tiny.toml"
"""For what a cell does not say: the engine and the cores."""
CONFIRMED = ("grpo", "decoupled_ppo", "topr")
ALPHA = 8
SEED = 0


def cells(quick: bool) -> list[Cell]:
    """What is run: the same cells as in the grid; one of them on a quick run."""
    chosen = [
        Cell(method=method, alpha=ALPHA, seed=SEED, setting=QUICK if quick else SETTING)
        for method in METHODS
        if method.key in CONFIRMED
    ]
    return chosen[:1] if quick else chosen


def overrides(cell: Cell) -> list[str]:
    """The cell as arguments of `flash train`, on top of `BASE`."""
    tables = cell.tables()
    tables["train"]["decay"] = "constant"
    # One evaluation waits for the engine as long as a dozen steps.
    tables["eval"] |= {"every": 2 * cell.setting.eval_every, "temperature": 0.0}
    tables["checkpoint"] = {"every": 1000, "export": False}
    return list(_assignments(tables, ""))


def _assignments(table: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _assignments(value, f"{prefix}{key}.")
        elif not isinstance(value, dict):
            said = "none" if value is None else value
            yield tomli_w.dumps({"value": said}).strip().replace("value", prefix + key, 1).replace(" = ", "=", 1)


def run(args: Args) -> list[Row]:
    """Train the chosen cells, one after the other, and compare each with its exact one."""
    exact = summarise(read_lines(KEPT)) if KEPT.exists() and not args.quick else []
    return [
        row
        for cell in cells(args.quick)
        for row in compared(cell, train(BASE, f"bench-offpolicy-{cell.name}", [*PINNED, *overrides(cell)]), exact)
    ]


def compared(cell: Cell, measured: Measured, exact: list[Summary]) -> list[Row]:
    """The run beside the exact cells of its method and alpha."""
    case = f"{cell.method.title}, α ≤ {cell.alpha}"
    accuracies = [one["mean_reward"] for one in measured.evals]
    final = accuracies[-FINAL_POINTS:]
    same = [one.mean for one in exact if (one.method.key, one.alpha) == (cell.method.key, cell.alpha)]
    return [
        Row(case, "first_accuracy", "share", accuracies[0]),
        Row(case, "final_accuracy", "share", sum(final) / len(final), same[0] if same else None),
        Row(case, "final_accuracy_low", "share", measured.evals[-1]["low"]),
        Row(case, "final_accuracy_high", "share", measured.evals[-1]["high"]),
        Row(case, "age_mean", "versions", measured.mean("age_mean")),
        Row(case, "age_max", "versions", max(row["age_max"] for row in measured.metrics)),
        Row(case, "seconds", "s", measured.seconds),
    ]


if __name__ == "__main__":
    main("offpolicy_confirm", __doc__ or "", run)
