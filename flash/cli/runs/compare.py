"""`flash compare`: compare the results and the configurations of several runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flash.cli.arguments import CommandParsers, run_directory
from flash.observe.comparison import differences, read_run, results, table


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "compare", help="Compare runs: their results, with intervals, and their configurations."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, such as outputs/tiny.")
    parser.add_argument(
        "other",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="Further runs, each of which is compared with the first one.",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the results of the runs, and the settings in which they differ."""
    runs = [read_run(run_directory(path).path) for path in (arguments.run_dir, *arguments.other)]
    apart = differences(runs)
    rows = [("run", [str(run.path) for run in runs]), *results(runs)]
    rows += [("", [""] * len(runs)), ("configuration", ["" if apart else "the same"] * len(runs)), *apart]
    sys.stdout.writelines(f"{line}\n" for line in table(rows))
    return 0
