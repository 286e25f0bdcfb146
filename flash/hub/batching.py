"""Dealing a step's groups to the trainer ranks: token-balanced, with the denominators of the whole batch."""

from __future__ import annotations

from flash.hub.groups import Group
from flash.types import Shard, ShardSample


def deal(groups: list[Group], step: int, min_version: int, ranks: int) -> list[Shard]:
    """One shard per rank. Longest samples first, each to the rank with the fewest tokens so far."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories()]
    batch = [trajectory.entry(min_version) for trajectory in trajectories]
    earlier = [entry for group in groups for entry in group.earlier]
    trained = [trajectory.trained_tokens(min_version) for trajectory in trajectories]
    dealt: list[list[ShardSample]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(range(len(trajectories)), key=lambda i: (-trajectories[i].length, i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        dealt[rank].append(ShardSample(index, trajectories[index]))
        load[rank] += trajectories[index].length
    return [
        Shard(
            step=step,
            min_version=min_version,
            samples=samples,
            batch=batch,
            total_tokens=sum(trained),
            total_sequences=sum(count > 0 for count in trained),
            earlier=earlier,
        )
        for samples in dealt
    ]
