"""`flash train`: run a configuration."""

from __future__ import annotations

import argparse
import sys

from flash.cli.commands import Commands
from flash.config.load import dump, load, split_arguments
from flash.trainer.tiny_model import make_missing_model


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("train", help="run a config: rollouts and training at the same time")
    parser.add_argument("config", nargs="+", metavar="CONFIG|KEY=VALUE", help="TOML files, then dotted overrides")
    parser.add_argument("--dry-run", action="store_true", help="validate, print the resolved config, start nothing")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration, make the tiny model that it may want, and train."""
    paths, overrides = split_arguments(arguments.config)
    if arguments.resume:
        overrides.append("run.resume=true")
    config = load(paths, overrides)
    if arguments.dry_run:
        sys.stdout.write(dump(config))
        return 0
    from flash.run.launcher import INTERRUPTED, launch, resume_command

    make_missing_model(config)
    files = [str(path) for path in paths]
    code = launch(config, files, overrides)
    if code == INTERRUPTED:
        sys.stderr.write(f"flash: interrupted; go on with: {resume_command(files, overrides)}\n")
    return code
