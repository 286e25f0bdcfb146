"""`flash track`: send a run's rows to a tracker, from the first row that the tracker does not have."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from flash.cli.arguments import CommandParsers, run_directory
from flash.config.tree import TrackerName
from flash.errors import ConfigError, FlashError
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.trackers.trackers import Tracking, held, not_installed, settings

NAMES: tuple[TrackerName, ...] = get_args(TrackerName)


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("track", help="Send those rows of a run to a tracker that it does not have yet.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, such as outputs/tiny.")
    parser.add_argument("--to", choices=NAMES, help="Name of the tracker. Default: the trackers of the run's track.to.")
    parser.add_argument("--project", help="Project in the tracker. Default: the run's track.project.")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Send the rows to each tracker, and print their number."""
    directory = run_directory(arguments.run_dir)
    names = [arguments.to] if arguments.to else settings(directory).get("track", {}).get("to", [])
    if not names:
        raise ConfigError(f"{arguments.run_dir} has no track.to: name a tracker with --to ({', '.join(NAMES)})")
    for name in names:
        sys.stdout.write(f"{name}: sent {_send(directory, name, arguments.project)} rows\n")
    return 0


def _send(directory: RunDirectory, name: TrackerName, project: str | None) -> int:
    """Send the rows that one tracker does not have, and return their number."""
    if name not in NAMES:
        raise ConfigError(f"track.to: expected one of {', '.join(NAMES)}, got {name!r}")
    if (problem := not_installed(name)) is not None:
        raise ConfigError(problem)
    with held(directory, name) as alone:
        if not alone:
            raise ConfigError(f"{name}: the run itself or another command is sending rows to it: wait until that ends")
        tracking = Tracking(directory, name)
        rows = tracking.left()
        try:
            if rows:
                tracking.send(project)
                tracking.close(failed=False)
        except FlashError:
            raise
        except Exception as error:  # the tracker's package may raise any error
            where = "rows that it has received are written down, and the same command sends the rest"
            raise ConfigError(f"{name} failed: {type(error).__name__}: {error}; {where}") from error
    return rows
