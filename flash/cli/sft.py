"""`flash sft`: supervised fine-tuning on JSON lines."""

from __future__ import annotations

import argparse
import sys

from flash.cli.arguments import CommandParsers
from flash.cli.train import begun, exit_told, interruptible
from flash.config.advice import advise
from flash.config.load import dump, load, split_arguments
from flash.config.tree import Config
from flash.run.checks.preflight import left_as_it_was, sft_problems


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("sft", help="supervised fine-tuning on JSONL: messages, or prompts and completions")
    parser.add_argument("config", nargs="+", metavar="CONFIG|KEY=VALUE", help="TOML files, then dotted overrides")
    parser.add_argument("--dry-run", action="store_true", help="tokenize all rows; print the resolved config")
    parser.add_argument("--resume", action="store_true", help="go on with the run in the run directory")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration and its rows, and train."""
    paths, overrides = split_arguments(arguments.config)
    if arguments.resume:
        overrides.append("run.resume=true")
    config = load(paths, overrides, also=sft_problems)
    from flash.run.sft.course import look, with_steps

    config = with_steps(config)
    advise(config, left_as_it_was(config))
    if arguments.dry_run:
        for line in look(config):
            sys.stderr.write(f"checked {line}\n")
        sys.stdout.write(dump(config))
        return 0
    before = begun(config)
    return exit_told(_start(config), config, arguments.typed, before)


def _start(config: Config) -> int:
    """Fetch the model that the configuration may want, and train."""
    from flash.run.models.models import make_fetched
    from flash.run.sft.launch import launch

    interruptible()
    make_fetched(config)
    return launch(config)
