"""Checks of a configuration whose values have the right types: impossible combinations, wrong paths, missing hardware.

Each table has one function `check_TABLE`, which yields every problem of its keys, and some have `advise_TABLE`, which
yields warnings. The tuples at the end of this file list them. The functions are not methods of the tables, because most
rules compare keys of several tables, and because a file of tables must not import environments, objectives and vLLM's
arguments. `flash.config.load` calls `check` with the resolved configuration, in which `auto` is replaced in the keys
cluster.gpus_per_node and model.dtype.

Beside this file, `flash.config.check_learning` has the functions of the tables that train, `flash.config.machine` those
of the tables that place processes, and `flash.config.models` those of models. `flash.run.checks.preflight` checks what
needs the network, files to be written, or the files of a resumed run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

from flash.config import check_learning, machine, models
from flash.config.decode import ConfigProblem, show, suggest
from flash.config.objects import class_with, examine_options, load_environment, load_sink, refusal
from flash.config.section import LOWEST_TEMPERATURE, sampling_faults
from flash.config.simulate import RARE, SimulateConfig, sampler, stated
from flash.config.tree import Config, TrackerName
from flash.errors import ConfigError
from flash.text import harmless

MOST_ANSWERS = 1_000_000
"""Largest number of answers of one evaluation. The hub keeps all of them in memory until the evaluation is over."""
WARM_START_METHODS = ("solved_examples", "alphabet")
"""Methods of an environment from which a tiny model is made and first trained."""
TEMPERATURES = (0.2, 1.5)
"""Range of useful temperatures. Below it samples are all alike; above it they are noise."""
NOT_NEGATIVE = ("prompt_tokens", "response_tokens", "observation_tokens", "turns", "reset_s", "env_s", "reward_s")
"""Distributions of `[simulate]` that are times in seconds, lengths in tokens, or numbers of turns."""
AT_LEAST_1 = ("prompt_tokens", "response_tokens", "turns")
"""Distributions of `[simulate]` whose draws below 1 count as 1."""

Check = Callable[[Config], Iterator[ConfigProblem]]
"""Function that yields the problems of one table."""


def check(config: Config, *, simulated: bool = False) -> list[ConfigProblem]:
    """Return every problem of a resolved configuration. `flash.config.load.load` calls this.

    With an `[sft]` table only the tables that `flash sft` uses are checked. `simulated`: True to return only problems
    that matter to a simulation.
    """
    checks = SIMULATION if simulated else TABLES if config.sft is None else SUPERVISED
    return [problem for one in checks for problem in one(config)]


def check_training(config: Config) -> list[ConfigProblem]:
    """Return every problem of the tables that a replay of recorded batches uses. Nothing is sampled then, and the
    places of models and environments are not looked at."""
    return [problem for one in TRAINING for problem in one(config)]


def unwise(config: Config) -> list[ConfigProblem]:
    """Return a warning for each setting that is valid but probably not intended. For `advise`."""
    return [problem for one in ADVICE for problem in one(config)]


def advise(config: Config, also: Iterable[ConfigProblem] = ()) -> None:
    """Print a warning on standard error for each setting that is unwise, in general or on this machine, and for each
    problem of `also`. `flash train`, `flash sft` and `flash.train` call this once, before they start anything."""
    _warn([*unwise(config), *machine.advise_dtype(config), *also])


def advise_on_engines(config: Config) -> None:
    """Print the warnings that concern engines only, for commands that do not train: `flash eval`, `flash rollout` and
    `flash join`."""
    _warn(machine.advise_engine(config))


def _warn(problems: Iterable[ConfigProblem]) -> None:
    """Print one line for each problem. Values that the user wrote may hold control characters; these are escaped."""
    for key, message in problems:
        sys.stderr.write(f"flash: warning: `{key}`: {harmless(message)}\n")


# -- one function for each table -------------------------------------------------------------------------------------


def check_run(config: Config) -> Iterator[ConfigProblem]:
    """Check that the run directory can be made, and that there is a run to continue if the run resumes."""
    if (fault := models.unreachable(str(config.run_dir.absolute()))) is not None:
        yield ConfigProblem("run.output_dir", f"{show(str(config.run_dir.absolute()))} cannot be used: {fault}")
        return
    # The run makes all folders that are missing, so the innermost existing one must be writable.
    folder = config.run_dir.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        yield ConfigProblem("run.output_dir", f"expected a folder, and {folder} is not a folder")
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield ConfigProblem("run.output_dir", f"expected a folder that can be written to; {folder} cannot")
    if config.run.resume and not config.run_dir.is_dir():
        yield ConfigProblem("run.resume", f"there is no run to continue: the folder {config.run_dir} does not exist")


def check_env(config: Config) -> Iterator[ConfigProblem]:
    """Check that the environment exists, has the methods of an environment, and accepts its options.

    With a `[tiny_model]` table the class also needs the methods WARM_START_METHODS.
    """
    try:
        env = load_environment(config.env.path)
    except ConfigError as error:
        yield ConfigProblem("env.path", str(error))
        return
    kwargs, problems = examine_options(env, config.env.options, "env.options")
    # The class's own methods get the options, so each check is made only if the one before has found nothing.
    faults = problems or list(_own_check(env, kwargs))
    yield from faults or _domains(config, env, kwargs)
    if config.tiny_model is not None and not all(callable(getattr(env, name, None)) for name in WARM_START_METHODS):
        message = (
            f"`{config.env.path}` has no solved examples to teach a tiny model with: give it the methods "
            "solved_examples and alphabet (docs/environments.md), or name another model and leave [tiny_model] out (in "
            'Python: settings={"tiny_model": None})'
        )
        yield ConfigProblem("tiny_model", message)


def _own_check(env: type[object], kwargs: dict[str, Any]) -> Iterator[ConfigProblem]:
    """Yield the error of the environment's own classmethod `check` about its options (`kwargs`), if it has one."""
    own_check: object = getattr(env, "check", None)
    if not callable(own_check):
        return
    try:
        own_check(**kwargs)
    # The class is the user's, so it may raise any exception to refuse its options, or even try to end the process.
    except (Exception, SystemExit) as error:
        yield ConfigProblem("env.options", refusal(env, error))


