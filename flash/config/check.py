"""Check: finds faults of a well-typed configuration, such as impossible combinations, import paths, folders, hardware.

Each rule checks one subject and yields its problems; no rule depends on another. The configuration must be resolved.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from flash.ages import window
from flash.config.check_algorithm import algorithm_rule, lora_rule, sft_rule, undivided_rule
from flash.config.check_machine import ENGINE_RULES, MACHINE_RULES, Rule
from flash.config.check_models import fetch_rule, model_rule, other_models_rule, template_rule, unreachable
from flash.config.decode import ConfigProblem, show
from flash.config.objects import class_with, examine_options, load_environment, load_sink, refusal
from flash.config.section import LOWEST_TEMPERATURE, sampling_faults
from flash.config.simulate import SimulateConfig
from flash.config.spread import parse_spread
from flash.config.tree import Config
from flash.errors import ConfigError

MOST_ANSWERS = 1_000_000
"""Largest number of answers of one evaluation. The hub keeps all of them in memory until the evaluation is over."""

WARM_START_METHODS = ("solved_examples", "alphabet")

SPREADS = tuple(field.name for field in msgspec.structs.fields(SimulateConfig) if field.type is str)
"""Keys of `[simulate]` that hold distributions."""


def check(config: Config, *, simulated: bool = False) -> list[ConfigProblem]:
    """Return every problem of a resolved configuration. `simulated`: only problems that matter to a simulation."""
    rules = SIMULATION_RULES if simulated else RULES if config.sft is None else SFT_RULES
    return [problem for rule in rules for problem in rule(config)]


def batch_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that a batch consists of whole groups, and that each data shard gets a sample of each minibatch."""
    train, group_size = config.train, config.rollout.group_size
    if train.batch_size % group_size:
        message = f"expected a multiple of rollout.group_size = {group_size}, got {train.batch_size}"
        yield ConfigProblem("train.batch_size", message)
        return
    if config.groups_per_batch % train.minibatches:
        message = f"expected a divisor of the {config.groups_per_batch} groups of a batch, got {train.minibatches}"
        yield ConfigProblem("train.minibatches", message)
    elif train.batch_size // train.minibatches < config.data_shards:
        message = (
            f"{train.batch_size} samples in {train.minibatches} minibatches leave some of the "
            f"{config.data_shards} shards of the trainer ranks without a sample"
        )
        yield ConfigProblem("train.batch_size", message)


def age_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the bound on token age is not below the age that admission permits anyway."""
    bound, least = config.train.max_token_age, window(config.train.async_ratio)
    if bound is not None and (bound < least or not least):
        expected = f"a number of at least {least}, ⌈train.async_ratio⌉" if least else "none"
        why = "" if least else ": with train.async_ratio = 0 every age is 0"
        yield ConfigProblem("train.max_token_age", f"expected {expected}, got {bound}{why}")


def environment_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the environment exists, has the interface, accepts its options, and can train a tiny model if it
    must."""
    try:
        env = load_environment(config.env.path)
    except ConfigError as error:
        yield ConfigProblem("env.path", str(error))
        return
    kwargs, problems = examine_options(env, config.env.options, "env.options")
    faults = problems or list(_own_check(env, kwargs))
    yield from faults or _domains(config, env, kwargs)
    if config.tiny_model is not None and not all(callable(getattr(env, name, None)) for name in WARM_START_METHODS):
        message = (
            f"`{config.env.path}` has no solved examples to teach a tiny model with: give it the methods "
            "solved_examples and alphabet (docs/environments.md), or leave [tiny_model] out and name another model"
        )
        yield ConfigProblem("tiny_model", message)


def _own_check(env: type[object], kwargs: dict[str, Any]) -> Iterator[ConfigProblem]:
    """Yield the error of the environment's own classmethod `check` about its options, if it has one."""
    own_check: Callable[..., object] | None = getattr(env, "check", None)
    if own_check is None:
        return
    try:
        own_check(**kwargs)
    except Exception as error:  # the class is the user's, so it may raise any exception to refuse its options
        yield ConfigProblem("env.options", refusal(env, error))


