"""Section: base class of the configuration's tables, the types of their values, and the rules of sampling settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

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


# `PLAIN` has the default of each setting, with which tokens are drawn from the model's own distribution.
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
