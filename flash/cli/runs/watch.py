"""`flash watch`: show a run on one screen of a terminal, in progress or finished."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from flash.cli.arguments import OUTPUTS, CommandParsers, run_directory, runs_in

EVERY_S = 1.0
"""Seconds between two updates of the screen."""


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("watch", help="Show a run in the terminal, while it runs and afterwards.")
    parser.add_argument(
        "run_dir", nargs="?", type=Path, help=f"Folder of the run. Default: the newest run in {OUTPUTS}."
    )
    parser.add_argument("--once", action="store_true", help="Print the present state once, and exit.")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Draw the run every second until an interrupt, or once if the output is no terminal."""
    from rich.console import Console
    from rich.live import Live

    from flash.observe.watch import Watched

    watched = Watched(run_directory(arguments.run_dir or runs_in(OUTPUTS, "watch")[0]))
    console = Console(highlight=False)
    if arguments.once or not console.is_terminal or console.is_dumb_terminal:
        console.print(watched.picture(time.time(), console.width))
        return 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(watched.picture(time.time(), console.width), refresh=True)
            time.sleep(EVERY_S)
