"""Advice: warnings about settings that are valid but probably unintended. They are printed once before the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator

from flash.config.decode import ConfigProblem
from flash.config.machine import why_eager
from flash.config.tree import Config
from flash.text import harmless

HIGH_LEARNING_RATE = 1e-2
"""Learning rate above which Adam destroys a pretrained model in a few steps, whatever its size."""
HIGH_ENTROPY_BONUS = 0.1
"""Entropy bonus above which the entropy outweighs rewards of about 1."""
LOOSE_TOLERANCE = 0.5
"""Canary tolerance, in nats, above which the canary detects nothing. Engines that computed with other weights differed
by 0.6 nats and more."""
TEMPERATURES = (0.2, 1.5)
"""Range of useful temperatures. Below it samples are all alike; above it they are noise."""


def advise(config: Config, also: Iterable[ConfigProblem] = ()) -> None:
    """Print a warning on standard error for each unwise setting, and for each problem of `also`."""
    _warn([*unwise(config), *also])


def advise_on_engines(config: Config) -> None:
    """Print the warnings that concern engines only, for commands that do not train."""
    _warn(_engines(config))


def _warn(problems: Iterable[ConfigProblem]) -> None:
    for key, message in problems:
        sys.stderr.write(f"flash: warning: `{key}`: {harmless(message)}\n")


def unwise(config: Config) -> list[ConfigProblem]:
    """Return a warning for each setting that is probably not intended."""
    return [*_learning(config), *_sampling(config), *_machine(config), *_engines(config)]


def _learning(config: Config) -> Iterator[ConfigProblem]:
    train, steps = config.train, config.run.steps
    if train.learning_rate > HIGH_LEARNING_RATE:
        message = f"{train.learning_rate:g} is far above what trains a language model; 1e-6 to 1e-4 are usual"
        yield ConfigProblem("train.learning_rate", message)
    if train.warmup_steps >= steps:
        message = f"the run has {steps} steps, so that the learning rate never reaches {train.learning_rate:g}"
        yield ConfigProblem("train.warmup_steps", message)
    if config.algorithm.entropy_bonus > HIGH_ENTROPY_BONUS:
        message = f"{config.algorithm.entropy_bonus:g} is likely to outweigh the rewards"
        yield ConfigProblem("algorithm.entropy_bonus", message)


def _sampling(config: Config) -> Iterator[ConfigProblem]:
    low, high = TEMPERATURES
    temperature = config.rollout.temperature
    if not low <= temperature <= high:
        message = f"at {temperature:g} samples are {'all alike' if temperature < low else 'noise'}"
        yield ConfigProblem("rollout.temperature", message)
    tolerance = config.weights.canary_tolerance
    if tolerance is not None and tolerance > LOOSE_TOLERANCE:
        message = f"a canary that allows {tolerance:g} nats finds no engine that computes something else"
        yield ConfigProblem("weights.canary_tolerance", message)


def _machine(config: Config) -> Iterator[ConfigProblem]:
    cores = os.cpu_count() or 1
    if config.gpus_per_node == 0 and config.cluster.trainer_ranks > cores:
        message = f"{config.cluster.trainer_ranks} ranks share the {cores} cores of this machine"
        yield ConfigProblem("cluster.trainer_ranks", message)
    if config.gpus_per_node == 0 and config.train.offload:
        yield ConfigProblem("train.offload", "trainers without GPUs have no other memory than the host's")


def _engines(config: Config) -> Iterator[ConfigProblem]:
    if (why := why_eager(config)) is not None:
        yield ConfigProblem("engine.enforce_eager", why)
