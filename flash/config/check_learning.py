"""Checks of the tables that `flash.config.learning` declares: `[train]`, `[lora]`, `[algorithm]`, `[critic]`, `[sft]`.

Each `check_TABLE` yields every problem of one table; `flash.config.check` calls them. Rules that need the objective's
own properties are in `check_algorithm`, also if the key belongs to another table. An option without an effect is
refused, because a user who sets it expects an effect. `advise_train` and `advise_algorithm` yield warnings.

The *age* of a token is the number of training steps since the weights that sampled it. With α (`train.async_ratio`) = 0
every age is 0. Law 6: with α > 0, an objective must correct for the age, by the log-probs under the sampling policy. A
*correction* is a factor of the loss that does so for any objective (`algorithms.corrections`).

A *streamed* step (`train.stream`) begins while its batch is still sampled. `WHOLE_BATCH` lists the settings for which a
step waits for its whole batch. `supervised` changes a configuration with an `[sft]` table, as soon as it is read:
`flash sft` (supervised fine-tuning) learns rows of a file and samples nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from algorithms.base import Advantage, Objective
from algorithms.corrections import IcePop, TokenTis
from algorithms.shaping import LengthPenalty, Overlong
from algorithms.staleness import NoStaleness
from flash.ages import window
from flash.config.decode import ConfigProblem, show
from flash.config.learning import AlgorithmConfig
from flash.config.objects import check_options, examine_options, load_objective, refusal
from flash.config.section import faults_with_teacher
from flash.config.tree import Config
from flash.errors import ConfigError

# -- [train] and [lora] ----------------------------------------------------------------------------------------------

HIGH_LEARNING_RATE = 1e-2
"""Learning rate above which Adam destroys a pretrained model in a few steps, whatever its size."""


def check_train(config: Config) -> Iterator[ConfigProblem]:
    """Check the division of a batch, the bound on ages, the learning rate, the profiled steps and the memory
    options."""
    if config.sft is None:
        yield from check_batch(config)
    elif config.train.batch_size < (least := config.train.minibatches * config.data_shards):
        message = f"expected at least {least}, a row for each minibatch and data shard, got {config.train.batch_size}"
        yield ConfigProblem("train.batch_size", message)
    longest = config.model.max_length
    if config.train.max_tokens_per_microbatch < longest:
        message = f"expected at least model.max_length = {longest}, got {config.train.max_tokens_per_microbatch}"
        yield ConfigProblem("train.max_tokens_per_microbatch", message)
    yield from _rates(config)
    yield from _profile(config)
    yield from _offload(config)


def advise_train(config: Config) -> Iterator[ConfigProblem]:
    """Warn of a learning rate that destroys the model or is never reached, and of memory options without an effect."""
    train, steps = config.train, config.run.steps
    if train.learning_rate > HIGH_LEARNING_RATE:
        message = f"{train.learning_rate:g} is far above what trains a language model; 1e-6 to 1e-4 are usual"
        yield ConfigProblem("train.learning_rate", message)
    if train.warmup_steps >= steps:
        message = f"the run has {steps} steps, so that the learning rate never reaches {train.learning_rate:g}"
        yield ConfigProblem("train.warmup_steps", message)
    if config.gpus_per_node == 0 and train.offload:
        yield ConfigProblem("train.offload", "trainers without GPUs have no other memory than the host's")


def check_batch(config: Config) -> Iterator[ConfigProblem]:
    """Check the parts of `[train]` that a simulation needs, too: whole groups, a sample for each shard, the bound on
    ages.

    A batch consists of whole groups, and each data shard (the ranks that train the same samples) gets a sample of each
    minibatch. The bound on the age of tokens is not below the age that admission permits anyway.
    """
    train, group_size = config.train, config.rollout.group_size
    bound, least = train.max_token_age, window(train.async_ratio)
    if train.batch_size % group_size:
        message = f"expected a multiple of rollout.group_size = {group_size}, got {train.batch_size}"
        yield ConfigProblem("train.batch_size", message)
    elif config.groups_per_batch % train.minibatches:
        message = f"expected a divisor of the {config.groups_per_batch} groups of a batch, got {train.minibatches}"
        yield ConfigProblem("train.minibatches", message)
    elif train.batch_size // train.minibatches < config.data_shards:
        message = (
            f"{train.batch_size} samples in {train.minibatches} minibatches leave some of the "
            f"{config.data_shards} shards of the trainer ranks without a sample"
        )
        yield ConfigProblem("train.batch_size", message)
    if bound is not None and (bound < least or not least):
        expected = f"a number of at least {least}, ⌈train.async_ratio⌉" if least else "none"
        why = "" if least else ": with train.async_ratio = 0 every age is 0"
        yield ConfigProblem("train.max_token_age", f"expected {expected}, got {bound}{why}")


def _rates(config: Config) -> Iterator[ConfigProblem]:
    """Check that the decay of the learning rate does not end above its peak."""
    train = config.train
    if train.final_learning_rate > train.learning_rate:
        message = (
            f"is a rate, not a share: expected at most train.learning_rate = {train.learning_rate:g}, got "
            f"{train.final_learning_rate:g}; a tenth of the peak is {train.learning_rate / 10:g}"
        )
        yield ConfigProblem("train.final_learning_rate", message)


def _profile(config: Config) -> Iterator[ConfigProblem]:
    """Check that the profiled steps are a range of steps of the run."""
    text = config.train.profile
    if not text:
        return
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if found is None:
        message = f"expected FIRST:LAST, two numbers of steps such as `3:5`, or an empty text, got {show(text)}"
        yield ConfigProblem("train.profile", message)
    elif int(found[1]) > int(found[2]):
        yield ConfigProblem("train.profile", f"expected FIRST:LAST with FIRST at most LAST, got {show(text)}")
    # The steps of `flash sft` follow from its rows, which are not read yet.
    elif config.sft is None and int(found[2]) >= config.run.steps:
        message = (
            f"expected a LAST step of at most {config.run.steps - 1} (run.steps = {config.run.steps}), got {found[2]}"
        )
        yield ConfigProblem("train.profile", message)


def _offload(config: Config) -> Iterator[ConfigProblem]:
    """Check that moments alone on the host belong to AdamW, and that offloaded activations are checkpointed."""
    train, key = config.train, "train.offload"
    # The optimizer that keeps only its moments on the host, `OffloadedAdamW`, is an AdamW. With offloaded weights the
    # moments are on the host anyway, with any optimizer.
    if train.optimizer == "muon" and "moments" in train.offload and "weights" not in train.offload:
        message = 'moments on the host without the weights need train.optimizer = "adamw", got "muon"'
        yield ConfigProblem(key, message)
    if "activations" in train.offload and not train.activation_checkpointing:
        message = (
            "`activations` offloads the inputs of layers that are computed again: set "
            "train.activation_checkpointing = true"
        )
        yield ConfigProblem(key, message)


def check_lora(config: Config) -> Iterator[ConfigProblem]:
    """Check that adapters travel by tcp, and that their reference is the base model.

    `check_model` refuses a data type for which engines have no kernels, `check_parallel` ranks that divide adapters.
    """
    if config.lora is None:
        return
    if config.algorithm.kl is not None and config.algorithm.kl.refresh is not None:
        yield ConfigProblem(
            "algorithm.kl.refresh", "expected none: with adapters ([lora]) the base model stays the reference"
        )
    # Deltas would save nothing, because adapters change everywhere.
    if (backend := config.weights.backend) not in ("auto", "tcp"):
        message = f"expected tcp or auto, which alone can transfer adapters ([lora]), got {backend}"
        yield ConfigProblem("weights.backend", message)


# -- [algorithm] and [critic] ----------------------------------------------------------------------------------------

COMPARING: tuple[Advantage, ...] = ("group", "group_mean", "leave_one_out", "turn")
"""Estimators that compare the samples of a prompt with each other. They need groups of at least two samples."""
WEIGHTS = (TokenTis, IcePop)
"""Corrections that compensate the age of a token, for objectives that do not."""
COARSE = ("quantization", "quantization_config", "kv_cache_dtype")
"""Arguments of vLLM that make engines compute with lower precision than `model.dtype`."""
DISCOUNTING: tuple[Advantage, ...] = ("turn", "gae")
"""Estimators that use `algorithm.gamma`."""


def check_algorithm(config: Config) -> Iterator[ConfigProblem]:
    """Check that the objective exists, that its options fit, and that the settings of `[algorithm]` are consistent.

    If the objective cannot be made, nothing else is checked, because most rules ask the objective for its properties.
    """
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
        without_effect = dict(objective.without_effect())
    except ValueError as error:
        yield ConfigProblem("algorithm.options", str(error))
        return
    except (Exception, SystemExit) as error:  # the class may be a user's, whose code may raise anything
        yield ConfigProblem("algorithm.options", refusal(kind, error))
        return
    for name, needed in without_effect.items():
        if name in config.algorithm.options:
            yield ConfigProblem(f"algorithm.options.{name}", f"has no effect: {needed}")
    advantage = config.algorithm.advantage or objective.advantage
    yield from _advantage(config, advantage)
    yield from _staleness(config, objective)
    yield from _reuse(config, objective)
    yield from _critic(config, objective, advantage)
    yield from _disagreement(config, objective, advantage)
    yield from _kl(config)
    yield from _teacher(config, objective)
    yield from _shaping(config)
    yield from _rhythm(config)


def _advantage(config: Config, advantage: Advantage) -> Iterator[ConfigProblem]:
    """Yield the problems of the advantage estimator: groups of one sample, which it cannot compare, or an unused
    discount. If rewards do not count (`algorithm.teacher.reward = false`), nothing is compared or discounted, and
    `_teacher` checks the settings."""
    algorithm, teacher = config.algorithm, config.algorithm.teacher
    if teacher is not None and not teacher.reward:
        return
    if config.rollout.group_size == 1 and advantage in COMPARING:
        whose = "" if algorithm.advantage else f", which `{algorithm.objective}` uses,"
        message = (
            f"expected at least 2: algorithm.advantage = {advantage!r}{whose} compares the samples of a prompt; "
            "'batch' and 'gae' do not"
        )
        yield ConfigProblem("rollout.group_size", message)
    if algorithm.gamma != 1 and advantage not in DISCOUNTING:
        message = f"{algorithm.gamma:g} has no effect: algorithm.advantage = {advantage!r} discounts nothing"
        yield ConfigProblem("algorithm.gamma", message)


def is_off_policy(config: Config) -> bool:
    """Return True if the objective must correct for the age of samples: they may be old, no correction by weight
    (WEIGHTS) is set, and the user has not allowed to train without one. `flash.trainer.objective` then tries whether
    the objective really does so."""
    corrected_by_weight = any(isinstance(one, WEIGHTS) for one in config.algorithm.corrections)
    return config.train.async_ratio > 0 and not corrected_by_weight and not config.train.allow_uncorrected


def _staleness(config: Config, objective: Objective) -> Iterator[ConfigProblem]:
    """Yield the problems of law 6: training on old samples needs a correction. Also yield those of options that need
    old samples, and of engines with lower precision, whose samples need a correction at any age."""
    algorithm, alpha = config.algorithm, config.train.async_ratio
    corrected = objective.corrects_staleness or any(isinstance(one, WEIGHTS) for one in algorithm.corrections)
    corrected = corrected or config.train.allow_uncorrected
    for name in COARSE:  # "auto" is vLLM's default, the precision of the model
        if config.engine.vllm.get(name, "auto") not in ("auto", config.model.dtype) and not corrected:
            message = (
                f"engines sample from a less precise policy than the trained one, which `{algorithm.objective}` "
                "does not correct for: use an objective that does, a correction by weight ('token_tis'), or "
                "train.allow_uncorrected"
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
            "the log-linear proximal policy depends on the age of tokens, and with "
            "train.async_ratio = 0 every age is 0: choose another proximal policy"
        )
        yield ConfigProblem("algorithm.options", message)
    if not isinstance(algorithm.staleness, NoStaleness):
        message = "has no effect: with train.async_ratio = 0 every age is 0"
        yield ConfigProblem("algorithm.staleness", message)


def _reuse(config: Config, objective: Objective) -> Iterator[ConfigProblem]:
    """Yield the problems of law 6 within a step: after the first update, the samples are those of an older policy.

    A correction by weight does not count here: its weights do not follow the policy that the updates change.
    """
    train = config.train
    if train.updates_per_batch > 1 and not objective.corrects_staleness and not train.allow_uncorrected:
        message = (
            f"{train.updates_per_batch} trains again on samples that are old after the first update, which "
            f"`{config.algorithm.objective}` does not correct for: use an objective that does, 1, or set "
            "train.allow_uncorrected = true"
        )
        yield ConfigProblem("train.updates_per_batch", message)


def _critic(config: Config, objective: Objective, advantage: Advantage) -> Iterator[ConfigProblem]:
    """Yield the problems of the critics: a missing or unused table, too long a warm-up, or fewer samples of a prompt
    than critics."""
    critic = config.critic
    if advantage == "gae" and critic is None:
        message = "is missing: advantage 'gae' takes its values from a critic; an empty [critic] table gives one"
        yield ConfigProblem("critic", message)
    if critic is None:
        return
    if advantage != "gae":
        message = f"has no effect: algorithm.advantage is {advantage!r}; expected 'gae' with it"
        yield ConfigProblem("critic", message)
        return
    if critic.warmup_steps >= config.run.steps:
        message = (
            f"expected fewer than run.steps = {config.run.steps}, or the policy never learns; got {critic.warmup_steps}"
        )
        yield ConfigProblem("critic.warmup_steps", message)
    count, group_size = objective.critics, config.rollout.group_size
    if count > group_size:
        message = (
            f"expected at least {count}, as responses to a prompt are split among {count} critics, got {group_size}"
        )
        yield ConfigProblem("rollout.group_size", message)


def _disagreement(config: Config, objective: Objective, advantage: Advantage) -> Iterator[ConfigProblem]:
    """Yield the problems of an objective that compares critics: another advantage, or an option without effect.

    Such an objective (AsyPPO) looks at how far the values of its critics differ for a token. Its option
    `filter_highest` leaves the tokens with the largest differences out of the entropy bonus.
    """
    if objective.critics < 2:
        return
    name, algorithm = config.algorithm.objective, config.algorithm
    if advantage != "gae":
        message = f"`{name}` compares the values of critics, and advantage {advantage!r} uses no critic: expected 'gae'"
        yield ConfigProblem("algorithm.advantage", message)
    if "filter_highest" in algorithm.options and algorithm.entropy_bonus == 0:
        message = "has no effect: algorithm.entropy_bonus is 0; expected a value above 0 with it"
        yield ConfigProblem("algorithm.options.filter_highest", message)


def _kl(config: Config) -> Iterator[ConfigProblem]:
    """Yield a problem if the estimator of the KL to the reference has no gradient at its place in the loss."""
    kl = config.algorithm.kl
    if kl is not None and kl.estimator == "k1" and kl.place == "loss":
        message = (
            "k1 in the loss has no effect, because its expected gradient is zero; "
            "expected 'k2' or 'k3', or place = 'reward' with 'k1'"
        )
        yield ConfigProblem("algorithm.kl.estimator", message)


def _teacher(config: Config, objective: Objective) -> Iterator[ConfigProblem]:
    """Check that a teacher has exactly one source and supports the sampling settings.

    If rewards do not count, also refuse settings that use rewards.
    """
    algorithm = config.algorithm
    if algorithm.teacher is None:
        return
    path, url = algorithm.teacher.path, algorithm.teacher.url
    if (path is None) == (url is None):
        yield ConfigProblem(
            "algorithm.teacher", "expected either path, a model that the trainer loads, or url, a server"
        )
    if url is not None and not re.fullmatch(r"https?://(\[[\da-fA-F:]+\]|[\w.-]+)(:\d{1,5})?(/[\w./-]*)?", url):
        yield ConfigProblem("algorithm.teacher.url", f"expected http://HOST:PORT of a vLLM server, got {show(url)}")
    for name, fault in faults_with_teacher(config.sampling, algorithm.teacher):
        yield ConfigProblem(f"rollout.{name}", fault)
    if algorithm.teacher.reward:
        return
    # Without rewards the estimator has nothing to do, so setting one is a mistake. There are two exceptions: an
    # objective whose default is `gae`, which would need a critic, and a KL in the reward, which "batch" whitens.
    has_kl = algorithm.kl is not None and algorithm.kl.place == "reward"
    idle = algorithm.advantage is not None and objective.advantage != "gae" and not has_kl
    for key, is_set in (
        ("critic", config.critic is not None),
        ("algorithm.shaping", algorithm.shaping),
        ("algorithm.advantage", idle),
        ("algorithm.gamma", algorithm.gamma != 1),
    ):
        if is_set:
            yield ConfigProblem(key, "has no effect: rewards do not count (algorithm.teacher.reward = false)")


def _shaping(config: Config) -> Iterator[ConfigProblem]:
    """Yield the problems of changes of the reward by length: limits beyond every response, groups without
    comparison."""
    rollout, longest = config.rollout, _longest_sample(config)
    for place, shaping in enumerate(config.algorithm.shaping):
        key = f"algorithm.shaping[{place}]"
        if isinstance(shaping, Overlong) and shaping.limit > longest:
            message = (
                f"expected at most {longest}, the longest that the responses of a sample get (rollout.max_new_tokens · "
                f"rollout.max_turns), got {shaping.limit}"
            )
            yield ConfigProblem(f"{key}.limit", message)
        if isinstance(shaping, LengthPenalty) and rollout.group_size == 1:
            yield ConfigProblem(key, "compares the samples of a prompt, and rollout.group_size is 1")


def _longest_sample(config: Config) -> int:
    """Return the largest number of response tokens of a sample, over all turns and all branches (its sequences)."""
    rollout = config.rollout
    return rollout.max_new_tokens * rollout.max_turns


def _rhythm(config: Config) -> Iterator[ConfigProblem]:
    """Yield the problems of `algorithm.rhythm`: options without effect, and a distance beyond the longest response."""
    rhythm = config.algorithm.rhythm
    if rhythm is None:
        return
    if rhythm.credit == "local":
        defaults = {field.name: field.default for field in msgspec.structs.fields(rhythm)}
        for name in ("nearest", "farthest"):
            if (value := getattr(rhythm, name)) != defaults[name]:
                message = f"{value:g} has no effect: algorithm.rhythm.credit is 'local'; expected another credit"
                yield ConfigProblem(f"algorithm.rhythm.{name}", message)
        return
    # The largest number of response tokens in one sequence.
    longest = min(config.rollout.max_new_tokens * config.rollout.max_turns, config.model.max_length)
    if rhythm.nearest >= longest:
        message = (
            f"expected fewer than {longest}, the longest that responses get (rollout.max_new_tokens · "
            f"rollout.max_turns, and model.max_length), or no token has an influence; got {rhythm.nearest}"
        )
        yield ConfigProblem("algorithm.rhythm.nearest", message)


HIGH_ENTROPY_BONUS = 0.1
"""Entropy bonus above which the entropy outweighs rewards of about 1."""


def advise_algorithm(config: Config) -> Iterator[ConfigProblem]:
    """Warn of an entropy bonus that is larger than the rewards."""
    if config.algorithm.entropy_bonus > HIGH_ENTROPY_BONUS:
        message = f"{config.algorithm.entropy_bonus:g} is likely to outweigh the rewards"
        yield ConfigProblem("algorithm.entropy_bonus", message)


# -- streamed steps --------------------------------------------------------------------------------------------------


class WholeBatch(NamedTuple):
    """A setting for which a step needs its whole batch before its first backward pass, so that it is not streamed."""

    setting: str
    """Keys and values of the setting, as docs/asynchrony.md names them."""
    reason: str
    """Clause that says for what the whole batch is needed."""
    applies: Callable[[Config, Objective], bool]
    """True if the run has the setting. The objective is the configured one."""


def _advantage_of(config: Config, objective: Objective) -> Advantage:
    """Return the advantage estimator of a run with this objective."""
    return config.algorithm.advantage or objective.advantage


def _needs_start_weights(config: Config, objective: Objective) -> bool:
    """Return True if the loss uses log-probs of the policy at the start of the step, before any minibatch's update."""
    kl = config.algorithm.kl
    return objective.proximal_policy == "recompute" or (kl is not None and kl.place == "reward")