def _domains(config: Config, env: type[object], kwargs: dict[str, Any]) -> Iterator[ConfigProblem]:
    """Yield a problem for each option of a domain that conflicts with the rest of the configuration."""
    found = class_with("domains", env, kwargs)
    domains: dict[str, Any] = {} if found is None else found[0].domains(**found[1])
    # Only the wrapper knows which of its options holds the table of a wrapped mixture.
    table = "env.options.kinds" if found is not None and found[0] is env else "env.options … kinds"
    if len(domains) > 1 and config.rollout.fifo_window is not None:
        message = "cannot hold with several domains, whose shares decide which groups a step takes: leave it out"
        yield ConfigProblem("rollout.fifo_window", message)
    for name, domain in domains.items():
        key, limit = f"{table}.{name}", config.model.max_length - 1
        if (domain.max_new_tokens or 0) > limit:
            message = f"expected at most {limit} (model.max_length = {limit + 1}), got {domain.max_new_tokens}"
            yield ConfigProblem(f"{key}.max_new_tokens", message)
        size = domain.group_size or config.rollout.group_size
        drop = domain.drop_equal_rewards
        if size == 1 and (config.rollout.drop_equal_rewards if drop is None else drop):
            message = "groups of one sample have equal rewards: all would be dropped"
            yield ConfigProblem(f"{key}.group_size", message)


def response_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the longest response leaves room for a prompt."""
    limit = config.model.max_length - 1
    if config.rollout.max_new_tokens > limit:
        message = f"expected at most {limit} (model.max_length = {limit + 1}), got {config.rollout.max_new_tokens}"
        yield ConfigProblem("rollout.max_new_tokens", message)
    if (least := config.rollout.min_tokens) > (most := config.rollout.max_new_tokens):
        yield ConfigProblem("rollout.min_tokens", f"expected at most rollout.max_new_tokens = {most}, got {least}")


def length_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that a sequence of full length fits into a forward pass."""
    longest = config.model.max_length
    if config.train.max_tokens_per_microbatch < longest:
        message = f"expected at least model.max_length = {longest}, got {config.train.max_tokens_per_microbatch}"
        yield ConfigProblem("train.max_tokens_per_microbatch", message)


def sampled_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the canary is no longer than a sequence, and that a sequence of full length fits into an episode."""
    longest = config.model.max_length
    if config.weights.canary_tokens > longest:
        message = f"expected at most {longest} (model.max_length = {longest}), got {config.weights.canary_tokens}"
        yield ConfigProblem("weights.canary_tokens", message)
    episode = config.rollout.max_episode_tokens
    if episode is not None and episode < longest:
        message = f"expected at least model.max_length = {longest}, got {episode}: lower that one for shorter sequences"
        yield ConfigProblem("rollout.max_episode_tokens", message)


def rate_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the learning rate does not rise towards its end."""
    train = config.train
    if train.final_learning_rate > train.learning_rate:
        message = (
            f"is a rate, not a share: expected at most train.learning_rate = {train.learning_rate:g}, got "
            f"{train.final_learning_rate:g}; a tenth of the peak is {train.learning_rate / 10:g}"
        )
        yield ConfigProblem("train.final_learning_rate", message)


def profile_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the profiled steps are a range of steps of the run."""
    text = config.train.profile
    if not text:
        return
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if found is None or int(found[1]) > int(found[2]):
        message = f"expected FIRST:LAST, two numbers of steps such as `3:5`, or an empty text, got {show(text)}"
        yield ConfigProblem("train.profile", message)
    # The steps of `flash sft` follow from its rows, which are not read yet.
    elif config.sft is None and int(found[2]) >= config.run.steps:
        message = (
            f"expected a LAST step of at most {config.run.steps - 1} (run.steps = {config.run.steps}), got {found[2]}"
        )
        yield ConfigProblem("train.profile", message)


def eval_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that several answers to a problem can differ, and that an evaluation is not too large."""
    if config.eval.samples > 1 and config.eval.temperature == 0:
        message = f"{config.eval.samples} greedy answers are all the same: set eval.temperature above 0"
        yield ConfigProblem("eval.samples", message)
    if 0 < config.eval.temperature < LOWEST_TEMPERATURE:
        message = f"expected 0, which is greedy, or at least {LOWEST_TEMPERATURE}, got {config.eval.temperature:g}"
        yield ConfigProblem("eval.temperature", message)
    if config.eval.problems * config.eval.samples > MOST_ANSWERS:
        message = f"expected at most {MOST_ANSWERS} answers (problems · samples), got {config.eval.samples} to each"
        yield ConfigProblem("eval.problems", message)


def sink_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the sink of a tracker can be loaded."""
    if config.observe.sink is not None:
        try:
            load_sink(config.observe.sink)
        except ConfigError as error:
            yield ConfigProblem("observe.sink", str(error))


def alarm_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that alarms which act have a limit, and that their command can be started."""
    alarms = config.alarms
    for key, chosen in (("alarms.checkpoint", alarms.checkpoint), ("alarms.stop", alarms.stop)):
        for name in chosen:
            if getattr(alarms, name) is None:
                yield ConfigProblem(key, f"`{name}` is never given: expected a limit as alarms.{name}")
    if alarms.command is None:
        return
    try:
        words = shlex.split(alarms.command)
    except ValueError as error:
        yield ConfigProblem("alarms.command", f"cannot be split into words: {error}")
        return
    if not words or shutil.which(words[0]) is None:
        yield ConfigProblem("alarms.command", f"expected a program and its arguments, got {show(alarms.command)}")


