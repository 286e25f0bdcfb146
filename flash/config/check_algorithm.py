"""Checks of `[algorithm]`, `[critic]`, `[lora]` and `[sft]` tables: settings that would fail or have no effect.

Each rule checks one subject and yields its problems. An option without an effect is refused, because a user who sets it
expects an effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from algorithms.base import Advantage, Aggregation, Objective
from algorithms.corrections import IcePop, TokenTis
from algorithms.rhythm import USED_BY
from algorithms.shaping import LengthPenalty, Overlong
from algorithms.staleness import NoStaleness
from flash.config.decode import ConfigProblem, show
from flash.config.learning import AlgorithmConfig
from flash.config.objects import examine_options, load_objective
from flash.config.section import faults_with_teacher
from flash.config.tree import Config
from flash.errors import ConfigError

COMPARING: tuple[Advantage, ...] = ("group", "group_mean", "leave_one_out", "turn")
"""Estimators that compare the samples of a prompt with each other. They need groups of at least two samples."""
WEIGHTS = (TokenTis, IcePop)
"""Corrections that compensate the age of a token, for objectives that do not."""
COARSE = ("quantization", "quantization_config", "kv_cache_dtype")
"""Arguments of vLLM that make engines compute with lower precision than `model.dtype`."""
DISCOUNTING: tuple[Advantage, ...] = ("turn", "gae")
"""Estimators that use `algorithm.gamma`."""


def algorithm_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the objective exists, that its options fit, and that the settings of `[algorithm]` are consistent."""
    try:
        kind = load_objective(config.algorithm.objective)
    except ConfigError as error:
        yield ConfigProblem("algorithm.objective", str(error))
        return
    options, problems = examine_options(kind, config.algorithm.options, "algorithm.options")
    if problems:
        yield from problems
        return
    try:
        objective = kind(**options)
    except ValueError as error:
        yield ConfigProblem("algorithm.options", str(error))
        return
    for name, needed in objective.without_effect().items():
        if name in config.algorithm.options:
            yield ConfigProblem(f"algorithm.options.{name}", f"has no effect: {needed}")
    advantage = config.algorithm.advantage or objective.advantage
    yield from _advantage(config, objective, advantage)
    yield from _aggregation(config, config.algorithm.aggregation or objective.aggregation)
    yield from _staleness(config, objective)
    yield from _reuse(config, objective)
    yield from _critic(config, objective, advantage)
    yield from _disagreement(config, objective, advantage)
    yield from _kl(config)
    yield from _teacher(config)
    yield from _shaping(config)
    yield from _rhythm(config)


def lora_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that adapters are not divided, travel by tcp, and have a data type for which engines have kernels."""
    if config.lora is None:
        return
    if config.gpus_per_node > 0 and config.model.dtype == "float32":
        message = "expected bfloat16 or float16: vLLM's kernels for adapters ([lora]) on GPUs take no float32"
        yield ConfigProblem("model.dtype", message)
    yield from undivided_rule(config)
    if config.algorithm.kl is not None and config.algorithm.kl.refresh is not None:
        yield ConfigProblem(
            "algorithm.kl.refresh", "expected none: with adapters ([lora]) the base stays the reference"
        )
    if config.weights_backend != "tcp":
        message = f"expected tcp or auto, as adapters ([lora]) travel by nothing else, got {config.weights_backend}"
        yield ConfigProblem("weights.backend", message)


def undivided_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that ranks do not divide adapters. FSDP may shard them."""
    for name in config.parallel.__struct_fields__:
        if config.lora is not None and (ranks := getattr(config.parallel, name)) > 1:
            message = f"expected 1, as what ranks divide takes no adapters ([lora]), got {ranks}"
            yield ConfigProblem(f"parallel.{name}", message)


