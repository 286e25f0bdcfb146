"""`flash drain`: make a node that has joined a run leave it in order."""

from __future__ import annotations

import argparse
import os
import sys

from flash.cli.arguments import CommandParsers, add_hub_option, hub_place
from flash.errors import ConfigError


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("drain", help="Let a node that has joined a run finish its samples and leave.")
    parser.add_argument(
        "where",
        nargs="+",
        metavar="RUN_DIR|NODE",
        help="Folder of the run, and then the number of the node, which the run prints.",
    )
    add_hub_option(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Ask the hub to make the node leave."""
    import anyio

    from flash.hub import protocol as p
    from flash.run.processes.hub_place import TOKEN_VARIABLE
    from flash.run.processes.rendezvous import ask

    *folders, node = arguments.where
    if not node.isdecimal():
        raise ConfigError(f"expected the number of a node, as the run's output names it, got {node}")
    place = hub_place(arguments.hub, folders)
    anyio.run(ask, place.find(os.environ.get(TOKEN_VARIABLE)), p.DrainRequest(int(node)))
    sys.stdout.write(f"node {node} is told to leave\n")
    return 0
