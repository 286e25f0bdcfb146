"""Off-policy methods side by side on data of an exact age, on a small model that learns two-digit sums.

Every cell is one run of the system's own trainer in one process on one core: a method, an age of 0 to 16 versions, a
seed. All share the model, the batches' problems, the learning rate and two updates per version. A cell counts as
collapsed when its final accuracy is below half of its own best or below its start. Finished cells are kept in a folder
and not run again, so the grid can be run in pieces.

Further options: --cells FOLDER (default outputs/offpolicy), --workers N (default: one per usable core), --limit-s S
(start no cell that would end later), --methods A,B,… and --alphas 0,2,… and --seeds N (a part of the grid),
--learning-rate R (another one, for all cells), --budgets B,… (each method also held to budgets of `algorithm.lag`; 0 is
without), --mixed (every batch has tokens of all ages up to alpha), --span V (beside them, two parts of each are of long
answers, begun V versions before), --bounds N,… (each method also with `train.max_token_age`; 0 is without),
--keep FILE (all finished cells as JSON lines).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from benchmarks.form import Args, Row
from benchmarks.offpolicy.cells import Cell, Folder, Method, Result, Setting, write_lines
from benchmarks.offpolicy.summary import accuracy_table, draw, rows, steps_table, summarise

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
ALPHAS = (0, 1, 2, 4, 8, 16)
SEEDS = 3
SETTING = Setting()
QUICK = Setting(steps=24, eval_every=8, problems=128)
QUICK_METHODS, QUICK_ALPHAS = ("grpo", "decoupled_ppo"), (0, 8)
CELL_TIMEOUT_S = 900
"""A cell takes a minute where it has a core for itself, with a critic one and a half."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and how."""

    cells: list[Cell]
    folder: Path
    workers: int
    limit_s: float
    """No cell is started that would end later than this, by the longest so far."""
    keep: Path | None


RunCell = Callable[[Cell, Path, int | None], Awaitable[str]]
"""Of a cell, the folder for its result and the core it is to have; `run_cell`."""


class Pool:
    """Runs the cells that are missing, one process each, one core each."""

    def __init__(self, plan: Plan, run_cell: RunCell) -> None:
        self._plan = plan
        self._run_cell = run_cell
        self._folder = Folder(plan.folder)
        self._started = time.monotonic()
        self._longest = 0.0
        self.failures: list[str] = []
        """What the cells said that ended without a result."""

    def missing(self) -> list[Cell]:
        """Cells without a result."""
        return [cell for cell in self._plan.cells if self._folder.find(cell) is None]

    async def run(self) -> None:
        """Consumes the missing cells in order. Waits for their processes. Produces a file per cell that ends well."""
        waiting = iter(self.missing())
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        async with anyio.create_task_group() as workers:
            for number in range(self._plan.workers):
                workers.start_soon(self._work, waiting, cores[number % len(cores)] if cores else None)

    async def _work(self, waiting: Iterable[Cell], core: int | None) -> None:
        for cell in waiting:
            if self._folder.find(cell) is not None:
                continue  # Another grid that keeps its cells there was faster.
            begun = time.monotonic()
            if begun - self._started + self._longest > self._plan.limit_s:
                return
            problem = await self._run_cell(cell, self._plan.folder, core)
            took = time.monotonic() - begun
            self._longest = max(self._longest, took)
            self._report(cell, took, problem)

    def _report(self, cell: Cell, took: float, problem: str) -> None:
        result = self._folder.find(cell)
        case = f"{cell.method.title}, α = {cell.alpha}, seed {cell.seed}"
        if result is None:
            self.failures.append(f"{case}: {problem}")
        said = "failed" if result is None else f"{result.start:.3f} → {result.final:.3f}"
        done = len(self._plan.cells) - len(self.missing())
        print(f"[{done}/{len(self._plan.cells)}] {case}: {said} in {took:.0f} s", flush=True)


