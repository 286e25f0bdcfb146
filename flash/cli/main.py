"""The command line. Each command is a module with `add_parser` and `run`.

It parses and validates first: torch and vllm are imported only when something starts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from envs.sandbox import cli as sandbox
from flash.cli import calibrate, plot, simulate, tiny_model, train
from flash.errors import FlashError

DESCRIPTION = "Asynchronous reinforcement-learning post-training for language models."
COMMANDS = (train, simulate, calibrate, plot, tiny_model, sandbox)
"""In the order of the help."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flash", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands).set_defaults(run=command.run)
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; files and overrides may also stand behind options, where argparse alone does not look for them."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [argument for argument in rest if argument.startswith("-") or "config" not in arguments]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.config += rest
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `flash`; the exit code. 2 means wrong input, 130 an interrupt."""
    arguments = _parse(argv)
    try:
        return arguments.run(arguments)
    except FlashError as error:
        sys.stderr.write(f"flash: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
