"""`flash tiny-model`: a small model that can be trained on a CPU."""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from flash.cli.arguments import CommandParsers
from flash.config.tree import DeadlinesConfig, TinyModelConfig
from flash.errors import ConfigError


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("tiny-model", help="make a small Qwen3, warm-started on an environment's examples")
    parser.add_argument("path", type=Path, help="folder to write")
    parser.add_argument("--env", default="envs.arithmetic:Arithmetic", metavar="MODULE:CLASS")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the environment")
    defaults = TinyModelConfig()
    parser.add_argument("--layers", type=int, default=defaults.layers)
    parser.add_argument("--width", type=int, default=defaults.width)
    parser.add_argument("--steps", type=int, default=defaults.warm_start_steps, help="supervised steps")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    tied = parser.add_mutually_exclusive_group()
    tied.add_argument("--tied", dest="tied", action="store_true", default=True, help="share the embeddings (default)")
    tied.add_argument("--untied", dest="tied", action="store_false")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Make the model that the arguments describe."""
    from flash.run.models.making import making
    from flash.trainer.model.tiny_model import make_tiny_model, show_progress

    wanted = {
        "layers": arguments.layers,
        "width": arguments.width,
        "tied": arguments.tied,
        "warm_start_steps": arguments.steps,
        "seed": arguments.seed,
    }
    try:
        config = msgspec.convert(wanted, TinyModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"tiny-model: {error}") from None
    options = dict(map(_option, arguments.option))
    with making(arguments.path, f"the tiny model {arguments.path}", DeadlinesConfig().rendezvous):
        make_tiny_model(arguments.path, config, arguments.env, options, show_progress)
    sys.stdout.write(f"{arguments.path}\n")
    return 0


def _option(text: str) -> tuple[str, Any]:
    """`key=value`, with the value read as TOML where it is TOML. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--option {text!r}: expected KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