async def run_cell(cell: Cell, folder: Path, core: int | None, python: str = sys.executable) -> str:
    """Run one cell to its end, or to ours; returns the end of what it wrote to standard error."""
    command = [python, "-m", "benchmarks.offpolicy.harness", str(folder)]
    command += [] if core is None else ["--core", str(core)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    # One that is interrupted while it starts would be forgotten.
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(command, stdout=subprocess.DEVNULL, env=env)
    async with process:
        assert process.stdin is not None
        assert process.stderr is not None
        with anyio.move_on_after(CELL_TIMEOUT_S):
            with contextlib.suppress(anyio.BrokenResourceError):
                await process.stdin.send(msgspec.json.encode(cell))
            await process.stdin.aclose()
            said = b"".join([chunk async for chunk in process.stderr])
            await process.wait()
            return said.decode(errors="replace").strip()[-2000:]
    return f"not finished after {CELL_TIMEOUT_S} s"


def grid(
    setting: Setting,
    methods: Sequence[str],
    alphas: Sequence[int],
    seeds: int,
    budgets: Sequence[float] = (0,),
    *,
    mixed: bool = False,
    span: int = 0,
    bounds: Sequence[int] = (0,),
) -> list[Cell]:
    """All cells, seed by seed, so that a part of the grid is a whole comparison."""
    within = [
        method.within(budget) if budget else method for method in METHODS if method.key in methods for budget in budgets
    ]
    chosen = [method.older(bound) if bound else method for method in within for bound in bounds]
    return [
        Cell(method=method, alpha=alpha, mixed=mixed or span > 0, span=span, seed=seed, setting=setting)
        for seed in range(seeds)
        for alpha in alphas
        for method in chosen
    ]


def make_model(cell: Cell) -> None:
    """The warm-started models, unless they are there. Once, before the workers, who would disturb each other."""
    from flash.run.models.models import make_missing_model

    make_missing_model(cell.config())


class Comparison:
    """Runs a plan and reports it."""

    def __init__(
        self,
        options: argparse.Namespace,
        run_cell: RunCell = run_cell,
        make_model: Callable[[Cell], object] = make_model,
    ) -> None:
        self._options = options
        self._run_cell, self._make_model = run_cell, make_model
        self._results: list[Result] = []

    def measure(self, args: Args) -> list[Row]:
        """Run what is missing, then sum up what is there."""
        plan = self._plan(args.quick)
        self._make_model(plan.cells[0])
        pool = Pool(plan, self._run_cell)
        anyio.run(pool.run)
        self._results = Folder(plan.folder).finished(plan.cells)
        for failure in pool.failures:
            print(f"\nno result of {failure}")
        if missing := pool.missing():
            print(f"\n{len(missing)} of {len(plan.cells)} cells are missing; the same command runs them")
        if plan.keep is not None:
            write_lines(self._results, plan.keep)
        summaries = summarise(self._results)
        print(f"\n{accuracy_table(summaries)}\n\n{steps_table(summaries)}\n")
        return rows(summaries)

    def plot(self, rows: Sequence[Row], file: Path) -> None:
        """Of the cells, whose curves the rows do not hold."""
        draw(self._results, file)

    def _plan(self, quick: bool) -> Plan:
        options = self._options
        methods = options.methods or (QUICK_METHODS if quick else [method.key for method in METHODS])
        alphas = options.alphas or (QUICK_ALPHAS if quick else ALPHAS)
        seeds = options.seeds or (1 if quick else SEEDS)
        setting = QUICK if quick else SETTING
        if options.learning_rate is not None:
            setting = msgspec.structs.replace(setting, learning_rate=options.learning_rate)
        return Plan(
            cells=grid(
                setting,
                methods,
                alphas,
                seeds,
                options.budgets,
                mixed=options.mixed,
                span=options.span,
                bounds=options.bounds,
            ),
            folder=options.cells,
            workers=options.workers,
            limit_s=options.limit_s,
            keep=options.keep,
        )


def own_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options that only this benchmark has, and the arguments that are left."""
    parser = cell_options("python -m benchmarks.offpolicy", Path("outputs/offpolicy"), METHODS)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--budgets", type=lambda text: [float(part) for part in text.split(",")], default=(0,))
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--span", type=int, default=0)
    parser.add_argument("--bounds", type=lambda text: [int(part) for part in text.split(",")], default=(0,))
    return parser.parse_known_args(argv)


def cell_options(program: str, cells: Path, methods: Sequence[Method]) -> argparse.ArgumentParser:
    """The options of a benchmark that runs cells: where they are kept, and which of them are run."""
    known = [method.key for method in methods]

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    parser = argparse.ArgumentParser(prog=program, add_help=False, allow_abbrev=False)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--cells", type=Path, default=cells)
    parser.add_argument("--workers", type=int, default=usable)
    parser.add_argument("--limit-s", type=float, default=math.inf)
    parser.add_argument("--methods", type=chosen)
    parser.add_argument("--alphas", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--keep", type=Path)
    return parser