def _keeps_steps(config: Config) -> bool:
    """Return True if a resumed run can train the steps after its last checkpoint again, on the recorded batches."""
    return config.checkpoint.batches != "none" and config.checkpoint.journal != "off"


WHOLE_BATCH = (
    WholeBatch(
        'algorithm.advantage = "batch"',
        "advantages are compared over the whole batch",
        lambda config, objective: _advantage_of(config, objective) == "batch",
    ),
    WholeBatch(
        'algorithm.advantage = "gae"',
        "the critics learn from the whole batch at once",
        lambda config, objective: _advantage_of(config, objective) == "gae",
    ),
    WholeBatch(
        "algorithm.staleness",
        "the weights of samples have mean 1 over the whole batch",
        lambda config, objective: not isinstance(config.algorithm.staleness, NoStaleness),
    ),
    WholeBatch(
        "algorithm.rhythm",
        "heads are chosen by the attention in the whole batch",
        lambda config, objective: config.algorithm.rhythm is not None,
    ),
    WholeBatch(
        "an objective with `limits`, such as `m2po`",
        "the objective computes a limit from all tokens of a minibatch",
        lambda config, objective: objective.limits,
    ),
    WholeBatch(
        "train.minibatches > 1, with a recomputed proximal policy or a KL in the reward",
        "log-probs under the weights before the first update are needed for all samples",
        lambda config, objective: config.train.minibatches > 1 and _needs_start_weights(config, objective),
    ),
    WholeBatch(
        'train.minibatches > 1, with checkpoint.batches = "none" or checkpoint.journal = "off"',
        "an interrupt between two updates would lose the steps since the last checkpoint",
        lambda config, objective: config.train.minibatches > 1 and not _keeps_steps(config),
    ),
    WholeBatch(
        'rollout.on_expire = "wait"',
        "a step may have to wait for a slow group instead of a complete one",
        lambda config, objective: config.rollout.on_expire == "wait",
    ),
)
"""All settings for which a step is not streamed although `train.stream` asks for it. docs/asynchrony.md has the same
table."""