def _advantage(config: Config, objective: Objective, advantage: Advantage) -> Iterator[ConfigProblem]:
    """Yield the problems of the advantage estimator: groups of one sample, which it cannot compare, or an unused
    discount."""
    algorithm, teacher = config.algorithm, config.algorithm.teacher
    counts = teacher is None or teacher.reward
    if config.rollout.group_size == 1 and advantage in COMPARING and counts:
        whose = "" if algorithm.advantage else f", which `{algorithm.objective}` uses,"
        message = (
            f"expected at least 2: algorithm.advantage = {advantage!r}{whose} compares the samples of a prompt; "
            "'batch' and 'gae' do not"
        )
        yield ConfigProblem("rollout.group_size", message)
    if algorithm.gamma != 1 and advantage not in DISCOUNTING:
        message = f"{algorithm.gamma:g} has no effect: algorithm.advantage = {advantage!r} discounts nothing"
        yield ConfigProblem("algorithm.gamma", message)


def _aggregation(config: Config, aggregation: Aggregation) -> Iterator[ConfigProblem]:
    length = config.algorithm.constant_length
    if length is not None and aggregation != "constant":
        message = f"{length} has no effect: algorithm.aggregation is {aggregation!r}; expected 'constant' beside it"
        yield ConfigProblem("algorithm.constant_length", message)


def is_off_policy(config: Config) -> bool:
    """Return True if the objective must correct for the age of samples: they may be old, and nothing else corrects
    it."""
    weighed = any(isinstance(one, WEIGHTS) for one in config.algorithm.corrections)
    return config.train.async_ratio > 0 and not weighed and not config.train.allow_uncorrected


def _staleness(config: Config, objective: Objective) -> Iterator[ConfigProblem]:
    """Yield the problems of law 6: training on old samples needs a correction. Also those of options that need old
    samples."""
    algorithm, alpha = config.algorithm, config.train.async_ratio
    corrected = objective.corrects_staleness or any(isinstance(one, WEIGHTS) for one in algorithm.corrections)
    corrected = corrected or config.train.allow_uncorrected
    for name in COARSE:
        if config.engine.vllm.get(name, "auto") not in ("auto", config.model.dtype) and not corrected:
            message = (
                f"engines draw from a coarser policy than is trained, which `{algorithm.objective}` does not correct "
                "for: use an objective that does, a correction by weight ('token_tis'), or train.allow_uncorrected"
            )
            yield ConfigProblem(f"engine.vllm.{name}", message)
    if is_off_policy(config) and not objective.corrects_staleness:
        message = (
            f"{alpha:g} trains on samples of older versions, which `{algorithm.objective}` does not correct for: use "
            "an objective that does, a correction by weight ('token_tis'), async_ratio = 0, or set "
            "train.allow_uncorrected = true"
        )
        yield ConfigProblem("train.async_ratio", message)
    if alpha > 0:
        return
    if objective.proximal_policy == "loglinear":
        message = (
            "the log-linear proximal policy lies between the sampling policy and now by age, and with "
            "train.async_ratio = 0 every age is 0: choose another proximal policy"
        )
        yield ConfigProblem("algorithm.options", message)
    if not isinstance(algorithm.staleness, NoStaleness):
        message = "has no effect: with train.async_ratio = 0 every age is 0"
        yield ConfigProblem("algorithm.staleness", message)


def _reuse(config: Config, objective: Objective) -> Iterator[ConfigProblem]:
    """Yield the problems of law 6 within a step: after the first update, the samples are those of an older policy."""
    train = config.train
    if train.updates_per_batch > 1 and not objective.corrects_staleness and not train.allow_uncorrected:
        message = (
            f"{train.updates_per_batch} trains again on samples that the first update has left behind, which "
            f"`{config.algorithm.objective}` does not correct for: use an objective that does, 1, or set "
            "train.allow_uncorrected = true"
        )
        yield ConfigProblem("train.updates_per_batch", message)