def resume_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that there is a run to continue."""
    if config.run.resume and unreachable(str(config.run_dir)) is None and not config.run_dir.is_dir():
        yield ConfigProblem("run.resume", f"there is no run to continue: the folder {config.run_dir} does not exist")


def rollout_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the settings of `[rollout]` are consistent."""
    rollout = config.rollout
    if rollout.accuracy_bounds is not None and rollout.accuracy_bounds[0] > rollout.accuracy_bounds[1]:
        yield ConfigProblem("rollout.accuracy_bounds", f"expected [low, high], got {list(rollout.accuracy_bounds)}")
    for name, fault in sampling_faults(config.sampling):
        yield ConfigProblem(f"rollout.{name}", fault)
    if (coarse := config.why_kept_tokens_unknown(config.sampling)) is not None:
        yield ConfigProblem("rollout.top_k", coarse)
    if rollout.routing_replay and config.gpus_per_node == 0:
        message = "expected false without GPUs: vLLM's engine on the CPU does not tell which experts it chose"
        yield ConfigProblem("rollout.routing_replay", message)
    members = rollout.group_size + rollout.extra_per_group
    if not rollout.replicate_prompts and rollout.max_concurrent != "auto" and rollout.max_concurrent < members:
        message = (
            f"expected at least the {members} samples of a group, which start together with "
            f"rollout.replicate_prompts = false, got {rollout.max_concurrent}"
        )
        yield ConfigProblem("rollout.max_concurrent", message)
    if rollout.on_expire == "wait" and rollout.extra_groups:
        message = "expected 0: groups beyond those of a step outgrow the window, and with on_expire = 'wait' none may"
        yield ConfigProblem("rollout.extra_groups", message)
    if rollout.drop_equal_rewards and rollout.group_size == 1:
        yield ConfigProblem(
            "rollout.drop_equal_rewards", "groups of one sample have equal rewards: all would be dropped"
        )


def simulate_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the simulated GPUs can be divided among engines and trainers, and that the distributions can be
    parsed."""
    simulate = config.simulate
    if simulate is None:
        return
    gpus, serving, width = simulate.gpus, simulate.rollout_gpus, simulate.gpus_per_engine
    if serving >= gpus:
        message = f"expected fewer than simulate.gpus = {gpus}, so that some GPUs train, got {serving}"
        yield ConfigProblem("simulate.rollout_gpus", message)
    if serving % width:
        message = f"expected a multiple of simulate.gpus_per_engine = {width}, got {serving}"
        yield ConfigProblem("simulate.rollout_gpus", message)
    elif serving // width < simulate.nodes:
        message = f"expected at most one per engine: {serving // width}, got {simulate.nodes}"
        yield ConfigProblem("simulate.nodes", message)
    for key in SPREADS:
        try:
            parse_spread(getattr(simulate, key))
        except ConfigError as error:
            yield ConfigProblem(f"simulate.{key}", str(error))


def simulated_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that there is a `[simulate]` table, and that the simulator supports the swap method."""
    if config.simulate is None:
        yield ConfigProblem("simulate", "is missing: a [simulate] table says what stands in for hardware and workload")
    if config.adapters > 1:
        yield ConfigProblem(
            "rollout.swap", "expected another one than drain: adapters ([lora]) side by side are not simulated"
        )


RULES: tuple[Rule, ...] = (
    batch_rule,
    age_rule,
    rollout_rule,
    algorithm_rule,
    lora_rule,
    environment_rule,
    model_rule,
    template_rule,
    fetch_rule,
    other_models_rule,
    response_rule,
    length_rule,
    sampled_rule,
    rate_rule,
    profile_rule,
    eval_rule,
    sink_rule,
    alarm_rule,
    *ENGINE_RULES,
    *MACHINE_RULES,
    resume_rule,
    simulate_rule,
)
"""Rules for a run that samples and trains."""

SFT_RULES: tuple[Rule, ...] = (
    sft_rule,
    undivided_rule,
    model_rule,
    template_rule,
    fetch_rule,
    length_rule,
    profile_rule,
    sink_rule,
    alarm_rule,
    *MACHINE_RULES,
    resume_rule,
)
"""Rules for supervised fine-tuning. Nothing is sampled, so neither environment nor engines are checked."""

SIMULATION_RULES: tuple[Rule, ...] = (batch_rule, age_rule, rollout_rule, response_rule, simulate_rule, simulated_rule)
"""Rules for a simulation. It needs no model, device or environment, so these are not checked."""
