"""Off-policy methods side by side on data of an exact age, on a small model that learns two-digit sums.

Every cell is one run of the system's own trainer in one process on one core: a method, an age of 0 to 16 versions, a
seed. All share the model, the batches' problems, the learning rate and two updates per version. A cell counts as
collapsed when its final accuracy is below half of its own best or below its start. Finished cells are kept in a folder
and not run again, so the grid can be run in pieces.

Further options: --cells FOLDER (default outputs/offpolicy), --workers N (default: one per usable core), --methods A,B,…
and --alphas 0,2,… and --seeds N (a part of the grid), --learning-rate R (another one, for all cells), --budgets B,…
(each method also held to budgets of `algorithm.lag`; 0 is without), --mixed (every batch has tokens of all ages up to
alpha), --keep FILE (all finished cells as JSON lines).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec

from benchmarks.form import Args, Row, main
from benchmarks.offpolicy.cells import Cell, Folder, Method, Result, Setting, write_lines
from benchmarks.plots import lines
from flash.observe.stats import Interval, mean_interval

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
CELL_TIMEOUT_S = 900
"""Longest run of a cell. It takes a minute where it has a core for itself, with a critic one and a half."""

RunCell = Callable[[Cell, Path, int | None], Awaitable[str]]
"""Runs a cell with a folder for its result on a core, and returns its error output; see `run_cell`."""


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
    """Number of seeds whose run has collapsed (`cells.COLLAPSED`)."""

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


class Pool:
    """Runs the cells that have no result yet, one process each, one core each.

    Args:
        cells: all cells of the grid, in the order in which they are run.
        folder: folder of the results.
        workers: number of cells that run at once.
        run_cell: runs a cell; tests replace it.
    """

    def __init__(self, cells: list[Cell], folder: Path, workers: int, run_cell: RunCell) -> None:
        self._cells = cells
        self._folder = Folder(folder)
        self._workers = workers
        self._run_cell = run_cell
        self.failures: list[str] = []
        """Error output of the cells that ended without a result."""

    def missing(self) -> list[Cell]:
        """Return the cells without a result."""
        return [cell for cell in self._cells if self._folder.find(cell) is None]

    async def run(self) -> None:
        """Run the missing cells in order. Waits for their processes; each cell that succeeds leaves a file."""
        waiting = iter(self.missing())  # one iterator for all workers, so that each cell is taken once
        cores = sorted(os.sched_getaffinity(0))
        async with anyio.create_task_group() as workers:
            for number in range(self._workers):
                workers.start_soon(self._work, waiting, cores[number % len(cores)])

    async def _work(self, waiting: Iterable[Cell], core: int) -> None:
        """Run cells on one core until none is waiting, and print the result of each. Workers share `waiting`."""
        for cell in waiting:
            begun = time.monotonic()
            problem = await self._run_cell(cell, self._folder.path, core)
            result = self._folder.find(cell)  # the process has written it, if it has succeeded
            case = f"{cell.method.title}, α = {cell.alpha}, seed {cell.seed}"
            if result is None:
                self.failures.append(f"{case}: {problem}")
            outcome = "failed" if result is None else f"{result.start:.3f} → {result.final:.3f}"
            done = f"{len(self._cells) - len(self.missing())}/{len(self._cells)}"
            print(f"[{done}] {case}: {outcome} in {time.monotonic() - begun:.0f} s", flush=True)


async def run_cell(
    cell: Cell, folder: Path, core: int | None, python: str = sys.executable, timeout_s: float = CELL_TIMEOUT_S
) -> str:
    """Run one cell in a process, which is killed after `timeout_s`, or if the caller is cancelled.

    Returns the end of its error output, which may be warnings of a cell that succeeded, or a sentence that it has not
    finished. `core` is the core that it is pinned to; None: any. `folder` gets the result, if the cell succeeds. Tests
    replace `python` and `timeout_s`.
    """
    command = [python, "-m", "benchmarks.offpolicy.harness", str(folder)]
    command += [] if core is None else ["--core", str(core)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    # A process whose start is interrupted would be forgotten.
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(command, stdout=subprocess.DEVNULL, env=env)
    async with process:
        assert process.stdin is not None
        assert process.stderr is not None
        with anyio.move_on_after(timeout_s):
            with contextlib.suppress(anyio.BrokenResourceError):
                await process.stdin.send(msgspec.json.encode(cell))
            await process.stdin.aclose()
            errors = b"".join([chunk async for chunk in process.stderr])
            await process.wait()
            return errors.decode(errors="replace").strip()[-2000:]
        process.kill()  # the end of the block waits for the process
    return f"not finished after {timeout_s:g} s"


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


def make_model(cell: Cell) -> None:
    """Make the warm-started model of all cells, unless it exists. `cell` is any of them.

    This happens before any cell runs, because processes that make it at the same time would disturb each other.
    """
    from flash.run.models import make_missing_models

    make_missing_models(cell.config())


def measure(
    options: argparse.Namespace,
    args: Args,
    run_cell: RunCell = run_cell,
    make_model: Callable[[Cell], object] = make_model,
) -> list[Row]:
    """Run the cells that the options name and that have no result yet, and return the rows of all cells that have one.

    `benchmarks.form.main` calls this. `run_cell` and `make_model` are replaced by tests.
    """
    setting = QUICK if args.quick else SETTING
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
    make_model(cells[0])
    pool = Pool(cells, options.cells, options.workers, run_cell)
    anyio.run(pool.run)
    results = Folder(options.cells).finished(cells)
    for failure in pool.failures:
        print(f"\nno result of {failure}")
    if missing := pool.missing():
        print(f"\n{len(missing)} of {len(cells)} cells are missing; the same command runs them")
    if options.keep is not None:
        write_lines(results, options.keep)
    summaries = summarise(results)
    print(f"\n{accuracy_table(summaries)}\n")
    return rows(summaries)


def own_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options that only this benchmark has. Also returns the arguments that `benchmarks.form.main` parses."""
    known = [method.key for method in METHODS]

    def methods(text: str) -> list[str]:
        """Parse the value of `--methods`."""
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    def integers(text: str) -> list[int]:
        """Parse the value of `--alphas`."""
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m benchmarks.offpolicy", add_help=False, allow_abbrev=False)
    parser.add_argument("--cells", type=Path, default=Path("outputs/offpolicy"))
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--methods", type=methods)
    parser.add_argument("--alphas", type=integers)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--budgets", type=lambda text: [float(part) for part in text.split(",")], default=(0,))
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--keep", type=Path)
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    own, rest = own_options(None)
    across = "age of the data α (versions)"
    plot = lines("Final accuracy", across, "held-out accuracy", "final_accuracy", r", α = (\d+)")
    main("offpolicy", __doc__ or "", partial(measure, own), rest, plot=plot)
