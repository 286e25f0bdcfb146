"""Readable samples of a run: search by their properties, and display token by token.

A run keeps a few samples of each step in readable form (`flash.observe.rundir.samples`). For requests of the page,
`flash.view.app` calls `find`, which returns a list, and `show_group`, which returns all samples of one group. A *group*
is the samples of one problem, whose rewards are compared with each other. The *age* of a token is the version that
trained on it minus the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from flash.ages import age_of
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.samples import (
    Sample,
    SampleOutline,
    SampleTurn,
    TokenValues,
    read_outlines,
    read_samples,
    sampled_steps,
)
from flash.types import Span, TokenUse

MOST_FOUND = 100
"""Number of found samples after which a search stops, once it has read the whole step."""
MOST_BYTES = 32 << 20
"""Size of text, in bytes, that one search reads before it stops. The next search continues from there."""
MOST_STEPS = 300
"""Largest number of steps of which one search reads the files."""
NAMES = {use.value: use.name for use in TokenUse}
"""Name of each `TokenUse`, by its value."""
EXCERPT = 160
"""Largest length of the excerpt of a response in the list, in characters."""
DIGITS = 4
"""Number of decimals of a token's values."""

Bound = float | None
"""Bound of a search; None: no bound."""
FloatArray = npt.NDArray[np.float64]
T = TypeVar("T")


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Search for samples, decoded from the parameters of a request. Bounds are inclusive, and None means no bound.

    The reward is that of the whole sample. Tokens are the number of tokens of its responses, and the age is that of its
    oldest token, in versions.
    """

    before: Annotated[int, Meta(ge=0)] | None = None
    """Search only steps below this one, where an earlier search has stopped. None: start with the newest step."""
    step: Annotated[int, Meta(ge=0)] | None = None
    """Search only this step. None: all steps."""
    environment: str = ""
    """Part of the environment's name, in a mixture of several environments; empty for any."""
    outcome: str = ""
    """`Outcome` of the episode; empty for any."""
    reward_min: Bound = None
    reward_max: Bound = None
    tokens_min: Bound = None
    tokens_max: Bound = None
    age_min: Bound = None
    age_max: Bound = None
    time_min: Bound = None
    time_max: Bound = None
    """End of a time range in Unix seconds; `time_min` is its start. A sample is found if the generation of a response
    or the environment's step after it overlaps the range."""
    text: str = ""
    """Text to find in observations, responses or notes; empty for any. Upper and lower case are not distinguished."""


class FoundSample(msgspec.Struct, frozen=True):
    """Sample in the list of search results. `step`, `group_id` and `sample_index` together identify it."""

    step: int
    group_id: int
    sample_index: int
    environment: str
    outcome: str
    reward: float
    turns: int
    """Number of turns."""
    tokens: int
    """Number of tokens of its responses."""
    age: int
    """Age of its oldest token, in versions."""
    excerpt: str
    """Beginning of its last response."""


class FoundSamples(msgspec.Struct, frozen=True):
    """Result of a search, the newest samples first."""

    samples: list[FoundSample]
    """At most one step's samples more than `most_found` of `find`."""
    searched_to: int | None
    """Value of `before` for a search that continues this one. None: no older step is left."""
    newest: int | None
    """Last step that has readable samples; None if no step has any."""


class ShownTurn(msgspec.Struct, frozen=True):
    """Turn with the tokens of its response. Lists have one item per token, or are empty if the values are unknown."""

    observation: str
    """Text that the policy was shown."""
    tokens: list[str]
    """Text of each token of the response."""
    versions: list[int]
    """Policy version that sampled each token."""
    ages: list[int]
    """Age of each token, in versions."""
    logprobs: list[float | None]
    """Log-probs with which the tokens were sampled."""
    log_ratios: list[float | None]
    """Log-probs under the policy before the step, minus those with which the tokens were sampled."""
    advantages: list[float | None]
    """Advantage with which each token was trained."""
    entropies: list[float | None]
    """Entropy of the policy at each token, in nats."""
    uses: list[str]
    """Names of `TokenUse`: how the trainer used each token; empty text for a use that this version does not know."""
    reward: float
    """Reward of this turn alone."""
    generate_s: float
    """Seconds that the generation of the response took."""
    env_s: float
    """Seconds that the environment's step after the response took."""
    note: str
    """Text of the environment for people."""
    metrics: dict[str, float]
    """Numbers of the environment, by name."""
    branch: int
    """Number of the branch of the episode that the turn belongs to; 0 without branches."""


