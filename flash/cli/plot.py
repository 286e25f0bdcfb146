"""`flash plot`: draw the plots of a run directory again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flash.cli.commands import Commands
from flash.errors import ConfigError


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("plot", help="draw the plots of a run directory again")
    parser.add_argument("run_dir", type=Path)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Draw, and say which files were written."""
    from flash.observe.plots import write_plots

    run_dir: Path = arguments.run_dir
    if not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no metrics.jsonl")
    for path in write_plots(run_dir):
        sys.stdout.write(f"{path}\n")
    return 0
