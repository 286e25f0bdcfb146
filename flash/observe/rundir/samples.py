"""Trained samples in readable form, for `flash view`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from flash.ages import age_of
from flash.branches import spans_by_turn
from flash.types import Outcome, Span, TrainedSample, Trajectory, VersionRun


class SampleTurn(msgspec.Struct, frozen=True):
    """Turn of a sample in readable form."""

    observation: str
    action: str
    reward: float
    generate_s: float
    env_s: float
    metrics: dict[str, float] = {}
    note: str = ""
    branch: int = 0
    """Number of the turn's branch in its episode."""
    start: float = 0.0
    """Time when the response was requested, in Unix seconds."""


class TokenValues(msgspec.Struct, frozen=True):
    """Values of the action tokens: each list has a number per action token, in the order of the tokens."""

    sampled_logprobs: list[float]
    """Log-prob with which the engine sampled the token, in nats."""
    logprobs: list[float] = []
    """Log-prob of the token that the trainer computed before its step, in nats. This and the following lists are empty
    if no trainer reported values, and NaN where `TrainedSample` says so."""
    entropies: list[float] = []
    """Entropy of the trainer's distribution at the token, in nats."""
    advantages: list[float] = []
    uses: list[int] = []
    """`TokenUse` of each token, as an integer."""


class Sample(msgspec.Struct, frozen=True):
    """Trained sample in readable form."""

    step: int
    task_id: int
    group_id: int
    sample_index: int
    seed: int
    environment: str
    """Name of the environment in a run with several; otherwise empty."""
    outcome: Outcome
    reward: float
    turns: list[SampleTurn]
    tokens: list[str]
    """Text of each token of observations and responses, branch by branch."""
    branches: list[int]
    """Index of the first token of each branch."""
    action_spans: list[Span]
    """Tokens that the policy sampled: one [start, stop) per turn."""
    versions: list[VersionRun]
    """Policy version of the action tokens, run-length encoded in the order of the tokens."""
    ages: dict[int, int]
    """Number of action tokens of each age, in versions between sampling and training."""
    values: TokenValues
    group_rewards: list[float]
    """Rewards of all samples of the group in the batch."""


def readable(
    trajectory: Trajectory,
    step: int,
    tokens: Sequence[str],
    *,
    group_rewards: Sequence[float] = (),
    seen: TrainedSample | None = None,
) -> Sample:
    """Return the readable form of a trajectory that was trained at `step`.

    Args:
        tokens: text of each of the trajectory's T tokens.
        group_rewards: rewards of all samples of the group in the batch.
        seen: the trainer's values of the action tokens; None if there are none.
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