def _domains(config: Config, env: type[object], kwargs: dict[str, Any]) -> Iterator[ConfigProblem]:
    """Yield a problem for each option of a domain that conflicts with the rest of the configuration.

    A domain is a kind of problems with settings of its own, in place of those of the run. Most domains are the
    environments of a mixture (`envs.mixture`). An environment without domains has no problems here. `kwargs` are the
    options of `env` as keyword arguments.
    """
    try:
        # Only the class that names the kinds of problems can have their domains, as in `LoadedEnvironment.domains`.
        found = class_with("kind_of", env, kwargs)
        has_domains = found is not None and callable(getattr(found[0], "domains", None))
        domains: dict[str, Any] = found[0].domains(**found[1]) if found is not None and has_domains else {}
        limits = {name: (one.max_new_tokens, one.group_size, one.drop_equal_rewards) for name, one in domains.items()}
    # `wrapped` and `domains` are a user's methods, which may raise any exception and return anything.
    except (Exception, SystemExit) as error:
        yield ConfigProblem("env.options", refusal(env, error))
        return
    # Only the wrapper knows which of its options holds the table of a wrapped mixture.
    table = "env.options.kinds" if found is not None and found[0] is env else "env.options … kinds"
    if len(domains) > 1 and config.rollout.fifo_window is not None:
        message = "cannot be kept with several domains, whose shares decide which groups a step takes: leave it out"
        yield ConfigProblem("rollout.fifo_window", message)
    for name, (max_new_tokens, group_size, drop) in limits.items():
        key, limit = f"{table}.{name}", config.model.max_length - 1
        if (max_new_tokens or 0) > limit:
            message = f"expected at most {limit} (model.max_length = {limit + 1}), got {max_new_tokens}"
            yield ConfigProblem(f"{key}.max_new_tokens", message)
        size = group_size or config.rollout.group_size
        if size == 1 and (config.rollout.drop_equal_rewards if drop is None else drop):
            message = "groups of one sample have equal rewards: all would be dropped"
            yield ConfigProblem(f"{key}.group_size", message)