def _critic(config: Config, objective: Objective, advantage: Advantage) -> Iterator[ConfigProblem]:
    """Yield the problems of the critics: a missing or unused table, too long a warm-up, or more critics than
    samples."""
    critic = config.critic
    if advantage == "gae" and critic is None:
        message = "is missing: advantage 'gae' takes its values from a critic; an empty [critic] table gives one"
        yield ConfigProblem("critic", message)
    if critic is None:
        return
    if advantage != "gae":
        message = f"has no effect: algorithm.advantage is {advantage!r}; expected 'gae' beside it"
        yield ConfigProblem("critic", message)
        return
    if critic.warmup_steps >= config.run.steps:
        message = (
            f"expected fewer than run.steps = {config.run.steps}, or the policy never learns; got {critic.warmup_steps}"
        )
        yield ConfigProblem("critic.warmup_steps", message)
    count, group_size = critic.count or objective.critics, config.rollout.group_size
    if count > 1 and count > group_size:
        message = (
            f"the responses to a prompt are split among {count} critics, and there are {group_size} of them "
            f"(rollout.group_size): expected at most as many critics"
        )
        yield ConfigProblem("critic.count", message)


def _disagreement(config: Config, objective: Objective, advantage: Advantage) -> Iterator[ConfigProblem]:
    """Yield the problems of an objective that compares critics: too few critics, or an option without effect."""
    if objective.critics < 2:
        return
    name, algorithm = config.algorithm.objective, config.algorithm
    if advantage != "gae":
        message = f"`{name}` compares what critics expect, and {advantage!r} asks none: expected 'gae'"
        yield ConfigProblem("algorithm.advantage", message)
    elif config.critic is not None and config.critic.count == 1:
        yield ConfigProblem("critic.count", f"`{name}` compares what critics expect: expected at least 2, got 1")
    if "filter_highest" in algorithm.options and algorithm.entropy_bonus == 0:
        message = "has no effect: algorithm.entropy_bonus is 0; expected more beside it"
        yield ConfigProblem("algorithm.options.filter_highest", message)


def _kl(config: Config) -> Iterator[ConfigProblem]:
    kl = config.algorithm.kl
    if kl is not None and kl.estimator == "k1" and kl.place == "loss":
        message = (
            "k1 in the loss pulls nowhere: its expected gradient is zero; "
            "expected 'k2' or 'k3', or place = 'reward' beside 'k1'"
        )
        yield ConfigProblem("algorithm.kl.estimator", message)


def _teacher(config: Config) -> Iterator[ConfigProblem]:
    """Check that a teacher has exactly one source and supports the sampling settings.

    If rewards do not count, also refuse settings that use rewards.
    """
    algorithm = config.algorithm
    if algorithm.teacher is None:
        return
    path, url = algorithm.teacher.path, algorithm.teacher.url
    if (path is None) == (url is None):
        yield ConfigProblem("algorithm.teacher", "expected either path, of a model that the trainer holds, or url")
    if url is not None and not re.fullmatch(r"https?://(\[[\da-fA-F:]+\]|[\w.-]+)(:\d{1,5})?(/[\w./-]*)?", url):
        yield ConfigProblem("algorithm.teacher.url", f"expected http://HOST:PORT of a vLLM server, got {show(url)}")
    for name, fault in faults_with_teacher(config.sampling, algorithm.teacher):
        yield ConfigProblem(f"rollout.{name}", fault)
    if algorithm.teacher.reward:
        return
    for key, asked in (("critic", config.critic is not None), ("algorithm.shaping", algorithm.shaping)):
        if asked:
            yield ConfigProblem(key, "has no effect: rewards do not count (algorithm.teacher.reward = false)")


def _shaping(config: Config) -> Iterator[ConfigProblem]:
    rollout, longest = config.rollout, _longest_sample(config)
    for place, shaping in enumerate(config.algorithm.shaping):
        key = f"algorithm.shaping[{place}]"
        if isinstance(shaping, Overlong) and shaping.limit > longest:
            message = (
                f"expected at most {longest}, the longest that the responses of a sample get (rollout.max_new_tokens · "
                f"rollout.max_turns, and model.max_length · rollout.max_branches), got {shaping.limit}"
            )
            yield ConfigProblem(f"{key}.limit", message)
        if isinstance(shaping, LengthPenalty) and rollout.group_size == 1:
            yield ConfigProblem(key, "compares the samples of a prompt, and rollout.group_size is 1")


