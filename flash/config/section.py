"""Section: base class of the configuration's tables, the types of their values, and the rules of sampling settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from flash.sampling import PLAIN, Sampling

if TYPE_CHECKING:
    from algorithms.references import Teacher

MOST = 2**31 - 1
"""Largest value of any count: libraries that Flash uses store counts in 32 bits."""

# Types of values. msgspec refuses a value outside the bounds.
Positive = Annotated[int, Meta(gt=0, le=MOST)]
NonNegative = Annotated[int, Meta(ge=0, le=MOST)]
Seed = NonNegative
LearningRate = Annotated[float, Meta(gt=0, le=1)]
"""Learning rate. Adam moves each weight by about the learning rate, so a rate above 1 destroys a model in one step."""
LOWEST_TEMPERATURE = 0.01
"""Smallest temperature above 0. Engines raise lower temperatures to it, and would then sample from another distribution
than the trainer assumes."""
HIGHEST_TEMPERATURE = 2
"""Largest temperature; engines refuse requests above it."""
Temperature = Annotated[float, Meta(ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)]
HIGHEST_TOP_K = 1024
"""Largest `top_k`. All kept tokens travel with each sampled token."""
TopK = Annotated[int, Meta(ge=0, le=HIGHEST_TOP_K)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Text = Annotated[str, Meta(min_length=1, max_length=1000)]
Texts = tuple[Text, ...]
Ends = tuple[Text | NonNegative, ...]
"""Texts and token ids that end a response."""
Biases = tuple[tuple[NonNegative, Annotated[float, Meta(ge=-100, le=100)]], ...]
"""Pairs of a token id and the number that is added to its logit."""
Penalty = Annotated[float, Meta(gt=0, le=10)]
"""Repetition penalty: above 1, tokens that are already in the context become less likely. 1: no penalty."""
Deadline = Annotated[float, Meta(ge=0.1, le=1e8)]
"""Time limit in seconds. Below a tenth of a second a healthy network may miss it. The upper bound keeps sums of time
limits within the range of clocks."""
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
"""Number from 0 to below 1: a factor of repeated multiplication, which must decay."""
Fraction = Annotated[float, Meta(ge=0, le=1)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the tables of the configuration."""


NEEDING_TOP_K = ("top_p", "min_p", "min_tokens", "logit_bias", "repetition_penalty")
"""Sampling settings that change the distribution of a token and need `top_k`, because the trainer computes this
distribution only over the tokens that `top_k` keeps."""
MOST_ENTRIES = {"logit_bias": 1024, "stop": 100}
"""Largest number of token ids that a setting may name, by key. vLLM's GPU workers have room for 1024 biases,
and for 128 tokens that end a response, among them the model's own end tokens."""
ABSENT: dict[str, str] = dict.fromkeys(
    ("rollout.presence_penalty", "rollout.frequency_penalty"),
    "an engine counts only the tokens that it has sampled itself, so after a response has moved to another engine the "
    "trainer does not know the distribution of its tokens; use rollout.repetition_penalty, which looks at the whole "
    "context",
)
"""Keys that users of other systems look for and that do not exist, by dotted path: the reason, and the key to use
instead."""


class RemovedKey(NamedTuple):
    """Key that earlier versions of Flash had. The recorded configuration of an older run may still hold it."""

    default: Any
    """Default that the key had. Flash does the same without the key, so `flash.config.load` ignores this value in a
    file."""
    why: str
    """Sentence, without the final dot, that says what Flash does now, and what to use instead."""


