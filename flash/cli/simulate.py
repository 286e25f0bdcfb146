"""`flash simulate` and `flash calibrate`: simulate runs, and fit the simulation to a run.

A sweep is the cartesian product of the values of its keys. Each cell is a separate simulation in a worker process. All
cells are checked before the first one runs. torch and vllm are never imported here.

With `--faults`, a *seed* stands for a random configuration with random faults, which is simulated. The run must keep
certain *laws*, for example that no sample is lost (`flash.simulate.faults`).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from flash.cli.arguments import CommandParsers, check_plot, check_writable
from flash.config.decode import suggest
from flash.config.load import key_paths, load, split_arguments
from flash.config.section import MOST
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.observe.rundir.rundir import write_atomically
from flash.observe.timeline import Floats
from flash.run.processes.launch_state import end_with_parent
from flash.simulate import tables
from flash.simulate.bounds import bounds, quantities
from flash.simulate.calibrate import calibrate
from flash.simulate.report import SimReport, SweepCell
from flash.simulate.world import simulate
from flash.waiting import worker_deaths_named

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

CLOSE = 0.02
"""Share of the best throughput that may be given up to train on younger tokens."""
OPENING, CLOSING = "([{", ")]}"
"""Brackets of TOML, inside of which a comma does not separate the values of a sweep."""
SEEDS = 1000
"""Number of runs that `--faults` plays unless `--seeds` is given."""
MOST_SHRUNK = 5
"""Number of failing seeds that are made smaller. Each takes up to a minute."""
CALIBRATION_SEEDS = 4
"""Number of draws of the workload over which a prediction is averaged, since one draw of a short run is noisy."""


class Sweep(NamedTuple):
    """Key and the values that it takes in a sweep."""

    key: str
    """Full path of the key, such as `train.async_ratio`."""
    values: list[str]
    """Values as TOML text."""


def add_simulate(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash simulate` to `commands`, and return it."""
    parser = commands.add_parser(
        "simulate",
        help="Predict the speed of a configuration with a simulation, which needs no GPU and no model. With --faults: "
        "test runs with random faults.",
    )
    parser.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG|KEY=VALUE",
        help="Configuration files and settings, as for `flash train`. They need a [simulate] table.",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V1,V2,…",
        help="Simulate each of these values. Several --sweep try all combinations.",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="Draw the result into this file.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result to this file.")
    parser.add_argument(
        "--faults", action="store_true", help="Play random runs with random faults, and check the laws of a run."
    )
    parser.add_argument("--seeds", type=int, metavar="N", help=f"Number of runs to play. Default: {SEEDS}.")
    parser.add_argument("--from", type=int, dest="first", metavar="SEED", help="First seed. Default: 0.")
    parser.add_argument("--seed", type=int, metavar="SEED", help="Play only this seed.")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Write the events of --seed as JSON lines.")
    parser.set_defaults(run=run_simulate)
    return parser


def run_simulate(arguments: argparse.Namespace) -> int:
    """Run the simulations that the arguments ask for, for `flash simulate`.

    Returns 1 if a run with faults has broken a law.
    """
    check_simulate(arguments)
    if arguments.faults:
        if arguments.seed is not None:
            return replay_faults(arguments.seed, arguments.trace)
        return play_faults(arguments.first or 0, SEEDS if arguments.seeds is None else arguments.seeds)
    paths, overrides = split_arguments(arguments.config)
    simulate_command(paths, overrides, sweeps=arguments.sweep, plot=arguments.plot, json=arguments.json)
    return 0