def _longest_sample(config: Config) -> int:
    """Return the largest number of response tokens of a sample, over all turns and branches."""
    rollout = config.rollout
    return min(rollout.max_new_tokens * rollout.max_turns, config.model.max_length * rollout.max_branches)


def _longest(config: Config) -> int:
    """Return the largest number of response tokens in one sequence."""
    return min(config.rollout.max_new_tokens * config.rollout.max_turns, config.model.max_length)


def _rhythm(config: Config) -> Iterator[ConfigProblem]:
    """Yield the problems of `algorithm.rhythm`: options without effect, and a distance beyond the longest response."""
    rhythm = config.algorithm.rhythm
    if rhythm is None:
        return
    defaults = {field.name: field.default for field in msgspec.structs.fields(rhythm)}
    for name, credits in USED_BY.items():
        value = getattr(rhythm, name)
        if value != defaults[name] and rhythm.credit not in credits:
            beside = " or ".join(repr(credit) for credit in credits)
            message = (
                f"{value:g} has no effect: algorithm.rhythm.credit is {rhythm.credit!r}; expected {beside} beside it"
            )
            yield ConfigProblem(f"algorithm.rhythm.{name}", message)
    longest = _longest(config)
    if rhythm.credit in USED_BY["nearest"] and rhythm.nearest >= longest:
        message = (
            f"expected fewer than {longest}, the longest that responses get (rollout.max_new_tokens · "
            f"rollout.max_turns, and model.max_length), or no token has an influence; got {rhythm.nearest}"
        )
        yield ConfigProblem("algorithm.rhythm.nearest", message)


SUPERVISED = AlgorithmConfig(objective="algorithms.objectives.reinforce:Supervised", lag=None)
"""Objective of supervised fine-tuning, the only one that an `[sft]` table can use."""


def supervised(config: Config) -> Config:
    """Return the configuration with the settings that an `[sft]` table needs; unchanged without such a table.

    It gets the supervised objective and age 0. Settings for samples are turned off: recorded batches, routing replay,
    and the alarm of an entropy that is too low.
    """
    if config.sft is None:
        return config
    train, checkpoint = replace(config.train, async_ratio=0.0, max_token_age=None), config.checkpoint
    config = replace(config, train=train, checkpoint=replace(checkpoint, batches="none"))
    alarms, rollout = config.alarms, replace(config.rollout, routing_replay=False)
    # Lists, as the fields are: a configuration that is written and read back must equal the one that was written.
    stop, kept = ([one for one in some if one != "entropy"] for some in (alarms.stop, alarms.checkpoint))
    alarms = replace(alarms, entropy=None, stop=stop, checkpoint=kept)
    return replace(config, algorithm=SUPERVISED, critic=None, tiny_model=None, alarms=alarms, rollout=rollout)


def unsupervised(config: Config) -> Iterator[ConfigProblem]:
    """Yield the tables that have no effect on rows, in a configuration as it was written."""
    if config.sft is None:
        return
    why = "has no effect: `flash sft` learns rows as they are; leave the table out, or clear it with"
    if config.algorithm not in (AlgorithmConfig(), SUPERVISED):
        yield ConfigProblem("algorithm", f"{why} `algorithm={{}}`")
    if config.critic is not None:
        yield ConfigProblem("critic", f"{why} `critic=none`")


def sft_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that all ranks are on one machine, and that each of them gets a part of each minibatch."""
    for name in ("nodes", "trainer_nodes"):
        if (nodes := getattr(config.cluster, name)) > 1:
            yield ConfigProblem(f"cluster.{name}", f"expected 1: `flash sft` trains on one node, got {nodes}")
    ranks, gpus, train = config.cluster.trainer_ranks, config.gpus_per_node, config.train
    if 0 < gpus < ranks:
        yield ConfigProblem("cluster.trainer_ranks", f"expected at most the {gpus} GPUs of a node, got {ranks}")
    if train.batch_size < (least := train.minibatches * config.data_shards):
        message = f"expected at least {least}, a row for each minibatch and data shard, got {train.batch_size}"
        yield ConfigProblem("train.batch_size", message)
