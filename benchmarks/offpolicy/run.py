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

T = TypeVar("T")
Found = TypeVar("Found")
TrainCells = Callable[[Sequence[Cell]], Iterable[tuple[Cell, Result | str]]]
"""Trains cells. Yields each with its result, or with the text of its error; see `train_cells`."""


# -- rows ------------------------------------------------------------------------------------------------------------

BASELINE = "grpo"
"""Synchronous training is this method at alpha = 0."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Final accuracy of a method at one alpha, over its seeds."""

    method: Method
    alpha: int
    """Age of the data, in versions."""
    seeds: int
    """Number of seeds."""
    mean: float
    """Final accuracy."""
    low: float
    """95 % confidence interval of the mean over seeds (Student's t), within 0 … 1; the mean if there is one seed."""
    high: float
    """Upper end of the interval."""
    collapses: int
    """Number of seeds whose run has collapsed (`harness.COLLAPSED`)."""

    @property
    def case(self) -> str:
        """Name of the rows."""
        return f"{self.method.title}, α = {self.alpha}"


def summarise(results: Sequence[Result]) -> list[Summary]:
    """Make one summary for each method and alpha, in the order of their first results."""
    together: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        together.setdefault((result.cell.method.key, result.cell.alpha), []).append(result)
    found: list[Summary] = []
    for members in together.values():
        finals = [result.final for result in members]
        # One value says nothing about the spread.
        interval = mean_interval(finals) if len(finals) > 1 else Interval(finals[0], finals[0], finals[0])
        found.append(
            Summary(
                method=members[0].cell.method,
                alpha=members[0].cell.alpha,
                seeds=len(members),
                mean=interval.mean,
                low=max(interval.low, 0.0),
                high=min(interval.high, 1.0),
                collapses=sum(result.collapsed for result in members),
            )
        )
    return found


def rows(summaries: Sequence[Summary]) -> list[Row]:
    """Return the rows: each final accuracy, and how it compares with synchronous training.

    A method is as good as synchronous training if its mean is not below the lower end of the latter's interval. The
    goals are 4 such methods at α = 2, and 1 at α = 8.
    """
    out: list[Row] = []
    for summary in summaries:
        out += [
            Row(summary.case, "final_accuracy", "share", summary.mean),
            Row(summary.case, "final_accuracy_low", "share", summary.low),
            Row(summary.case, "final_accuracy_high", "share", summary.high),
            Row(summary.case, "seeds", "runs", summary.seeds),
            Row(summary.case, "collapsed", "runs", summary.collapses),
        ]
    baseline = next((one for one in summaries if (one.method.key, one.alpha) == (BASELINE, 0)), None)
    for alpha, goal in ((2, 4), (8, 1)):
        here = [summary for summary in summaries if summary.alpha == alpha]
        if baseline is None or not here:
            continue
        good = sum(summary.mean >= baseline.low for summary in here)
        case = f"as good as synchronous {BASELINE}, α = {alpha}"
        out.append(Row(case, "methods", f"of {len(here)}", good, at_least=goal))
    return out


def accuracy_table(summaries: Sequence[Summary]) -> str:
    """Return a Markdown table of final accuracies by method and α, with half intervals and collapsed runs.

    docs/figures.md has this table, and a test compares them.
    """

    def cell(summary: Summary) -> str:
        """Return the text of a cell of the table."""
        half = f" ± {(summary.high - summary.low) / 2:.3f}" if summary.seeds > 1 else ""
        collapsed = f", {summary.collapses} of {summary.seeds} collapsed" if summary.collapses else ""
        return f"{summary.mean:.3f}{half}{collapsed}"

    titles = list(dict.fromkeys(summary.method.title for summary in summaries))
    alphas = sorted({summary.alpha for summary in summaries})
    at = {(summary.method.title, summary.alpha): cell(summary) for summary in summaries}
    lines = [f"| final held-out accuracy | {' | '.join(f'α = {alpha}' for alpha in alphas)} |"]
    lines.append(f"|---|{'--:|' * len(alphas)}")
    lines += [f"| {title} | {' | '.join(at.get((title, alpha), '') for alpha in alphas)} |" for title in titles]
    return "\n".join(lines)


# -- cells -----------------------------------------------------------------------------------------------------------


def train_cells(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Result | str]]:
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
) -> list[Cell]:
    """Return all cells. They are ordered by seed, so that the first part of the grid is a whole comparison.

    `methods` are keys of METHODS. `budgets` are lag budgets of each method, where 0 is none. `mixed`: see `Cell.mixed`.
    """
    chosen = [
        method.within(budget) if budget else method for method in METHODS if method.key in methods for budget in budgets
    ]
    return [
        Cell(method=method, alpha=alpha, mixed=mixed, seed=seed, setting=setting)
        for seed in range(seeds)
        for alpha in alphas
        for method in chosen
    ]


def measure(args: Args, train_cells: TrainCells = train_cells) -> list[Row]:
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
    summaries = summarise(found)
    print(f"\n{accuracy_table(summaries)}\n")
    return rows(summaries)


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


if __name__ == "__main__":
    across = "age of the data α (versions)"
    plot = lines("Final accuracy", across, "held-out accuracy", "final_accuracy", r", α = (\d+)")
    main("offpolicy", __doc__ or "", measure, plot=plot, add_options=add_options)
