"""`flash sft`: supervised fine-tuning on JSON lines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from flash.cli.arguments import CommandParsers
from flash.cli.train import add_run_parser, carry_out, interruptible
from flash.config.tree import Config


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    about = "supervised fine-tuning on JSONL: messages, or prompts and completions"
    return add_run_parser(commands, "sft", about, tried="tokenize all rows")


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration and its rows, and train."""
    from flash.run.checks.preflight import sft_problems
    from flash.run.sft.course import with_steps

    return carry_out(arguments, sft_problems, _tried, _start, whole=with_steps)


def _tried(config: Config) -> Iterator[str]:
    """What can be tried without training."""
    from flash.run.checks.dry_run import model_described
    from flash.run.sft.course import look

    yield from look(config)
    yield f"model: {config.model.path}, {model_described(config)}"


def _start(config: Config) -> int:
    """Fetch the model that the configuration may want, and train."""
    from flash.run.models.models import make_fetched
    from flash.run.sft.launch import launch

    interruptible()
    make_fetched(config)
    return launch(config)