ALARM_LIMITS = {
    **dict.fromkeys(("stale", "masked", "failures"), 0.1),
    **dict.fromkeys(("ess", "clipping", "equal_rewards", "lag"), 0.5),
    **dict.fromkeys(("trainer_waits", "engines_idle"), 0.9),
    "mismatch": 0.01,
    "entropy": 0.02,
    "nonfinite": 0.0,
}
"""Defaults of the removed keys `alarms.NAME`, the limits of the alarms, by NAME."""
RHYTHM = {
    **dict.fromkeys(("local_heads", "global_heads"), 0.3),
    "window": 10,
    "reach": 3,
    "shift": 0.4,
    "low_distance": 0.5,
    "high_change": 0.6,
}
"""Defaults of the removed options of `algorithm.rhythm` that are numbers, by option."""
PASSED_OVER = (
    "Problems are issued in their order, and none is passed over; rollout.drop_equal_rewards replaces groups that "
    "teach nothing"
)
"""Field `why` of the removed keys that chose between problems."""
REMOVED: dict[str, RemovedKey] = {
    "rollout.session_s": RemovedKey(
        0.0,
        "The KV caches of episodes that wait for their environments are not counted any more; if many turns overfill "
        "the engines' KV caches, rollout.max_concurrent bounds the episodes of a node",
    ),
    "rollout.max_episode_tokens": RemovedKey(
        None, "rollout.max_turns responses of at most rollout.max_new_tokens tokens are the limit of an episode"
    ),
    "rollout.max_branches": RemovedKey(
        16, "Each branch of an episode has a response of its own, so rollout.max_turns also limits the branches"
    ),
    "rollout.quarantine": RemovedKey(
        16, "After a quarter of rollout.breaker samples of one kind, problems of this kind are left out"
    ),
    "rollout.stop_token_ids": RemovedKey([], "rollout.stop takes token ids beside texts"),
    "rollout.selection": RemovedKey("uniform", PASSED_OVER),
    "rollout.selection_floor": RemovedKey(0.1, PASSED_OVER),
    "algorithm.branches": RemovedKey("same", "Each branch gets the advantage of its episode"),
    "algorithm.entropy_target": RemovedKey(
        None, "The coefficient of the entropy bonus is the same in all steps; algorithm.entropy_bonus sets it"
    ),
    **{
        f"algorithm.rhythm.{name}": RemovedKey(value, f"It is fixed at {value:g}, as algorithms/rhythm.py says")
        for name, value in RHYTHM.items()
    },
    "train.eps": RemovedKey(1e-8, "AdamW's ε is 1e-08"),
    "train.moments": RemovedKey(
        "float32", 'Moments are in float32; train.offload = ["moments"] keeps them on the host'
    ),
    "algorithm.rhythm.signs": RemovedKey("both", "Advantages of both signs are multiplied"),
    "algorithm.rhythm.heads": RemovedKey("batch", "Heads are classified in each batch"),
    "algorithm.rhythm.layers": RemovedKey(5, "The attention of 5 layers from the middle third is used"),
    "rollout.share_drift": RemovedKey(1.0, "A domain may be one batch ahead of its share"),
    **{
        f"rollout.{name}": RemovedKey(True, f'rollout.barriers = ["{barrier}"] does what false did')
        for name, barrier in (("queue_scheduling", "batch"), ("replicate_prompts", "group"), ("env_async", "turn"))
    },
    "observe": RemovedKey({}, "track.to takes the import path of your own tracker, beside the names of others"),
    "run.log_samples_mb": RemovedKey(1000, "Readable samples have at most 1 GB; run.log_samples chooses their number"),
    "tiny_model.seed": RemovedKey(1, "The seed of a tiny model is 1; run.seed repeats a run with other random choices"),
    "tiny_model.tied": RemovedKey(True, "The embedding and the output layer of a tiny model share their weights"),
    "weights.deltas": RemovedKey(False, 'weights.backend = "tcp_deltas" does what true did'),
    "weights.canary_tokens": RemovedKey(32, "The test text has 32 tokens, or fewer if model.max_length is smaller"),
    "algorithm.constant_length": RemovedKey(None, "The aggregation `constant` divides by rollout.max_new_tokens"),
    "critic.count": RemovedKey(
        None, "The objective says how many critics it has: two for asyppo, `critics` of the class for one of your own"
    ),
    "critic.tiny_layers": RemovedKey(
        None, "With [tiny_model], a missing critic.path gets a tiny model with a third of the policy's layers"
    ),
    "critic.max_grad_norm": RemovedKey(1.0, "train.max_grad_norm also holds for the critics"),
    "checkpoint.export": RemovedKey(
        True, "After its last step a run always writes the trained model to its folder model/"
    ),
    "engine.max_restarts": RemovedKey(3, "cluster.max_restarts also limits the restarts of an engine in a row"),
    "cluster.hub_host": RemovedKey(None, 'cluster.hub = "HOST:PORT" is the address of the hub, also "HOST:0"'),
    "cluster.hub_port": RemovedKey(0, 'cluster.hub = "HOST:PORT" is the address of the hub, also ":PORT"'),
    "deadlines.batch": RemovedKey(3600, "deadlines.step also limits the wait for the groups of a step"),
    "deadlines.connect": RemovedKey(60, "deadlines.request also limits connections"),
    "deadlines.env_reset": RemovedKey(60, "deadlines.env_step also limits the reset of an environment"),
    "deadlines.hub": RemovedKey(300, "The hub has five times deadlines.request to answer"),
    "deadlines.engine_step": RemovedKey(
        300, "A step of an engine has 300 s, or half of deadlines.generate if that is shorter"
    ),
    "deadlines.sink": RemovedKey(60, "Trackers and the sink have 60 s at the end of the run"),
    "simulate.nodes": RemovedKey(1, "cluster.nodes is the number of nodes among which the engines are divided"),
    "simulate.gpus_per_engine": RemovedKey(1, "engine.tensor_parallel is the number of GPUs per engine"),
    **{
        f"alarms.{reaction}": RemovedKey([], f'alarms.reactions names the alarms, each as NAME = "{reaction}"')
        for reaction in ("off", "checkpoint", "stop")
    },
    "alarms.window": RemovedKey(10, "A metric is averaged over 10 steps before it is compared with its limit"),
    "alarms.age": RemovedKey(
        None, "The age of trained tokens raises no alarm; train.max_token_age limits it, and metrics.jsonl has it"
    ),
    **{
        f"alarms.{name}": RemovedKey(
            limit, f'The limit of this alarm is {limit:g}; alarms.reactions.{name} = "off" turns it off'
        )
        for name, limit in ALARM_LIMITS.items()
    },
}
"""Keys that were removed, by dotted path."""


