"""`flash plot`: draw the plots of a run directory again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flash.cli.arguments import CommandParsers, run_directory
from flash.errors import ConfigError


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("plot", help="Draw the plots of a run again.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, such as outputs/tiny.")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Draw the plots, and print the names of the files."""
    from flash.observe.plots import write_plots

    paths = write_plots(run_directory(arguments.run_dir).path)
    if not paths:
        raise ConfigError(f"{arguments.run_dir}: there is nothing to draw yet: its run has made no step")
    for path in paths:
        sys.stdout.write(f"{path}\n")
    return 0
