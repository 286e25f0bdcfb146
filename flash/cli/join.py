"""`flash join`: generate samples for a run that is in progress."""

from __future__ import annotations

import argparse

from flash.cli.arguments import CommandParsers, add_hub_option, hub_place
from flash.errors import ConfigError


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("join", help="Add the engines of this machine to a run that is under way.")
    parser.add_argument(
        "where",
        nargs="*",
        metavar="RUN_DIR|KEY=VALUE",
        help="Folder of the run, and settings of this machine alone, such as engine.count=2.",
    )
    add_hub_option(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Join the run and serve it until it is over or a signal arrives."""
    from flash.run.processes.launcher import OWN_KEYS, join

    overrides = [argument for argument in arguments.where if "=" in argument]
    foreign = [override for override in overrides if override.partition("=")[0].strip() not in OWN_KEYS]
    if foreign:
        known = ", ".join(f"`{key}`" for key in OWN_KEYS)
        raise ConfigError(f"`{foreign[0]}` is not a machine's own: the run has it; a node that joins may set {known}")
    place = hub_place(arguments.hub, [argument for argument in arguments.where if "=" not in argument])
    return join(place, overrides)