def check_simulate(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if arguments of `flash simulate` contradict each other, a number is out of its range, or the
    file of `--trace` cannot be written."""
    of_faults = {"--seeds": arguments.seeds, "--from": arguments.first, "--seed": arguments.seed}
    given = [name for name, value in (of_faults | {"--trace": arguments.trace}).items() if value is not None]
    if not arguments.faults:
        if given:
            raise ConfigError(f"{given[0]} is an option of --faults: add --faults, or leave {given[0]} out")
        if not arguments.config:
            raise ConfigError("name a configuration file with a [simulate] table, or play random faults with --faults")
        return
    others = {"--sweep": arguments.sweep, "--plot": arguments.plot, "--json": arguments.json}
    if arguments.config or any(others.values()):
        wrong = arguments.config[0] if arguments.config else next(name for name, value in others.items() if value)
        raise ConfigError(f"--faults draws its own configurations: leave {wrong} out")
    if arguments.seed is not None and (arguments.seeds is not None or arguments.first is not None):
        raise ConfigError("--seed plays one seed: leave --seeds and --from out")
    if arguments.trace is not None and arguments.seed is None:
        raise ConfigError("--trace writes the events of one run: name its seed with --seed")
    for name, value in of_faults.items():
        least = 1 if name == "--seeds" else 0
        if value is not None and value < least:
            raise ConfigError(f"{name}: expected at least {least}, got {value}")
        if value is not None and value > MOST:  # the largest `run.seed`
            raise ConfigError(f"{name}: expected at most {MOST}, got {value}")
    first, seeds = arguments.first or 0, SEEDS if arguments.seeds is None else arguments.seeds
    if seeds > (left := MOST + 1 - first):
        raise ConfigError(f"--seeds: expected at most {left} from seed {first}, got {seeds}")
    check_writable(arguments.trace)


def play_faults(first: int, count: int) -> int:
    """Play `count` seeds from `first` on all cores. Returns 1 if one of them breaks a law, else 0.

    Prints each seed that breaks a law, the first MOST_SHRUNK of them also in a smaller form, with fewer faults, that
    breaks the same law. At the end, prints how often each kind of fault has happened.
    """
    from flash.simulate.faults.play import play_seed, shrunk

    befallen: Counter[str] = Counter()  # number of faults by kind
    failed = 0  # number of seeds that break a law
    for played in in_workers(play_seed, range(first, first + count)):
        befallen.update(played.faults)
        if played.law:
            failed += 1
            tables.print_failed_seed(played.seed, played.law)
            if failed <= MOST_SHRUNK:
                tables.print_scenario(shrunk(played.seed, played.law))
    tables.print_faults(count, befallen, failed)
    return 1 if failed else 0


def replay_faults(seed: int, trace: Path | None) -> int:
    """Play one seed in this process, and print the broken law and the faults. Returns 1 if it breaks a law, else 0.

    `trace`: file for the events of the run, one JSON object in each line; None: write none.
    """
    from flash.simulate.faults.play import play
    from flash.simulate.faults.scenario import draw

    played = play(draw(seed))
    if trace is not None:
        write_atomically(trace, b"".join(msgspec.json.encode(event) + b"\n" for event in played.events))
    if played.law:
        tables.print_failed_seed(seed, played.law)
    tables.print_faults(1, Counter(played.faults), 1 if played.law else 0)
    return 1 if played.law else 0


def simulate_command(
    paths: Sequence[Path],
    overrides: Sequence[str],
    *,
    sweeps: Sequence[str] = (),
    plot: Path | None = None,
    json: Path | None = None,
) -> list[SweepCell]:
    """Simulate a configuration, or every cell of a sweep. Print the result and return it; write the files if they are
    named.

    `run_simulate` calls this with the arguments of the command line.

    Args:
        paths: configuration files.
        overrides: `KEY=VALUE` settings.
        sweeps: values of `--sweep`; empty: simulate one configuration.
        plot: PNG file for a plot of the result; None: draw none.
        json: file for the cells as JSON; None: write none.

    Raises:
        ConfigError: names every problem of the arguments or of a cell's configuration.
    """
    check_writable(plot, json)
    check_plot(plot)
    if plot is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed")
    parsed = [parse_sweep(sweep) for sweep in sweeps]
    keys = [sweep.key for sweep in parsed]
    if repeated := {key for key in keys if keys.count(key) > 1}:
        raise ConfigError(f"--sweep names `{min(repeated)}` more than once; give all its values at once")
    # The settings of each cell, by key. The values of the last key change fastest. Without a sweep there is one cell
    # without settings.
    settings = [dict(zip(keys, values, strict=True)) for values in product(parsed)]
    configs = [
        load(paths, [*overrides, *(f"{key}={value}" for key, value in setting.items())], simulated=True)
        for setting in settings
    ]
    cells = [
        SweepCell(values=setting, report=report, bounds=bounds(quantities(config, report.ledger)))
        for setting, config, report in zip(settings, configs, run_all(configs), strict=True)
    ]
    if keys:
        tables.print_sweep(cells, recommend(cells))
    else:
        tables.print_run(configs[0], cells[0])
    if json is not None:
        write_atomically(json, msgspec.json.format(msgspec.json.encode(cells), indent=2) + b"\n")
    if plot is not None:
        from flash.simulate.plots import draw_run, draw_sweep

        write_atomically(plot, draw_sweep(cells) if keys else draw_run(cells[0].report))
    return cells


def run_all(configs: Sequence[Config]) -> list[SimReport]:
    """Simulate all configurations in parallel, one process per core, and return the reports in the same order.

    A single configuration is simulated in this process.
    """
    if len(configs) == 1:
        return [simulate(configs[0])]
    return list(tables.with_progress(in_workers(simulate, configs), len(configs)))


def in_workers(function: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> Generator[ResultT]:
    """Call a function of a module with each item, in one process per core, and yield the results in order.

    A single item is handled in this process. An error of the function is raised here. If a worker process dies, the
    error names its end (`worker_deaths_named`). If the caller is interrupted, the workers are terminated.
    """
    if len(items) == 1:
        yield function(items[0])
        return
    # Only Linux says how many cores a process may use.
    workers = min(len(items), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    # Workers are spawned, not forked: a fork would copy the threads and locks of the caller. They would outlive this
    # process if it is killed, because each of them keeps the pipe open from which all of them read their work.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=end_with_parent)
    with worker_deaths_named("simulates a run"), pool, _workers_end_with_us():
        with _interrupts_held_back():  # `map` starts the workers
            results = pool.map(function, items)
        yield from results


@contextmanager
def _workers_end_with_us() -> Generator[None]:
    """Terminate the worker processes of a sweep if an interrupt or an error ends the block, in which they work.

    Otherwise the end of the pool would wait until all cells are simulated.
    """
    try:
        yield
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise


@contextmanager
def _interrupts_held_back() -> Generator[None]:
    """Block SIGINT while processes are started, so that they inherit the block.

    A terminal sends an interrupt to all processes, and each worker would print a long traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def parse_sweep(text: str) -> Sweep:
    """Return the sweep that `key=v1,v2,…` describes, with the full path of the key.

    Raises:
        ConfigError: the text has another form, or the key is unknown or ambiguous.
    """
    name, equals, listed = text.partition("=")
    values = split_values(listed)
    if not equals or not all(values):
        raise ConfigError(f"--sweep {text!r}: expected KEY=VALUE,VALUE,…")
    return Sweep(resolve_key(name.strip()), values)


def split_values(text: str) -> list[str]:
    """Split the values of a sweep at commas that are outside of brackets: a value may be a list or a table of TOML.

    Values are stripped of spaces, and may be empty. Quotes have no meaning here: a comma in a text divides it.
    """
    parts, depth = [""], 0  # `depth`: number of brackets that are open
    for character in text:
        depth += (character in OPENING) - (character in CLOSING)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def resolve_key(name: str) -> str:
    """Return the only key of the configuration that equals `name`, or whose last part is `name`. For `--sweep`.

    Raises:
        ConfigError: there is no such key, or there are several.
    """
    keys = list(key_paths())
    found = [key for key in keys if key == name] or [key for key in keys if key.endswith("." + name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"--sweep: `{name}` is ambiguous: {' or '.join(f'`{key}`' for key in found)}")
    endings = {key.rpartition(".")[2]: key for key in keys}
    raise ConfigError(f"--sweep: there is no key `{name}`{suggest(name, [*keys, *endings])}")


def product(sweeps: Sequence[Sweep]) -> list[tuple[str, ...]]:
    """Return every combination of values. The values of the last key change fastest."""
    return list(itertools.product(*(sweep.values for sweep in sweeps)))


def recommend(cells: Sequence[SweepCell]) -> SweepCell:
    """Return the cell that `flash simulate` recommends: of cells within CLOSE of the highest throughput, the one whose
    oldest trained token has the lowest age in versions.

    Of cells with equal ages, this is the one that wastes the smallest share of tokens, and then the fastest.
    """
    fastest = max(cell.report.tokens_per_s for cell in cells)
    near = [cell for cell in cells if cell.report.tokens_per_s >= (1 - CLOSE) * fastest]
    # Shares of waste that differ by less than a thousandth count as equal, because they are random.
    return min(near, key=lambda cell: (cell.oldest, round(cell.waste, 3), -cell.report.tokens_per_s))


def add_calibrate(commands: CommandParsers) -> argparse.ArgumentParser:
    """Add the parser of `flash calibrate` to `commands`, and return it."""
    parser = commands.add_parser("calibrate", help="Fit a [simulate] table to what a run has measured.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, such as outputs/tiny.")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.toml", help="File to write the table to. Default: RUN_DIR/fitted.toml."
    )
    parser.set_defaults(run=run_calibrate)
    return parser


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Fit a `[simulate]` table to a run, write it, and predict the run with it, for `flash calibrate`."""
    calibrate_command(arguments.run_dir, arguments.output)
    return 0


def calibrate_command(run_dir: Path, output: Path | None = None) -> dict[str, Any]:
    """Fit a `[simulate]` table to a run, write it, and predict the run with it. Returns the table, by key.

    Prints the fitted values, and the predicted time of a step beside the measured one.

    Args:
        run_dir: folder of the run.
        output: file to write; None: `fitted.toml` in the folder of the run.

    Raises:
        ConfigError: the run has no measurements to fit to, or the file cannot be written.
    """
    file = run_dir / "fitted.toml" if output is None else output
    check_writable(output)
    fitted = calibrate(run_dir)
    write_atomically(file, fitted.toml().encode())
    tables.print_calibration(fitted, predicted_step_s(run_dir / "config.toml", file), run_dir / "config.toml", file)
    return fitted.table


def predicted_step_s(*paths: Path) -> Floats:
    """Return the simulated time of a step in seconds, once for each of CALIBRATION_SEEDS draws of the workload.

    `calibrate_command` prints it beside the measured time. `paths`: the run's configuration and the fitted table.
    """
    seeds = [f"run.seed={seed}" for seed in range(CALIBRATION_SEEDS)]
    configs = [load(paths, [seed], simulated=True) for seed in seeds]
    return np.array([report.step_s for report in run_all(configs)])
