"""`flash eval`: evaluate a model on the held-out problems of an environment."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from flash.cli import sampling
from flash.cli.arguments import CommandParsers, check_writable
from flash.config.tree import Config
from flash.observe.console import best_of_lines, environment_lines, evaluation_line
from flash.observe.rundir.rundir import write_atomically
from flash.observe.rundir.samples import Sample
from flash.observe.stats import BestOf, best_of_each
from flash.text import one_line


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("eval", help="Evaluate a configuration, a run or a model on held-out problems.")
    sampling.add_options(parser)
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="Number of answers to each problem, which gives pass@k for k up to N. Default: eval.samples.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the result to this file.")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Evaluate with the settings of `[eval]`, in the same way as a run does. Returns 1 if answers are missing.

    Prints the line that a run prints, pass@k, and the metrics of the environment.
    """
    from flash.run.sampling import evaluate

    check_writable(arguments.json, arguments.transcripts)
    config, model = sampling.configured(arguments)
    if arguments.samples is not None:
        config, model = sampling.configured(arguments, *_several(arguments.samples, config))
    sampled, samples = sampling.sample(config, model, evaluate)
    found = best_of_each(answers(samples))
    if arguments.json is not None:
        write_atomically(arguments.json, result(sampled.evaluation, found))
    sampling.write_transcripts(arguments.transcripts, samples)
    told = [evaluation_line(sampled.evaluation)]
    if len(found) > 1:
        told += best_of_lines(found, binary=sampled.evaluation["binary"] == 1)
    sys.stdout.writelines(f"{one_line(line)}\n" for line in told + environment_lines(sampled.evaluation))
    return sampling.told_failures(sampled)


def _several(samples: int, config: Config) -> list[str]:
    """Return the overrides for `samples` answers per problem.

    Several greedy answers would be equal, so they are drawn at the temperature of training.
    """
    temperature = config.eval.temperature
    if samples > 1 and temperature == 0:
        temperature = config.rollout.temperature
        sys.stderr.write(f"[answers are drawn at temperature {temperature:g}, as for training]\n")
    return [f"eval.samples={samples}", f"eval.temperature={temperature}"]


def answers(samples: Sequence[Sample]) -> list[list[float]]:
    """Return the rewards of the answers to each problem."""
    problems: dict[int, list[float]] = {}
    for sample in samples:
        problems.setdefault(sample.group_id, []).append(sample.reward)
    return list(problems.values())


def result(row: dict[str, float], found: Sequence[BestOf]) -> bytes:
    """Return the content of the file of `--json`: the row of the evaluation, and pass@k.

    If a reward is neither 0 nor 1, it is the best of k instead of pass@k.
    """
    each = [{"k": one.k, **one.interval._asdict()} for one in found]
    return msgspec.json.format(msgspec.json.encode({**row, "time": time.time(), "best_of": each}), indent=2) + b"\n"
