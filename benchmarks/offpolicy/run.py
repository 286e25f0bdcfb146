"""Off-policy methods side by side on data of an exact age, on a small model that learns two-digit sums.

Every cell is one run of the system's own trainer in one process on one core: a method, an age of 0 to 16 versions, a
seed. All share the model, the batches' problems, the learning rate and two updates per version. A cell counts as
collapsed when its final accuracy is below half of its own best or below its start. The results of finished cells are
kept in a file, a line each, and these cells are not run again. So the grid can be run in pieces.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.form import Args, Row, main
from benchmarks.offpolicy.harness import Cell, Method, Result, Setting, append_result, read_results, train_cell
from benchmarks.plots import lines
from flash.observe.stats import Interval, mean_interval
from flash.run.models import make_missing_models

METHODS = (
    Method(key="grpo", objective="grpo"),
    Method(key="ppo", objective="ppo", critic={"learning_rate": 1e-3}, note="with critic"),
    Method(key="decoupled_ppo", objective="decoupled_ppo"),
    Method(key="topr", objective="topr"),
    # With equal weights it would be topr.
    Method(key="topr_weighted", objective="topr_weighted", options={"negative": 0.5}, note="w⁻ = 0.5"),
    Method(key="tis", objective="tis"),
    Method(key="cispo", objective="cispo"),
    # The published range of 3e-4 is for answers of thousands of tokens; a mean over four of them moves much further.
    Method(key="gspo", objective="gspo", options={"clip_low": 0.2, "clip_high": 0.2}, note="clip 0.2"),
    Method(key="m2po", objective="m2po"),
)
"""Methods that are compared."""
ALPHAS = (0, 1, 2, 4, 8, 16)
"""Ages of the data, in versions."""
SEEDS = 3
"""Number of seeds of each method and age."""
SETTING = Setting()
"""Setting of a full comparison."""
QUICK = Setting(steps=24, eval_every=8, problems=128)
"""Setting of `--quick`."""
QUICK_METHODS, QUICK_ALPHAS = ("grpo", "decoupled_ppo"), (0, 8)
"""Methods and ages of `--quick`."""
CELL_TIMEOUT_S = 1800
"""Longest time in which no cell ends. A cell takes a minute where it has a core for itself, with a critic one and a
half."""

CellEnd = tuple[Cell, Result | str]
"""A cell that has ended, with its result, or with the text of its error."""
T = TypeVar("T")
Found = TypeVar("Found")


BASELINE = "grpo"
"""Synchronous training is this method at alpha = 0."""


def rows(results: Sequence[Result]) -> list[Row]:
    """Return the rows: final accuracies over seeds by method and age, and how they compare with synchronous training.

    The interval of a mean over seeds is that of Student's t, within 0 … 1; it is the mean if there is one seed. A
    method is as good as synchronous training if its mean is not below the lower end of the latter's interval. The goals
    are 4 such methods at α = 2, and 1 at α = 8.
    """
    together: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        together.setdefault((result.cell.method.title, result.cell.alpha), []).append(result)
    out: list[Row] = []
    for (title, alpha), members in together.items():
        case, finals = f"{title}, α = {alpha}", [result.final for result in members]
        # One value says nothing about the spread.
        interval = mean_interval(finals) if len(finals) > 1 else Interval(finals[0], finals[0], finals[0])
        out += [
            Row(case, "final_accuracy", "share", interval.mean),
            Row(case, "final_accuracy_low", "share", max(interval.low, 0.0)),
            Row(case, "final_accuracy_high", "share", min(interval.high, 1.0)),
            Row(case, "seeds", "runs", len(members)),
            Row(case, "collapsed", "runs", sum(result.collapsed for result in members)),
        ]
    found = {(row.case, row.metric): row.ours for row in out}
    least = found.get((f"{BASELINE}, α = 0", "final_accuracy_low"))
    for alpha, goal in ((2, 4), (8, 1)):
        here = [title for title, age in together if age == alpha]
        if least is None or not here:
            continue
        good = sum(found[f"{title}, α = {alpha}", "final_accuracy"] >= least for title in here)
        case = f"as good as synchronous {BASELINE}, α = {alpha}"
        out.append(Row(case, "methods", f"of {len(here)}", good, at_least=goal))
    return out


def accuracy_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of final accuracies by method and α, with half intervals and collapsed runs.

    docs/figures.md has this table, and a test compares them.
    """
    cases: dict[str, dict[str, float]] = {}  # figures of each case, by metric
    for row in rows:
        cases.setdefault(row.case, {})[row.metric] = row.ours
    cells: dict[str, dict[int, str]] = {}  # text of each cell of the table, by method and α
    for case, figures in cases.items():
        if "methods" in figures:  # the number of methods that are as good as synchronous training
            continue
        text = f"{figures['final_accuracy']:.3f}"
        if figures["seeds"] > 1:
            text += f" ± {(figures['final_accuracy_high'] - figures['final_accuracy_low']) / 2:.3f}"
        if figures["collapsed"]:
            text += f", {figures['collapsed']} of {figures['seeds']} collapsed"
        title, _, alpha = case.rpartition(", α = ")
        cells.setdefault(title, {})[int(alpha)] = text
    alphas = sorted({alpha for row in cells.values() for alpha in row})
    lines = [f"| final held-out accuracy | {' | '.join(f'α = {alpha}' for alpha in alphas)} |"]
    lines.append(f"|---|{'--:|' * len(alphas)}")
    lines += [f"| {title} | {' | '.join(row.get(alpha, '') for alpha in alphas)} |" for title, row in cells.items()]
    return "\n".join(lines)