COPIED_FIELDS = [name for name in SampleTurn.__struct_fields__ if name in ShownTurn.__struct_fields__]
"""Names of the fields that `_shown` copies from a recorded turn without a change: those that both classes have."""


class ShownSample(msgspec.Struct, frozen=True):
    """Sample of a group."""

    sample_index: int
    """Number of the sample in its group."""
    outcome: str
    reward: float
    tokens: int
    """Number of tokens of its responses."""
    ages: dict[int, int]
    """Number of these tokens of each age, in versions."""
    turns: list[ShownTurn]


class ShownGroup(msgspec.Struct, frozen=True):
    """Readable samples of a group, shown side by side."""

    step: int
    group_id: int
    rewards: list[float]
    """Rewards of all samples of the group in the step's batch, including samples that are not readable."""
    samples: list[ShownSample]


def find(
    directory: RunDirectory,
    query: Query,
    *,
    most_found: int = MOST_FOUND,
    most_bytes: int = MOST_BYTES,
    most_steps: int = MOST_STEPS,
) -> FoundSamples:
    """Return the newest samples that match a query.

    A search stops after a number of samples, bytes or steps, so that each request takes a short time. The page then
    continues it from `FoundSamples.searched_to`. Raises RunDirectoryError if a file may not be read.
    """
    steps = sampled_steps(directory)
    newest = steps[-1] if steps else None
    if query.step is not None:
        steps = [step for step in steps if step == query.step]
    if query.before is not None:
        steps = [step for step in steps if step < query.before]
    found: list[FoundSample] = []
    bytes_left = most_bytes
    for searched, step in enumerate(reversed(steps)):
        # Limits are checked between steps, so that each step is searched as a whole.
        if bytes_left <= 0 or searched == most_steps or len(found) >= most_found:
            return FoundSamples(found, step + 1, newest)  # the next search begins with this step
        samples = read_outlines(directory, step)
        # Characters are counted as bytes, which is exact enough for a limit.
        bytes_left -= sum(len(turn.observation) + len(turn.action) for sample in samples for turn in sample.turns)
        for sample in samples:
            listed = _list_item(sample)
            if _matches(query, sample, listed):
                found.append(listed)
    return FoundSamples(found, None, newest)


def _list_item(sample: SampleOutline) -> FoundSample:
    """Return a sample in the form of the list. `sample` holds its texts, but no values of single tokens."""
    return FoundSample(
        step=sample.step,
        group_id=sample.group_id,
        sample_index=sample.sample_index,
        environment=sample.environment,
        outcome=sample.outcome,
        reward=sample.reward,
        turns=len(sample.turns),
        tokens=sum(sample.ages.values()),  # each response token has an age
        age=max(sample.ages, default=0),
        excerpt=sample.turns[-1].action[:EXCERPT] if sample.turns else "",
    )


def _matches(query: Query, sample: SampleOutline, listed: FoundSample) -> bool:
    """Return True if a sample fulfils all conditions of a query. `listed` is the sample in the form of the list."""
    if query.outcome not in ("", listed.outcome) or query.environment.casefold() not in listed.environment.casefold():
        return False
    for low, value, high in (
        (query.reward_min, listed.reward, query.reward_max),
        (query.tokens_min, listed.tokens, query.tokens_max),
        (query.age_min, listed.age, query.age_max),
    ):
        if (low is not None and value < low) or (high is not None and value > high):
            return False
    if not any(_overlaps(query, turn) for turn in sample.turns):  # a trained sample has at least one turn
        return False
    text = query.text.casefold()
    return not text or any(
        text in part.casefold() for turn in sample.turns for part in (turn.observation, turn.action, turn.note)
    )


