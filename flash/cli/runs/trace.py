"""`flash trace`: write a run's timeline in a format that Perfetto reads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from flash.cli.arguments import CommandParsers, check_writable, run_directory
from flash.errors import ConfigError
from flash.observe.rundir.rundir import write_atomically
from flash.observe.timeline import trace


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "trace", help="Write the timeline of a run as a file that ui.perfetto.dev and chrome://tracing show."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="Folder of the run, such as outputs/tiny.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="File to write. Default: RUN_DIR/trace.json.")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and print its name."""
    directory = run_directory(arguments.run_dir)
    output: Path = arguments.output or directory.path / "trace.json"
    check_writable(output)
    spans = directory.read_spans()
    if not spans:
        raise ConfigError(f"{arguments.run_dir}: there is nothing to trace yet: its spans.jsonl is empty or missing")
    write_atomically(output, msgspec.json.encode(trace(spans, directory.read_metrics())) + b"\n")
    sys.stdout.write(f"{output}: open it at ui.perfetto.dev, which keeps it in the browser, or in chrome://tracing\n")
    return 0