def train_cells(cells: list[Cell]) -> Iterator[CellEnd]:
    """Train cells, and yield each as soon as it ends: with its result, or with the text of its error.

    Each usable core trains one cell at a time. The model of all cells is made first, unless it exists, because
    processes that make it at the same time would disturb each other.
    """
    make_missing_models(cells[0].config())
    return in_processes(train_cell, cells, len(os.sched_getaffinity(0)), CELL_TIMEOUT_S)


def in_processes(call: Callable[[T], Found], values: Sequence[T], workers: int, timeout_s: float) -> Iterator[Found]:
    """Call a function with each of `values`, `workers` at once, and yield the results in the order of their ends.

    Each call has a new process. All processes have ended when the iterator is exhausted or closed.

    Raises:
        multiprocessing.TimeoutError: no call has ended for `timeout_s` seconds.
    """
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        found = pool.imap_unordered(call, values)
        for _ in values:
            yield found.next(timeout_s)


def grid(
    setting: Setting,
    methods: Sequence[str],
    alphas: Sequence[int],
    seeds: int,
    budgets: Sequence[float] = (0,),
    *,
    mixed: bool = False,
    span: int = 0,
    max_token_ages: Sequence[int] = (0,),
) -> list[Cell]:
    """Return all cells. They are ordered by seed, so that the first part of the grid is a whole comparison.

    `methods` are keys of METHODS. `budgets` are lag budgets of each method, where 0 is none, and `max_token_ages` the
    values of `train.max_token_age`, where 0 is ⌈α⌉. `mixed` and `span`: see `Cell`.
    """
    known = [method for method in METHODS if method.key in methods]
    chosen = [method.within(budget, age) for method in known for budget in budgets for age in max_token_ages]
    return [
        Cell(method=method, alpha=alpha, mixed=mixed or span > 0, span=span, seed=seed, setting=setting)
        for seed in range(seeds)
        for alpha in alphas
        for method in chosen
    ]


def measure(args: Args, train_cells: Callable[[list[Cell]], Iterable[CellEnd]] = train_cells) -> list[Row]:
    """Run the cells that the options name and that have no result yet, and return the rows of all cells that have one.

    `benchmarks.form.main` calls this. Tests replace `train_cells`.
    """
    options, setting = args.own, QUICK if args.quick else SETTING
    if options.learning_rate is not None:
        setting = msgspec.structs.replace(setting, learning_rate=options.learning_rate)
    cells = grid(
        setting,
        options.methods or (QUICK_METHODS if args.quick else [method.key for method in METHODS]),
        options.alphas or (QUICK_ALPHAS if args.quick else ALPHAS),
        options.seeds or (1 if args.quick else SEEDS),
        options.budgets,
        mixed=options.mixed,
        span=options.span,
        max_token_ages=options.max_token_ages,
    )
    recorded = read_results(options.cells)
    missing = [cell for cell in cells if all(result.cell != cell for result in recorded)]
    for cell, result in train_cells(missing) if missing else ():
        case = f"{cell.method.title}, α = {cell.alpha}, seed {cell.seed}"
        if isinstance(result, Result):
            append_result(options.cells, result)
            recorded.append(result)
            print(f"{case}: {result.start:.3f} → {result.final:.3f}", flush=True)
        else:
            print(f"{case} failed: {result}", flush=True)
    found = [result for cell in cells for result in recorded if result.cell == cell]
    if lost := len(cells) - len(found):
        print(f"\n{lost} of {len(cells)} cells have no result; the same command runs them")
    print(f"\n{accuracy_table(rows(found))}\n")
    return rows(found)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    methods = [method.key for method in METHODS]
    cells = Path("outputs/offpolicy.jsonl")
    parser.add_argument("--cells", type=Path, default=cells, metavar="FILE", help=f"results of cells; default: {cells}")
    parser.add_argument("--methods", nargs="+", choices=methods, metavar="NAME", help=", ".join(methods))
    parser.add_argument("--alphas", nargs="+", type=int, metavar="N", help="ages of the data, in versions")
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds")
    parser.add_argument("--learning-rate", type=float, metavar="R", help="learning rate of all cells")
    parser.add_argument("--budgets", nargs="+", type=float, default=(0,), help="budgets of algorithm.lag; 0: none")
    parser.add_argument("--mixed", action="store_true", help="every batch has tokens of all ages up to alpha")
    long = "beside them, a third of each batch are long answers, sampled during so many versions"
    parser.add_argument("--span", type=int, default=0, metavar="N", help=long)
    ages = "values of train.max_token_age; 0: the age of the data"
    parser.add_argument("--max-token-ages", nargs="+", type=int, default=(0,), metavar="N", help=ages)


if __name__ == "__main__":
    across = "age of the data α (versions)"
    plot = lines("Final accuracy", across, "held-out accuracy", "final_accuracy", r", α = (\d+)")
    main("offpolicy", __doc__ or "", measure, plot=plot, add_options=add_options)