def why_not_streamed(config: Config) -> str | None:
    """Return the reason why the steps of a run wait for their whole batches, as a clause; None if they are streamed.

    The hub and each trainer rank call this when they start, and a replay for each step. A dry run shows the reason. The
    configuration has passed `check_algorithm`, so its objective can be made.
    """
    train = config.train
    if not train.streamed:
        if train.stream is False:
            return "train.stream is false"
        why = "train.async_ratio is 0" if train.async_ratio == 0 else "train.minibatches is above 1"
        return f"{why}, and train.stream is not set"
    algorithm = config.algorithm
    kind = load_objective(algorithm.objective)
    objective = kind(**check_options(kind, algorithm.options, "algorithm.options"))
    found = next((one for one in WHOLE_BATCH if one.applies(config, objective)), None)
    return None if found is None else f"{found.reason} ({found.setting})"


# -- [sft] -----------------------------------------------------------------------------------------------------------

SUPERVISED = AlgorithmConfig(objective="algorithms.objectives.reinforce:Supervised", lag=None)
"""Objective of supervised fine-tuning, the only one that an `[sft]` table can use."""


def supervised(config: Config) -> Config:
    """Return the configuration with the settings that an `[sft]` table needs; unchanged without such a table.

    `flash.config.load` calls this before the checks. The configuration gets the supervised objective, age 0, and steps
    that are not streamed. The tables `[critic]` and `[tiny_model]` are dropped. Settings for samples are turned off:
    recorded batches, routing replay, and the alarm of an entropy that is too low.
    """
    if config.sft is None:
        return config
    train = replace(config.train, async_ratio=0.0, max_token_age=None, stream=False)
    config = replace(config, train=train, checkpoint=replace(config.checkpoint, batches="none"))
    alarms = replace(config.alarms, reactions={**config.alarms.reactions, "entropy": "off"})
    rollout = replace(config.rollout, routing_replay=False)
    return replace(config, algorithm=SUPERVISED, critic=None, tiny_model=None, alarms=alarms, rollout=rollout)


def check_sft(config: Config) -> Iterator[ConfigProblem]:
    """Yield the tables that have no effect beside `[sft]`. `flash.config.load.load` calls this. `config` is as it was
    written, before `supervised` changed it."""
    if config.sft is None:
        return
    why = "has no effect: `flash sft` trains on rows of a file; leave the table out, or clear it with"
    # The recorded configuration of a run, which may be read again, has SUPERVISED.
    if config.algorithm not in (AlgorithmConfig(), SUPERVISED):
        yield ConfigProblem("algorithm", f"{why} `algorithm={{}}`")
    if config.critic is not None:
        yield ConfigProblem("critic", f"{why} `critic=none`")