SAMPLING_KEYS = tuple(name for name in Sampling.__struct_fields__ if name != "stop_token_ids")
"""Keys of `[rollout]`, and of an environment's domains, that become a `Sampling`. The key `stop` becomes two fields."""


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
    """Return the sampling settings that the values of `SAMPLING_KEYS` give. `settings` has them by key."""
    fields = {name: settings[name] for name in SAMPLING_KEYS}
    ends = fields.pop("stop")
    texts = tuple(one for one in ends if isinstance(one, str))
    return Sampling(**fields, stop=texts, stop_token_ids=tuple(one for one in ends if not isinstance(one, str)))


def named_tokens(sampling: Sampling) -> dict[str, tuple[int, ...]]:
    """Return the token ids that sampling settings name, by key."""
    return {"stop": sampling.stop_token_ids, "logit_bias": tuple(token for token, _ in sampling.logit_bias)}


def sampling_faults(sampling: Sampling) -> Iterator[tuple[str, str]]:
    """Yield the name and the error message of each sampling setting that an engine or the trainer cannot handle.

    Such a setting has too many entries for an engine, or the trainer cannot compute the distribution of its tokens. The
    checks of `[rollout]` and of an environment's domains call this.
    """
    for name, tokens in named_tokens(sampling).items():
        if len(tokens) > (most := MOST_ENTRIES[name]):
            yield name, f"an engine on a GPU crashes with more than {most} token ids: got {len(tokens)}"
    if sampling.top_k:  # then the trainer knows the kept tokens, and can compute all other settings
        return
    why = f"needs top_k, from 1 to {HIGHEST_TOP_K}: the trainer can compute it only for the tokens that top_k keeps"
    for name in NEEDING_TOP_K:
        if getattr(sampling, name) != getattr(PLAIN, name):
            yield name, why


def faults_with_teacher(sampling: Sampling, teacher: Teacher | None) -> Iterator[tuple[str, str]]:
    """Yield the name and the error message of each sampling setting that the server of a teacher
    (`algorithm.teacher.url`) does not support.

    Yields nothing without a teacher, or if the trainer ranks hold the teacher (`algorithm.teacher.path`). The checks of
    the configuration and of an environment's domains call this.
    """
    why = "is not supported by the server of a teacher, which scores all tokens at temperature 1"
    if teacher is not None and teacher.url is not None:
        for name in ("temperature", "top_k"):
            if getattr(sampling, name) != getattr(PLAIN, name):
                yield name, f"{why}: use algorithm.teacher.path"


def why_kept_tokens_unknown(sampling: Sampling, *, dtype: str, head_dtype: str, drafted: bool = False) -> str | None:
    """Return why the trainer cannot know which tokens `top_k` keeps; None if it can, or if all tokens are kept.

    The result is an error message that follows the name of the setting.

    Args:
        sampling: the sampling settings.
        dtype: the data type of the model, such as `bfloat16`.
        head_dtype: the data type of its output layer, which computes the logits.
        drafted: True if the engines decode speculatively, from drafts.
    """
    if sampling.has_kept_sets and drafted:
        why = "the trainer does not know which drafted tokens it keeps"
        return f"{why}: expected 0, or no engine.vllm.speculative_config"
    if not sampling.has_kept_sets or "float32" in (dtype, head_dtype):
        return None
    why = f"the trainer does not know which tokens it keeps with logits in {dtype}, of which too many are equal"
    return f'{why}: expected 0, or model.head_dtype = "float32"'