def check_sampling(config: Config) -> Iterator[ConfigProblem]:
    """Check the parts of `[rollout]` that a simulation needs, too: groups, sampling, and room for a prompt."""
    rollout = config.rollout
    if rollout.accuracy_bounds is not None and rollout.accuracy_bounds[0] > rollout.accuracy_bounds[1]:
        yield ConfigProblem("rollout.accuracy_bounds", f"expected [low, high], got {list(rollout.accuracy_bounds)}")
    for name, fault in sampling_faults(config.sampling):
        yield ConfigProblem(f"rollout.{name}", fault)
    members = rollout.group_size + rollout.extra_per_group
    if "group" in rollout.barriers and rollout.max_concurrent != "auto" and rollout.max_concurrent < members:
        message = (
            f"expected at least the {members} samples of a group, which start together with "
            f'rollout.barriers = ["group"], got {rollout.max_concurrent}'
        )
        yield ConfigProblem("rollout.max_concurrent", message)
    if rollout.on_expire == "wait" and rollout.extra_groups:
        message = "expected 0: redundant groups become too old, which on_expire = 'wait' does not allow"
        yield ConfigProblem("rollout.extra_groups", message)
    if rollout.drop_equal_rewards and rollout.group_size == 1:
        yield ConfigProblem(
            "rollout.drop_equal_rewards", "groups of one sample have equal rewards: all would be dropped"
        )
    limit = config.model.max_length - 1
    if config.rollout.max_new_tokens > limit:
        message = f"expected at most {limit} (model.max_length = {limit + 1}), got {config.rollout.max_new_tokens}"
        yield ConfigProblem("rollout.max_new_tokens", message)
    if (least := config.rollout.min_tokens) > (most := config.rollout.max_new_tokens):
        yield ConfigProblem("rollout.min_tokens", f"expected at most rollout.max_new_tokens = {most}, got {least}")


def check_rollout(config: Config) -> Iterator[ConfigProblem]:
    """Check that the settings of `[rollout]` are consistent and possible with this model and on these devices."""
    yield from check_sampling(config)
    # The trainer must know which tokens `top_k` keeps. It cannot with logits in bfloat16 or with drafted tokens.
    if (why_unknown := config.why_kept_tokens_unknown(config.sampling)) is not None:
        yield ConfigProblem("rollout.top_k", why_unknown)
    if config.rollout.routing_replay and config.gpus_per_node == 0:
        message = "expected false without GPUs: vLLM's engine on the CPU does not report which experts it chose"
        yield ConfigProblem("rollout.routing_replay", message)


def advise_rollout(config: Config) -> Iterator[ConfigProblem]:
    """Warn of a temperature at which samples teach nothing."""
    low, high = TEMPERATURES
    temperature = config.rollout.temperature
    if not low <= temperature <= high:
        message = f"at {temperature:g} samples are {'all alike' if temperature < low else 'noise'}"
        yield ConfigProblem("rollout.temperature", message)


def check_eval(config: Config) -> Iterator[ConfigProblem]:
    """Check that several answers to a problem can differ, and that an evaluation is not too large."""
    if config.eval.samples > 1 and config.eval.temperature == 0:
        message = f"{config.eval.samples} greedy answers are all the same: set eval.temperature above 0"
        yield ConfigProblem("eval.samples", message)
    if 0 < config.eval.temperature < LOWEST_TEMPERATURE:
        message = f"expected 0, which is greedy, or at least {LOWEST_TEMPERATURE}, got {config.eval.temperature:g}"
        yield ConfigProblem("eval.temperature", message)
    if config.eval.problems * config.eval.samples > MOST_ANSWERS:
        message = (
            f"expected at most {MOST_ANSWERS} answers (problems · samples), got {config.eval.problems} · "
            f"{config.eval.samples}"
        )
        yield ConfigProblem("eval.problems", message)


def check_track(config: Config) -> Iterator[ConfigProblem]:
    """Check that each tracker is a known name, or a function of the user that can be imported and called."""
    names = get_args(TrackerName)
    for place, given in enumerate(config.track.to):
        key = f"track.to[{place}]"
        if ":" in given:
            try:
                load_sink(given)
            except ConfigError as error:
                yield ConfigProblem(key, str(error))
        elif given not in names:
            known = ", ".join(map(show, names))
            message = f"expected {known} or `module:function`, got {show(given)}{suggest(given, names)}"
            yield ConfigProblem(key, message)


def check_alarms(config: Config) -> Iterator[ConfigProblem]:
    """Check that the command that alarms call can be started."""
    command = config.alarms.command
    if command is None:
        return
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield ConfigProblem("alarms.command", f"cannot be split into words: {error}")
        return
    if not words:
        yield ConfigProblem("alarms.command", f"expected a program and its arguments, got {show(command)}")
    elif shutil.which(words[0]) is None:
        place = "" if os.path.dirname(words[0]) else " on PATH"
        message = f"there is no program {show(words[0])}{place}: install it, or name an executable file by its path"
        yield ConfigProblem("alarms.command", message)


