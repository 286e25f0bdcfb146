"""`flash plot`: draw the plots of a run directory again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flash.cli.commands import Commands
from flash.errors import ConfigError
from flash.observe.rundir import RunDirectory


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("plot", help="draw the plots of a run directory again")
    parser.add_argument("run_dir", type=Path)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Draw, and say which files were written."""
    from flash.observe.plots import write_plots

    directory = RunDirectory(arguments.run_dir)
    if not directory.config.is_file():
        raise ConfigError(f"{arguments.run_dir} is no run directory: it holds no config.toml")
    paths = write_plots(arguments.run_dir)
    if not paths:
        raise ConfigError(f"{arguments.run_dir}: there is nothing to draw yet: its run has made no step")
    for path in paths:
        sys.stdout.write(f"{path}\n")
    return 0
