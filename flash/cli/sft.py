"""`flash sft`: supervised fine-tuning on the rows of a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flash.cli.arguments import CommandParsers
from flash.cli.train import add_run_parser, carry_out, interruptible
from flash.config.decode import refuse
from flash.config.tree import Config
from flash.text import harmless

if TYPE_CHECKING:
    from flash.run.sft_rows import CourseTokens


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    about = "Fine-tune a model on a file of messages, of prompts with completions, or of texts."
    return add_run_parser(commands, "sft", about, tried="Tokenize all rows")


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration, fetch its model if it needs one, tokenize all rows, and train."""
    from flash.run.checks.preflight import made_steps, sft_problems

    tokens: list[CourseTokens] = []

    def whole(config: Config) -> Config:
        from flash.run.models import make_fetched
        from flash.run.sft_rows import CourseTokens

        interruptible()
        if not arguments.dry_run:
            make_fetched(config)
        tokens.append(CourseTokens.read(config, _tell))
        config = tokens[0].with_steps(config)
        if problems := list(made_steps(config)):
            raise refuse(problems)
        return config

    def tried(config: Config) -> Iterator[str]:
        from flash.rollout.episode.tokenizer import HfTokenizer
        from flash.run.checks.dry_run import model_described

        yield from tokens[0].described(HfTokenizer(config.model))
        yield f"steps: {config.run.steps} of {config.train.batch_size} rows"
        yield f"model: {config.model.path}, {model_described(config)}"

    def start(config: Config) -> int:
        from flash.run.processes.launcher import launch_sft

        for line in tokens[0].lines:
            _tell(line)
        return launch_sft(config, tokens[0])

    return carry_out(arguments, sft_problems, tried, start, whole=whole)


def _tell(line: str) -> None:
    sys.stdout.write(f"[{harmless(line)}]\n")
    sys.stdout.flush()