def _overlaps(query: Query, turn: SampleTurn) -> bool:
    """Return True if a turn, from the start of its generation to the end of its step, overlaps the query's range."""
    starts_in_time = query.time_max is None or turn.start <= query.time_max
    return starts_in_time and (query.time_min is None or query.time_min <= turn.start + turn.generate_s + turn.env_s)


def show_group(directory: RunDirectory, step: int, group_id: int) -> ShownGroup:
    """Return the readable samples of a group. Damaged samples are left out.

    Raises RunDirectoryError if the file of the step may not be read.
    """
    samples = [one for one in read_samples(directory, step, group_id) if _is_consistent(one)]
    rewards = samples[0].group_rewards if samples else []  # every sample holds the rewards of its whole group
    return ShownGroup(step, group_id, rewards, [_shown(sample) for sample in samples])


def _is_consistent(sample: Sample) -> bool:
    """Return True if the parts of a sample have consistent lengths. A damaged file may still have the right form.

    Each turn has one span of response tokens. Each list of token values has one item per response token, or none.
    """
    count = sum(map(_length, sample.action_spans))
    value_lists = [getattr(sample.values, name) for name in TokenValues.__struct_fields__]
    return (
        len(sample.turns) == len(sample.action_spans)
        and sum(run.count for run in sample.versions) == count == len(sample.values.sampled_logprobs)
        and all(len(values) in (0, count) for values in value_lists)
    )


def _length(span: Span) -> int:
    """Return the number of tokens in a span of `Sample.action_spans`, which are positions in `Sample.tokens`."""
    return span.stop - span.start


def _shown(sample: Sample) -> ShownSample:
    """Return a sample with its values divided by turn. It must have consistent lengths (`_is_consistent`)."""
    spans, values = sample.action_spans, sample.values

    def by_turn(token_values: Sequence[T]) -> list[list[T]]:
        """Divide values of all response tokens, which are in the order of the tokens, into one list per turn.

        If there are no values, each list is empty.
        """
        parts: list[list[T]] = [[] for _ in spans]
        begin = 0
        # In an episode with branches, turns may not be in the order of their tokens.
        for turn in sorted(range(len(spans)), key=lambda turn: spans[turn].start):
            end = begin + _length(spans[turn])
            parts[turn] = list(token_values[begin:end])
            begin = end
        return parts

    versions = [run.version for run in sample.versions for _ in range(run.count)]
    # Without log-probs of the trainer, the differences are not used. Infinite log-probs would make numpy warn.
    with np.errstate(invalid="ignore"):
        log_ratios = np.subtract(values.logprobs or values.sampled_logprobs, values.sampled_logprobs)
    # For each field of `ShownTurn` that is not copied: its values, one list for each turn.
    columns: dict[str, list[list[Any]]] = {
        "versions": by_turn(versions),
        "ages": by_turn([age_of(version, sample.step) for version in versions]),
        "logprobs": by_turn(_numbers(values.sampled_logprobs)),
        "log_ratios": by_turn(_numbers(log_ratios if values.logprobs else [])),
        "advantages": by_turn(_numbers(values.advantages)),
        "entropies": by_turn(_numbers(values.entropies)),
        "uses": by_turn([NAMES.get(use, "") for use in values.uses]),
        "tokens": [sample.tokens[span.start : span.stop] for span in spans],
    }
    turns = [
        ShownTurn(
            **{name: column[index] for name, column in columns.items()},
            **{name: getattr(turn, name) for name in COPIED_FIELDS},
        )
        for index, turn in enumerate(sample.turns)
    ]
    return ShownSample(
        sample_index=sample.sample_index,
        outcome=sample.outcome,
        reward=sample.reward,
        tokens=sum(map(_length, spans)),
        ages=sample.ages,
        turns=turns,
    )


def _numbers(values: Sequence[float] | FloatArray) -> list[float | None]:
    """Round values, and replace values that are not finite by None, because JSON has no NaN."""
    rounded = np.round(np.asarray(values, dtype=np.float64), DIGITS)
    return [value if known else None for value, known in zip(rounded.tolist(), np.isfinite(rounded), strict=True)]