def check_simulated_gpus(config: Config) -> Iterator[ConfigProblem]:
    """Check that the simulated GPUs can be divided among engines and trainers. Without `[simulate]`, check nothing."""
    simulate = config.simulate
    if simulate is None:
        return
    gpus, serving, width = simulate.gpus, simulate.rollout_gpus, config.engine.tensor_parallel
    if serving >= gpus:
        message = f"expected fewer than simulate.gpus = {gpus}, so that some GPUs train, got {serving}"
        yield ConfigProblem("simulate.rollout_gpus", message)
    if serving % width:
        message = f"expected a multiple of engine.tensor_parallel = {width}, got {serving}"
        yield ConfigProblem("simulate.rollout_gpus", message)


def check_simulated_run(config: Config) -> Iterator[ConfigProblem]:
    """Check the requirements of `flash simulate` alone.

    It needs a `[simulate]` table, at most one adapter per engine, an engine for each node, possible distributions, and
    a prompt that fits into model.max_length.
    """
    if config.simulate is None:
        yield ConfigProblem(
            "simulate", "is missing: the [simulate] table describes the simulated hardware and workload"
        )
    # Only drain with [lora] keeps the adapters of several versions in an engine.
    if config.adapters > 1:
        message = "expected another value than drain: with [lora] an engine then holds several adapters, which is not "
        yield ConfigProblem("rollout.swap", f"{message}simulated")
    if config.simulate is not None:
        engines, nodes = config.simulate.rollout_gpus // config.engine.tensor_parallel, config.cluster.nodes
        if engines < nodes:
            yield ConfigProblem("cluster.nodes", f"expected at most one per simulated engine: {engines}, got {nodes}")
        yield from _distributions(config.simulate)
        # RARE is a probability so small that no prompt is shorter than its quantile.
        limit, shortest = config.model.max_length - 1, round(sampler(config.simulate.prompt_tokens).draw(RARE))
        if shortest > limit:
            message = (
                f"leaves no room in model.max_length = {limit + 1}: the shortest prompt has {shortest} tokens; "
                f"expected at most {limit}"
            )
            yield ConfigProblem("simulate.prompt_tokens", message)


def _distributions(simulate: SimulateConfig) -> Iterator[ConfigProblem]:
    """Yield a problem for each number of a distribution that is no possible time, length, count or probability."""
    for key in NOT_NEGATIVE:
        # `place` completes the key: `.low` of a table, `[1]` of a list, or empty.
        for place, value in stated(getattr(simulate, key)):
            # Limits cut the draws, so a mean or a lower limit below 1 is possible: such draws count as 1.
            least = 1 if key in AT_LEAST_1 and place not in (".low", ".mean") else 0
            if value < least:
                yield ConfigProblem(f"simulate.{key}{place}", f"expected at least {least}, got {value:g}")
    for place, value in stated(simulate.success):
        if not 0 <= value <= 1:
            message = f"expected a probability from 0 to 1, got {value:g}"
            yield ConfigProblem(f"simulate.success{place}", message)


TABLES: tuple[Check, ...] = (
    check_run,
    models.check_model,
    check_env,
    check_rollout,
    machine.check_engine,
    check_learning.check_train,
    check_learning.check_lora,
    check_learning.check_algorithm,
    models.check_other_models,
    machine.check_weights,
    check_eval,
    check_track,
    check_alarms,
    machine.check_cluster,
    machine.check_parallel,
    check_simulated_gpus,
)
"""Checks of a run that samples and trains."""

SUPERVISED: tuple[Check, ...] = (
    check_run,
    models.check_model,
    check_learning.check_train,
    check_track,
    check_alarms,
    machine.check_cluster,
    machine.check_parallel,
)
"""Checks of supervised fine-tuning. Nothing is sampled, so neither environment nor engines are checked."""

TRAINING: tuple[Check, ...] = (check_learning.check_train, check_learning.check_lora, check_learning.check_algorithm)
"""Checks of a replay, which trains on one rank."""

SIMULATION: tuple[Check, ...] = (check_learning.check_batch, check_sampling, check_simulated_gpus, check_simulated_run)
"""Checks of a simulation. It needs no model, device or environment, so these are not checked."""

ADVICE: tuple[Check, ...] = (
    check_learning.advise_train,
    check_learning.advise_algorithm,
    advise_rollout,
    machine.advise_weights,
    machine.advise_cluster,
    machine.advise_engine,
)
"""Warnings about a configuration that `check` has accepted."""
