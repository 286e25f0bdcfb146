"""The readable samples of a run: found by what they are, and shown token by token.

What is not in `trajectories/`, the log-probs and the rewards of the others in the group, comes from the step's recorded
batch, where that is still there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from flash.observe.recording import find_trajectories, step_named
from flash.observe.rundir import RunDirectory, Sample, SampleTurn, read_rows
from flash.types import Outcome, Span, Trajectory

MOST_FOUND = 100
"""Samples of one answer."""
MOST_BYTES = 32 << 20
"""Of files that are read for one answer: a search of a long run is continued by the next one."""
EXCERPT = 160
"""Characters of a response in the list."""
DIGITS = 4
"""Of a log-prob."""

Bound = float | None
T = TypeVar("T")


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Which samples; bounds are meant with their ends."""

    before: Annotated[int, Meta(ge=0)] | None = None
    """Steps below this one only: where an earlier answer ended."""
    step: Annotated[int, Meta(ge=0)] | None = None
    outcome: str = ""
    reward_min: Bound = None
    reward_max: Bound = None
    tokens_min: Bound = None
    tokens_max: Bound = None
    age_min: Bound = None
    age_max: Bound = None
    text: str = ""
    """In what was shown, said or noted; upper and lower case are the same."""


class Glance(msgspec.Struct, frozen=True):
    """What the list shows of a sample, and is searched: to read the texts of all tokens takes ten times as long."""

    step: int
    group_id: int
    sample_index: int
    outcome: Outcome
    reward: float
    turns: list[SampleTurn]
    ages: dict[int, int]


class Found(msgspec.Struct, frozen=True):
    """A sample in the list."""

    step: int
    group_id: int
    sample_index: int
    outcome: str
    reward: float
    turns: int
    tokens: int
    """Of its responses."""
    age: int
    """Of its oldest token."""
    excerpt: str


class Findings(msgspec.Struct, frozen=True):
    """What a query has found, the newest first."""

    samples: list[Found]
    searched_to: int | None
    """Ask again with `before` of this step; None: nothing older is left."""
    newest: int | None
    """The last step that has readable samples."""


class ShownTurn(msgspec.Struct, frozen=True):
    """A turn with its response's tokens; lists are one item per token."""

    observation: str
    tokens: list[str]
    versions: list[int]
    logprobs: list[float] | None
    reward: float
    generate_s: float
    env_s: float
    note: str
    metrics: dict[str, float]
    branch: int


class ShownSample(msgspec.Struct, frozen=True):
    """A member of a group."""

    sample_index: int
    outcome: str
    reward: float
    tokens: int
    ages: dict[int, int]
    turns: list[ShownTurn]


class ShownGroup(msgspec.Struct, frozen=True):
    """The readable members of a group, side by side."""

    step: int
    group_id: int
    rewards: list[float] | None
    """Of all its members that the step trained, as far as that is recorded."""
    samples: list[ShownSample]


def find(directory: RunDirectory, query: Query) -> Findings:
    """The newest samples that a query means."""
    named = (step_named(file.stem) for file in directory.trajectories.glob("*.jsonl"))
    steps = sorted(step for step in named if step is not None)
    newest = steps[-1] if steps else None
    if query.step is not None:
        steps = [step for step in steps if step == query.step]
    if query.before is not None:
        steps = [step for step in steps if step < query.before]
    found: list[Found] = []
    left = MOST_BYTES
    for step in reversed(steps):
        if left <= 0 or len(found) >= MOST_FOUND:
            return Findings(found, step + 1, newest)
        samples = read_rows(directory.trajectories_of(step), Glance)
        left -= sum(len(turn.observation) + len(turn.action) for sample in samples for turn in sample.turns)
        found += [one for sample in samples if _meant(query, sample, one := _found(sample))]
    return Findings(found, None, newest)


def _found(sample: Glance) -> Found:
    return Found(
        step=sample.step,
        group_id=sample.group_id,
        sample_index=sample.sample_index,
        outcome=sample.outcome,
        reward=sample.reward,
        turns=len(sample.turns),
        tokens=sum(sample.ages.values()),
        age=max(sample.ages, default=0),
        excerpt=sample.turns[-1].action[:EXCERPT] if sample.turns else "",
    )


def _meant(query: Query, sample: Glance, found: Found) -> bool:
    within = (
        (query.reward_min, found.reward, query.reward_max),
        (query.tokens_min, found.tokens, query.tokens_max),
        (query.age_min, found.age, query.age_max),
    )
    if query.outcome not in ("", found.outcome):
        return False
    if any((low is not None and value < low) or (high is not None and value > high) for low, value, high in within):
        return False
    text = query.text.casefold()
    return not text or any(
        text in part.casefold() for turn in sample.turns for part in (turn.observation, turn.action, turn.note)
    )


def show_group(directory: RunDirectory, step: int, group_id: int) -> ShownGroup:
    """The readable members of a group, with what the step's batch knows of them."""
    samples = [one for one in directory.read_trajectories(step) if one.group_id == group_id and _whole(one)]
    named = {sample.task_id for sample in samples}
    rewards: list[float] = []
    recorded: dict[int, Trajectory] = {}
    for trajectory in find_trajectories(directory.batches, step, lambda one: one.task.group_id == group_id):
        rewards.append(trajectory.reward)
        if trajectory.task.task_id in named:
            recorded[trajectory.task.task_id] = trajectory
    return ShownGroup(
        step=step,
        group_id=group_id,
        rewards=rewards or None,
        samples=[_shown(sample, recorded) for sample in samples],
    )


def _whole(sample: Sample) -> bool:
    """Whether its parts fit each other: a file may be damaged and still have the right form."""
    versions = sum(run.count for run in sample.versions)
    return len(sample.turns) == len(sample.action_spans) and versions == sum(map(_length, sample.action_spans))


def _length(span: Span) -> int:
    return span.stop - span.start


def _shown(sample: Sample, recorded: Mapping[int, Trajectory]) -> ShownSample:
    spans = sample.action_spans
    order = sorted(range(len(spans)), key=lambda turn: spans[turn].start)
    lengths = [_length(spans[turn]) for turn in order]
    each = [run.version for run in sample.versions for _ in range(run.count)]
    versions = dict(zip(order, _parts(each, lengths), strict=True))
    trajectory = recorded.get(sample.task_id)
    logprobs: dict[int, list[float]] = {}
    if trajectory is not None and trajectory.action_count == sum(lengths):
        values = np.round(trajectory.behaviour().astype(np.float64), DIGITS).tolist()
        logprobs = dict(zip(order, _parts(values, lengths), strict=True))
    turns = [
        ShownTurn(
            observation=turn.observation,
            tokens=sample.tokens[span.start : span.stop],
            versions=versions[place],
            logprobs=logprobs.get(place),
            reward=turn.reward,
            generate_s=turn.generate_s,
            env_s=turn.env_s,
            note=turn.note,
            metrics=turn.metrics,
            branch=turn.branch,
        )
        for place, (turn, span) in enumerate(zip(sample.turns, spans, strict=True))
    ]
    return ShownSample(
        sample_index=sample.sample_index,
        outcome=sample.outcome,
        reward=sample.reward,
        tokens=sum(lengths),
        ages=sample.ages,
        turns=turns,
    )


def _parts(values: Sequence[T], lengths: Sequence[int]) -> Iterator[list[T]]:
    begin = 0
    for length in lengths:
        yield list(values[begin : begin + length])
        begin += length
