"""Trained samples as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from flash.ages import age_of
from flash.branches import spans_by_turn
from flash.types import Outcome, Span, TrainedSample, Trajectory, VersionRun


class SampleTurn(msgspec.Struct, frozen=True):
    """One turn of a sample as a person reads it."""

    observation: str
    action: str
    reward: float
    generate_s: float
    env_s: float
    metrics: dict[str, float] = {}
    note: str = ""
    branch: int = 0
    """Which branch of the episode it is in."""
    start: float = 0.0
    """Unix seconds at which the response was asked for."""


class TokenValues(msgspec.Struct, frozen=True):
    """A number per action token, in the order of the tokens."""

    sampled_logprobs: list[float]
    """Log-prob with which the engine sampled it."""
    logprobs: list[float] = []
    """Log-prob before the step that trained it, as the trainer has it. This and the following are empty where no
    trainer has told them, and NaN as `TrainedSample` says."""
    entropies: list[float] = []
    """Nats."""
    advantages: list[float] = []
    uses: list[int] = []
    """A `TokenUse` each."""


class Sample(msgspec.Struct, frozen=True):
    """One trained sample as a person reads it."""

    step: int
    task_id: int
    group_id: int
    sample_index: int
    seed: int
    environment: str
    """Its name in a mixture of several, or empty."""
    outcome: Outcome
    reward: float
    turns: list[SampleTurn]
    tokens: list[str]
    """Text of each token, observations and responses, branch by branch."""
    branches: list[int]
    """Where in the tokens each branch begins."""
    action_spans: list[Span]
    """Which of the tokens the policy sampled: one [start, stop) per turn."""
    versions: list[VersionRun]
    """Policy version of the action tokens in the order of the tokens, run-length."""
    ages: dict[int, int]
    """Action tokens by age: how many versions the trainer was ahead when it trained them."""
    values: TokenValues
    group_rewards: list[float]
    """Of all members of its group in the batch."""


def readable(
    trajectory: Trajectory,
    step: int,
    tokens: Sequence[str],
    *,
    group_rewards: Sequence[float] = (),
    seen: TrainedSample | None = None,
) -> Sample:
    """Describe a trajectory that was trained at `step`.

    Args:
        tokens: the text of each of its T tokens.
        group_rewards: of all members of its group in the batch.
        seen: what the trainer found at its action tokens.
    """
    assert len(tokens) == trajectory.length, "one text per token"
    ages: dict[int, int] = {}
    for run in trajectory.versions:
        age = age_of(run.version, step)
        ages[age] = ages.get(age, 0) + run.count
    task = trajectory.task
    return Sample(
        step=step,
        task_id=task.task_id,
        group_id=task.group_id,
        sample_index=task.sample_index,
        seed=task.seed,
        environment=task.kind,
        outcome=Outcome(trajectory.outcome),
        reward=trajectory.reward,
        turns=[
            SampleTurn(t.observation, t.action, t.reward, t.generate_s, t.env_s, t.metrics, t.note, t.branch, t.start)
            for t in trajectory.turns
        ],
        tokens=list(tokens),
        branches=list(trajectory.branches),
        action_spans=spans_by_turn(trajectory),
        versions=trajectory.versions,
        ages=dict(sorted(ages.items())),
        values=_values(trajectory, seen),
        group_rewards=list(group_rewards),
    )


def _values(trajectory: Trajectory, seen: TrainedSample | None) -> TokenValues:
    sampled = _numbers(trajectory.logprobs)
    if seen is None or len(seen.uses) != len(sampled):
        return TokenValues(sampled)
    logprobs, entropies, advantages = map(_numbers, (seen.logprobs, seen.entropies, seen.advantages))
    return TokenValues(sampled, logprobs, entropies, advantages, list(seen.uses))


def _numbers(values: bytes) -> list[float]:
    return np.frombuffer(values, dtype="<f4").tolist()
