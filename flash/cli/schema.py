"""`flash schema`: print the JSON Schema of the configuration, for editors."""

from __future__ import annotations

import argparse
import sys

import msgspec

from flash.cli.arguments import CommandParsers
from flash.config.schema import schema


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    return commands.add_parser(
        "schema", help="Print the JSON Schema of the configuration, with which editors complete and check TOML files."
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the schema, indented."""
    sys.stdout.write(encoded() + "\n")
    return 0


def encoded() -> str:
    """Return the schema as text, as docs/configuration.schema.json has it."""
    return msgspec.json.format(msgspec.json.encode(schema())).decode()
