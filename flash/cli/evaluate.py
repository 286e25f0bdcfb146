"""`flash eval`: a model on the held-out problems of a config's environment."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from flash.cli import sampling
from flash.cli.commands import Commands
from flash.cli.files import check_writable
from flash.observe.console import evaluation_line
from flash.observe.rundir import write_atomically


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("eval", help="a model on the held-out problems of a config's environment")
    sampling.add_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Evaluate as a run does, with `[eval]`; print the line that a run prints."""
    from flash.run.sampling import evaluate

    check_writable(arguments.json, arguments.transcripts)
    sampled, samples = sampling.sample(arguments, evaluate)
    if arguments.json is not None:
        write_atomically(arguments.json, msgspec.json.format(msgspec.json.encode(sampled.evaluation), indent=2) + b"\n")
    sampling.write_transcripts(arguments.transcripts, samples)
    sys.stdout.write(evaluation_line(sampled.evaluation) + "\n")
    return 0
