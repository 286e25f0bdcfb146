"""`flash rollout`: play episodes of a config's environment with a model, and print them."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from flash.cli import sampling
from flash.cli.arguments import CommandParsers, check_writable
from flash.errors import ConfigError


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "rollout", help="Play some episodes of a configuration, a run or a model, and print their texts."
    )
    sampling.add_options(parser)
    parser.add_argument("--episodes", "-n", type=int, default=4, metavar="N", help="Number of episodes. Default: 4.")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Play the first training problems, sampled as in training, and print the episodes. Returns 1 if an episode
    failed."""
    from flash.run.sampling import roll_out

    if arguments.episodes < 1:
        raise ConfigError(f"--episodes: expected at least 1, got {arguments.episodes}")
    check_writable(arguments.transcripts)
    config, model = sampling.configured(arguments)
    sampled, samples = sampling.sample(config, model, partial(roll_out, episodes=arguments.episodes))
    sampling.write_transcripts(arguments.transcripts, samples)
    for sample in samples:
        sys.stdout.write(sampling.transcript(sample) + "\n")
    mean = sum(sample.reward for sample in samples) / len(samples)
    sys.stdout.write(f"{len(samples)} episodes, mean reward {mean:.3f}\n")
    return sampling.told_failures(sampled)
