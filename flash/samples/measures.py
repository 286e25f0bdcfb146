"""Measures: what trajectories say of their environment and their domain, one by one and in the mean."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping

from flash.types import Trajectory

ENV_PREFIX = "env/"
"""Begins the names of what environments measure, so that they meet no other metric."""
TRAJECTORIES_AT_ONCE = 512
"""Trajectories in one slice, some of which are freed on the way: each takes up to ten microseconds."""


def measured(trajectory: Trajectory) -> dict[str, float]:
    """What one trajectory says of its environment, and of its domain."""
    row = {ENV_PREFIX + name: value for name, value in trajectory.env_metrics().items()}
    if kind := trajectory.task.kind:
        row[f"domain/{kind}/reward"] = trajectory.reward
        row[f"domain/{kind}/tokens"] = trajectory.action_count
    return row


def means(rows: Iterable[Mapping[str, float]]) -> Generator[None, None, dict[str, float]]:
    """The mean of each metric over the trajectories that have it, in slices as of `flash.samples.slices`."""
    values: dict[str, list[float]] = {}
    for number, metrics in enumerate(rows, start=1):
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
        if number % TRAJECTORIES_AT_ONCE == 0:
            yield
    # Each is divided before the sum: this cannot overflow.
    return {name: math.fsum(value / len(each) for value in each) for name, each in sorted(values.items())}
