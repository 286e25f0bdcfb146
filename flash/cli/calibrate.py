"""`flash calibrate`: fit a `[simulate]` table to a run, and predict the run with it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from flash.cli.arguments import CommandParsers, check_writable
from flash.cli.simulate import run_all
from flash.config.load import load
from flash.observe.rundir.rundir import write_atomically
from flash.observe.timeline import Floats
from flash.simulate import tables
from flash.simulate.calibrate import calibrate

SEEDS = 4
"""Number of draws of the workload over which a prediction is averaged, since one draw of a short run is noisy."""


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("calibrate", help="Fit a [simulate] table to what a run has measured.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, such as outputs/tiny.")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.toml", help="File to write the table to. Default: RUN_DIR/fitted.toml."
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Fit the table, write it, and predict the run."""
    calibrate_command(arguments.run_dir, arguments.output)
    return 0


def calibrate_command(run_dir: Path, output: Path | None = None) -> dict[str, Any]:
    """Fit a `[simulate]` table to a run, write it, and predict the run with it. Returns the table.

    Raises:
        ConfigError: the run has no measurements to fit to.
    """
    file = run_dir / "fitted.toml" if output is None else output
    check_writable(output)
    fitted = calibrate(run_dir)
    write_atomically(file, fitted.toml().encode())
    tables.print_calibration(fitted, predicted_step_s(run_dir / "config.toml", file), run_dir / "config.toml", file)
    return fitted.table


def predicted_step_s(*paths: Path) -> Floats:
    """Return the simulated time of a step in seconds, once for each of SEEDS draws of the workload."""
    seeds = [f"run.seed={seed}" for seed in range(SEEDS)]
    configs = [load(paths, [seed], simulated=True) for seed in seeds]
    return np.array([report.step_s for report in run_all(configs)])
